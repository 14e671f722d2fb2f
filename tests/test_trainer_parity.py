"""A pipeline trains as one process does: losses, gradient norms, learning rates, steps, final weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from distributed import run_ranks
from selection import slow
from training_runs import WORLD, Outcome, Run, assert_same_training, pipeline, reference

MODELS_OF_KIND = {
    "bert": Run("text-classification"),
    "bert-question-answering": Run("question-answering"),
    "llama-tied": Run("causal-lm"),
    "t5": Run("seq2seq"),
}


def on(world_size: int, run: Run) -> Run:
    """The run on another number of processes, with the global batch of `WORLD` processes."""
    return replace(run, per_device=run.per_device * WORLD // world_size)


@cache
def expected(name: str) -> Outcome:
    return run_ranks(reference, 1, MODELS_OF_KIND[name])[0]


IN_SHORT = [
    ("bert", 4, 4, "1f1b"),
    ("bert", 2, 1, "1f1b"),
    ("llama-tied", 2, 2, "gpipe"),
    ("t5", 4, 2, "1f1b"),
]
"""The cases of `make test`: each number of stages, tied weights, two stacks of layers. `test_virtual_stages.py` has
the interleaved schedules."""


@pytest.mark.parametrize(
    ("name", "world_size", "stages", "schedule"), [*IN_SHORT, *slow(("bert-question-answering", 4, 4, "gpipe"))]
)
def test_equals_one_process(name: str, world_size: int, stages: int, schedule: str) -> None:
    """Six steps in two epochs: accumulation, clipping, decay groups, warm-up, dynamic padding, an odd last batch."""
    run = on(world_size, MODELS_OF_KIND[name])
    outcomes = run_ranks(pipeline, world_size, run, stages, pipeline_schedule=schedule)
    assert expected(name).steps >= 5
    assert_same_training(outcomes, expected(name))


class OwnComputeLoss:
    """As users write it: calls the model, reads its outputs, does not know of pipelines."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):  # type: ignore[no-untyped-def]
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def token_sum(outputs, labels, num_items_in_batch=None):  # type: ignore[no-untyped-def]
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


VARIANTS = {
    "label-smoothing-lm": Run("causal-lm").with_options(label_smoothing_factor=0.1),
    "compute-loss-func": Run("causal-lm", keywords={"compute_loss_func": token_sum}),
    "own-compute-loss": Run(trainer=OwnComputeLoss),
    "gradient-checkpointing": Run("causal-lm").with_options(gradient_checkpointing=True),
    "no-accumulation-no-clipping": Run(trainer=OwnComputeLoss, accumulation=1).with_options(max_grad_norm=0.0),
    "tied-weights-synchronised-in-each-micro-step": Run("causal-lm").with_options(
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    ),
    "three-micro-steps": Run(accumulation=3, samples=100),
    "iterable": Run(streamed=True, epochs=1).with_options(max_steps=4),
    # one batch for each step: whole batches are dropped, and with accumulation one process has fewer, larger ones
    "drop-last": Run(accumulation=1).with_options(dataloader_drop_last=True, train_sampling_strategy="sequential"),
    "workers": Run().with_options(dataloader_num_workers=2),
    "albert": Run(model="albert"),
    "deberta": Run(model="deberta-v2"),
    "fewer-samples-than-pipelines": Run(samples=33, accumulation=1),
}


VARIANTS_IN_SHORT = (
    "compute-loss-func",
    "own-compute-loss",
    "gradient-checkpointing",
    "three-micro-steps",
    "iterable",
    "workers",
)
"""The variants of `make test`."""
OTHERS = tuple(name for name in VARIANTS if name not in VARIANTS_IN_SHORT)


def pipelines(rank: int, world_size: int, names: tuple[str, ...], stages: int) -> list[Outcome]:
    """One training after the other."""
    options = {name: {"loss_reduction": "mean"} if name == "own-compute-loss" else {} for name in names}
    return [pipeline(rank, world_size, on(world_size, VARIANTS[name]), stages, **options[name]) for name in names]


def references(rank: int, world_size: int, names: tuple[str, ...]) -> list[Outcome]:
    return [reference(rank, world_size, VARIANTS[name]) for name in names]


@pytest.mark.parametrize(
    ("world_size", "stages", "names"),
    [(2, 2, VARIANTS_IN_SHORT), *slow((4, 2, OTHERS))],
    ids=["short", "others"],
)
def test_equals_one_process_with(world_size: int, stages: int, names: tuple[str, ...]) -> None:
    (expected,) = run_ranks(references, 1, names)
    everyone = run_ranks(pipelines, world_size, names, stages, timeout=250)
    for number, name in enumerate(names):
        print(name)
        assert_same_training([outcomes[number] for outcomes in everyone], expected[number])
