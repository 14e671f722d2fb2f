"""Batch normalisation in a pipeline: in one micro-batch it trains as in one process, running statistics included."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, run_ranks_expecting_error
from model_zoo import MODELS
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

from hf_pipetransformer.errors import UnsupportedModelError

STAGES = 2
RUN = Run("image-classification", model="resnet", samples=52, accumulation=1).with_options(
    eval_strategy="epoch",
    per_device_eval_batch_size=1,  # a mean over batches of one sample is the same on any number of processes
)


class DeepRun(Run):
    """ResNet with four units in place of two."""

    def build_model(self) -> nn.Module:
        shallow = MODELS["resnet"].build()
        settings = {**shallow.config.to_dict(), "depths": [2, 1, 1, 1], "hidden_sizes": [16] * 4}
        for name in ("stage_names", "out_features", "out_indices"):
            settings.pop(name, None)
        torch.manual_seed(0)
        return type(shallow)(type(shallow.config)(**settings))


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


def one_process(rank: int, world_size: int, is_frozen: bool = False, run: Run = RUN) -> Outcome:
    trainer = reference_trainer(run)
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
    m: int | None = 1,
    run: Run = PIPELINE,
    **options: Any,
) -> Outcome:
    trainer = pipeline_trainer(run, STAGES, folder, num_microbatches=m or "auto", save_strategy="epoch", **options)
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


def test_one_micro_batch_equals_one_process_also_when_resumed(tmp_path: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved1f1b", "zbv"])
def test_virtual_stages_count_a_batch_once(schedule: str, tmp_path: Path) -> None:
    """The stem, which each virtual stage of a process runs again, has the statistics of one pass."""
    run = DeepRun(**{one.name: getattr(RUN, one.name) for one in fields(Run)})
    expected = run_ranks(one_process, 1, False, run)[0]
    on_two = replace(run, per_device=PIPELINE.per_device)
    outcomes = run_ranks(in_stages, STAGES, str(tmp_path), run=on_two, pipeline_schedule=schedule)
    (event, *_) = map(json.loads, (tmp_path / "pipeline_events.jsonl").read_text().splitlines())
    assert event["num_virtual_stages"] == 2
    for (
        outcome
    ) in outcomes:  # gradients of a deep ResNet on two images are large, and so is what rounding makes of them
        for name, statistic in expected.notes.items():
            torch.testing.assert_close(outcome.notes[name], statistic, rtol=1e-3, atol=1e-3, msg=name)


def test_in_eval_mode_it_may_have_micro_batches(tmp_path: Path) -> None:
    expected = run_ranks(one_process, 1, True)[0]
    assert_same(run_ranks(in_stages, STAGES, str(tmp_path), None, True, 4), expected)


def test_micro_batches_are_refused_before_the_first_step(tmp_path: Path) -> None:
    errors = run_ranks_expecting_error(in_stages, STAGES, str(tmp_path), None, False, None)
    assert {type(error) for error in errors} == {UnsupportedModelError}
    (message,) = {str(error) for error in errors}
    assert "BatchNorm2d" in message and "num_microbatches=1" in message and "eval mode" in message
