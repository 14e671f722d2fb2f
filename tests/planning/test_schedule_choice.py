"""`pipeline_schedule="auto"`: the schedule with the shortest predicted step; further ones must be worth it."""

from __future__ import annotations

from typing import Any

import pytest
from test_plan import plan_of, unit

from hf_pipetransformer.planning.elastic_policy import ElasticPolicy
from hf_pipetransformer.planning.plan import PipelinePlan
from hf_pipetransformer.planning.plan_choice import (
    SCHEDULES_TO_CHOOSE_FROM,
    ScheduleChoice,
    choose_schedule,
    largest_stage_bytes,
)

EVEN = tuple(unit(i) for i in range(24))
"""Six, three, two and three units in each part of four stages."""
ONE_F_ONE_B, V2, V3, ZBV = SCHEDULES_TO_CHOOSE_FROM


def choice_of(k: int, units: tuple[Any, ...] = EVEN, m: Any = "auto", **changes: Any) -> ScheduleChoice:
    """The choice for K ranks with four samples each."""
    plan = plan_of(k, k, units, schedule="auto", num_microbatches=m, **changes)
    choice = choose_schedule(plan, k)
    assert choice.chosen.plan == plan, "made again from what was chosen, the choice is the same"
    return choice


def of(plan: PipelinePlan) -> tuple[str, int]:
    return plan.schedule, plan.num_virtual_stages


def chosen(*arguments: Any, **changes: Any) -> tuple[str, int]:
    return of(choice_of(*arguments, **changes).chosen.plan)


def steps(choice: ScheduleChoice) -> list[float]:
    return [each.step for each in choice.considered]


def test_even_layers_and_few_micro_batches() -> None:
    """(M + (K - 1) / V) / M with K = M = 4: 7/4, 5.5/4, 5/4; ZBV has too few micro-batches to fill all gaps."""
    choice = choice_of(4, m=4)
    assert tuple(of(each.plan) for each in choice.considered) == SCHEDULES_TO_CHOOSE_FROM
    assert steps(choice) == pytest.approx([1, 5.5 / 7, 5 / 7, 5 / 7])
    assert [each.weighed for each in choice.considered] == pytest.approx(
        [1, 1.1 * 5.5 / 7, 1.21 * 5 / 7, 1.331 * 5 / 7]
    )
    assert of(choice.chosen.plan) == V2, "V = 3 is 10% faster and not more"


@pytest.mark.parametrize(
    ("k", "units", "m", "expected"),
    [
        (4, 24, 8, V2),  # 11/8, 9.5/8, 9/8
        (4, 12, 4, V3),  # 7/4, 6/4 with parts of one and two units, 5/4
        (2, 24, 4, V2),  # 5/4, 4.5/4
        (2, 6, 4, ONE_F_ONE_B),  # 5/4, 14/12 with parts of one and two units
        (2, 24, 8, ONE_F_ONE_B),  # 9/8, 8.5/8
    ],
)
def test_a_further_schedule_must_be_worth_it(k: int, units: int, m: int, expected: tuple[str, int]) -> None:
    assert chosen(k, EVEN[:units], m=m) == expected


def test_a_heavy_last_unit_keeps_the_simplest_schedule() -> None:
    """It takes longer than a fair share of all: with virtual stages its process would have other units as well."""
    choice = choice_of(4, (*EVEN[:11], unit(11, 12.0)), m=8)
    assert steps(choice)[1] > 1 and min(steps(choice)) > 0.95
    assert of(choice.chosen.plan) == ONE_F_ONE_B


@pytest.mark.parametrize(
    ("units", "expected"),
    [(7, [ONE_F_ONE_B]), (8, [ONE_F_ONE_B, V2, ZBV]), (11, [ONE_F_ONE_B, V2, ZBV]), (12, [ONE_F_ONE_B, V2, V3, ZBV])],
)
def test_too_few_units(units: int, expected: list[tuple[str, int]]) -> None:
    assert [of(each.plan) for each in choice_of(4, EVEN[:units], m=4).considered] == expected


def test_what_does_not_fit_is_not_chosen() -> None:
    """The first stage keeps 5 passes of half a stage with V = 2, and 2 of a whole one with 1F1B."""
    units = tuple(unit(i, activation_bytes=1000) for i in range(8))
    plain, interleaved = (largest_stage_bytes(each.plan) for each in choice_of(2, units, m=4).considered[:2])
    assert chosen(2, units, m=4, memory_budget_bytes=interleaved) == V2
    choice = choice_of(2, units, m=4, memory_budget_bytes=interleaved - 1)
    assert [each.fits for each in choice.considered[:2]] == [True, False]
    assert of(choice.chosen.plan) == ONE_F_ONE_B
    nothing = choice_of(2, units, m=4, memory_budget_bytes=plain // 2)
    assert not any(each.fits for each in nothing.considered)
    assert of(nothing.chosen.plan) == ONE_F_ONE_B


def test_later_plans_keep_what_was_chosen() -> None:
    """With as few micro-batches for K = 2 as here, 1F1B would be chosen there."""
    policy = ElasticPolicy(4, 4, True, None, "auto", num_microbatches=8)
    first = policy.first(EVEN, 4, None)
    then = policy.next(first, first, 20, 0)
    assert of(first) == of(then) == V2 and then.pipeline_parallel_size == 2
    assert of(choose_schedule(then, 2).chosen.plan) == ONE_F_ONE_B
    last = policy.next(then, first, 23, 22)
    assert last.schedule == V2[0] and last.runs_as == "1f1b"
