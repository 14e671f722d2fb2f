"""The dynamic program against brute force, the meaning of its times, and the fit to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest

from hf_pipetransformer.token_slices.slice_planning import (
    LIMITS_RATIO,
    MINIMAL_GAIN,
    RowSlices,
    SliceLatency,
    plan_slices,
    slices_asked_for,
    step_seconds,
)


@cache
def compositions(total: int) -> tuple[tuple[int, ...], ...]:
    """All ways to cut `total` units."""
    return tuple(
        tuple(b - a for a, b in pairwise((0, *cuts, total)))
        for count in range(total)
        for cuts in combinations(range(1, total), count)
    )


def by_brute_force(stages: Sequence[SliceLatency], rows: int, length: int, sizes: Sequence[int]) -> float:
    """The least seconds of a step over equal parts of these sizes and all slices."""
    return min(
        step_seconds(stages, [RowSlices(size, lengths)] * (rows // size))
        for size in sizes
        for lengths in compositions(length)
    )


def divisors(number: int) -> list[int]:
    return [size for size in range(number, 0, -1) if number % size == 0]


def random_stages(rng: np.random.Generator) -> list[SliceLatency]:
    def stage() -> SliceLatency:
        return SliceLatency(*(rng.random(4) * (2, 1, 0.1, 0.3)), int(rng.integers(0, 6)))

    number = int(rng.integers(1, 13))
    return [stage()] * number if rng.random() < 0.7 else [stage() for _ in range(min(number, 3))]


def test_a_plan_is_as_fast_as_brute_force_finds() -> None:
    """But for the ratio of two limits, and for what fewer slices may cost."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        stages = random_stages(rng)
        rows, length = int(rng.integers(1, 8)), int(rng.integers(1, 7))
        for sizes in (divisors(rows), divisors(rows)[-1:]):
            seconds = step_seconds(stages, plan_slices(stages, rows, length, sizes, 1))
            fastest = by_brute_force(stages, rows, length, sizes)
            assert fastest * (1 - 1e-9) <= seconds <= fastest * LIMITS_RATIO / (1 - MINIMAL_GAIN)


@pytest.mark.parametrize(
    ("length", "asked", "slices"),
    [
        *((10, 3, (4, 3, 3)), (2, 3, (1, 1))),
        *((10, [4, 3], (4, 3, 3)), (7, [4, 3], (4, 3)), (5, [4, 3], (4, 1)), (3, [4, 3], (3,))),
    ],
)
def test_slices_that_were_asked_for(length: int, asked: int | list[int], slices: tuple[int, ...]) -> None:
    assert slices_asked_for(length, asked) == slices
