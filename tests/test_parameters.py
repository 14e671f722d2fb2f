"""Parameters stay the user's objects, and those that the user wants are trained, as by the stock Trainer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import nn
from training_runs import WORLD, Outcome, Run, assert_same_training, outcome_of, pipeline_trainer, reference_trainer
from transformers import TrainerCallback

RUN = Run(samples=48, accumulation=1, epochs=3)
LAYERS = "bert.encoder.layer."


# ------------------------------------------------------------------------------------------ unfreezing
class FreezeBelow(TrainerCallback):
    """Trains the layers from a number on, by epoch or step; the embeddings with layer 0.

    Args:
        event: at which it sets `requires_grad`.
        first_trained: by epochs (or, at events of a step, steps) that are done.
    """

    def __init__(self, event: str, first_trained: dict[int, int]) -> None:
        self.first_trained, self.is_by_step = first_trained, "step" in event
        setattr(self, event, self.apply)

    def apply(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        done = state.global_step if self.is_by_step else round(state.epoch or 0.0)
        if done in self.first_trained:
            train_from(model, self.first_trained[done])


def train_from(model: nn.Module, first: int) -> None:
    for name, parameter in model.named_parameters():
        layer = int(name[len(LAYERS) :].split(".")[0]) if name.startswith(LAYERS) else 99
        layer = -1 if ".embeddings." in name else layer
        parameter.requires_grad_(layer >= first)


CASES: list[tuple[str, dict[int, int], int]] = [
    ("on_epoch_end", {1: 1}, 4),
    ("on_step_begin", {2: -1, 4: 3, 6: 0}, 2),
]
"""Event, first trained layer by epochs or steps, and stages."""


def gradual_trainings(rank: int, world_size: int) -> list[Outcome]:
    """The user's AdamW over all parameters; at first only the head is trained."""
    found = []
    for event, first_trained, stages in CASES:
        model = RUN.build_model()
        train_from(model, 99)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
        keywords = {"optimizers": (optimizer, None), "callbacks": [FreezeBelow(event, first_trained)]}
        make: Any = reference_trainer if world_size == 1 else partial(pipeline_trainer, stages=stages)
        found.append(outcome_of(make(replace(RUN, keywords=keywords), model=model)))
    return found


@pytest.mark.slow
def test_callbacks_that_freeze_and_unfreeze_equal_the_stock_trainer() -> None:
    (expected,), everyone = run_ranks(gradual_trainings, 1), run_ranks(gradual_trainings, WORLD)
    for number, wanted in enumerate(expected):
        assert_same_training([outcomes[number] for outcomes in everyone], wanted)


class TogglesInLoss:
    def compute_loss(self, model, inputs, *args, **kwargs):  # type: ignore[no-untyped-def]
        if self.state.global_step == 1:  # type: ignore[attr-defined]
            train_from(model, 3)
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]


def changes_of_flags(rank: int, world_size: int) -> None:
    """The refusals of layers that are unfrozen although the policy has frozen them, and of a change within a step."""
    run = Run(epochs=2, samples=32)
    thawing = replace(run, keywords={"callbacks": [FreezeBelow("on_step_begin", {2: -1})]})
    by_steps = {"freeze_policy": "schedule", "freeze_strategy": "steps", "freeze_steps": 1, "freeze_schedule": {1: 1}}
    for trainer, words in (
        (pipeline_trainer(thawing, 1, **by_steps), "freeze policy has frozen"),
        (pipeline_trainer(thawing, 2, **by_steps), "freeze policy has frozen"),
        (pipeline_trainer(replace(run, trainer=TogglesInLoss), 2), "outside a callback"),
    ):
        with pytest.raises(ValueError, match=words):
            trainer.train()


@pytest.mark.slow
def test_changes_of_flags_that_are_refused_everywhere() -> None:
    run_ranks(changes_of_flags, 2, timeout=100)
