"""A simulated training step of a pipeline over tokens: the start and end of each slice on each stage.

K = 2 stages, 2 parts of the batch, of 3 and 1 slices (F forward, B backward; part.slice):

    stage 0   F0.0 F0.1 F0.2 F1.0      B0.2 B0.1 B0.0      B1.0
    stage 1        F0.0 F0.1 F0.2 B0.2 B0.1 B0.0 F1.0 B1.0

`slice_planning.step_seconds` adds forward and backward of a slice, as the dynamic program requires. With frozen
layers, the ratio of forward to backward differs between stages, and this prediction is too short. The simulation is
then used instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from ..planning.schedules import Work
from ..planning.timeline import Timeline, play
from .slice_planning import MINIMAL_GAIN, RowSlices, SliceLatency, part_sizes, plan_slices, whole_rows

LEAST_GAIN_OF_CUTS = 0.15
"""Predicted saving, as a fraction of a step, required for splitting sequences rather than the batch alone. A
prediction may be off by as much. And if two stages idle for a fifth of a step, as with four micro-batches, short
slices do not save more than that."""


@dataclass(frozen=True)
class StageLatency:
    """Time of slices on one stage, forward and backward. Both are constant up to the same number of tokens."""

    forward: SliceLatency
    backward: SliceLatency

    @property
    def both(self) -> SliceLatency:
        one, other = self.forward, self.backward
        return SliceLatency(
            one.fixed + other.fixed,
            one.per_token + other.per_token,
            one.per_pair + other.per_pair,
            one.per_context + other.per_context,
            one.flat_tokens,
        )


@dataclass(frozen=True)
class SlicePlan:
    """The split of a batch.

    Attributes:
        parts: groups of samples. The pipeline runs the slices of one group after the other.
        seconds: predicted seconds of forward and backward of a step; None if unknown.
        stages: the latency of each stage, used for the prediction; empty if unknown.
    """

    parts: tuple[RowSlices, ...]
    seconds: float | None = None
    stages: tuple[StageLatency, ...] = ()


def choose_slices(
    stages: Sequence[StageLatency], rows: int, length: int, num_parts: int, *, chooses_parts: bool
) -> SlicePlan:
    """Choose the split of a batch by `plan_slices`. Sequences stay whole if splitting them saves too little.

    A simulation decides which split is faster, because the dynamic program adds forward and backward. Another split
    into parts of whole samples must save `MINIMAL_GAIN`, a split of sequences `LEAST_GAIN_OF_CUTS`.

    Args:
        stages: latency of each stage. `[K]`
        rows: number of samples of the batch that the pipeline processes in a step.
        length: number of tokens of each sample.
        num_parts: number of equal parts of whole samples. K of them are known to fit into memory at once.
        chooses_parts: whether the program may choose other parts.
    """
    together = [stage.both for stage in stages]
    sizes = part_sizes(rows, num_parts, len(stages)) if chooses_parts else [rows // num_parts]
    best = whole_rows(rows, length, num_parts)
    best_seconds = simulate_slices(stages, best).seconds
    for granularity, least_gain in ((length, MINIMAL_GAIN), (None, LEAST_GAIN_OF_CUTS)):
        parts = plan_slices(together, rows, length, sizes, granularity)
        seconds = simulate_slices(stages, parts).seconds
        if seconds < best_seconds * (1 - least_gain):
            best, best_seconds = parts, seconds
    return SlicePlan(best, best_seconds, tuple(stages))


def work_of(stage: int, num_stages: int, slices: Sequence[int]) -> list[Work]:
    """Return the passes of a stage in a step, in order: 1F1B over parts.

    Args:
        stage: index of the stage.
        num_stages: K.
        slices: each part's number of slices. `Work.micro_batch` counts the slices of all parts.
    """
    numbers = [list(range(end - count, end)) for count, end in zip(slices, accumulate(slices), strict=True)]
    forward = [[Work("forward", 0, i) for i in of_part] for of_part in numbers]
    backward = [[Work("backward", 0, i) for i in reversed(of_part)] for of_part in numbers]
    ahead = min(len(slices), num_stages - stage)
    work = list(chain(*forward[:ahead]))
    for part, of_part in enumerate(backward):
        work += of_part
        work += forward[ahead + part] if ahead + part < len(forward) else []
    return work


def simulate_slices(stages: Sequence[StageLatency], parts: Sequence[RowSlices]) -> Timeline:
    """Simulate forward and backward of a step. Messages take no time; `Span.micro_batch` counts the slices."""
    sizes = [
        (part.rows, length, context)
        for part in parts
        for length, context in zip(part.lengths, accumulate(part.lengths, initial=0), strict=False)
    ]
    seconds = {
        "forward": [[float(stage.forward.seconds(*size)) for size in sizes] for stage in stages],
        "backward": [[float(stage.backward.seconds(*size)) for size in sizes] for stage in stages],
    }
    k, counts = len(stages), [len(part.lengths) for part in parts]
    work = [work_of(stage, k, counts) for stage in range(k)]
    return play(work, [[stage] for stage in range(k)], lambda task: seconds[task.kind][task.part][task.micro_batch])
