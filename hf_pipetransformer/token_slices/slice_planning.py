"""Chooses where to split one sequence: slices of tokens that follow each other through a pipeline (TeraPipe).

In a causal model no token depends on later ones, so a stage can send on the first tokens of a sample before it
computes the next ones. Two stages, slices of 3, 2 and 2 seconds (one column per second):

    stage 0   1 1 1 2 2 3 3
    stage 1         1 1 1 2 2 3 3         (3 + 2 + 2) + (K - 1) * 3 = 10

A slice must not be too short, because a device is not faster with few tokens. A late slice must be shorter than the
first one, because it attends to all tokens before it. Li et al., TeraPipe, ICML 2021, section 3.3: equation 5 is
`step_seconds`, algorithm 1 is `plan_slices`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, combinations, pairwise
from typing import overload

import numpy as np

MINIMAL_GAIN = 0.02
"""Fraction of a step that more slices must save: the fitted latencies are not more accurate, and do not include all
costs of messages and calls."""
LIMITS_RATIO = 1.02
"""Ratio between consecutive limits on the seconds of a slice: bounds the slowdown against the fastest plan."""
GRANULARITY = 16
"""Most devices pad matrix products to a multiple of this, in tokens."""
MOST_UNITS = 64
"""Maximum number of units of a sequence: the time of the dynamic program grows with its square."""
FEWEST_POINTS = 4
"""Minimum number of measurements for a fit, equal to the number of coefficients of a `SliceLatency`."""


@dataclass(frozen=True)
class SliceLatency:
    """Seconds of a slice's forward and backward on one stage.

    A slice has `length` tokens in each of `rows` samples, after `context` earlier tokens of the same samples:

        fixed + per_token * max(rows * length, flat_tokens)
              + per_pair * rows * length * (context + length / 2) + per_context * rows * context

    Attributes:
        fixed: seconds per slice of any size: calls, messages.
        per_token: seconds per token.
        per_pair: seconds per pair of a token and a token that it attends to.
        per_context: seconds per earlier token, for its keys and values.
        flat_tokens: slices with fewer tokens take as long as this many tokens (figure 3 of the paper).
    """

    fixed: float
    per_token: float
    per_pair: float
    per_context: float
    flat_tokens: int = 0

    @overload
    def seconds(self, rows: int, length: int, context: int) -> float: ...

    @overload
    def seconds(self, rows: int | np.ndarray, length: np.ndarray, context: int | np.ndarray) -> np.ndarray: ...

    def seconds(
        self, rows: int | np.ndarray, length: int | np.ndarray, context: int | np.ndarray
    ) -> float | np.ndarray:
        """Return the seconds of one slice, or of many slices: arrays broadcast."""
        return (
            self.fixed
            + self.per_token * np.maximum(rows * length, self.flat_tokens)
            + self.per_pair * (rows * length * (context + length / 2))
            + self.per_context * (rows * context)
        )

    @classmethod
    def fit(
        cls, points: Sequence[tuple[int, int, int, float]], flat_tokens: int | None = None
    ) -> tuple[SliceLatency, float]:
        """Fit the latency to measurements by least squares of the relative error.

        No coefficient is negative. `flat_tokens` is the best fit among 0 and the measured numbers of tokens.

        Args:
            points: (rows, length, context, measured seconds) of each measurement.
            flat_tokens: the value, if known.

        Returns:
            The fit, and the root mean square of its relative error at the points.
        """
        assert len(points) >= FEWEST_POINTS, points
        known = () if flat_tokens is None else (flat_tokens,)
        tokens = known or (0, *sorted({rows * length for rows, length, _, _ in points}))
        fits = [_fit_coefficients(points, flat) for flat in tokens]
        error, latency = min(fits, key=lambda fit: fit[0])  # ties: the smallest flat part wins
        return latency, error


@dataclass(frozen=True)
class RowSlices:
    """`rows` samples of a batch, split into slices of these lengths, in tokens."""

    rows: int
    lengths: tuple[int, ...]


def whole_rows(rows: int, length: int, num_parts: int) -> tuple[RowSlices, ...]:
    """Return equal parts of the samples, each with a single slice."""
    return (RowSlices(rows // num_parts, (length,)),) * num_parts


def step_seconds(stages: Sequence[SliceLatency], parts: Sequence[RowSlices]) -> float:
    """Predict forward and backward of one step: sum t_i + (K_eff - 1) max t_i over all slices of all parts.

    t_i is a slice's time on its slowest stage; K_eff is `effective_stages`.
    """
    pace = effective_stages(stages, sum(part.rows for part in parts), sum(parts[0].lengths)) - 1
    times = [
        max(stage.seconds(part.rows, length, context) for stage in stages)
        for part in parts
        for length, context in zip(part.lengths, accumulate(part.lengths, initial=0), strict=False)
    ]
    return float(sum(times) + pace * max(times))


def effective_stages(stages: Sequence[SliceLatency], rows: int, length: int) -> float:
    """K_eff = sum w_k / max w_k, where w_k is stage k's time for the whole batch: K if the stages are equal.

    Filling and draining the pipeline passes one slice through all stages; fast stages take less time for it.
    """
    work = [stage.seconds(rows, length, 0) for stage in stages]
    return float(sum(work) / max(work)) if max(work) > 0 else 1.0


def plan_slices(
    stages: Sequence[SliceLatency],
    rows: int,
    length: int,
    sizes: Sequence[int],
    granularity: int | None = None,
) -> tuple[RowSlices, ...]:
    """Choose equal parts of the batch and slices of tokens to minimize the time of a step (`step_seconds`).

    1. For each size of a part and each of many limits on the seconds of a slice, a dynamic program over the units of a
       sample finds the split with the least sum. Limits grow by a factor of `LIMITS_RATIO`: one limit is within this
       factor above the longest slice of the fastest plan.
    2. Among the plans within `MINIMAL_GAIN` of the best one, the plan with the fewest slices is chosen.

    Args:
        stages: latency of each stage. `[K]`
        rows: number of samples of the batch that the pipeline processes in a step.
        length: number of tokens of each sample.
        sizes: allowed numbers of samples in a part; divisors of `rows`.
        granularity: slices are multiples of this many tokens, except the last one. Default: 16, or the next multiple
            of 16 that leaves at most 64 units.
    """
    if granularity is None:
        granularity = GRANULARITY * math.ceil(max(length / MOST_UNITS, 1) / GRANULARITY)
    bounds = np.minimum(np.arange(math.ceil(length / granularity) + 1) * granularity, length)
    pace = effective_stages(stages, rows, length) - 1
    different = tuple(dict.fromkeys(stages))  # equal stages have equal times
    splits = {size: _split(_slice_table(different, size, bounds)) for size in sizes}
    seconds = {size: rows // size * sums + pace * longest for size, (sums, longest, _) in splits.items()}
    best = min(float(of_size.min()) for of_size in seconds.values())
    plans: dict[tuple[int, tuple[int, ...]], float] = {}  # size and slices -> seconds
    for size, (_, _, begins) in splits.items():
        near = np.flatnonzero(seconds[size] * (1 - MINIMAL_GAIN) <= best)
        for c in near[np.unique(seconds[size][near], return_index=True)[1]].tolist():
            ends = [len(bounds) - 1]
            while ends[-1]:
                ends.append(int(begins[c, ends[-1]]))
            plans[size, tuple(np.diff(bounds[ends[::-1]]).tolist())] = float(seconds[size][c])
    size, lengths = min(plans, key=lambda plan: (len(plan[1]) > 1, len(plan[1]) / plan[0], plans[plan]))
    return (RowSlices(size, lengths),) * (rows // size)


def part_sizes(rows: int, num_microbatches: int, num_stages: int) -> list[int]:
    """Return part sizes that keep no more samples on a stage than `num_microbatches` does, the largest first.

    1F1B keeps K parts in the first stage. With fewer micro-batches than stages it keeps all samples anyway.
    """
    most = rows // num_microbatches if num_microbatches >= num_stages else rows
    return [size for size in range(most, 0, -1) if rows % size == 0]


def slices_asked_for(length: int, asked: int | Sequence[int]) -> tuple[int, ...]:
    """Split a sample by the user's setting.

    Args:
        length: number of tokens of the sample.
        asked: a number of nearly equal slices, longer ones first (at most one per token); or the lengths of the
            slices. Lengths beyond the sample are ignored, and the remainder of the sample is one more slice.
    """
    if isinstance(asked, int):
        count = min(asked, length)
        return tuple(length // count + (i < length % count) for i in range(count))
    ends = [min(end, length) for end in (*accumulate(asked), length)]
    return tuple(end - start for start, end in pairwise((0, *ends)) if end > start)


# ---------------------------------------------------------------------------------------------------------
# The dynamic program. C: limits; n: units of a sample; tables and times are in seconds
# ---------------------------------------------------------------------------------------------------------


def _slice_table(stages: Sequence[SliceLatency], rows: int, bounds: np.ndarray) -> np.ndarray:
    """Return the seconds of each slice between two bounds on its slowest stage, else infinity. `[n + 1, n + 1]`"""
    begin, end = np.triu_indices(len(bounds), 1)
    table = np.full((len(bounds), len(bounds)), np.inf)
    lengths, contexts = bounds[end] - bounds[begin], bounds[begin]
    table[begin, end] = reduce(np.maximum, (stage.seconds(rows, lengths, contexts) for stage in stages))
    return table


def _split(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Algorithm 1 of the paper, for all limits at once: the split of one part's samples with the least sum.

    Returns:
        The sum `[C]`, infinity if a limit is too strict; the longest slice `[C]`; and for each unit the start of the
        slice that ends there. `[C, n + 1]`
    """
    highest = float(table[np.isfinite(table)].max())
    # lower bound of the longest slice: the fastest possible first and last slices
    lowest = max(float(table[0].min()), float(table[:, -1].min()), 1e-4 * highest, np.finfo(float).tiny)
    count = 2 + int(math.log(max(highest / lowest, 1.0)) / math.log(LIMITS_RATIO))
    limits = np.geomspace(lowest, max(highest, lowest), count)
    limits[-1] = max(highest, limits[-1])  # rounding must not exclude a single slice
    every = np.arange(count)
    sums = np.full((count, len(table)), np.inf)
    sums[:, 0] = 0
    longest = np.zeros_like(sums)
    begins = np.zeros(sums.shape, int)
    for end in range(1, len(table)):
        slices = table[:end, end]
        options = np.where(slices <= limits[:, None], sums[:, :end] + slices, np.inf)
        begin = options.argmin(axis=1)  # ties: the longest slice wins
        sums[:, end], begins[:, end] = options[every, begin], begin
        longest[:, end] = np.maximum(longest[every, begin], slices[begin])
    return sums[:, -1], longest[:, -1], begins


def _fit_coefficients(points: Sequence[tuple[int, int, int, float]], flat_tokens: int) -> tuple[float, SliceLatency]:
    """Return the least root mean square relative error for this flat part, and its latency."""
    rows, length, context, measured = (np.array(column, float) for column in zip(*points, strict=True))
    matrix = np.stack(
        [
            np.ones_like(rows),
            np.maximum(rows * length, flat_tokens),
            rows * length * (context + length / 2),
            rows * context,
        ],
        axis=1,
    )
    matrix /= measured[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), np.finfo(float).tiny)  # otherwise the pairs would dominate
    matrix /= scale
    best, coefficients = math.inf, np.zeros(4)
    # The non-negative optimum is the plain optimum over its positive coefficients: try all sets.
    for kept in (list(kept) for count in range(1, 5) for kept in combinations(range(4), count)):
        solution = np.linalg.lstsq(matrix[:, kept], np.ones(len(points)), rcond=None)[0]
        error = float(np.sqrt(np.mean((matrix[:, kept] @ solution - 1) ** 2)))
        if error < best and (solution >= 0).all():
            best, coefficients = error, np.zeros(4)
            coefficients[kept] = solution / scale[kept]
    fixed, per_token, per_pair, per_context = coefficients.tolist()
    return best, SliceLatency(fixed, per_token, per_pair, per_context, flat_tokens)
