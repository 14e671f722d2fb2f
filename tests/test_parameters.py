"""Parameters stay the user's objects, and those that the user wants are trained, as by the stock Trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import nn
from training_runs import WORLD, Outcome, Run, assert_same_training, outcome_of, pipeline_trainer, reference_trainer
from transformers import Trainer, TrainerCallback

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


CASES: dict[str, tuple[str, dict[int, int]]] = {
    "unfreeze at an epoch's end": ("on_epoch_end", {1: 1}),
    "freeze and unfreeze at steps": ("on_step_begin", {2: -1, 4: 3, 6: 0}),
}
STAGES = {"unfreeze at an epoch's end": 4, "freeze and unfreeze at steps": 2}


def gradual(case: str) -> tuple[Run, nn.Module]:
    """The user's AdamW over all parameters, of which the head alone is trained at first."""
    model = RUN.build_model()
    train_from(model, 99)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    keywords = {"optimizers": (optimizer, None), "callbacks": [FreezeBelow(*CASES[case])]}
    return replace(RUN, keywords=keywords), model


def gradual_trainings(rank: int, world_size: int) -> list[Outcome]:
    """One after the other, in stages or by the stock Trainer."""
    found = []
    for case, stages in STAGES.items():
        run, model = gradual(case)
        of_one = world_size == 1
        trainer: Trainer = (
            reference_trainer(run, model=model) if of_one else pipeline_trainer(run, stages, model=model)
        )
        found.append(outcome_of(trainer))
    return found


def test_callbacks_that_freeze_and_unfreeze_equal_the_stock_trainer() -> None:
    (expected,) = run_ranks(gradual_trainings, 1)
    everyone = run_ranks(gradual_trainings, WORLD)
    for number, case in enumerate(STAGES):
        print(case)
        assert_same_training([outcomes[number] for outcomes in everyone], expected[number])


class TogglesInLoss:
    def compute_loss(self, model, inputs, *args, **kwargs):  # type: ignore[no-untyped-def]
        if self.state.global_step == 1:  # type: ignore[attr-defined]
            train_from(model, 3)
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]


def changes_of_flags(rank: int, world_size: int) -> list[str]:
    """The refusals of layers that are unfrozen although the policy has frozen them, and of a change within a step."""
    run = Run(epochs=2, samples=32)
    thawing = replace(run, keywords={"callbacks": [FreezeBelow("on_step_begin", {2: -1})]})
    by_steps = {"freeze_policy": "schedule", "freeze_strategy": "steps", "freeze_steps": 1, "freeze_schedule": {1: 1}}
    messages = []
    for trainer in (
        pipeline_trainer(thawing, 1, **by_steps),
        pipeline_trainer(thawing, 2, **by_steps),
        pipeline_trainer(replace(run, trainer=TogglesInLoss), 2),
    ):
        with pytest.raises(ValueError) as caught:
            trainer.train()
        messages.append(str(caught.value))
    return messages


def test_changes_of_flags_that_are_refused_everywhere() -> None:
    for one, two, within in run_ranks(changes_of_flags, 2, timeout=100):
        assert "freeze policy has frozen" in one and "freeze policy has frozen" in two
        assert "outside a callback" in within
