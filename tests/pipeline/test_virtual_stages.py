"""Several parts of the model on each process train, predict and change their layout as one process.

A model of eight layers on two stages with two virtual stages each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_runs import cached, expected_of, hit_rates
from distributed import run_ranks
from model_zoo import MODELS, without_dropout
from selection import few
from torch import nn
from training_data import ZOO_MODEL, TrainingData
from training_runs import (
    WORLD,
    Outcome,
    Run,
    StopAfter,
    assert_same_training,
    at_each_step,
    outcome_of,
    pipeline_trainer,
    reference_trainer,
)
from transformers import Trainer

LAYERS = 8
PROCESSES = 2
ROWS = 13
TOLERANCE = 1e-4


@dataclass(frozen=True)
class DeepRun(Run):
    """A run of a model with more layers than the zoo's."""

    def build_model(self) -> nn.Module:
        shallow = MODELS[self.model or ZOO_MODEL[self.kind]].build()
        shallow.config.num_hidden_layers = LAYERS
        torch.manual_seed(0)
        return without_dropout(type(shallow)(shallow.config))


RUNS: dict[str, Run] = {
    "llama-tied": DeepRun("causal-lm").with_options(gradient_checkpointing=True),
    "t5": Run("seq2seq"),  # its relative position biases belong to several virtual stages of each process
}


def predicted(trainer: Trainer, run: Run) -> torch.Tensor:
    """The sum of each sample's logits, without padding."""
    output = trainer.predict(TrainingData(run.kind, ROWS, seed=9))
    logits = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
    values, labels = torch.as_tensor(logits).double(), torch.as_tensor(output.label_ids)
    if labels.dim() > 1:
        values = values[:, : labels.shape[1]] * (labels[:, : values.shape[1]] != -100).unsqueeze(2)
    return values.flatten(1).sum(1)


def stock(rank: int, world_size: int, run: Run) -> Outcome:
    trainer = reference_trainer(run)
    before = predicted(trainer, run)
    outcome = outcome_of(trainer)
    outcome.notes = {"before": before, "after": predicted(trainer, run)}
    return outcome


@cache
def expected(name: str) -> Outcome:
    return run_ranks(stock, 1, RUNS[name])[0]


def in_parts(rank: int, world_size: int, run: Run, schedule: str) -> Outcome:
    trainer = pipeline_trainer(
        replace(run, per_device=run.per_device * WORLD // world_size),
        PROCESSES,
        pipeline_schedule=schedule,
        virtual_pipeline_parallel_size=2,
        num_microbatches=4,
    )
    held = []
    at_each_step(trainer, after=lambda run: held.append(len(run.pipeline.stage.stages)))
    before = predicted(trainer, run)
    outcome = outcome_of(trainer)
    outcome.notes = {"before": before, "after": predicted(trainer, run), "held": set(held)}
    return outcome


CASES = [
    ("llama-tied", "interleaved1f1b"),
    ("llama-tied", "zbv"),
    ("t5", "zbv"),
]


@pytest.mark.parametrize(("name", "schedule"), few(CASES, CASES[0]))
def test_trains_and_predicts_as_one_process(name: str, schedule: str) -> None:
    """With accumulation, clipping, an odd last batch, and gradient checkpointing in one of the models."""
    outcomes = run_ranks(in_parts, PROCESSES, RUNS[name], schedule)
    assert expected(name).steps >= 5
    assert_same_training(outcomes, expected(name))
    for outcome in outcomes:
        assert outcome.notes["held"] == {2}
        for when in ("before", "after"):
            torch.testing.assert_close(outcome.notes[when], expected(name).notes[when], rtol=TOLERANCE, atol=TOLERANCE)


TABLE = {3: 1, 6: 2, 9: 5, 12: 6}
"""Steps done -> frozen layers. An epoch has three steps."""
STAGES = {0: 2, 1: 2, 2: 2, 5: 2, 6: 1}
"""Frozen layers -> stages, with four processes."""
VIRTUAL = {0: 2, 1: 2, 2: 2, 5: 2, 6: 1}
"""Frozen layers -> virtual stages per stage."""


@pytest.mark.slow
def test_freezing_and_caching_equal_one_process(tmp_path: Path) -> None:
    """(2, 2) with two virtual stages each, which read cached layers and frozen ones that are not cached -> (1, 4)."""
    run = DeepRun(epochs=6)
    results = run_ranks(cached_in_parts, WORLD, run, str(tmp_path))
    assert_same_training([outcome for outcome, _ in results], expected_of(run, TABLE))
    # each of the last epochs has more frozen layers, and reads the outputs stored for fewer layers in the epoch before
    assert all(hit_rates(epochs) == [(0, 0), (0, 1), (0, 1), (0, 1)] for _, epochs in results)
    events = [json.loads(line) for line in (tmp_path / "pipeline_events.jsonl").read_text().splitlines()]
    layouts = [(e["num_frozen_layers"], e["pipeline_parallel_size"], e["num_virtual_stages"]) for e in events]
    assert {frozen: k for frozen, k, _ in layouts} == STAGES
    assert {frozen: v for frozen, _, v in layouts} == VIRTUAL


def cached_in_parts(rank: int, world_size: int, run: Run, folder: str) -> tuple[Outcome, list[dict[str, Any]]]:
    return cached(rank, world_size, run, STAGES, TABLE, folder=folder, pipeline_schedule="interleaved1f1b")


def resumed(rank: int, world_size: int, run: Run, folder: str) -> Outcome:
    options: dict[str, Any] = {"stages": 2, "folder": f"{folder}/run", "save_strategy": "steps", "save_steps": 2}
    trainer = pipeline_trainer(run, pipeline_schedule="interleaved1f1b", **options)
    trainer.add_callback(StopAfter(2))
    trainer.train()
    return outcome_of(pipeline_trainer(run, pipeline_schedule="zbv", **options), f"{folder}/run/checkpoint-2")


@pytest.mark.slow
def test_resumes_under_another_schedule(tmp_path: Path) -> None:
    run = DeepRun("causal-lm")
    assert_same_training(run_ranks(resumed, WORLD, run, str(tmp_path)), run_ranks(stock, 1, run)[0])
