"""On a device that behaves like an accelerator: no mixed devices, no wrong groups, and no more waits than are known."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_device
import fake_groups
import pytest
from training_runs import (
    Outcome,
    Run,
    outcome_of,
    pipeline_trainer,
    reference_trainer,
)
from transformers import Trainer, TrainerCallback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(fake_device.compiler() is None, reason="there is no C++ compiler"),
]

RUN = Run(samples=96, per_device=4, accumulation=1, epochs=5).with_options(
    dataloader_pin_memory=False, logging_strategy="no"
)
"""Six steps an epoch on K = 1 or K = 2 stages of one replica."""
STEADY = 28
"""A step inside the last epoch: layers are frozen, and what they give is read from the cache."""


@pytest.fixture(scope="session")
def library() -> Path:
    return fake_device.build()


class Counts(TrainerCallback):
    """Counts what each step makes the program wait for, from the end of the step before."""

    def __init__(self) -> None:
        self.of_step: dict[int, dict[str, int]] = {}
        self.sites: dict[int, dict[str, int]] = {}
        self._counting: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._counting is not None:
            context, counted = self._counting
            context.__exit__(None, None, None)
            self.of_step[state.global_step] = dict(counted)
            self.sites[state.global_step] = {
                f"{what}: {site}": n for (what, site), n in sorted(fake_device.sites.items())
            }
        context = fake_device.counting()
        self._counting = context, context.__enter__()


Counts.__module__ = "transformers.trainer_callback"  # not a user's, who might look at weights in each step


@dataclass
class Seen:
    outcome: Outcome
    of_step: dict[int, dict[str, int]]
    sites: dict[int, dict[str, int]]
    wrong: dict[str, int] = field(default_factory=dict)


def on_the_device(rank: int, world_size: int, library: Path, run: Run, stages: int, **options: Any) -> Seen:
    prepare(world_size, library)
    return seen_by(pipeline_trainer(run, stages, **options))


def stock_on_the_device(rank: int, world_size: int, library: Path, run: Run) -> Seen:
    prepare(world_size, library)
    return seen_by(reference_trainer(run.with_options(use_cpu=False)))


def prepare(world_size: int, library: Path) -> None:
    fake_device.register(library)
    if world_size > 1:
        fake_groups.register()
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]  # without a launcher


def seen_by(trainer: Trainer) -> Seen:
    counts = Counts()
    trainer.add_callback(counts)
    assert trainer.args.device.type == "fake"
    return Seen(outcome_of(trainer), counts.of_step, counts.sites, dict(fake_groups.wrong))
