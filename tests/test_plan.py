from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hf_pipetransformer.costs import UnitCost
from hf_pipetransformer.plan import MIB, PipelinePlan, make_plan, replan


def unit(
    index: int,
    flops: float = 1.0,
    activation_bytes: int = 0,
    boundary_bytes: int = 0,
    parameters: dict[str, int] | None = None,
    trainable_bytes: int | None = None,
) -> UnitCost:
    own = {f"layer.{index}.weight": 100} if parameters is None else parameters
    return UnitCost(
        name=f"layer.{index}",
        forward_flops=flops,
        activation_bytes=activation_bytes,
        boundary_bytes=boundary_bytes,
        parameters=own,
        trainable_bytes=sum(own.values()) if trainable_bytes is None else trainable_bytes,
    )


UNITS = tuple(unit(i) for i in range(8))


def plan_of(k: int, world_size: int = 8, units: tuple[UnitCost, ...] = UNITS, **changes: Any) -> PipelinePlan:
    arguments: dict[str, Any] = {"rows_per_pipeline_device": 4, "memory_budget_bytes": None, **changes}
    return make_plan(units, world_size, k, **arguments)


def test_ranks_are_laid_out_as_drawn() -> None:
    """
                stage 0   stage 1   stage 2   stage 3
    replica 0   rank 0    rank 1    rank 2    rank 3
    replica 1   rank 4    rank 5    rank 6    rank 7
    """
    plan = plan_of(4)
    assert [plan.ranks_of_pipeline(r) for r in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [plan.ranks_of_stage(s) for s in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [plan.stage_of(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [plan.replica_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [list(plan.units_of(s)) for s in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_plan_is_a_value() -> None:
    assert plan_of(4) == plan_of(4)
    assert hash(plan_of(4)) == hash(plan_of(4))
    assert plan_of(4) != plan_of(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_of(4).schedule = "gpipe"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["stage_of", "replica_of", "ranks_of_stage", "ranks_of_pipeline", "units_of"])
@pytest.mark.parametrize("value", [-1, 8])
def test_out_of_range(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"is {value}, but must be between 0 and"):
        getattr(plan_of(4), name)(value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size is 3, but must divide the world size 8.*1, 2, 4, 8"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size is 0"),
        ({"world_size": 0}, "world_size is 0"),
        ({"data_parallel_size": 3}, "data_parallel_size is 3.*set it to 2"),
        ({"stage_bounds": (0, 2, 4, 8)}, "stage_bounds"),
        ({"stage_bounds": (0, 2, 2, 4, 8)}, "stage_bounds.*strictly increasing"),
        ({"stage_bounds": (0, 2, 4, 6, 7)}, "stage_bounds.*from 0 to 8"),
        ({"schedule": "zigzag"}, "schedule is 'zigzag'"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"unit_costs": ()}, "unit_costs is empty"),
        ({"unit_costs": UNITS[:3]}, "pipeline_parallel_size is 4, but the model has 3 units"),
    ],
)
def test_plan_refuses_contradictions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(plan_of(4), **changes)


def test_one_process_is_told_how_to_start_more() -> None:
    with pytest.raises(ValueError, match=r"must divide the world size 1.*torchrun"):
        plan_of(4, world_size=1)


def test_bubble() -> None:
    assert plan_of(4).bubble_fraction(16) == pytest.approx(3 / 19)
    assert plan_of(1).bubble_fraction(1) == 0
    with pytest.raises(ValueError, match="num_microbatches is 0"):
        plan_of(4).bubble_fraction(0)


def test_split_follows_the_flops() -> None:
    units = tuple(unit(i, flops) for i, flops in enumerate([1, 1, 1, 3]))
    assert plan_of(2, world_size=2, units=units).stage_bounds == (0, 3, 4)


# -- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "m", "in_flight"),
    [("1f1b", 8, [4, 3, 2, 1]), ("1f1b", 4, [4, 3, 2, 1]), ("1f1b", 2, [2, 2, 2, 2]), ("gpipe", 8, [8, 8, 8, 8])],
)
def test_microbatches_in_flight(schedule: str, m: int, in_flight: list[int]) -> None:
    plan = plan_of(4, schedule=schedule)
    assert [plan.microbatches_in_flight(stage, m) for stage in range(4)] == in_flight


def test_stage_bytes_adds_up() -> None:
    units = tuple(unit(i, activation_bytes=10, boundary_bytes=3) for i in range(4))
    plan = plan_of(2, world_size=2, units=units)
    # stage 0 of 2: two units; 16 rows as 8 micro-batches of 2 rows, 2 of them in flight
    weights, gradients, adam = 200, 200, 400
    activations = 2 * 10 * (2 * 2)
    gradients_received = 3 * 16
    assert plan.stage_bytes(0, rows=16, num_microbatches=8) == (
        weights + gradients + adam + activations + gradients_received
    )
    # SGD has no state; the last stage keeps one micro-batch and receives activations
    assert plan.stage_bytes(1, rows=16, num_microbatches=8, optimizer_bytes_per_parameter_byte=0) == (
        weights + gradients + 2 * 10 * 2 + 3 * 16
    )


def test_frozen_parameters_need_neither_gradient_nor_state() -> None:
    plan = plan_of(1, world_size=1, units=(unit(0, trainable_bytes=0), unit(1)))
    assert plan.stage_bytes(0, rows=1, num_microbatches=1) == 200 + 3 * 100


def test_parameter_shared_within_a_stage_counts_once() -> None:
    units = tuple(unit(i, parameters={"albert.weight": 100}) for i in range(4))
    assert plan_of(1, world_size=1, units=units).stage_bytes(0, rows=1, num_microbatches=1) == 4 * 100
    two = plan_of(2, world_size=2, units=units)  # replicated
    assert [two.parameter_bytes_of(stage) for stage in range(2)] == [100, 100]


@pytest.mark.parametrize(("rows", "m"), [(0, 1), (16, 3), (2, 4)])
def test_stage_bytes_refuses_uneven_microbatches(rows: int, m: int) -> None:
    with pytest.raises(ValueError, match=f"rows is {rows} and num_microbatches {m}"):
        plan_of(4).stage_bytes(0, rows=rows, num_microbatches=m)


# -- auto ----------------------------------------------------------------------------------------------------


def needed(k: int, units: tuple[UnitCost, ...] = UNITS) -> int:
    plan = plan_of(k, units=units)
    return max(plan.stage_bytes(stage, rows=4 * k, num_microbatches=4 * k) for stage in range(k))


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_auto_takes_the_smallest_pipeline_that_fits(k: int) -> None:
    plan = make_plan(UNITS, 8, "auto", rows_per_pipeline_device=4, memory_budget_bytes=needed(k))
    assert (plan.pipeline_parallel_size, plan.data_parallel_size) == (k, 8 // k)


def test_auto_without_a_budget_is_one_stage() -> None:
    plan = make_plan(UNITS, 8, "auto", rows_per_pipeline_device=4, memory_budget_bytes=None)
    assert plan.pipeline_parallel_size == 1


def test_auto_never_has_more_stages_than_units() -> None:
    units = UNITS[:3]
    plan = make_plan(units, 8, "auto", rows_per_pipeline_device=4, memory_budget_bytes=needed(2, units))
    assert plan.pipeline_parallel_size == 2
    with pytest.raises(ValueError, match="with 2 stages"):
        make_plan(units, 8, "auto", rows_per_pipeline_device=4, memory_budget_bytes=1)


def test_auto_says_what_is_missing() -> None:
    units = tuple(unit(i, parameters={f"{i}": 10 * MIB}) for i in range(8))
    with pytest.raises(ValueError, match="with 8 stages the largest still needs 40 MiB, and a device has 20 MiB"):
        make_plan(units, 8, "auto", rows_per_pipeline_device=4, memory_budget_bytes=20 * MIB)


def test_make_plan_refuses_no_rows() -> None:
    with pytest.raises(ValueError, match=r"rows_per_pipeline_device is 0.*per_device_train_batch_size"):
        plan_of(2, rows_per_pipeline_device=0)


# -- text ----------------------------------------------------------------------------------------------------


def test_plan_prints_a_table() -> None:
    units = tuple(unit(i, parameters={f"{i}": 3 * MIB}, activation_bytes=MIB) for i in range(4))
    text = str(plan_of(2, world_size=4, units=units, num_microbatches=6))
    assert text == "\n".join(
        (
            "2 stages × 2 pipelines = 4 ranks, 4 units",
            "stage  units  first unit  parameters MiB  activations MiB/row  FLOPs %",
            "    0  0-1    layer.0                6.0                 2.00     50.0",
            "    1  2-3    layer.2                6.0                 2.00     50.0",
            "schedule 1f1b, up to 6 micro-batches; bubble 14.3 % at 6",
        )
    )


def test_plan_of_one_stage_speaks_of_no_schedule() -> None:
    assert str(plan_of(1, world_size=1)).endswith("no schedule, no bubble (one stage)")


# ------------------------------------------------------------------------------------------ after a freeze
def start(k: int = 4) -> PipelinePlan:
    return make_plan(UNITS, 4, k, num_microbatches=4, rows_per_pipeline_device=4, memory_budget_bytes=None)


def test_frozen_units_cost_a_third_in_the_split() -> None:
    plan = make_plan(UNITS, 4, 2, rows_per_pipeline_device=4, memory_budget_bytes=None, num_frozen_layers=3)
    assert plan.stage_bounds == (0, 5, 8)  # 3 x 1 + 2 x 3 = 9 = 3 x 3
    assert "3 frozen" in str(plan)


def test_a_stage_may_hold_frozen_units_only() -> None:
    plan = make_plan(UNITS, 4, 4, rows_per_pipeline_device=4, memory_budget_bytes=None, num_frozen_layers=6)
    assert plan.stage_bounds == (0, 3, 6, 7, 8)


def test_compression_takes_the_shortest_pipeline_that_fits() -> None:
    """Its largest stage may need no more bytes than the largest did at the start."""

    def largest(plan: PipelinePlan) -> int:
        k = plan.pipeline_parallel_size
        m = 1 if k == 1 else 4  # of the rows that a pipeline gets
        return max(plan.stage_bytes(stage, rows=4 * k, num_microbatches=m) for stage in range(k))

    plan, sizes = start(), []
    for frozen in range(1, 9):
        plan = replan(plan, frozen, start(), rows_per_pipeline_device=4)
        sizes.append(plan.pipeline_parallel_size)
        assert plan.num_frozen_layers == frozen
        if plan.pipeline_parallel_size < 4:
            assert largest(plan) <= largest(start())
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 4 and sizes[-1] == 1


def test_without_compression_only_the_split_changes() -> None:
    plan = replan(start(), 4, start(), rows_per_pipeline_device=4, compress=False)
    assert plan.pipeline_parallel_size == 4
    assert plan.stage_bounds != start().stage_bounds


def test_more_frozen_layers_than_there_are() -> None:
    with pytest.raises(ValueError, match="num_frozen_layers is 9, but must be between 0 and 8"):
        replan(start(), 9, start(), rows_per_pipeline_device=4)
