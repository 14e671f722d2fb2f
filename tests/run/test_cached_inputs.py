"""Trainings with the cache: inputs of other shapes than [samples, tokens], and losses that read padding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from one_job import run_each
from torch.utils.data import Dataset
from training_runs import Outcome, Run, assert_same_training, outcome_of, pipeline_trainer

from hf_pipetransformer.parts.prefix_cache.cache import writing

CHOICES = 3


class Questions(Dataset):
    """Questions, each with some answers to choose from, of different lengths. The second answer is always the same."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        lengths = torch.randint(4, 12, (CHOICES,), generator=generator).tolist()
        answers = [torch.randint(5, 60, (length,), generator=generator) for length in lengths]
        answers[1] = torch.arange(5, 10)
        return {"input_ids": answers, "labels": int(answers[0][0]) % CHOICES}


def padded_together(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """[samples, choices, tokens of the longest]."""
    length = max(len(answer) for sample in samples for answer in sample["input_ids"])
    ids = torch.zeros(len(samples), CHOICES, length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        for choice, answer in enumerate(sample["input_ids"]):
            ids[row, choice, : len(answer)], mask[row, choice, : len(answer)] = answer, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([s["labels"] for s in samples])}


@dataclass(frozen=True)
class ChoiceRun(Run):
    def data(self, samples: int, seed: int = 0) -> Dataset:
        return Questions(samples, seed)


RUNS = {
    "multiple choice": ChoiceRun(model="bert-multiple-choice", samples=48, per_device=4, accumulation=1, epochs=4),
    "padding in the loss": Run("question-answering", samples=48, per_device=4, accumulation=1, epochs=4),
}


def train(rank: int, world_size: int, name: str, cache: str, folder: str) -> tuple[Outcome, list[float]]:
    writing.PENDING_BATCHES = 1000  # a busy machine drops no batches either
    options = {"freeze_policy": "schedule", "freeze_schedule": {1: 2}, "elastic": False}
    trainer = pipeline_trainer(RUNS[name], world_size, folder, activation_cache=cache, **options)
    if name == "multiple choice":
        trainer.data_collator, trainer.eval_dataset = padded_together, Questions(9, seed=9)
    outcome = outcome_of(trainer)
    return outcome, [entry["cache_hit_rate"] for entry in trainer.state.log_history if "cache_hit_rate" in entry]


@pytest.mark.slow
def test_cached(tmp_path: Path) -> None:
    cases = {f"{name} {mode}": (name, mode, str(tmp_path / name / mode)) for name in RUNS for mode in ("off", "on")}
    found = run_each(train, 1, cases)
    for name in RUNS:
        ((outcome, hits),), ((computed, _),) = found[f"{name} on"], found[f"{name} off"]
        assert_same_training([outcome], computed)
        assert hits[-1] == 1.0
