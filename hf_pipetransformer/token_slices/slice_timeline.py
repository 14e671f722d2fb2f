"""A simulated training step of a pipeline over tokens: which stage computes which slice, and when.

K = 2 stages, 2 parts of the batch, of 3 and 1 slices (F forward, B backward; part.slice):

    stage 0   F0.0 F0.1 F0.2 F1.0      B0.2 B0.1 B0.0      B1.0
    stage 1        F0.0 F0.1 F0.2 B0.2 B0.1 B0.0 F1.0 B1.0

`slice_planning.step_seconds` adds forward and backward of a slice, as the dynamic program requires. If layers are
frozen, the ratio of forward to backward differs between stages, and its prediction is too short; a simulation is used
then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Literal

from ..planning.timeline import Span, Timeline
from .slice_planning import (
    MINIMAL_GAIN,
    RowSlices,
    SliceLatency,
    most_rows_of_part,
    plan_slices,
    whole_rows,
)

LEAST_GAIN_OF_CUTS = 0.15
"""Fraction of a step that splitting sequences must be predicted to save over splitting the batch alone. A prediction
may be off by as much; and if two stages idle for a fifth of a step, as with four micro-batches, short slices do not
save more than that."""


@dataclass(frozen=True)
class SliceTask:
    """The forward or backward of one slice of one part of the batch."""

    is_forward: bool
    part: int
    slice: int


@dataclass(frozen=True)
class StageLatency:
    """Time of slices on one stage, forward and backward; both are constant up to the same number of tokens."""

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


def choose_slices(
    stages: Sequence[StageLatency], rows: int, length: int, num_parts: int, *, chooses_parts: bool
) -> tuple[tuple[RowSlices, ...], float]:
    """Choose how to split a batch, by `plan_slices`; sequences stay whole if splitting them saves too little.

    A simulation decides which split is faster, because the dynamic program adds forward and backward. Another split
    into parts of whole samples must save `MINIMAL_GAIN`, a split of sequences `LEAST_GAIN_OF_CUTS`.

    Args:
        stages: latency of each stage. `[K]`
        rows: number of samples of the batch that the pipeline processes in a step.
        length: number of tokens of each sample.
        num_parts: number of equal parts of whole samples, of which K are known to fit into memory at once.
        chooses_parts: whether the program may choose other parts than these.

    Returns:
        The parts, and the predicted seconds of forward and backward of a step.
    """
    together = [stage.both for stage in stages]
    best = whole_rows(rows, length, num_parts)
    best_seconds = simulate_slices(stages, best).seconds
    whole, cut = (length, MINIMAL_GAIN), (None, LEAST_GAIN_OF_CUTS)
    if chooses_parts:
        limit, ways = {"most_rows": most_rows_of_part(rows, num_parts, len(stages))}, [whole, cut]
    else:
        limit, ways = {"num_parts": num_parts}, [cut]
    for granularity, least_gain in ways:
        parts = plan_slices(together, rows, length, granularity=granularity, **limit).parts
        seconds = simulate_slices(stages, parts).seconds
        if seconds < best_seconds * (1 - least_gain):
            best, best_seconds = parts, seconds
    return best, best_seconds


def tasks_of(stage: int, num_stages: int, slices: Sequence[int]) -> list[SliceTask]:
    """Return what a stage does in a step, in order: 1F1B over parts; `slices` has each part's number of slices."""
    forward = [[SliceTask(True, part, i) for i in range(count)] for part, count in enumerate(slices)]
    backward = [[SliceTask(False, part, i) for i in reversed(range(count))] for part, count in enumerate(slices)]
    ahead = min(len(slices), num_stages - stage)
    tasks = list(chain(*forward[:ahead]))
    for part, of_part in enumerate(backward):
        tasks += of_part
        tasks += forward[ahead + part] if ahead + part < len(forward) else []
    return tasks


def simulate_slices(stages: Sequence[StageLatency], parts: Sequence[RowSlices]) -> Timeline:
    """Simulate forward and backward of a step whose messages take no time.

    The micro-batches of the returned spans are slices, counted over all parts.
    """
    k, counts = len(stages), [len(part.lengths) for part in parts]
    first = list(accumulate(counts, initial=0))
    work = [deque(tasks_of(stage, k, counts)) for stage in range(k)]
    forward = [seconds_of_slices(stage.forward, parts) for stage in stages]
    backward = [seconds_of_slices(stage.backward, parts) for stage in stages]
    done: dict[tuple[bool, int, int, int], float] = {}
    free = [0.0] * k
    spans = []
    while any(work):
        for stage, tasks in enumerate(work):
            while tasks:
                task = tasks[0]
                seconds = (forward if task.is_forward else backward)[stage][task.part, task.slice]
                source = stage - 1 if task.is_forward else stage + 1
                has_source = 0 <= source < k and (task.is_forward or seconds > 0)  # 0: frozen up to here, no gradients
                if has_source and (task.is_forward, source, task.part, task.slice) not in done:
                    break
                start = max(free[stage], done[task.is_forward, source, task.part, task.slice] if has_source else 0.0)
                free[stage] = done[task.is_forward, stage, task.part, task.slice] = start + seconds
                if seconds > 0:
                    kind: Literal["forward", "backward"] = "forward" if task.is_forward else "backward"
                    spans.append(Span(stage, kind, first[task.part] + task.slice, start, free[stage]))
                tasks.popleft()
    return Timeline(tuple(sorted(spans, key=lambda span: (span.stage, span.start))), max(free))


def seconds_of_slices(latency: SliceLatency, parts: Sequence[RowSlices]) -> dict[tuple[int, int], float]:
    """Seconds of each slice, by (index of the part, index of the slice)."""
    return {
        (number, i): float(latency.seconds(part.rows, length, sum(part.lengths[:i])))
        for number, part in enumerate(parts)
        for i, length in enumerate(part.lengths)
    }
