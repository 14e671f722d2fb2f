"""The dynamic program against brute force, what its times are, and the fit to what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pipetransformer.token_slices import slice_planning
from hf_pipetransformer.token_slices.slice_planning import (
    RowSlices,
    SliceLatency,
    SlicingPlan,
    effective_stages,
    plan_slices,
    step_seconds,
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


def random_stages(rng: np.random.Generator) -> list[SliceLatency]:
    def stage() -> SliceLatency:
        few = [*(rng.random(4) * (2, 1, 0.1, 0.3)), int(rng.integers(0, 6))]
        return Bumpy(*few, seed=int(rng.integers(1000))) if rng.random() < 0.5 else SliceLatency(*few)

    number = int(rng.integers(1, 13))
    return [stage()] * number if rng.random() < 0.7 else [stage() for _ in range(min(number, 3))]


# ---------------------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------------------


def test_parts_and_slices_equal_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_planning, "MINIMAL_GAIN", 0.0)
    monkeypatch.setattr(slice_planning, "TOLERANCE", 0.0)
    rng = np.random.default_rng(1)
    for _ in range(30):
        stages = random_stages(rng)
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


# ---------------------------------------------------------------------------------------------------------
# The fit
# ---------------------------------------------------------------------------------------------------------

GRID = [(r, n, c) for r in (1, 2) for n in (64, 128, 256, 512, 1024) for c in (0, 512, 1024)]


@pytest.mark.parametrize("latency", [USUAL, replace(USUAL, fixed=0.0, per_pair=0.0, flat_tokens=0)])
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
