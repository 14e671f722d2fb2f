"""`pipeline_schedule="auto"`: the schedule with the shortest predicted step; further ones must be worth it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_plan import plan_of, times_of, unit

from hf_pipetransformer.planning.elastic_policy import ElasticPolicy
from hf_pipetransformer.planning.plan import PipelinePlan
from hf_pipetransformer.planning.plan_choice import (
    SCHEDULES_TO_CHOOSE_FROM,
    ScheduleChoice,
    choose_schedule,
    largest_stage_bytes,
    predicted_flops,
    predicted_seconds,
)
from hf_pipetransformer.planning.unit_times import PartTimes, Seconds

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


def test_one_stage_has_no_schedule() -> None:
    choice = choice_of(1)
    assert [of(each.plan) for each in choice.considered] == [ONE_F_ONE_B] and steps(choice) == [1.0]


def test_units_without_operations() -> None:
    assert chosen(2, tuple(unit(i, 0.0) for i in range(8))) == ONE_F_ONE_B


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


def test_zbv_needs_no_more_memory_than_1f1b() -> None:
    """K = 8: the first stage keeps 8 passes with 1F1B, 23 of half a stage with V = 2, and 16 of a half with ZBV."""
    units = tuple(unit(i, activation_bytes=1000) for i in range(16))
    plain = largest_stage_bytes(choice_of(8, units, m=16).considered[0].plan)
    choice = choice_of(8, units, m=16, memory_budget_bytes=plain)
    assert [each.fits for each in choice.considered] == [True, False, True]
    assert steps(choice)[-1] == pytest.approx((1 + 7 / 96) / (1 + 7 / 16))
    assert of(choice.chosen.plan) == ZBV


def test_a_number_of_micro_batches_that_an_interleaved_schedule_cannot_run() -> None:
    """13 samples on 2 stages: 13 micro-batches, or 1 where rounds must have equal sizes."""
    whole = dataclasses.replace(plan_of(1, 2, EVEN), world_size=2, rows_per_device=13)
    choice = choose_schedule(dataclasses.replace(whole, num_microbatches=13), 2)
    assert [each.plan.num_microbatches_for(13) for each in choice.considered[:2]] == [13, 1]
    assert of(choice.chosen.plan) == ONE_F_ONE_B


def test_counts_and_times() -> None:
    """Each part computes again what precedes the units. Plans by counts are the same whatever was measured."""
    dear = dataclasses.replace(times_of(24), prologue=PartTimes(Seconds(0.0, 6.0), Seconds()))
    for times in (times_of(24), dear):
        assert chosen(4, m=4, times=times) == V2
    assert chosen(4, m=4, times=times_of(24), plan_by="times") == V2
    choice = choice_of(4, m=4, times=dear, plan_by="times")
    assert of(choice.chosen.plan) == ONE_F_ONE_B
    seconds = [predicted_seconds(each.plan) for each in choice.considered]
    assert steps(choice) == pytest.approx([each / seconds[0] for each in seconds])


@pytest.mark.parametrize(("schedule", "v"), SCHEDULES_TO_CHOOSE_FROM)
def test_flops_predict_what_equal_times_do(schedule: str, v: int) -> None:
    """Times of a second for each FLOP and sample, with frozen and cached units."""
    options: dict[str, Any] = {"num_frozen_layers": 5, "num_cached_layers": 2, "num_microbatches": 4}
    plan = plan_of(2, 2, EVEN, schedule=schedule, virtual_pipeline_parallel_size=v, times=times_of(24), **options)
    assert predicted_flops(plan) == pytest.approx(predicted_seconds(plan))


def test_the_schedule_is_chosen_with_stages_and_sharding() -> None:
    """Neither one stage nor two replicas of two fit without sharding, and one stage does not with it."""
    units = tuple(unit(i) for i in range(8))
    policy = ElasticPolicy("auto", 4, True, 1300, "auto", num_microbatches=2, replica_sharding="auto")
    for stages in ("auto", 2):
        first = dataclasses.replace(policy, pipeline_parallel_size=stages).first(units, 4, None)
        assert (first.pipeline_parallel_size, of(first), first.replica_sharding) == (2, V2, "optimizer")


def test_the_shortest_pipeline_that_fits_has_a_schedule_of_its_own() -> None:
    plain = plan_of(2, 4, EVEN, num_microbatches=4)
    first = plan_of(
        "auto", 4, EVEN, schedule="auto", num_microbatches=4, memory_budget_bytes=largest_stage_bytes(plain)
    )
    assert (first.pipeline_parallel_size, *of(first)) == (2, *V2)


def test_later_plans_keep_what_was_chosen() -> None:
    """With as few micro-batches for K = 2 as here, 1F1B would be chosen there."""
    policy = ElasticPolicy(4, 4, True, None, "auto", num_microbatches=8)
    first = policy.first(EVEN, 4, None)
    then = policy.next(first, first, 20, 0)
    assert of(first) == of(then) == V2 and then.pipeline_parallel_size == 2
    assert of(choose_schedule(then, 2).chosen.plan) == ONE_F_ONE_B
    last = policy.next(then, first, 23, 22)
    assert last.schedule == V2[0] and last.runs_as == "1f1b"


def test_virtual_stages_are_not_given_as_well() -> None:
    with pytest.raises(ValueError, match="virtual_pipeline_parallel_size is 2"):
        plan_of(2, schedule="auto", virtual_pipeline_parallel_size=2)
