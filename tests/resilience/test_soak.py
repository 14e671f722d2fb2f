"""A long training that changes its layout, saves and evaluates again and again: as one process, without leaks.

    steps     0 ...... 300 ....... 600 ...... 1000 ............ 1600 ...... 2000
              warm-up              early window                 late window

Losses and weights must equal an undisturbed training in one process. A process must hold as much memory, descriptors
and threads in the late window as in the early one. The last freeze comes before both: a freeze releases memory.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from test_elastic_pipeline import reference
from training_runs import (
    WORLD,
    Outcome,
    Run,
    at_each_step,
    largest_difference,
    outcome_of,
    pipeline_trainer,
    with_stages,
)
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.planning.layout import Layout
from hf_pipetransformer.run.run import PipelineRun

RANKS = 2


SAMPLES, STEPS = 1003, 2000
"""An epoch has 63 steps, and the last one 11 rows."""
FREEZES = {210: 1, 450: 2}
"""Steps done -> frozen layers."""
CHANGES = (
    *(50, 130, 210, 290, 370, 450, 530, 610, 690, 770),
    *(905, 1003, 1101, 1201, 1333, 1450, 1610, 1730, 1850, 1930),
)
"""Steps done when two stages become one, or one becomes two; some at the end of an epoch, a save or an evaluation."""
SAVED_EVERY, LOOKED_EVERY = 100, 50
"""Steps between two saves, and two evaluations; between two looks at a process's resources, at most."""
WARM_UP, EARLY, LATE = 300, range(600, 1001), range(1600, 2001)
"""Between the windows are 1,000 steps, 11 changes, 10 saves and 10 evaluations."""
MOST_GROWTH = 5 * 2**18
"""Bytes of resident memory, between the means of the windows.

About half of it is seen. 1.7 MiB or more would be, if 1 KiB were kept in each step, or the weights and the optimizer
state of this model (116 KiB) in each change.
"""
# With this learning rate the loss falls over the whole run; with a larger one it would soon be too small to differ.
RUN = Run(samples=SAMPLES, accumulation=1).with_options(max_steps=STEPS, learning_rate=1e-4)

LOSS_TOLERANCE = 1e-5
"""Of each step. Rows that are divided among replicas and micro-batches are summed in another order, in float32; with a
ten times larger learning rate 5e-6 is seen, and 3e-6 in the weights."""
WEIGHT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Holdings:
    """Memory, descriptors and other resources of a process at one moment.

    Attributes:
        step: number of steps done.
        stages: of the layout in force.
        resident_bytes: of memory.
        descriptors: open, without `/proc`: the watchdog opens its peers' entries there for an instant.
        threads: of the process.
        groups: of processes, that torch knows.
        shared: mappings of shared memory.
        tensors: Python objects that are alive, garbage having been collected.
    """

    step: int
    stages: int
    resident_bytes: int
    descriptors: int
    threads: int
    groups: int
    shared: int
    tensors: int

    @classmethod
    def now(cls, step: int, stages: int) -> Holdings:
        gc.collect()
        process = psutil.Process()
        return cls(
            step=step,
            stages=stages,
            resident_bytes=process.memory_info().rss,
            descriptors=_open_descriptors(),
            threads=process.num_threads(),
            groups=len(dist.distributed_c10d._world.pg_map),
            shared=Path("/proc/self/maps").read_text().count("/dev/shm/"),
            tensors=sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        )


def _open_descriptors() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += not os.readlink(f"/proc/self/fd/{name}").startswith("/proc/")
        except FileNotFoundError:  # closed since it was listed
            continue
    return count


class Lookout(TrainerCallback):
    """Notes the process's resources now and then.

    Also behind the first step of each layout: more tensors come when batches of other shapes do.
    """

    def __init__(self, trainer: PipeTransformerTrainer) -> None:
        self.trainer = trainer
        self.seen: list[Holdings] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % LOOKED_EVERY == 0 or state.global_step - 1 in CHANGES:
            pipeline = self.trainer.pipeline
            assert pipeline is not None
            self.seen.append(Holdings.now(state.global_step, pipeline.num_stages))


@dataclass
class Soaked:
    """The results of one process.

    Attributes:
        outcome: of the training, with the loss of every step.
        seen: its resources, in the order of steps.
        layouts: (steps done, stages, frozen layers) of every transformation.
        evaluations: how many there were.
    """

    outcome: Outcome
    seen: list[Holdings]
    layouts: list[tuple[int, int, int]]
    evaluations: int


def alternate(trainer: PipeTransformerTrainer) -> None:
    """Go over from two stages to one and back after these steps, whether a layer freezes there or not."""
    to_come = set(CHANGES)

    def other_stages(layout: Layout, num_frozen: int) -> int:
        to_come.discard(trainer.state.global_step)
        return 1 if layout.pipeline_parallel_size > 1 else RANKS

    def change(run: PipelineRun) -> None:
        if trainer.state.global_step in to_come:  # no freeze has changed the layout
            run.change_layout(run.pipeline.current_layout.num_frozen_layers, 0)

    with_stages(trainer, other_stages)
    at_each_step(trainer, after=change)


def soak(rank: int, world_size: int, folder: str) -> Soaked:
    trainer = pipeline_trainer(
        replace(RUN, per_device=RUN.per_device * WORLD // world_size),
        world_size,
        folder,
        freeze_policy="schedule",
        freeze_strategy="steps",
        freeze_steps=1,
        freeze_schedule=FREEZES,
        activation_cache="off",
        logging_steps=SAVED_EVERY,  # of every step it would grow, as under the stock Trainer
        save_strategy="steps",
        save_steps=SAVED_EVERY,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=SAVED_EVERY,
    )
    alternate(trainer)
    lookout = Lookout(trainer)
    trainer.add_callback(lookout)
    losses: list[float] = []
    training_step = trainer.training_step

    def noting(*arguments: Any) -> torch.Tensor:
        loss = training_step(*arguments)
        losses.append(float(loss))
        return loss

    trainer.training_step = noting  # type: ignore[method-assign]
    outcome = outcome_of(trainer)
    outcome.losses = losses
    log = trainer.state.log_history
    changes = [entry for entry in log if "transform_seconds" in entry]
    layouts = [(c["step"], c["pipeline_parallel_size"], c["num_frozen_layers"]) for c in changes]
    return Soaked(outcome, lookout.seen, layouts, sum("eval_loss" in entry for entry in log))


def within(seen: Sequence[Holdings], window: range) -> list[Holdings]:
    return [holdings for holdings in seen if holdings.step in window]


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_a_long_training_loses_nothing_and_keeps_nothing(tmp_path: Path) -> None:
    """2,000 steps, 20 transformations, 20 saves, 20 evaluations; three minutes on two free cores."""
    folder = tmp_path / "soak"
    ranks: list[Soaked] = run_ranks(soak, RANKS, str(folder), timeout=900)
    expected: Outcome = run_ranks(reference, 1, RUN, FREEZES, timeout=300)[0]
    frozen_at = [(step, sum(done <= step for done in FREEZES)) for step in CHANGES]
    for rank, soaked in enumerate(ranks):
        assert soaked.outcome.steps == expected.steps == STEPS
        assert soaked.layouts == [(step, 2 if n % 2 else 1, frozen) for n, (step, frozen) in enumerate(frozen_at)]
        assert soaked.evaluations == STEPS // SAVED_EVERY
        differences = [abs(a - b) for a, b in zip(soaked.outcome.losses, expected.losses, strict=True)]
        assert max(differences) <= LOSS_TOLERANCE
        difference, name = largest_difference(soaked.outcome.weights, expected.weights)
        assert difference <= WEIGHT_TOLERANCE, name
        assert_nothing_piles_up(rank, soaked.seen)
    checkpoints = {path.name for path in folder.iterdir() if path.is_dir()}
    assert checkpoints == {f"checkpoint-{STEPS - SAVED_EVERY}", f"checkpoint-{STEPS}"}


def assert_nothing_piles_up(rank: int, seen: Sequence[Holdings]) -> None:
    """After the warm-up no descriptor, thread, group or mapping is added, and memory stays where it is."""
    first, *later = [held for held in seen if held.step >= WARM_UP]
    for what in ("descriptors", "threads", "groups", "shared"):
        counts = [getattr(held, what) for held in later]
        assert max(counts) <= getattr(first, what), f"rank {rank}: {what} after step {WARM_UP}: {counts}"
    for stages in (1, RANKS):
        early, late = ([h.tensors for h in within(seen, w) if h.stages == stages] for w in (EARLY, LATE))
        assert min(late) <= min(early), f"rank {rank}, {stages} stages: tensors went from {early} to {late}"
    early, late = (mean(held.resident_bytes for held in within(seen, window)) for window in (EARLY, LATE))
    assert late - early <= MOST_GROWTH, f"rank {rank}: {(late - early) / 2**20:.2f} MiB more"
