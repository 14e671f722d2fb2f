"""What cannot work is refused at once, on all processes, with the field, the numbers and the remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import nn
from training_data import PadCollator, TrainingData
from training_runs import WORLD, Run, pipeline_trainer, with_layerdrop
from transformers import TrainingArguments, default_data_collator
from transformers.distributed import DistributedConfig

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments, UnsupportedModelError

RUN = Run(samples=16, epochs=1)


def refused_by_all(names: str, world_size: int, kind: type[BaseException] = ValueError) -> dict[str, str]:
    """The messages, which must be the same on every process; of attempts in a table of this module."""
    first, *others = run_ranks(attempt_all, world_size, names, kind, timeout=250)
    assert all(found == first for found in others)
    return first


def attempt_all(rank: int, world_size: int, table: str, kind: type[BaseException]) -> dict[str, str]:
    """What each attempt raises on this process, one after the other."""
    found = {}
    for name, attempt in globals()[table].items():
        with pytest.raises(kind) as caught:
            attempt(rank)
        assert caught.type is kind, f"{name}: {caught.value!r}"
        found[name] = str(caught.value)
    return found


# ------------------------------------------------------------------------------------------ arguments
def building(stages: Any, **options: Any) -> Callable[[int], Any]:
    return lambda rank: pipeline_trainer(RUN, stages, **options)


EXCLUDING: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": "shard_grad_op"},
    "fsdp's offload": {"fsdp": True, "fsdp_config": {"cpu_offload": True}},
    "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 1}}},
    "compile": {"torch_compile": True},
    "batch size": {"auto_find_batch_size": True},
    "full evaluation": {"bf16_full_eval": True},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "rebalanced batches": {"train_sampling_strategy": "batch_rebalance"},
    "optimizer": {"optim": "lomo"},
    "debug": {"debug": "underflow_overflow"},
    "split batches": {"accelerator_config": {"split_batches": True}},
}
BUILDING = {
    **{name: building(2, **options) for name, options in EXCLUDING.items()},
    "three": building(3),
    "no samples": lambda rank: pipeline_trainer(replace(RUN, per_device=0), 2),
    "jit": building(1, enable_jit_checkpoint=True),  # the stock Trainer's own way to leave at SIGTERM
}


def test_arguments() -> None:
    messages = refused_by_all("BUILDING", 2)
    for name, options in EXCLUDING.items():
        what, _, how = messages[name].partition(" cannot be combined with pipeline_parallel_size=2: ")
        assert next(iter(options)) in what.replace(" ", "_") and how
    assert all(word in messages["jit"] for word in ("enable_jit_checkpoint=True", "Unset it", "SIGTERM"))
    assert all(word in messages["three"] for word in ("pipeline_parallel_size=3", "2 processes", "1, 2"))
    assert "CPU" not in messages["three"]
    assert "per_device_train_batch_size=0" in messages["no samples"]


def with_plain_arguments(rank: int) -> None:
    arguments = TrainingArguments("out", use_cpu=True)
    PipeTransformerTrainer(RUN.build_model(), arguments, train_dataset=RUN.data(8))


def started_by_accelerate(rank: int) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "True"
    pipeline_trainer(RUN, 2)


ALONE = {"stages": building(2), "accelerate": started_by_accelerate, "arguments": with_plain_arguments}


def test_one_process() -> None:
    messages = refused_by_all("ALONE", 1)
    remedies = ("accelerate launch --num_processes 2", "torchrun --nproc_per_node 2")
    traps = ("accelerate launch --cpu", "MULTI_CPU", "MULTI_GPU")
    assert all(words in messages["stages"] for words in ("only one process runs", *remedies))
    assert all(words not in messages["stages"] and words in messages["accelerate"] for words in traps)
    assert "PipeTransformerTrainingArguments" in messages["arguments"]


# ------------------------------------------------------------------------------------------ models and data


def with_model(how: str) -> Callable[[int], None]:
    def train(rank: int) -> None:
        model: Any = RUN.build_model()
        if how == "data-parallel":
            model = nn.DataParallel(model)
        elif how == "device-map":
            model.hf_device_map = {"bert": 0, "classifier": 1}
        elif how == "transformers":
            model.config.distributed_config = DistributedConfig(pp_size=2)
        elif how == "different-models" and rank == 1:
            model.classifier = nn.Linear(16, 3)
        pipeline_trainer(RUN, 2, model=model).train()

    return train


def with_data(
    size: Callable[[int], int] = lambda rank: 16, seed: Callable[[int], int] = lambda rank: 0
) -> Callable[[int], None]:
    def train(rank: int) -> None:
        trainer = pipeline_trainer(RUN, 2)
        trainer.train_dataset = TrainingData(RUN.kind, size(rank), seed=seed(rank))
        trainer.train()

    return train


def evaluating(rank: int) -> None:
    pipeline_trainer(RUN, 2).evaluate(TrainingData(RUN.kind, 8 + rank))


class OwnLoader(PipeTransformerTrainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)


def with_own_loader(rank: int) -> None:
    arguments = PipeTransformerTrainingArguments("out", pipeline_parallel_size=2, report_to=[])
    OwnLoader(RUN.build_model(), arguments, train_dataset=RUN.data(8), data_collator=PadCollator(RUN.kind)).train()


def without_labels(rank: int) -> None:
    trainer = pipeline_trainer(RUN, 2)
    trainer.train_dataset = [{"input_ids": [1, 2, 3], "target": 0} for _ in range(16)]
    trainer.data_collator = default_data_collator
    trainer.train()


def resuming(name: str) -> Callable[[int], None]:
    return lambda rank: pipeline_trainer(RUN, 2).train(resume_from_checkpoint=name)


def with_metric(wanted: str, **keywords: Any) -> Callable[[int], None]:
    """Evaluates after each epoch."""

    def train(rank: int) -> None:
        options = {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": wanted}
        run = replace(RUN, keywords=keywords).with_options(**options)
        trainer = pipeline_trainer(run, 2, folder=wanted)
        try:
            trainer.train()
        finally:
            steps = trainer.state.global_step
            assert steps == 0 or (Path(wanted) / f"checkpoint-{steps}" / "manifest.json").is_file()

    return train


def with_layers(*names: str) -> Callable[[int], None]:
    return lambda rank: pipeline_trainer(RUN, 2, pipeline_layers=names).train()


def without_trainable_parameters(rank: int) -> None:
    trainer = pipeline_trainer(RUN, 2)
    trainer.model.requires_grad_(False)
    trainer.train()


def with_reentrant_checkpointing(rank: int) -> None:
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    pipeline_trainer(Run(), 1, freeze_policy="alpha", **options).train()


REFUSED_WITH: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "data-parallel": (with_model("data-parallel"), ["DataParallel", "unwrapped model"]),
    "device-map": (with_model("device-map"), ["device map", "2 entries"]),
    "transformers": (with_model("transformers"), ["DistributedConfig(pp_size=2)", "pipeline_parallel_size=2"]),
    "different-models": (with_model("different-models"), ["different models", "process 0", "process 1"]),
    "length": (with_data(lambda rank: 16 + rank), ["different datasets", "16 samples", "17 samples"]),
    "content": (with_data(seed=lambda rank: rank), ["different datasets", "first samples"]),
    "evaluation": (evaluating, ["8 samples", "9 samples"]),
    "loader": (with_own_loader, ["get_train_dataloader"]),
    "nothing to train": (without_trainable_parameters, ["requires_grad=True"]),
    "reentrant": (with_reentrant_checkpointing, ["use_reentrant=True"]),
    "layers": (with_layers("bert.blocks"), ["'bert.blocks' does not exist", "It has 'bert.encoder.layer'"]),
    "labels": (without_labels, ["no 'labels'", "'target'", "rename_column('target', 'labels')"]),
    "checkpoint": (resuming("none/checkpoint-7"), ["'none/checkpoint-7' does not exist", "no valid checkpoint"]),
    "metric": (with_metric("accuracy"), ["metric_for_best_model='accuracy'", "eval_loss", "compute_metrics"]),
    "late metric": (
        with_metric("acuracy", compute_metrics=lambda _: {"accuracy": 1.0}),
        ["metric_for_best_model='acuracy'", "Did you mean 'eval_accuracy'?"],
    ),
    "no layers": (with_layers("classifier"), ["'classifier' is a Linear"]),
}
TRAINING = {name: attempt for name, (attempt, _) in REFUSED_WITH.items()}


@pytest.mark.slow
def test_models_and_data() -> None:
    """The first layer above frozen ones got no gradient under reentrant checkpointing, with a line in the log."""
    messages = refused_by_all("TRAINING", 2)
    for name, (_, words) in REFUSED_WITH.items():
        assert all(word in messages[name] for word in words), messages[name]


def all_hidden_states(rank: int) -> None:
    model = RUN.build_model()
    model.config.output_hidden_states = True
    pipeline_trainer(RUN, 2, model=model).predict(TrainingData(RUN.kind, 8))


def skipping_layers(rank: int) -> None:
    pipeline_trainer(Run("seq2seq", samples=16), 2, model=with_layerdrop()).train()


CUTTING = {"layerdrop": skipping_layers, "output_hidden_states": all_hidden_states}


def test_models_that_cannot_be_cut() -> None:
    messages = refused_by_all("CUTTING", 2, UnsupportedModelError)
    assert "output_hidden_states" in messages["output_hidden_states"]
    assert "BartForConditionalGeneration" in messages["layerdrop"] and "Set " in messages["layerdrop"]


def with_three_layers(rank: int) -> None:
    model = RUN.build_model()
    model.bert.encoder.layer = model.bert.encoder.layer[:3]
    pipeline_trainer(RUN, WORLD, model=model).train()


MORE_STAGES = {"three layers": with_three_layers}


def test_more_stages_than_units() -> None:
    (message,) = refused_by_all("MORE_STAGES", WORLD).values()
    assert "pipeline_parallel_size is 4" in message and "3 units" in message
