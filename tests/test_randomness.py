"""Probes before the first step draw no numbers from the user's generators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import torch
from training_data import PadCollator, TrainingData
from training_runs import Run, assert_same_training, outcome_of, pipeline_trainer, reference_trainer


class MaskingCollator(PadCollator):
    """Makes its generator when it is first called, as `DataCollatorForLanguageModeling(seed=...)` does."""

    rng = None

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if self.rng is None:
            self.rng = torch.Generator().manual_seed(42)
        batch = super().__call__(samples)
        drawn = torch.rand(batch["input_ids"].shape, generator=self.rng) < 0.15
        return {**batch, "input_ids": batch["input_ids"].masked_fill(drawn, 7)}


class NoisyData(TrainingData):
    """Draws from a generator of its own."""

    rng = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.rng = self.rng or numpy.random.default_rng(3)
        return {**super().__getitem__(index), "labels": int(self.rng.integers(2))}


def test_what_is_looked_at_before_training_draws_nothing_from_users_generators() -> None:
    run = Run(samples=64, accumulation=1, epochs=1)
    outcomes = []
    for make in (reference_trainer, lambda run: pipeline_trainer(replace(run, per_device=16), 1, use_cpu=True)):
        trainer = make(run)
        trainer.train_dataset, trainer.data_collator = NoisyData(run.kind, 64), MaskingCollator(run.kind)
        outcomes.append(outcome_of(trainer))
    assert_same_training(outcomes[1:], outcomes[0])
