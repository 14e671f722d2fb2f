from __future__ import annotations

import pytest
from test_plan import UNITS, plan_of, unit

from hf_pipetransformer.planning.costs import UnitCost
from hf_pipetransformer.planning.plan import MIB, PipelinePlan
from hf_pipetransformer.planning.plan_choice import largest_stage_bytes, make_plan, replan


def needed(k: int, units: tuple[UnitCost, ...] = UNITS) -> int:
    plan = plan_of(k, units=units)
    return max(plan.stage_bytes(stage, rows=4 * k, num_microbatches=4 * k) for stage in range(k))


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_auto_takes_the_smallest_pipeline_that_fits(k: int) -> None:
    plan = make_plan(UNITS, 8, "auto", rows_per_device=4, memory_budget_bytes=needed(k))
    assert (plan.pipeline_parallel_size, plan.data_parallel_size) == (k, 8 // k)


def test_auto_says_what_is_missing() -> None:
    units = tuple(unit(i, parameters={f"{i}": 10 * MIB}) for i in range(8))
    with pytest.raises(
        ValueError, match="with 8 stages the largest stage still needs 40 MiB, but a device has 20 MiB"
    ):
        make_plan(units, 8, "auto", rows_per_device=4, memory_budget_bytes=20 * MIB)


# ------------------------------------------------------------------------------------------ after a freeze
def start(k: int = 4) -> PipelinePlan:
    return make_plan(UNITS, 4, k, num_microbatches=4, rows_per_device=4, memory_budget_bytes=None)


def test_frozen_units_cost_a_third_in_the_split() -> None:
    plan = make_plan(UNITS, 4, 2, rows_per_device=4, memory_budget_bytes=None, num_frozen_layers=3)
    assert plan.stage_bounds == (0, 5, 8)  # 3 x 1 + 2 x 3 = 9 = 3 x 3
    assert "3 frozen" in str(plan)


def test_compression_takes_the_shortest_pipeline_that_fits() -> None:
    """Its largest stage may need no more bytes than the largest did at the start."""

    plan, sizes, budget = start(), [], largest_stage_bytes(start())
    for frozen in range(1, 9):
        plan = replan(plan, frozen, budget)
        sizes.append(plan.pipeline_parallel_size)
        assert plan.num_frozen_layers == frozen
        if plan.pipeline_parallel_size < 4:
            assert largest_stage_bytes(plan) <= budget
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 4 and sizes[-1] == 1


def test_without_compression_only_the_split_changes() -> None:
    plan = replan(start(), 4, 0, is_elastic=False)
    assert plan.pipeline_parallel_size == 4
    assert plan.stage_bounds != start().stage_bounds


# ------------------------------------------------------------------------------------------ by measured times


# ------------------------------------------------------------------------------------------ with cached layers
def test_cached_layers_cost_nothing_and_are_the_first_stages() -> None:
    plan = replan(start(2), 4, 10**9, num_cached_layers=4, is_elastic=False)
    assert plan.stage_bounds == (0, 6, 8)  # two active units each
    assert "4 frozen, 4 cached" in str(plan)
    plan = replan(plan, 6, 10**9, num_cached_layers=4, is_elastic=False)
    assert plan.stage_bounds == (0, 7, 8)  # 0 x 4 + 1 x 2 + 3 | 3
    plan = replan(plan, 6, 10**9, num_cached_layers=0, is_elastic=False)
    assert plan.stage_bounds == (0, 6, 8)  # 1 x 6 | 3 x 2


def test_a_pipeline_too_long_for_what_is_left_counts_fewer_as_cached() -> None:
    plan = replan(start(4), 7, 10**9, num_cached_layers=7, is_elastic=False)
    assert (plan.stage_bounds, plan.num_cached_layers) == ((0, 5, 6, 7, 8), 4)


@pytest.mark.parametrize(
    ("k", "wanted", "frozen", "cached", "bounds"),
    [
        (2, 3, 0, 0, (0, 1, 2, 3, 4, 6, 8)),
        (2, 5, 0, 0, (0, 1, 2, 3, 4, 5, 6, 7, 8)),  # as many as there are units for
        (4, 3, 0, 0, (0, 1, 2, 3, 4, 5, 6, 7, 8)),
        (1, 3, 0, 0, (0, 8)),  # one stage has one part
        (2, 2, 4, 4, (0, 5, 6, 7, 8)),  # the first virtual stage has all cached units
        (2, 2, 5, 5, (0, 6, 8)),  # 1F1B rather than fewer cached units
    ],
)
def test_number_of_virtual_stages(k: int, wanted: int, frozen: int, cached: int, bounds: tuple[int, ...]) -> None:
    options = {"schedule": "interleaved1f1b", "virtual_pipeline_parallel_size": wanted}
    plan = plan_of(k, num_frozen_layers=frozen, num_cached_layers=cached, **options)
    assert (plan.stage_bounds, plan.num_cached_layers) == (bounds, cached)
    assert plan.runs_as == ("interleaved1f1b" if plan.num_virtual_stages > 1 else "1f1b")


def test_virtual_stages_come_back_in_a_shorter_pipeline() -> None:
    """4 stages of 8 units have 2 each; the request for 3 is fulfilled with 2 stages."""
    options = {"schedule": "interleaved1f1b", "virtual_pipeline_parallel_size": 3}
    plan = make_plan(UNITS, 4, 4, rows_per_device=4, memory_budget_bytes=None, **options)
    shorter = replan(plan, 1, 10**9)
    assert (plan.num_virtual_stages, shorter.num_virtual_stages) == (2, 1)  # one stage
    assert replan(plan, 1, largest_stage_bytes(plan) * 2).num_virtual_stages == 3


def test_more_micro_batches_where_only_that_makes_the_stages_fit() -> None:
    """By counts; with the number of the rule (2 K) the training was refused."""
    units = tuple(unit(k, activation_bytes=100) for k in range(8))
    by_rule = plan_of(2, 2, units, rows_per_device=12)
    assert by_rule.num_microbatches_for(24) == 4
    for m in (6, 8, 12):
        needed = max(by_rule.stage_bytes(stage, rows=24, num_microbatches=m) for stage in range(2))
        fitting = plan_of(2, 2, units, rows_per_device=12, memory_budget_bytes=needed)
        assert fitting.num_microbatches_for(24) == m and largest_stage_bytes(fitting) == needed
    too_small = plan_of(2, 2, units, rows_per_device=12, memory_budget_bytes=needed - 1)
    assert too_small.num_microbatches_for(24) == 4  # nothing fits
