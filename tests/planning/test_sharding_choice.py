"""`replica_sharding="auto"`: the least sharding of each K that fits, and the shortest K."""

from __future__ import annotations

from typing import Any

import pytest
from test_plan import unit

from hf_pipetransformer.planning.elastic_policy import ElasticPolicy
from hf_pipetransformer.planning.plan import REPLICA_SHARDINGS, PipelinePlan
from hf_pipetransformer.planning.plan_choice import fits, largest_stage_bytes, make_plan
from hf_pipetransformer.planning.sharding_choice import ShardingChoice, choose_sharding

UNITS = tuple(unit(i) for i in range(8))
"""Of 100 bytes; a device needs 3,200 (none), 2,000 (optimizer) or 1,200 (full) with K = 1."""


def chosen(budget: int | None, k: Any = "auto", **options: Any) -> ShardingChoice:
    return choose_sharding(UNITS, 4, k, memory_budget_bytes=budget, rows_per_device=16, **options)


def layout(plan: PipelinePlan) -> tuple[int, str]:
    return plan.pipeline_parallel_size, plan.replica_sharding


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(None, "none"), (3200, "none"), (3199, "optimizer"), (2000, "optimizer")],
)
def test_memory_decides_the_sharding_of_one_stage(budget: int | None, expected: str) -> None:
    for k in ("auto", 1):
        assert layout(chosen(budget, k).plan) == (1, expected)


def test_what_is_considered() -> None:
    """Two stages need 1,600 bytes without sharding and 1,200 with that of the optimizer's state; one replica 800."""
    choice = chosen(1300)
    assert [layout(plan) for plan in choice.considered] == [(1, "optimizer"), (2, "optimizer"), (4, "none")]
    assert [fits(plan) for plan in choice.considered] == [False, True, True]
    assert choice.plan is choice.considered[1]


def test_a_given_number_of_stages_that_does_not_fit_is_kept() -> None:
    choice = chosen(1999, k=1)
    assert layout(choice.plan) == (1, "optimizer") and not fits(choice.plan)


def test_nothing_fits() -> None:
    with pytest.raises(
        ValueError, match=r"are 'auto', but no pipeline fits: the smallest, with 4 stages and replica_sh"
    ):
        chosen(799)


def test_an_elastic_training_keeps_what_was_chosen_at_its_begin() -> None:
    """Two stages that divide the optimizer's state; with seven of eight units frozen one stage divides it, too."""
    budget = largest_stage_bytes(make_plan(UNITS, 4, 2, rows_per_device=16, memory_budget_bytes=None)) - 1
    elastic = ElasticPolicy(2, 16, True, budget, replica_sharding="auto")
    first = elastic.first(UNITS, 4, None)
    assert layout(first) == (2, "optimizer")
    after = elastic.next(first, first, 7, 0)
    assert layout(after) == (1, "optimizer") and after.data_parallel_size == 4


def test_a_plan_has_no_choice_left() -> None:
    with pytest.raises(ValueError, match=rf"replica_sharding is 'auto', but must be one of '{REPLICA_SHARDINGS[0]}'"):
        make_plan(UNITS, 4, 1, rows_per_device=16, memory_budget_bytes=None, replica_sharding="auto")
