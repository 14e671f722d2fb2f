"""A long training that changes its layout, saves and evaluates again and again: as one process, and nothing piles up.

    steps     0 ...... 300 ....... 600 ...... 1000 ............ 1600 ...... 2000
              warm-up              early window                 late window

Losses and weights must be those of one process that trains undisturbed. What a process holds of the system must be in
the late window what it was in the early one. The last freeze comes before both, so that nothing is let go in between.
A shorter one caches what layers have frozen; there they count as cached before both windows, too.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from hf_pipetransformer.cache import writing
from hf_pipetransformer.planning.layout import Layout
from hf_pipetransformer.run.run import PipelineRun

RANKS = 2


@dataclass(frozen=True)
class Course:
    """A training, and what happens when.

    Attributes:
        samples: of an epoch.
        steps: of the training.
        freezes: steps done -> frozen layers.
        changes: steps done when two stages become one, or one becomes two; some at the end of an epoch, a save or an
            evaluation.
        saved_every: steps between two saves, and two evaluations.
        looked_every: steps between two looks at what a process holds, at most.
        warm_up: steps after which no descriptor, thread, group or mapping is added.
        early: steps of the first window.
        late: steps of the last one.
        most_growth: bytes of resident memory, between the means of the windows.
        counted: steps done -> layers that count as cached; empty: nothing is cached.
    """

    samples: int
    steps: int
    freezes: dict[int, int]
    changes: tuple[int, ...]
    saved_every: int
    looked_every: int
    warm_up: int
    early: range
    late: range
    most_growth: int
    counted: dict[int, int] = field(default_factory=dict)

    @property
    def run(self) -> Run:
        """The last step of an epoch has 11 rows.

        With this learning rate the loss falls over the whole run; with a larger one it would soon be so small that
        nothing could make it differ.
        """
        options = {"max_steps": self.steps, "learning_rate": 1e-4}
        return Run(samples=self.samples, accumulation=1).with_options(**options)


LONG = Course(
    samples=1003,
    steps=2000,
    freezes={210: 1, 450: 2},
    changes=(
        *(50, 130, 210, 290, 370, 450, 530, 610, 690, 770),
        *(905, 1003, 1101, 1201, 1333, 1450, 1610, 1730, 1850, 1930),
    ),
    saved_every=100,
    looked_every=50,
    warm_up=300,
    early=range(600, 1001),
    late=range(1600, 2001),
    most_growth=5 * 2**18,
)
"""An epoch has 63 steps. Between the windows are 1,000 steps, 11 changes, 10 saves and 10 evaluations.

About half of `most_growth` is seen. 1.7 MiB or more would be, if 1 KiB were kept in each step, or the weights and the
optimizer state of this model (116 KiB) in each change.
"""
CACHED = Course(
    samples=251,
    steps=300,
    freezes={10: 1, 40: 2},
    changes=(
        *(10, 21, 32, 40, 53, 64, 75, 87, 96, 107, 118, 129),
        *(140, 150, 163, 176, 187, 200, 212, 224, 235, 250, 261, 273, 288),
    ),
    saved_every=50,
    looked_every=10,
    warm_up=125,
    early=range(130, 181),
    late=range(250, 301),
    most_growth=5 * 2**19,
    counted={32: 1, 64: 2},
)
"""An epoch has 16 steps. What layers give is put for a whole epoch; they count as cached from the next one on.

About half of `most_growth` is seen between the windows, with and without a cache: so early it has not settled.
"""

LOSS_TOLERANCE = 1e-5
"""Of each step. Rows that are divided among replicas and micro-batches are summed in another order, in float32; with a
ten times larger learning rate 5e-6 is seen, and 3e-6 in the weights."""
WEIGHT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Holdings:
    """What a process holds of the system at one moment.

    Attributes:
        step: number of steps done.
        stages: of the layout in force.
        resident_bytes: of memory.
        descriptors: open, but for those of `/proc`: the watchdog opens its peers' entries for an instant.
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
    """Notes now and then what the process holds.

    Also behind the first step of each layout: more tensors come when batches of other shapes do.
    """

    def __init__(self, trainer: PipeTransformerTrainer, course: Course) -> None:
        self.trainer, self.course = trainer, course
        self.seen: list[Holdings] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.course.looked_every == 0 or state.global_step - 1 in self.course.changes:
            pipeline = self.trainer.pipeline
            assert pipeline is not None
            self.seen.append(Holdings.now(state.global_step, pipeline.num_stages))


@dataclass
class Soaked:
    """What one process leaves behind.

    Attributes:
        outcome: of the training, with the loss of every step.
        seen: what it held, in the order of steps.
        layouts: (steps done, stages, frozen layers, cached layers) of every transformation.
        evaluations: how many there were.
        hit_rates: of the cache, in each epoch but the last.
    """

    outcome: Outcome
    seen: list[Holdings]
    layouts: list[tuple[int, int, int, int]]
    evaluations: int
    hit_rates: list[float]


def alternate(trainer: PipeTransformerTrainer, changes: Sequence[int]) -> None:
    """Go over from two stages to one and back after these steps, whether a layer freezes there or not."""
    to_come = set(changes)

    def other_stages(layout: Layout, num_frozen: int) -> int:
        to_come.discard(trainer.state.global_step)
        return 1 if layout.pipeline_parallel_size > 1 else RANKS

    def change(run: PipelineRun) -> None:
        if trainer.state.global_step in to_come:  # nothing has changed by itself
            frozen = run.pipeline.current_plan.num_frozen_layers
            run.change_layout(frozen, run.cache.num_cached if run.cache is not None else 0)

    with_stages(trainer, other_stages)
    at_each_step(trainer, after=change)


def soak(rank: int, world_size: int, course: Course, folder: str) -> Soaked:
    writing.PENDING_BATCHES = 1000  # nothing is dropped on a busy machine: layers count when they should
    run = course.run
    trainer = pipeline_trainer(
        replace(run, per_device=run.per_device * WORLD // world_size),
        world_size,
        folder,
        freeze_policy="schedule",
        freeze_strategy="steps",
        freeze_steps=1,
        freeze_schedule=course.freezes,
        activation_cache="on" if course.counted else "off",
        logging_steps=course.saved_every,  # of every step it would grow, as under the stock Trainer
        save_strategy="steps",
        save_steps=course.saved_every,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=course.saved_every,
    )
    alternate(trainer, course.changes)
    lookout = Lookout(trainer, course)
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
    return Soaked(
        outcome,
        lookout.seen,
        [(c["step"], c["pipeline_parallel_size"], c["num_frozen_layers"], c["num_cached_layers"]) for c in changes],
        sum("eval_loss" in entry for entry in log),
        [entry["cache_hit_rate"] for entry in log if "cache_hit_rate" in entry],
    )


def within(seen: Sequence[Holdings], window: range) -> list[Holdings]:
    return [holdings for holdings in seen if holdings.step in window]


def growth_of_memory(course: Course, seen: Sequence[Holdings]) -> float:
    windows = (course.early, course.late)
    early, late = (mean(held.resident_bytes for held in within(seen, window)) for window in windows)
    return late - early


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("course", [LONG, CACHED], ids=["uncached", "cached"])
def test_a_long_training_loses_nothing_and_keeps_nothing(course: Course, tmp_path: Path) -> None:
    """2,000 steps, 20 transformations, 20 saves, 20 evaluations; three minutes on two free cores. With a cache 300."""
    folder = tmp_path / "soak"
    ranks: list[Soaked] = run_ranks(soak, RANKS, course, str(folder), timeout=900)
    expected: Outcome = run_ranks(reference, 1, course.run, course.freezes, timeout=300)[0]

    loss_differences = [
        max(abs(a - b) for a, b in zip(soaked.outcome.losses, expected.losses, strict=True)) for soaked in ranks
    ]
    weight_differences = [largest_difference(soaked.outcome.weights, expected.weights) for soaked in ranks]
    layouts = [
        (
            step,
            2 if number % 2 else 1,
            *(sum(done <= step for done in table) for table in (course.freezes, course.counted)),
        )
        for number, step in enumerate(course.changes)
    ]
    for soaked in ranks:
        assert soaked.outcome.steps == expected.steps == course.steps
        assert soaked.layouts == layouts
        assert soaked.evaluations == course.steps // course.saved_every
        if course.counted:
            assert min(soaked.hit_rates[-10:]) > 0.95  # of the epochs from the last freeze's second one on
    assert max(loss_differences) <= LOSS_TOLERANCE
    assert max(weight_differences)[0] <= WEIGHT_TOLERANCE, max(weight_differences)[1]
    checkpoints = {path.name for path in folder.iterdir() if path.is_dir()}
    assert checkpoints == {f"checkpoint-{course.steps - course.saved_every}", f"checkpoint-{course.steps}"}

    for rank, soaked in enumerate(ranks):
        assert_nothing_piles_up(rank, course, soaked.seen)


def assert_nothing_piles_up(rank: int, course: Course, seen: Sequence[Holdings]) -> None:
    """After the warm-up no descriptor, thread, group or mapping is added, and memory stays where it is."""
    first, *later = [held for held in seen if held.step >= course.warm_up]
    for what in ("descriptors", "threads", "groups", "shared"):
        counts = [getattr(held, what) for held in later]
        assert max(counts) <= getattr(first, what), f"rank {rank}: {what} after step {course.warm_up}: {counts}"
    for stages in (1, RANKS):
        windows = (course.early, course.late)
        early, late = ([h.tensors for h in within(seen, w) if h.stages == stages] for w in windows)
        assert min(late) <= min(early), f"rank {rank}, {stages} stages: tensors went from {early} to {late}"
    growth = growth_of_memory(course, seen)
    assert growth <= course.most_growth, f"rank {rank}: {growth / 2**20:.2f} MiB more"
