"""`replica_sharding="auto"`: the least sharding of each K that fits, and the shortest K of the fast ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_plan import times_of, unit

from hf_pipetransformer.planning.elastic_policy import ElasticPolicy
from hf_pipetransformer.planning.plan import REPLICA_SHARDINGS, PipelinePlan
from hf_pipetransformer.planning.plan_choice import fits, largest_stage_bytes, make_plan, predicted_seconds
from hf_pipetransformer.planning.sharding_choice import ShardingChoice, choose_sharding

UNITS = tuple(unit(i) for i in range(8))
"""Of 100 bytes; a device needs 3,200 (none), 2,000 (optimizer) or 1,200 (full) with K = 1."""
TIMES = times_of(8)


def chosen(budget: int | None, k: Any = "auto", times: Any = TIMES, by_times: bool = True) -> ShardingChoice:
    return choose_sharding(
        UNITS,
        4,
        k,
        memory_budget_bytes=budget,
        seconds=predicted_seconds if by_times else None,
        times=times,
        rows_per_device=16,
    )


def layout(plan: PipelinePlan) -> tuple[int, str]:
    return plan.pipeline_parallel_size, plan.replica_sharding


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(None, "none"), (3200, "none"), (3199, "optimizer"), (2000, "optimizer")],
)
def test_memory_decides_the_sharding_of_one_stage(budget: int | None, expected: str) -> None:
    for by_times in (True, False):
        plan = chosen(budget, by_times=by_times).plan
        assert layout(plan) == (1, expected)
        assert budget is None or largest_stage_bytes(plan) <= budget
    assert layout(chosen(budget, k=1).plan) == (1, expected)


def test_what_is_considered() -> None:
    """Two stages need 1,600 bytes without sharding and 1,200 with that of the optimizer's state; one replica 800."""
    choice = chosen(1300)
    assert [layout(plan) for plan in choice.considered] == [(1, "optimizer"), (2, "optimizer"), (4, "none")]
    assert [fits(plan) for plan in choice.considered] == [False, True, True]
    assert choice.plan is choice.considered[1]


def test_slow_links_make_a_longer_pipeline_faster() -> None:
    """One stage moves 2,400 bytes in a step, and a pipeline of one replica none."""
    slow = dataclasses.replace(TIMES, reduce_seconds_per_byte=4.0)
    assert layout(chosen(2000, times=slow).plan) == (4, "none")
    assert layout(chosen(2000, times=slow, by_times=False).plan) == (1, "optimizer"), "by counts: the shortest"
    assert layout(chosen(2000, times=None, by_times=False).plan) == (1, "optimizer")


def test_a_given_number_of_stages_that_does_not_fit_is_kept() -> None:
    choice = chosen(1999, k=1)
    assert layout(choice.plan) == (1, "optimizer") and not fits(choice.plan)


def test_nothing_fits() -> None:
    with pytest.raises(
        ValueError, match=r"are 'auto', but no pipeline fits: the smallest, with 4 stages and replica_sh"
    ):
        chosen(799)


def policy(plan_by: str, budget: int) -> ElasticPolicy:
    return ElasticPolicy("auto", 16, True, budget, plan_by=plan_by, replica_sharding="auto")


def test_an_elastic_training_keeps_what_was_chosen_at_its_begin() -> None:
    """Two stages that divide the optimizer's state; with seven of eight units frozen one stage divides it, too."""
    slow = dataclasses.replace(TIMES, reduce_seconds_per_byte=4.0)
    budget = largest_stage_bytes(make_plan(UNITS, 4, 2, rows_per_device=16, memory_budget_bytes=None)) - 1
    elastic = dataclasses.replace(policy("counts", budget), pipeline_parallel_size=2)
    first = elastic.first(UNITS, 4, slow)
    assert layout(first) == (2, "optimizer")
    after = elastic.next(first, first, 7, 0)
    assert layout(after) == (1, "optimizer") and after.data_parallel_size == 4


def test_only_plans_by_times_depend_on_times() -> None:
    slow = dataclasses.replace(TIMES, reduce_seconds_per_byte=4.0)
    assert layout(policy("counts", 2000).first(UNITS, 4, slow)) == (1, "optimizer")
    assert layout(policy("times", 2000).first(UNITS, 4, slow)) == (4, "none")
    assert layout(policy("times", 2000).first(UNITS, 4, None)) == (1, "optimizer")


def test_a_plan_has_no_choice_left() -> None:
    with pytest.raises(ValueError, match=rf"replica_sharding is 'auto', but must be one of '{REPLICA_SHARDINGS[0]}'"):
        make_plan(UNITS, 4, 1, rows_per_device=16, memory_budget_bytes=None, replica_sharding="auto")
