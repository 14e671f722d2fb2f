"""Under autocast, what travels between stages has the data type that the layer gives, and is not rounded for the way.

A layer of BERT, Llama or GPT-2 gives float32: its last operation adds a residual, or normalises. The next layer casts
it for its matrix products, but adds it to its own output as it is. So sending bfloat16 would halve the message, and
change gradients by 5e-3 of their norm, as much as computing in bfloat16 does (6e-3 to 9e-3, 12 layers of width 128).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from selection import slow
from torch.distributed.pipelining import PipelineStage
from training_runs import Outcome, Run, outcome_of, pipeline_trainer, weights_of

from hf_pipetransformer.pipeline.stage import StageModule

BATCH = 8
ROUNDING = 1e-6
"""Of gradients, relative: in float32."""


def train(
    rank: int, world_size: int, folder: str, model: str | None, casts_once: bool = True
) -> tuple[Outcome, set[Any], set[Any]]:
    """Train in as many stages as processes; the types and bytes of what layers give, and of what is sent onward."""
    torch.set_autocast_cache_enabled(casts_once)
    given: set[tuple[torch.dtype, int]] = set()
    sent_on: set[tuple[torch.dtype, int]] = set()
    carry_on = StageModule.carry_on
    is_training = False

    def noting_outputs(stage: StageModule, *positional: Any) -> tuple[torch.Tensor, ...]:
        outputs = carry_on(stage, *positional)
        if is_training and torch.is_grad_enabled() and stage.micro_batches:
            given.update((o.dtype, o.nbytes) for slot, o in zip(stage.slots_out, outputs, strict=True) if slot.is_used)
        return outputs

    def noting(method: str) -> Callable[..., list[Any]]:
        messages_of = getattr(PipelineStage, method)

        def noting_messages(stage: PipelineStage, chunk: int) -> list[Any]:
            messages: list[Any] = messages_of(stage, chunk)
            sent_on.update((message.tensor.dtype, message.tensor.nbytes) for message in messages)
            return messages

        return noting_messages

    run = Run(model=model, samples=40, per_device=BATCH // world_size, accumulation=1)
    # one step: a last digit of a weight decides how it is rounded to bfloat16 in the next one
    options = {"bf16": True, "max_steps": 1, "warmup_steps": 0, "num_microbatches": 1, "optim": "sgd"}
    trainer = pipeline_trainer(run, world_size, folder, use_cpu=True, **options)
    step = trainer.training_step

    def training_step(*positional: Any) -> torch.Tensor:
        nonlocal is_training
        is_training = True
        try:
            return step(*positional)
        finally:
            is_training = False

    trainer.training_step = training_step  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageModule, "carry_on", noting_outputs)
        for method in ("get_fwd_send_ops", "get_bwd_send_ops"):
            patch.setattr(PipelineStage, method, noting(method))
        outcome = outcome_of(trainer)
    return outcome, given, sent_on


def update(outcome: Outcome, model: str | None) -> torch.Tensor:
    """What plain SGD has changed, which is a multiple of the gradient."""
    before = weights_of(Run(model=model).build_model())
    return torch.cat([(outcome.weights[name] - before[name]).flatten() for name in before])


@pytest.mark.parametrize(("model", "dtype"), [(None, torch.float32), *slow(("electra", torch.bfloat16))])
def test_what_travels_is_what_the_layer_gives(model: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    """BERT's layers give float32; those of ELECTRA give bfloat16 on the CPU."""
    ((alone, _, _),) = run_ranks(train, 1, str(tmp_path / "alone"), model)
    (last, _, returned), (first, given, sent) = run_ranks(train, 2, str(tmp_path / "two"), model)
    assert {kind for kind, _ in given} == {dtype}
    assert sent == given == returned, "activations, and their gradients"
    for outcome in (first, last):
        assert outcome.losses == alone.losses
        step, expected = update(outcome, model), update(alone, model)
        assert (step - expected).norm() < ROUNDING * expected.norm()


def test_shared_weights_differ_by_where_autocast_sums_their_gradients(tmp_path: Path) -> None:
    """One process casts a weight once, and sums the gradients of all its uses in bf16; each stage those of its own."""
    ((alone, _, _),) = run_ranks(train, 1, str(tmp_path / "alone"), "albert", False)
    for outcome, _, _ in run_ranks(train, 2, str(tmp_path / "two"), "albert", False):
        assert outcome.losses == alone.losses
        step, expected = update(outcome, "albert"), update(alone, "albert")
        assert (step - expected).norm() < ROUNDING * expected.norm()
