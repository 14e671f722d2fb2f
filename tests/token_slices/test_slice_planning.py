from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pipetransformer.token_slices import slice_planning
from hf_pipetransformer.token_slices.slice_planning import (
    MINIMAL_GAIN,
    TOLERANCE,
    RowSlices,
    SliceLatency,
    SlicingPlan,
    effective_stages,
    given_slices,
    plan_slices,
    step_seconds,
    uniform_slices,
)

USUAL = SliceLatency(fixed=4e-4, per_token=4e-6, per_pair=1e-9, per_context=2e-8, flat_tokens=256)


@dataclass(frozen=True)
class Bumpy(SliceLatency):
    """A latency that knows no order: a longer or later slice may be quicker."""

    seed: int = 0

    def seconds(self, rows, length, context):
        bumps = np.random.default_rng(self.seed).random((16, 16, 16))
        return super().seconds(rows, length, context) * (0.3 + bumps[rows, length, context])


@cache
def compositions(total: int) -> tuple[tuple[int, ...], ...]:
    """All ways to cut `total` units."""
    return tuple(
        tuple(b - a for a, b in pairwise((0, *cuts, total)))
        for count in range(total)
        for cuts in combinations(range(1, total), count)
    )


def multisets(total: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All ways to make up `total` of these sizes."""
    if total == 0:
        yield ()
    for k, size in enumerate(sizes):
        if size <= total:
            yield from ((size, *rest) for rest in multisets(total - size, sizes[k:]))


def by_brute_force(stages: Sequence[SliceLatency], rows: int, length: int, sizes: tuple[int, ...]) -> float:
    """The least seconds of a step over all parts of rows of these sizes and all slices."""
    pace = effective_stages(stages, rows, length) - 1

    @cache
    def options(size: int) -> set[tuple[float, float]]:
        """(sum, maximum) of each cut of one part."""
        found = set()
        for lengths in compositions(length):
            contexts = np.cumsum((0, *lengths[:-1])).tolist()
            times = [max(s.seconds(size, n, c) for s in stages) for n, c in zip(lengths, contexts, strict=True)]
            found.add((sum(times), max(times)))
        return found

    best = math.inf
    for parts in multisets(rows, sizes):
        # of all parts: for each possible maximum the least sum
        sums = {0.0: 0.0}
        for size in parts:
            new: dict[float, float] = {}
            for so_far, total in sums.items():
                for seconds, longest in options(size):
                    highest = max(so_far, longest)
                    new[highest] = min(new.get(highest, math.inf), total + seconds)
            sums = new
        best = min(best, min(total + pace * longest for longest, total in sums.items()))
    return best


def random_stages(rng: np.random.Generator, make: Callable[..., SliceLatency]) -> list[SliceLatency]:
    def stage() -> SliceLatency:
        few = [*(rng.random(4) * (2, 1, 0.1, 0.3)), int(rng.integers(0, 6))]
        return make(*few) if make is SliceLatency else make(*few, seed=int(rng.integers(1000)))

    number = int(rng.integers(1, 13))
    return [stage()] * number if rng.random() < 0.7 else [stage() for _ in range(min(number, 3))]


# ---------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [SliceLatency, Bumpy])
@pytest.mark.parametrize("is_exact", [True, False])
def test_slices_of_one_row_equal_brute_force(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., SliceLatency], is_exact: bool
) -> None:
    if is_exact:
        monkeypatch.setattr(slice_planning, "MINIMAL_GAIN", 0.0)
        monkeypatch.setattr(slice_planning, "TOLERANCE", 0.0)
    rng = np.random.default_rng(0)
    for _ in range(40):
        stages, length = random_stages(rng, make), int(rng.integers(1, 8))
        plan = plan_slices(stages, 1, length, granularity=1)
        least = by_brute_force(stages, 1, length, (1,))
        assert plan.seconds == pytest.approx(step_seconds(stages, plan.parts))
        if is_exact:
            assert plan.seconds == pytest.approx(least)
        else:
            assert least * 0.999999 <= plan.seconds <= least / (1 - MINIMAL_GAIN - TOLERANCE)


@pytest.mark.parametrize("make", [SliceLatency, Bumpy])
def test_parts_and_slices_equal_brute_force(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., SliceLatency]
) -> None:
    monkeypatch.setattr(slice_planning, "MINIMAL_GAIN", 0.0)
    monkeypatch.setattr(slice_planning, "TOLERANCE", 0.0)
    rng = np.random.default_rng(1)
    for _ in range(30):
        stages = random_stages(rng, make)
        rows, length = int(rng.integers(1, 8)), int(rng.integers(1, 5))
        plan = plan_slices(stages, rows, length, granularity=1)
        sizes = tuple({rows, *(size for size in (1, 2, 4) if size <= rows)})
        assert plan.seconds == pytest.approx(by_brute_force(stages, rows, length, sizes))
        assert plan.seconds == pytest.approx(step_seconds(stages, plan.parts))

        num_parts = int(rng.choice([n for n in range(1, rows + 1) if rows % n == 0]))
        plan = plan_slices(stages, rows, length, num_parts=num_parts, granularity=1)
        assert [part.rows for part in plan.parts] == [rows // num_parts] * num_parts
        assert plan.seconds == pytest.approx(by_brute_force(stages, rows, length, (rows // num_parts,)))


latencies = st.builds(
    SliceLatency,
    st.floats(0, 1e-2), st.floats(1e-7, 1e-4), st.floats(0, 1e-7), st.floats(0, 1e-6), st.integers(0, 300),
)  # fmt: skip


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(latencies, min_size=1, max_size=4),
    st.integers(1, 12),
    st.integers(1, 100),
    st.sampled_from([None, 1, 7, 16, 500]),
)
def test_a_plan_holds_the_whole_batch(
    stages: list[SliceLatency], rows: int, length: int, granularity: int | None
) -> None:
    plan = plan_slices(stages, rows, length, granularity=granularity)
    assert sum(part.rows for part in plan.parts) == rows
    for part in plan.parts:
        assert sum(part.lengths) == length
        assert min(part.lengths) >= 1
        assert all(n % (granularity or 16) == 0 for n in part.lengths[:-1])
    assert plan.seconds == pytest.approx(step_seconds(stages, plan.parts))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(latencies, st.integers(1, 40), st.integers(1, 8), st.integers(1, 60), st.integers(1, 12))
def test_a_plan_is_no_slower_than_equal_slices(
    latency: SliceLatency, num_stages: int, rows: int, length: int, count: int
) -> None:
    stages = [latency] * num_stages
    plan = plan_slices(stages, rows, length, granularity=1)
    for size in (1, rows):
        equal = step_seconds(stages, [RowSlices(size, uniform_slices(length, count))] * (rows // size))
        assert plan.seconds * (1 - MINIMAL_GAIN - TOLERANCE) <= equal * 1.000001


def test_later_slices_are_shorter() -> None:
    """As in figure 4 of the paper; the first ones are as long as the rest of the row allows."""
    (part,) = plan_slices([replace(USUAL, per_pair=1e-8)] * 24, 1, 2048).parts
    assert len(part.lengths) > 4
    assert part.lengths[0] > 1.5 * part.lengths[-1]
    assert all(n % 16 == 0 for n in part.lengths)


def test_a_long_pipeline_gains_and_one_stage_does_not() -> None:
    assert plan_slices([USUAL], 1, 2048) == SlicingPlan((RowSlices(1, (2048,)),), USUAL.seconds(1, 2048, 0))
    whole = step_seconds([USUAL] * 24, [RowSlices(1, (2048,))])
    assert plan_slices([USUAL] * 24, 1, 2048).seconds < whole / 4


def test_a_sequence_stays_whole_where_slices_gain_too_little() -> None:
    """Halves save 1.5 of 67 micro-batches' time where 64 fill 4 stages, and 1.5 of 103 where 100 do."""
    stages = [SliceLatency(0.0, 1e-5, 0.0, 0.0, 1024)] * 4
    for rows, is_cut in ((64, True), (100, False)):
        plan = plan_slices(stages, rows, 2048, num_parts=rows)
        whole = step_seconds(stages, [RowSlices(1, (2048,))] * rows)
        halved = step_seconds(stages, [RowSlices(1, (1024, 1024))] * rows)
        assert halved == pytest.approx(whole * (rows + 1.5) / (rows + 3))
        assert plan.cuts_sequences == is_cut
        assert plan.seconds == pytest.approx(halved if is_cut else whole, rel=MINIMAL_GAIN / 2)


def test_few_slices_are_preferred_to_slightly_faster_many() -> None:
    nearly_free = SliceLatency(fixed=0.0, per_token=1e-5, per_pair=0.0, per_context=0.0)
    plan = plan_slices([nearly_free] * 2, 1, 2048, granularity=16)
    finest = step_seconds([nearly_free] * 2, [RowSlices(1, (16,) * 128)])
    assert plan.num_slices < 100
    assert finest < plan.seconds <= finest / (1 - MINIMAL_GAIN - TOLERANCE)


@pytest.mark.parametrize(
    ("length", "granularity"), [(1, 16), (2048, 16), (2049, 32), (4096, 32), (5000, 48), (32768, 256)]
)
def test_granularity_leaves_128_units_at_most(length: int, granularity: int) -> None:
    stages = [replace(USUAL, flat_tokens=0)] * 8
    plan = plan_slices(stages, 1, length)
    assert plan == plan_slices(stages, 1, length, granularity=granularity)
    assert all(n % granularity == 0 for n in plan.parts[0].lengths[:-1])


@pytest.mark.parametrize("are_equal", [True, False])
@pytest.mark.parametrize("num_stages", [2, 24, 96])
def test_a_plan_is_found_after_few_runs_of_the_dynamic_program(
    num_stages: int, are_equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the time of a plan goes by; 50 ms are wanted, and docs/benchmarks.md has what was measured.

    The paper runs it for each time that a slice may take, up to 8,256 here; and each time is asked for once.
    """
    limits: list[int] = []
    looked_up: list[int] = []
    cut_rows, seconds_of = slice_planning._cut_rows, SliceLatency.seconds

    def cut(table: np.ndarray, some: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        limits.append(len(some))
        return cut_rows(table, some)

    def seconds(self: SliceLatency, rows: int, length: int | np.ndarray, context: int | np.ndarray) -> object:
        looked_up.append(np.size(length))
        return seconds_of(self, rows, length, context)

    monkeypatch.setattr(slice_planning, "_cut_rows", cut)
    monkeypatch.setattr(SliceLatency, "seconds", seconds)
    stages = [USUAL if are_equal else replace(USUAL, fixed=(1 + k / 100) * USUAL.fixed) for k in range(num_stages)]
    plan_slices(stages, 1, 2048, granularity=16)
    assert len(limits) <= 8 and sum(limits) <= 128  # 4 to 5, with 41 to 73 together
    slices = 128 * 129 // 2 + 1  # of the units, and the whole row
    assert sum(looked_up) == num_stages + (1 if are_equal else num_stages) * slices


def test_the_plan_does_not_depend_on_the_unit_of_measure() -> None:
    milli = SliceLatency(*(2**10 * c for c in (4e-4, 4e-6, 1e-9, 2e-8)), flat_tokens=256)
    assert plan_slices([milli] * 8, 6, 1000).parts == plan_slices([USUAL] * 8, 6, 1000).parts


# ---------------------------------------------------------------------------------------------------------
# The formula
# ---------------------------------------------------------------------------------------------------------


def simulated(times: list[list[float]]) -> float:
    """When the last stage finishes the last slice. times: seconds of slice i on stage k. `[M][K]`"""
    free = [0.0] * len(times[0])
    for of_slice in times:
        for k, seconds in enumerate(of_slice):
            free[k] = max(free[k], free[k - 1] if k else 0.0) + seconds
    return free[-1]


def test_equal_stages_take_as_long_as_simulated() -> None:
    lengths = (500, 700, 100, 748)
    contexts = (0, 500, 1200, 1300)
    times = [USUAL.seconds(3, n, c) for n, c in zip(lengths, contexts, strict=True)]
    for k in (1, 2, 7):
        expected = simulated([[t] * k for t in times])
        assert step_seconds([USUAL] * k, [RowSlices(3, lengths)]) == pytest.approx(expected)
        assert effective_stages([USUAL] * k, 3, 2048) == pytest.approx(k)


def test_quick_stages_count_less() -> None:
    """Equal slices on unequal stages: as simulated, with K_eff = (1 + 2 + 4 + 1) / 4."""
    stages = [SliceLatency(0.0, seconds, 0.0, 0.0) for seconds in (1.0, 2.0, 4.0, 1.0)]
    assert effective_stages(stages, 2, 100) == 2.0
    expected = simulated([[10.0, 20.0, 40.0, 10.0]] * 10)
    assert step_seconds(stages, [RowSlices(1, (10,) * 10)]) == pytest.approx(expected) == 10 * 40 + (2 - 1) * 40


def test_a_slice_takes_as_long_as_on_its_slowest_stage() -> None:
    """One stage is slow with tokens, the other with earlier ones."""
    stages = [SliceLatency(0.0, 1.0, 0.0, 0.0), SliceLatency(0.0, 0.5, 0.0, 1.0)]
    k_eff = (8 + 4) / 8
    assert step_seconds(stages, [RowSlices(1, (4, 4))]) == 4 + 6 + (k_eff - 1) * 6


def test_seconds_of_arrays_are_those_of_each() -> None:
    lengths, contexts = np.array([1, 256, 257, 2000]), np.array([0, 10, 100, 48])
    assert USUAL.seconds(2, lengths, contexts).tolist() == [
        USUAL.seconds(2, n, c) for n, c in zip(lengths.tolist(), contexts.tolist(), strict=True)
    ]
    assert USUAL.seconds(2, 1, 0) == pytest.approx(4e-4 + 256 * 4e-6 + 1e-9)


def test_work_without_time_has_one_stage() -> None:
    nothing = SliceLatency(0.0, 0.0, 0.0, 0.0)
    assert plan_slices([nothing] * 3, 2, 64) == SlicingPlan((RowSlices(2, (64,)),), 0.0)


# ---------------------------------------------------------------------------------------------------------
# The fit
# ---------------------------------------------------------------------------------------------------------

GRID = [(r, n, c) for r in (1, 2) for n in (64, 128, 256, 512, 1024) for c in (0, 512, 1024)]


@pytest.mark.parametrize(
    "latency",
    [USUAL, replace(USUAL, flat_tokens=0), replace(USUAL, per_context=0.0), replace(USUAL, fixed=0.0, per_pair=0.0)],
)
def test_a_fit_finds_what_was_measured(latency: SliceLatency) -> None:
    fitted, error = SliceLatency.fit([(*point, latency.seconds(*point)) for point in GRID])
    assert error < 1e-9
    assert fitted.flat_tokens == latency.flat_tokens
    for name in ("fixed", "per_token", "per_pair", "per_context"):
        assert getattr(fitted, name) == pytest.approx(getattr(latency, name), rel=1e-6, abs=1e-15)


def test_a_fit_tells_how_far_it_is_off() -> None:
    rng = np.random.default_rng(0)
    _, some = SliceLatency.fit([(*p, USUAL.seconds(*p) * rng.normal(1, 0.05)) for p in GRID])
    assert 0.02 < some < 0.06
    _, much = SliceLatency.fit([(*p, rng.uniform(1, 10)) for p in GRID])
    assert much > 0.3


def test_a_fit_has_no_negative_part() -> None:
    """Times that fall with the context, as noise can make them."""
    fitted, _ = SliceLatency.fit([(r, n, c, 1e-3 + 1e-6 * r * n - 1e-7 * c) for r, n, c in GRID])
    assert min(fitted.fixed, fitted.per_token, fitted.per_pair, fitted.per_context) >= 0
    assert fitted.per_context == 0


# ---------------------------------------------------------------------------------------------------------
# Slices without a plan, and refusals
# ---------------------------------------------------------------------------------------------------------


def test_uniform_slices() -> None:
    assert uniform_slices(10, 3) == (4, 3, 3)
    assert uniform_slices(8, 4) == (2, 2, 2, 2)
    assert uniform_slices(3, 5) == (1, 1, 1)
    assert uniform_slices(7, 1) == (7,)


def test_given_slices_reach_as_far_as_the_sequence() -> None:
    assert given_slices(12, (4, 4, 4)) == (4, 4, 4)
    assert given_slices(10, (4, 4, 4)) == (4, 4, 2)
    assert given_slices(8, (4, 4, 4)) == (4, 4)
    assert given_slices(20, (4, 4)) == (4, 4, 12)
    assert given_slices(5, ()) == (5,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_slices([], 1, 8), "stages is empty"),
        (lambda: plan_slices([USUAL], 0, 8), "rows is 0"),
        (lambda: plan_slices([USUAL], 1, 0), "length is 0"),
        (lambda: plan_slices([USUAL], 1, 8, granularity=0), "granularity is 0"),
        (lambda: plan_slices([USUAL], 6, 8, num_parts=4), "num_parts is 4, but 6 samples"),
        (lambda: plan_slices([USUAL], 6, 8, num_parts=0), "num_parts is 0"),
        (lambda: step_seconds([], [RowSlices(1, (8,))]), "stages is empty"),
        (lambda: step_seconds([USUAL], []), "parts is empty"),
        (lambda: step_seconds([USUAL], [RowSlices(0, (8,))]), "rows is 0"),
        (lambda: step_seconds([USUAL], [RowSlices(1, ())]), "number of slices is 0"),
        (lambda: step_seconds([USUAL], [RowSlices(1, (8, 0))]), r"lengths\[1\] is 0"),
        (lambda: step_seconds([USUAL], [RowSlices(1, (8,)), RowSlices(1, (4, 2))]), "have 6 and 8 tokens"),
        (lambda: uniform_slices(0, 1), "length is 0"),
        (lambda: uniform_slices(8, 0), "count is 0"),
        (lambda: given_slices(0, (1,)), "length is 0"),
        (lambda: given_slices(8, (4, -1)), r"lengths\[1\] is -1"),
        (lambda: SliceLatency.fit([]), "points has 0 measurements"),
        (lambda: SliceLatency.fit([(1, 8, 0, 1.0)] * 3), "points has 3 measurements"),
        (lambda: SliceLatency.fit([(1, 8, 0, 1.0)] * 3 + [(1, 8, -1, 1.0)]), r"points\[3\] is \(1, 8, -1, 1.0\)"),
        (lambda: SliceLatency.fit([(1, 8, 0, 0.0)] * 4), r"points\[0\] is \(1, 8, 0, 0.0\)"),
        (lambda: SliceLatency.fit([(1, 8, 0, math.nan)] * 4), r"points\[0\]"),
    ],
)
def test_nonsense_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
