"""A short training that saves a checkpoint every other step, for tests of resuming; functions run inside ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from training_runs import Outcome, Run, StopAfter, outcome_of, pipeline_trainer, reference

RUN = Run(samples=64, accumulation=1).with_options(save_strategy="steps", save_steps=2)
"""Two epochs of four steps."""


def train_some(rank: int, world_size: int, folder: str, stages: int, stop: int = 6) -> None:
    trainer = pipeline_trainer(replace(RUN, per_device=16 // world_size), stages, folder)
    trainer.add_callback(StopAfter(stop))
    trainer.train()


def resume(rank: int, world_size: int, folder: str, stages: int, wanted: str | bool = True) -> Outcome:
    trainer = pipeline_trainer(replace(RUN, per_device=16 // world_size), stages, folder)
    return outcome_of(trainer, resume_from_checkpoint=wanted)  # type: ignore[arg-type]


@cache
def undisturbed() -> Outcome:
    """One process, without an interruption."""
    return reference(0, 1, RUN)
