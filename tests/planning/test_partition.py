from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_pipetransformer.planning.partition import (
    balance_holders,
    choose_num_microbatches,
    more_microbatches,
    split_min_max,
)
from hf_pipetransformer.planning.placement import Placement


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


def held_by_processes(num_stages: int, num_virtual_stages: int, is_v_shaped: bool) -> list[tuple[int, ...]]:
    placement = Placement(num_stages, num_virtual_stages, is_v_shaped)
    return [placement.held_by(stage) for stage in range(num_stages)]


def process_costs(costs: list[int], bounds: tuple[int, ...], held: list[tuple[int, ...]]) -> list[int]:
    parts = stage_costs(costs, bounds)
    return [sum(parts[part] for part in parts_held) for parts_held in held]


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
    ("costs", "num_stages", "bounds"),
    [
        ([4, 2, 2, 2, 6], 3, (0, 1, 4, 5)),  # as drawn in the module
        ([9, 1, 1, 1, 1], 3, (0, 1, 3, 5)),  # the maximum is 9 whatever the rest does: the rest is even too
        ([1.0] * 12, 8, (0, 1, 2, 3, 4, 6, 8, 10, 12)),
    ],
)
def test_split_examples(costs: list[float], num_stages: int, bounds: tuple[int, ...]) -> None:
    assert split_min_max(costs, num_stages) == bounds


def test_split_is_exact_where_floating_point_sums_round() -> None:
    # 2**53 + 1 is no float: sums in floating point would call both splits equal and take the first.
    assert split_min_max([2.0**53, 1.0, 1.0], 2) == (0, 1, 3)
    assert split_min_max([1.0, 1.0, 2.0**53], 2) == (0, 2, 3)


def test_processes_with_several_virtual_stages_hold_equal_parts() -> None:
    """Of six layers, the last one with the head: in a V, balanced virtual stages give two and four layers."""
    costs = [100] * 5 + [102]
    held = held_by_processes(2, 2, is_v_shaped=True)
    split = split_min_max(costs, 4)
    assert process_costs(costs, split, held) == [202, 400]
    assert process_costs(costs, balance_holders(split, costs, held), held) == [302, 300]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 20), min_size=8, max_size=16), st.booleans())
def test_balancing_processes_makes_nothing_worse(costs: list[int], is_v_shaped: bool) -> None:
    held = held_by_processes(4, 2, is_v_shaped)
    split = split_min_max(costs, 8)
    bounds = balance_holders(split, costs, held)
    assert bounds in all_bounds(len(costs), 8)
    assert max(process_costs(costs, bounds, held)) <= max(process_costs(costs, split, held))


@pytest.mark.parametrize(
    ("rows", "num_stages", "requested", "schedule", "expected"),
    [
        (32, 4, None, "1f1b", 8),  # up to 2 K
        (64, 2, None, "1f1b", 4),
        (28, 4, None, "gpipe", 7),  # 8 does not divide 28
        (7, 4, None, "1f1b", 7),
        (3, 4, None, "1f1b", 3),  # fewer rows than stages: the caller falls back to GPipe
        (13, 3, None, "1f1b", 13),  # 1F1B needs M >= K, and no divisor lies between 3 and 6
        (13, 3, None, "gpipe", 1),
        (26, 3, None, "1f1b", 13),
        (32, 4, 8, "1f1b", 8),
        (32, 4, 9, "1f1b", 8),
        (32, 4, 100, "1f1b", 32),
        (32, 4, 1, "1f1b", 1),  # asked for
        (1, 2, None, "1f1b", 1),
        (32, 1, None, "1f1b", 1),  # one stage needs no micro-batches
        (32, 1, 8, "gpipe", 1),
        (32, 4, None, "interleaved1f1b", 8),
        (18, 4, None, "interleaved1f1b", 6),  # 9 would be two rounds of 4.5
        (9, 4, None, "interleaved1f1b", 3),
        (18, 4, 9, "interleaved1f1b", 6),
        (13, 3, None, "interleaved1f1b", 1),
    ],
)
def test_choose_num_microbatches(
    rows: int, num_stages: int, requested: int | None, schedule: str, expected: int
) -> None:
    assert choose_num_microbatches(rows, num_stages, requested, schedule) == expected


def test_larger_numbers_are_divisors_up_to_six_per_stage() -> None:
    assert more_microbatches(24, 2, 4, "1f1b") == [6, 8, 12]
    assert more_microbatches(20, 4, 3, "interleaved1f1b") == [4, 5, 10, 20]
    assert more_microbatches(29, 4, 1, "1f1b") == []


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="rows is 0"):
        choose_num_microbatches(0, 2, None, "1f1b")
