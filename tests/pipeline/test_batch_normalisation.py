"""Batch normalisation in a pipeline: it trains as in one process, running statistics included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed import run_ranks
from safetensors.torch import load_file
from torch import nn
from training_runs import (
    WORLD,
    Outcome,
    Run,
    assert_same_training,
    largest_difference,
    outcome_of,
    pipeline_trainer,
    reference_trainer,
)

STAGES = 2
RUN = Run("image-classification", model="resnet", samples=52, accumulation=1).with_options(
    eval_strategy="epoch",
    per_device_eval_batch_size=1,  # a mean over batches of one sample is the same on any number of processes
)


PIPELINE = replace(RUN, per_device=RUN.per_device * WORLD // STAGES)
"""The same number of samples in a step, on fewer processes."""
TOLERANCE = 1e-5


class StaysInEval(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> StaysInEval:
        return super().train(False)


def freeze(model: nn.Module) -> None:
    """As users do: `model.train()` leaves batch normalisation in eval mode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = StaysInEval
            module.running_var.fill_(30.0)  # about what the weights of the zoo make of an image


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "running_" in name}


def one_process(rank: int, world_size: int, is_frozen: bool = False) -> Outcome:
    trainer = reference_trainer(RUN)
    if is_frozen:
        freeze(trainer.model)
    outcome = outcome_of(trainer)
    outcome.notes = statistics(trainer.model)
    return outcome


def in_stages(
    rank: int,
    world_size: int,
    folder: str,
    checkpoint: str | None = None,
    is_frozen: bool = False,
    m: int | None = None,
) -> Outcome:
    trainer = pipeline_trainer(PIPELINE, STAGES, folder, num_microbatches=m or "auto", save_strategy="epoch")
    if is_frozen:
        freeze(trainer.model)
    outcome = outcome_of(trainer, checkpoint)
    outcome.notes = statistics(trainer.model)
    return outcome


def assert_same(outcomes: list[Outcome], expected: Outcome) -> None:
    assert_same_training(outcomes, expected, TOLERANCE)
    for outcome in outcomes:
        assert outcome.metrics["eval_loss"] == pytest.approx(expected.metrics["eval_loss"], abs=10 * TOLERANCE)
        difference, name = largest_difference(outcome.notes, expected.notes)
        assert difference <= TOLERANCE, f"{name} differs by {difference:.1e}"


def test_equals_one_process_also_when_resumed(tmp_path: Path) -> None:
    """The stem's statistics are the first stage's, those of the layers their stages'; a checkpoint has them all."""
    expected = run_ranks(one_process, 1)[0]
    folder = str(tmp_path / "whole")
    assert_same(run_ranks(in_stages, STAGES, folder), expected)
    half, last = (tmp_path / "whole" / f"checkpoint-{step}" for step in (expected.steps // 2, expected.steps))
    saved = load_file(last / "model.safetensors")
    assert largest_difference({name: saved[name] for name in expected.notes}, expected.notes)[0] <= TOLERANCE
    resumed = run_ranks(in_stages, STAGES, str(tmp_path / "resumed"), str(half))
    assert largest_difference(resumed[0].notes, expected.notes)[0] <= TOLERANCE
    assert largest_difference(resumed[0].weights, expected.weights)[0] <= TOLERANCE


def test_in_eval_mode_it_may_have_micro_batches(tmp_path: Path) -> None:
    expected = run_ranks(one_process, 1, True)[0]
    assert_same(run_ranks(in_stages, STAGES, str(tmp_path), None, True, 4), expected)
