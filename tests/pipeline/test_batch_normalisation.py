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
from transformers import Trainer

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
    """Freeze as users do: `model.train()` leaves batch normalisation in eval mode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = StaysInEval
            module.running_var.fill_(30.0)  # about the variance that the weights of the zoo produce from an image


def trained(trainer: Trainer, checkpoint: str | None = None, is_frozen: bool = False) -> Outcome:
    """The outcome of a training, with the running statistics as its notes."""
    if is_frozen:
        freeze(trainer.model)
    outcome = outcome_of(trainer, checkpoint)
    outcome.notes = {name: b.clone() for name, b in trainer.model.named_buffers() if "running_" in name}
    return outcome


def one_process(rank: int, world_size: int) -> tuple[Outcome, Outcome]:
    return trained(reference_trainer(RUN)), trained(reference_trainer(RUN), is_frozen=True)


def in_stages(rank: int, world_size: int, folder: str, half: int) -> tuple[Outcome, Outcome, Outcome]:
    """Trainings in training mode, in eval mode with micro-batches, and resumed from a checkpoint of the first one."""
    options = {"num_microbatches": "auto", "save_strategy": "epoch"}
    whole = trained(pipeline_trainer(PIPELINE, STAGES, f"{folder}/whole", **options))
    frozen = trained(pipeline_trainer(PIPELINE, STAGES, f"{folder}/frozen", num_microbatches=4), is_frozen=True)
    resumed = pipeline_trainer(PIPELINE, STAGES, f"{folder}/resumed", **options)
    return whole, frozen, trained(resumed, f"{folder}/whole/checkpoint-{half}")


@pytest.mark.slow
def test_equals_one_process_also_when_resumed(tmp_path: Path) -> None:
    """The first stage has the stem's statistics, each stage its layers' ones; a checkpoint has them all."""
    ((expected, expected_frozen),) = run_ranks(one_process, 1)
    everyone = run_ranks(in_stages, STAGES, str(tmp_path), expected.steps // 2)
    for whole, frozen, resumed in everyone:
        for outcome, wanted in ((whole, expected), (frozen, expected_frozen)):
            assert_same_training([outcome], wanted, TOLERANCE)
            assert outcome.metrics["eval_loss"] == pytest.approx(wanted.metrics["eval_loss"], abs=10 * TOLERANCE)
            assert largest_difference(outcome.notes, wanted.notes)[0] <= TOLERANCE
        assert largest_difference(resumed.notes, expected.notes)[0] <= TOLERANCE
        assert largest_difference(resumed.weights, expected.weights)[0] <= TOLERANCE
    saved = load_file(tmp_path / "whole" / f"checkpoint-{expected.steps}" / "model.safetensors")
    assert largest_difference({name: saved[name] for name in expected.notes}, expected.notes)[0] <= TOLERANCE
    assert all(torch.isfinite(value).all() for value in saved.values())
