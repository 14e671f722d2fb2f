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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from typing import overload

import numpy as np

MINIMAL_GAIN = 0.02
"""Fraction of a step that more slices must save: the fitted latencies are no more accurate than that, and each slice
costs messages and calls that they do not include."""
TOLERANCE = 1e-3
"""Fraction of a step by which the plan found may be slower than the fastest plan: far below `MINIMAL_GAIN`."""
GRANULARITY = 16
"""In tokens; the multiple to which a matrix product is padded on most devices."""
MOST_UNITS = 128
"""Maximum number of units of a sequence: the time of the dynamic program grows with its square."""
FEWEST_POINTS = 4
"""Minimum number of measurements for a fit, equal to the number of coefficients of a `SliceLatency`."""
PIECES = 8
"""Number of pieces into which a range of limits is divided for a finer search."""


@dataclass(frozen=True)
class SliceLatency:
    """Seconds that forward and backward of a slice take on one stage.

    A slice has `length` tokens in each of `rows` samples, after `context` earlier tokens of the same samples:

        fixed + per_token * max(rows * length, flat_tokens)
              + per_pair * rows * length * (context + length / 2) + per_context * rows * context

    Attributes:
        fixed: seconds of a slice of any size: calls, messages.
        per_token: seconds per token.
        per_pair: seconds per pair of a token and a token that it attends to.
        per_context: seconds per earlier token, for its keys and values.
        flat_tokens: slices with fewer tokens than this take as long as with this many (figure 3 of the paper).
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
        """Seconds of one slice, or of many: arrays broadcast."""
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

        No coefficient is negative. `flat_tokens` is 0 or one of the measured numbers of tokens, whichever fits best.

        Args:
            points: (rows, length, context, measured seconds) of each measurement.
            flat_tokens: the value, if it is known.

        Returns:
            The fit, and the root mean square of its relative error at the points.

        Raises:
            ValueError: If there are fewer than 4 points, or a point is not a valid slice or took no time.
        """
        if len(points) < FEWEST_POINTS:
            raise ValueError(
                f"points has {len(points)} measurements, but {FEWEST_POINTS} coefficients need at least as many. "
                "Measure more lengths and contexts."
            )
        for number, (rows, length, context, measured) in enumerate(points):
            if min(rows, length) < 1 or context < 0 or not (math.isfinite(measured) and measured > 0):
                raise ValueError(
                    f"points[{number}] is {(rows, length, context, measured)}, but rows and length must be at least "
                    "1, context at least 0 and the seconds positive. Measure it again."
                )
        known = () if flat_tokens is None else (flat_tokens,)
        tokens = known or (0, *sorted({rows * length for rows, length, _, _ in points}))
        fits = [_fit_coefficients(points, flat) for flat in tokens]
        error, latency = min(fits, key=lambda fit: fit[0])  # of equally good fits the one with the least flat part
        return latency, error


@dataclass(frozen=True)
class RowSlices:
    """`rows` samples of a batch, split into slices of these lengths, in tokens."""

    rows: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class SlicingPlan:
    """How a batch is split.

    Attributes:
        parts: groups of samples; the pipeline processes their slices one after the other.
        seconds: predicted seconds of forward and backward of one step.
    """

    parts: tuple[RowSlices, ...]
    seconds: float

    @property
    def num_slices(self) -> int:
        return sum(len(part.lengths) for part in self.parts)

    @property
    def cuts_sequences(self) -> bool:
        return any(len(part.lengths) > 1 for part in self.parts)


def step_seconds(stages: Sequence[SliceLatency], parts: Sequence[RowSlices]) -> float:
    """Predict forward and backward of one step: sum t_i + (K_eff - 1) max t_i over all slices of all parts.

    t_i is a slice's time on the stage that is slowest with it; K_eff is `effective_stages`.

    Raises:
        ValueError: If there are no stages or parts, a part is empty, or parts have samples of different lengths.
    """
    if not parts:
        raise ValueError("parts is empty, but a step needs at least 1 part. Pass all samples of the batch.")
    for part in parts:
        _check_at_least_one("rows", part.rows)
        _check_at_least_one("number of slices", len(part.lengths))
        _check_lengths(part.lengths)
    lengths = {sum(part.lengths) for part in parts}
    if len(lengths) > 1:
        raise ValueError(
            f"The samples of the parts have {' and '.join(map(str, sorted(lengths)))} tokens, but all samples of a "
            "batch must have the same length. Pad them."
        )
    pace = effective_stages(stages, sum(part.rows for part in parts), lengths.pop()) - 1
    times: list[float] = []
    for part in parts:
        context = 0
        for length in part.lengths:
            times.append(max(stage.seconds(part.rows, length, context) for stage in stages))
            context += length
    return float(sum(times) + pace * max(times))


def effective_stages(stages: Sequence[SliceLatency], rows: int, length: int) -> float:
    """K_eff = sum w_k / max w_k, where w_k is stage k's time for the whole batch: K if the stages are equal.

    Filling and draining the pipeline takes one slice through all stages, and fast stages need less time for it.

    Raises:
        ValueError: If there are no stages.
    """
    if not stages:
        raise ValueError("stages is empty, but a pipeline needs at least 1 stage. Pass each stage's latency.")
    work = [stage.seconds(rows, length, 0) for stage in stages]
    return float(sum(work) / max(work)) if max(work) > 0 else 1.0


def plan_slices(
    stages: Sequence[SliceLatency],
    rows: int,
    length: int,
    *,
    num_parts: int | None = None,
    most_rows: int | None = None,
    granularity: int | None = None,
) -> SlicingPlan:
    """Choose parts of the batch and slices of tokens so that a step takes the least time (`step_seconds`).

    1. For a limit on the seconds of one slice, a dynamic program over the units of a sample finds the split with the
       least sum, for each number of samples that a part may have; a second one divides all samples into such parts.
    2. The sum never falls when the limit falls. So a plan under a range of limits takes at least the sum at its upper
       end plus K - 1 times its lower end: a range is searched only if this is less than the best plan found.
    3. Of the plans within `MINIMAL_GAIN` of the best one, a plan that leaves the sequences whole is taken; otherwise
       the one with the fewest slices.

    The best plan found is within `TOLERANCE` of the fastest on the grid of `granularity`, so the returned plan is
    at most a fraction `MINIMAL_GAIN + TOLERANCE` of its own time slower.

    Args:
        stages: latency of each stage. `[K]`
        rows: number of samples of the batch that the pipeline processes in a step.
        length: number of tokens of each sample.
        num_parts: number of equal parts into which the samples are divided. Default: parts of 1, 2, 4, ... samples or
            of all of them, whichever are fastest, not necessarily equal ones.
        most_rows: maximum number of samples in a part if `num_parts` is not given: memory grows with it.
        granularity: slices are multiples of this many tokens, except the last one. Default: 16, or the next multiple
            of 16 that leaves at most 128 units.

    Raises:
        ValueError: If a number is below 1, there are no stages, or `num_parts` does not divide the samples.
    """
    _check_at_least_one("rows", rows)
    _check_at_least_one("length", length)
    if granularity is None:
        granularity = GRANULARITY * math.ceil(max(length / MOST_UNITS, 1) / GRANULARITY)
    _check_at_least_one("granularity", granularity)
    pace = effective_stages(stages, rows, length) - 1
    sizes = _part_sizes(rows, num_parts, most_rows)
    different = tuple(dict.fromkeys(stages))  # equal stages share one table

    whole = np.array([0, length])
    units = np.minimum(np.arange(math.ceil(length / granularity) + 1) * granularity, length)
    plans = _search({size: _slice_table(different, size, whole) for size in sizes}, whole, rows, pace)
    best = min(plan.seconds for plan in plans)
    plans += _search({size: _slice_table(different, size, units) for size in sizes}, units, rows, pace, best)
    best = min(plan.seconds for plan in plans)
    near = [plan for plan in plans if plan.seconds * (1 - MINIMAL_GAIN) <= best]
    return min(near, key=lambda plan: (plan.cuts_sequences, plan.num_slices, plan.seconds))


def most_rows_of_part(rows: int, num_microbatches: int, num_stages: int) -> int:
    """Maximum samples in a part such that no stage keeps more samples at once than with `num_microbatches`.

    1F1B keeps K parts in the first stage. With fewer micro-batches than stages it keeps all samples anyway.
    """
    return rows // num_microbatches if num_microbatches >= num_stages else rows


def whole_rows(rows: int, length: int, num_parts: int) -> tuple[RowSlices, ...]:
    """Return equal parts of the samples, each of them as one slice."""
    return (RowSlices(rows // num_parts, (length,)),) * num_parts


def uniform_slices(length: int, count: int) -> tuple[int, ...]:
    """Split a sample into nearly equal slices, longer ones first; into single tokens if it has fewer than `count`.

    Raises:
        ValueError: If a number is below 1.
    """
    _check_at_least_one("length", length)
    _check_at_least_one("count", count)
    count = min(count, length)
    return tuple(length // count + (i < length % count) for i in range(count))


def given_slices(length: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Split a sample into slices of these lengths, as far as it reaches; the remainder is one more slice.

    Raises:
        ValueError: If a length is below 1.
    """
    _check_at_least_one("length", length)
    _check_lengths(lengths)
    slices = []
    for wanted in (*lengths, length):
        if length == 0:
            break
        slices.append(min(wanted, length))
        length -= slices[-1]
    return tuple(slices)


# ---------------------------------------------------------------------------------------------------------
# The dynamic program. C: limits tried at once; n: units of a sample; tables and times are in seconds
# ---------------------------------------------------------------------------------------------------------


def _part_sizes(rows: int, num_parts: int | None, most_rows: int | None) -> tuple[int, ...]:
    """Possible numbers of samples in a part, the largest first."""
    if num_parts is None:
        most = rows if most_rows is None else min(rows, most_rows)
        _check_at_least_one("most_rows", most)
        return tuple(sorted({most, *(2**k for k in range(most.bit_length()))}, reverse=True))
    if num_parts < 1 or rows % num_parts:
        raise ValueError(
            f"num_parts is {num_parts}, but {rows} samples must be split into equal parts. Set it to a divisor of "
            f"{rows}, or to None."
        )
    return (rows // num_parts,)


def _slice_table(stages: Sequence[SliceLatency], rows: int, bounds: np.ndarray) -> np.ndarray:
    """Seconds of each slice between two bounds on its slowest stage, infinity elsewhere. `[n + 1, n + 1]`"""
    begin, end = np.triu_indices(len(bounds), 1)
    table = np.full((len(bounds), len(bounds)), np.inf)
    lengths, contexts = bounds[end] - bounds[begin], bounds[begin]
    table[begin, end] = reduce(np.maximum, (stage.seconds(rows, lengths, contexts) for stage in stages))
    return table


def _search(
    tables: Mapping[int, np.ndarray], bounds: np.ndarray, rows: int, pace: float, best: float = math.inf
) -> list[SlicingPlan]:
    """Find plans near the fastest one, and the fastest itself unless it is slower than `best`. See `plan_slices`, 2.

    Args:
        tables: number of samples in a part -> seconds of its slices.
        bounds: positions where a sample may be split, in tokens. `[n + 1]`
        pace: K_eff - 1.
        best: seconds of a plan that is already known.
    """
    limits = np.unique(np.concatenate([table[np.isfinite(table)] for table in tables.values()]))
    plans: list[SlicingPlan] = []
    ranges = [(0, len(limits) - 1, 0.0)]  # limits not tried yet: first, last, and a lower bound of the sum
    while ranges:
        pieces = [
            (first, last)
            for lowest, highest, least_sum in ranges
            if least_sum + pace * limits[lowest] < best * (1 - TOLERANCE)
            for first, last in _pieces(lowest, highest)
        ]
        if not pieces:
            break
        cuts = _Cuts(tables, rows, limits[[last for _, last in pieces]])
        seconds = cuts.sums + pace * cuts.longest
        best = min(best, float(seconds.min()))
        near = np.flatnonzero(seconds * (1 - MINIMAL_GAIN) <= best).tolist()
        plans += [cuts.plan(c, bounds, float(seconds[c])) for c in near]
        # all limits from the longest slice up to the limit that was tried have the same split
        ends = np.searchsorted(limits, cuts.longest) - 1
        ranges = [
            (first, int(end), float(least_sum))
            for (first, _), end, least_sum in zip(pieces, ends, cuts.sums, strict=True)
            if first <= end and math.isfinite(least_sum)  # if a limit is too strict, so are all below it
        ]
    return plans


def _pieces(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Divide the range into at most `PIECES`; both ends are included."""
    for end in np.unique(np.linspace(first, last, PIECES + 1).astype(int)[1:]).tolist():
        yield first, end
        first = end + 1


class _Cuts:
    """The split with the least sum under each of several limits on the seconds of a slice.

    Attributes:
        sums: total seconds of all slices; infinity if a limit is too strict. `[C]`
        longest: seconds of the longest slice. `[C]`
    """

    def __init__(self, tables: Mapping[int, np.ndarray], rows: int, limits: np.ndarray) -> None:
        self._sizes = np.array(list(tables))
        of_sizes = [_cut_rows(table, limits) for table in tables.values()]
        self._begins = [begins for _, _, begins in of_sizes]
        part_sums = np.stack([sums for sums, _, _ in of_sizes], axis=1)
        part_longest = np.stack([longest for _, longest, _ in of_sizes], axis=1)

        # division into parts: sums[:, r] is the least for the first r samples, picks[:, r] the size of their last part
        every = np.arange(len(limits))
        sums = np.full((len(limits), rows + 1), np.inf)
        sums[:, 0] = 0
        longest = np.zeros_like(sums)
        self._picks = np.zeros(sums.shape, int)
        for r in range(int(self._sizes.min()), rows + 1):
            fitting = np.flatnonzero(self._sizes <= r)
            options = sums[:, r - self._sizes[fitting]] + part_sums[:, fitting]
            choice = options.argmin(axis=1)
            pick = fitting[choice]
            sums[:, r] = options[every, choice]
            longest[:, r] = np.maximum(longest[every, r - self._sizes[pick]], part_longest[every, pick])
            self._picks[:, r] = pick
        self.sums, self.longest = sums[:, rows], longest[:, rows]

    def plan(self, c: int, bounds: np.ndarray, seconds: float) -> SlicingPlan:
        """Return the split under limit `c`."""
        parts = []
        left = self._picks.shape[1] - 1
        while left:
            pick = self._picks[c, left]
            ends = [len(bounds) - 1]
            while ends[-1]:
                ends.append(int(self._begins[pick][c, ends[-1]]))
            parts.append(RowSlices(int(self._sizes[pick]), tuple(np.diff(bounds[ends[::-1]]).tolist())))
            left -= parts[-1].rows
        return SlicingPlan(tuple(sorted(parts, key=lambda part: -part.rows)), seconds)


def _cut_rows(table: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Algorithm 1 of the paper, for several limits at once: the split of one part's samples with the least sum.

    Returns:
        The sum `[C]`, the longest slice `[C]`, and for each unit the start of the slice that ends there. `[C, n + 1]`
    """
    num_bounds, every = len(table), np.arange(len(limits))
    sums = np.full((len(limits), num_bounds), np.inf)
    sums[:, 0] = 0
    longest = np.zeros_like(sums)
    begins = np.zeros(sums.shape, int)
    for end in range(1, num_bounds):
        slices = table[:end, end]
        options = np.where(slices <= limits[:, None], sums[:, :end] + slices, np.inf)
        begin = options.argmin(axis=1)  # of equally good ones the longest slice
        sums[:, end], begins[:, end] = options[every, begin], begin
        longest[:, end] = np.maximum(longest[every, begin], slices[begin])
    return sums[:, -1], longest[:, -1], begins


def _fit_coefficients(points: Sequence[tuple[int, int, int, float]], flat_tokens: int) -> tuple[float, SliceLatency]:
    """Return the least root mean square relative error for this flat part, and the latency that has it."""
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
    scale = np.maximum(np.abs(matrix).max(axis=0), np.finfo(float).tiny)  # else the pairs would dominate
    matrix /= scale
    best, coefficients = math.inf, np.zeros(4)
    # The non-negative optimum is the plain optimum over those coefficients that it leaves positive: try all sets.
    for kept in (list(kept) for count in range(1, 5) for kept in combinations(range(4), count)):
        solution = np.linalg.lstsq(matrix[:, kept], np.ones(len(points)), rcond=None)[0]
        error = float(np.sqrt(np.mean((matrix[:, kept] @ solution - 1) ** 2)))
        if error < best and (solution >= 0).all():
            best, coefficients = error, np.zeros(4)
            coefficients[kept] = solution / scale[kept]
    fixed, per_token, per_pair, per_context = coefficients.tolist()
    return best, SliceLatency(fixed, per_token, per_pair, per_context, flat_tokens)


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}, but must be at least 1.")


def _check_lengths(lengths: Sequence[int]) -> None:
    for number, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"lengths[{number}] is {length}, but a slice needs at least 1 token. Remove it.")
