"""Layers freeze under stock FSDP2 as they do on one process, and checkpoints resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from distributed import run_ranks, run_ranks_expecting_error
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from training_runs import WORLD, Outcome, Run, assert_same_training, outcome_of, pipeline_trainer
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import LayerFreezeCallback, PipeTransformerTrainer

RUN = Run("causal-lm", samples=96, accumulation=1)
SCHEDULE = {"freeze_policy": "schedule", "freeze_schedule": {1: 2}}
STEPS_OF_TWO_EPOCHS = 12


def on_the_cpu(self: PartialState, *args: Any, **kwargs: Any) -> None:
    """Accelerate shards models on accelerators only; on the CPU it takes DDP instead, without a warning."""
    prepare_state(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


prepare_state = PartialState.__init__


def sharded_trainer(world_size: int, folder: str, **options: Any) -> PipeTransformerTrainer:
    options = {"fsdp": "full_shard", "fsdp_config": {"version": 2}, **options} if world_size > 1 else options
    run = replace(RUN, per_device=RUN.per_device * WORLD // world_size)
    return pipeline_trainer(run, 1, folder, activation_cache="off", **options)


def train(rank: int, world_size: int, folder: str, resumes: bool = False, **options: Any) -> Outcome:
    with mock.patch.object(PartialState, "__init__", on_the_cpu):
        trainer = sharded_trainer(world_size, folder, **options)
        outcome = outcome_of(trainer, f"{folder}/checkpoint-{STEPS_OF_TWO_EPOCHS - 4}" if resumes else None)
    if world_size > 1:
        assert isinstance(trainer.model, FSDPModule)
        outcome.weights = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in outcome.weights.items()}
    freezing = next(c for c in trainer.callback_handler.callbacks if isinstance(c, LayerFreezeCallback))
    assert freezing.num_frozen > 0
    assert all(parameter.requires_grad for parameter in trainer.model.parameters()), "as it was before the training"
    return outcome


@pytest.mark.slow
def test_equals_one_process(tmp_path: Path) -> None:
    """Layers freeze after the first epoch of two, and again in a training that is resumed within the second one."""
    folder, expected = str(tmp_path), run_ranks(train, 1, str(tmp_path / "one"), **SCHEDULE)[0]
    saving = {"save_strategy": "steps", "save_steps": STEPS_OF_TWO_EPOCHS - 4}
    assert_same_training(run_ranks(train, 2, folder, **SCHEDULE, **saving), expected)
    assert_same_training(run_ranks(train, 2, folder, True, **SCHEDULE), expected)


def train_plainly(rank: int, world_size: int, folder: str) -> None:
    with mock.patch.object(PartialState, "__init__", on_the_cpu):
        options = {"fsdp": "full_shard", "fsdp_config": {"version": 2}}
        arguments = TrainingArguments(folder, use_cpu=True, report_to=[], max_steps=1, **options)
        data = RUN.data(8)
        Trainer(RUN.build_model(), arguments, train_dataset=data, callbacks=[LayerFreezeCallback()]).train()


def test_a_callback_alone_cannot_freeze_a_sharded_model(tmp_path: Path) -> None:
    for error in run_ranks_expecting_error(train_plainly, 2, str(tmp_path)):
        assert type(error) is ValueError and "FSDP" in str(error) and "PipeTransformerTrainer" in str(error)


def test_a_checkpoint_of_another_layout_is_refused(tmp_path: Path) -> None:
    """FSDP keeps weights and optimizer state in files of its own."""
    run_ranks(train, 1, str(tmp_path), max_steps=8, save_strategy="steps", save_steps=8, **SCHEDULE)
    for error in run_ranks_expecting_error(train, 2, str(tmp_path), True):
        assert type(error) is ValueError and "replica_sharding='optimizer'" in str(error)


def test_the_cache_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="activation_cache='on' cannot be combined with fsdp"):
        pipeline_trainer(RUN, 1, str(tmp_path), fsdp="full_shard", activation_cache="on")
