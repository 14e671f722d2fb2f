"""A short training that saves a checkpoint every other step, for tests of resuming; functions run inside ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from distributed import run_ranks
from training_runs import Outcome, Run, outcome_of, pipeline_trainer, reference
from transformers import TrainerCallback

RUN = Run(samples=64, accumulation=1).with_options(save_strategy="steps", save_steps=2)
"""Two epochs of four steps."""


class Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self._step


def train_some(rank: int, world_size: int, folder: str, stages: int, stop: int = 6) -> None:
    trainer = pipeline_trainer(replace(RUN, per_device=16 // world_size), stages, folder)
    trainer.add_callback(Stop(stop))
    trainer.train()


def resume(rank: int, world_size: int, folder: str, stages: int, wanted: str | bool = True) -> Outcome:
    trainer = pipeline_trainer(replace(RUN, per_device=16 // world_size), stages, folder)
    return outcome_of(trainer, resume_from_checkpoint=wanted)  # type: ignore[arg-type]


@cache
def undisturbed() -> Outcome:
    """One process that nothing interrupts."""
    return run_ranks(reference, 1, RUN)[0]
