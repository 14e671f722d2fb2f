from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pipetransformer.planning.partition import (
    choose_num_microbatches,
    split_min_max,
)


def all_bounds(num_units: int, num_stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, num_units) for inner in combinations(range(1, num_units), num_stages - 1)]


def stage_costs(costs: list[int], bounds: tuple[int, ...]) -> list[int]:
    return [sum(costs[a:b]) for a, b in pairwise(bounds)]


def by_brute_force(costs: list[int], num_stages: int) -> tuple[int, ...]:
    """The documented order of preference over every contiguous split."""
    return min(
        all_bounds(len(costs), num_stages),
        key=lambda bounds: (
            max(stage_costs(costs, bounds)),
            sum(c * c for c in stage_costs(costs, bounds)),
            bounds,
        ),
    )


@st.composite
def costs_and_stages(draw: st.DrawFn) -> tuple[list[int], int]:
    costs = draw(st.lists(st.integers(0, 20), min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs)))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(costs_and_stages())
def test_split_equals_brute_force(case: tuple[list[int], int]) -> None:
    costs, num_stages = case
    assert split_min_max(costs, num_stages) == by_brute_force(costs, num_stages)


@pytest.mark.parametrize(
    ("rows", "num_stages", "requested", "schedule", "expected"),
    [
        (32, 4, None, "1f1b", 8),  # up to 2 K
        (28, 4, None, "gpipe", 7),  # 8 does not divide 28
        (3, 4, None, "1f1b", 3),  # fewer rows than stages: the caller falls back to GPipe
        (13, 3, None, "1f1b", 13),  # 1F1B needs M >= K, and no divisor lies between 3 and 6
        (13, 3, None, "gpipe", 1),
        (32, 4, 9, "1f1b", 8),
        (32, 4, 1, "1f1b", 1),  # asked for
        (32, 1, None, "1f1b", 1),  # one stage needs no micro-batches
        (18, 4, None, "interleaved1f1b", 6),  # 9 would be two rounds of 4.5
        (13, 3, None, "interleaved1f1b", 1),
    ],
)
def test_choose_num_microbatches(
    rows: int, num_stages: int, requested: int | None, schedule: str, expected: int
) -> None:
    assert choose_num_microbatches(rows, num_stages, requested, schedule) == expected
