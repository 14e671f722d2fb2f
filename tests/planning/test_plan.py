from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hf_pipetransformer.planning.costs import HeadCost, UnitCost, step_flops
from hf_pipetransformer.planning.plan import MIB, PipelinePlan
from hf_pipetransformer.planning.plan_choice import make_plan
from hf_pipetransformer.planning.unit_times import ModelTimes, PartTimes, Seconds


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


def times_of(units: int, fixed: float = 0.0) -> ModelTimes:
    """A second a row forward, two backward."""
    part = PartTimes(Seconds(fixed, 1.0), Seconds(2 * fixed, 2.0))
    return ModelTimes(PartTimes(), (part,) * units, PartTimes())


def plan_of(k: int, world_size: int = 8, units: tuple[UnitCost, ...] = UNITS, **changes: Any) -> PipelinePlan:
    arguments: dict[str, Any] = {"rows_per_device": 4, "memory_budget_bytes": None, **changes}
    return make_plan(units, world_size, k, **arguments)


def test_ranks_are_laid_out_as_drawn() -> None:
    """
                stage 0   stage 1   stage 2   stage 3
    replica 0   rank 3    rank 2    rank 1    rank 0
    replica 1   rank 7    rank 6    rank 5    rank 4
    """
    plan = plan_of(4)
    assert [plan.ranks_of_pipeline(r) for r in range(2)] == [(3, 2, 1, 0), (7, 6, 5, 4)]
    assert [plan.ranks_of_stage(s) for s in range(4)] == [(3, 7), (2, 6), (1, 5), (0, 4)]
    assert [plan.stage_of(rank) for rank in range(8)] == [3, 2, 1, 0, 3, 2, 1, 0]
    assert [plan.replica_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [list(plan.units_of(s)) for s in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def interleaved(k: int, v: int, **changes: Any) -> PipelinePlan:
    return plan_of(k, schedule="interleaved1f1b", virtual_pipeline_parallel_size=v, **changes)


def test_virtual_stages_are_laid_out_as_drawn() -> None:
    """Stage 0 has units 0 1 and 4 5, stage 1 the others."""
    plan = interleaved(2, 2)
    assert (plan.stage_bounds, plan.num_virtual_stages) == ((0, 2, 4, 6, 8), 2)
    assert [plan.virtual_stages_of(s) for s in range(2)] == [(0, 2), (1, 3)]
    assert [plan.ranges_of(s) for s in range(2)] == [(range(2), range(4, 6)), (range(2, 4), range(6, 8))]
    assert [plan.units_of(s) for s in range(2)] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert "0-1 4-5" in str(plan)
    assert "schedule interleaved1f1b with 4 micro-batches, 2 virtual stages per stage" in str(plan)
    assert "bubble 11.1 %" in str(plan)


def test_a_v_brings_the_last_units_to_the_first_stage() -> None:
    plan = plan_of(2, schedule="zbv", virtual_pipeline_parallel_size=2)
    assert [plan.virtual_stages_of(s) for s in range(2)] == [(0, 3), (1, 2)]
    assert [plan.units_of(s) for s in range(2)] == [(0, 1, 6, 7), (2, 3, 4, 5)]
    assert [plan.ranks_of_pipeline(r) for r in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)], "the loss is on rank 0"
    assert "schedule zbv with 4 micro-batches, 2 virtual stages per stage; bubble 4.0 %" in str(plan)
    with pytest.raises(ValueError, match=r"is 3 and schedule is 'zbv'.* between 1 and 2"):
        dataclasses.replace(plan, virtual_pipeline_parallel_size=3)


@pytest.mark.parametrize("name", ["stage_of", "replica_of", "ranks_of_stage", "ranks_of_pipeline", "units_of"])
@pytest.mark.parametrize("value", [-1, 8])
def test_out_of_range(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"is {value}, but must be between 0 and"):
        getattr(plan_of(4), name)(value)


def test_one_process_is_told_how_to_start_more() -> None:
    with pytest.raises(ValueError, match=r"must divide the world size 1.*torchrun"):
        plan_of(4, world_size=1)


# -- memory --------------------------------------------------------------------------------------------------


def test_activations_of_an_interleaved_schedule() -> None:
    """Stage 0 keeps at most 5 forwards before its first backward (`F0 F1 f0 f1 F2`), stage 1 keeps 3."""
    units = tuple(unit(i, activation_bytes=10 ** (i // 2), boundary_bytes=10_000, trainable_bytes=0) for i in range(8))
    plan = interleaved(2, 2, world_size=2, units=units)
    # virtual stages keep 2, 20, 200 and 2000 bytes of a micro-batch; stage 0 receives at three boundaries
    weights, received = 4 * 100, 8 * 10_000
    assert plan.stage_bytes(0, rows=8, num_microbatches=8) == weights + 3 * received + 3 * 2 + 2 * 200
    assert plan.stage_bytes(1, rows=8, num_microbatches=8) == weights + 3 * received + 2 * 20 + 1 * 2000


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
    # the last stage keeps one micro-batch and receives activations
    assert plan.stage_bytes(1, rows=16, num_microbatches=8) == (weights + gradients + adam + 2 * 10 * 2 + 3 * 16)


def test_replicas_that_divide_the_optimizer_state_hold_a_part_of_it() -> None:
    times = dataclasses.replace(times_of(2), update_seconds_per_byte=1.0, reduce_seconds_per_byte=1.0)
    plan = plan_of(1, world_size=4, units=(unit(0), unit(1)), times=times)
    divided = dataclasses.replace(plan, replica_sharding="optimizer")
    assert plan.stage_bytes(0, rows=1, num_microbatches=1) == 200 + 200 + 400
    assert divided.stage_bytes(0, rows=1, num_microbatches=1) == 200 + 200 + 200, "parameters are not cut"
    assert plan.predict(1, 1).seconds_at_end == 200 + 200  # update; reduction as it was measured on four ranks
    assert divided.predict(1, 1).seconds_at_end == 200 // 4 + 1.5 * 200  # half of a reduction gathers the updates
    alone = plan_of(2, world_size=2, units=(unit(0), unit(1)), replica_sharding="optimizer")
    assert alone.stage_bytes(0, rows=1, num_microbatches=1) == 100 + 100 + 200, "one replica"
    assert "replicas divide the optimizer state" in str(divided) and "divide" not in str(alone)


def test_the_head_is_trained_when_all_units_are_frozen() -> None:
    """2 of the last unit's 3 FLOPs, 5 of its 15 bytes of activations, 30 of its 100 of weights are the head's."""
    last = dataclasses.replace(unit(3, flops=3.0, activation_bytes=15), head=HeadCost(2.0, 5, 30))
    units = (unit(0), unit(1), unit(2), last)
    assert step_flops(units, 3) == [1, 1, 1, 3 * 3]
    assert step_flops(units, 4) == [1, 1, 1, 1 + 3 * 2]
    assert step_flops(units, 4, 4) == [0, 0, 0, 3 * 2]
    times = dataclasses.replace(times_of(4), update_seconds_per_byte=1.0)
    plan = plan_of(2, world_size=2, units=units, num_frozen_layers=4, times=times)
    weights, trained = 100 * len(plan.units_of(1)), 30
    assert plan.stage_bytes(1, rows=16, num_microbatches=8) == weights + 3 * trained + 5 * 2
    assert plan.predict(8, 4).seconds_at_end == trained


def test_parameter_shared_within_a_stage_counts_once() -> None:
    units = tuple(unit(i, parameters={"albert.weight": 100}) for i in range(4))
    assert plan_of(1, world_size=1, units=units).stage_bytes(0, rows=1, num_microbatches=1) == 4 * 100
    two = plan_of(2, world_size=2, units=units)  # replicated
    assert [two.parameter_bytes_of(stage) for stage in range(2)] == [100, 100]


@pytest.mark.parametrize(
    ("schedule", "m", "in_flight"),
    [("1f1b", 8, [4, 3, 2, 1]), ("1f1b", 4, [4, 3, 2, 1]), ("1f1b", 2, [2, 2, 2, 2]), ("gpipe", 8, [8, 8, 8, 8])],
)
def test_activations_of_the_micro_batches_in_flight_are_kept(schedule: str, m: int, in_flight: list[int]) -> None:
    """A stage has two units, and a micro-batch one sample."""
    units = tuple(unit(i, activation_bytes=5, trainable_bytes=0) for i in range(8))
    plan = plan_of(4, units=units, schedule=schedule)
    stages = [plan.stage_bytes(stage, rows=m, num_microbatches=m) for stage in range(4)]
    assert stages == [2 * 100 + 2 * 5 * kept for kept in in_flight]


# -- text ----------------------------------------------------------------------------------------------------


def test_plan_prints_a_table() -> None:
    units = tuple(unit(i, parameters={f"{i}": 3 * MIB}, activation_bytes=MIB) for i in range(4))
    text = str(plan_of(2, world_size=4, units=units, num_microbatches=6))
    assert text == "\n".join(
        (
            "2 stages × 2 pipelines = 4 ranks, 4 units",
            "stage  units  first unit  parameters MiB  training MiB  FLOPs %",
            "    0  0-1    layer.0                6.0          32.0     50.0",
            "    1  2-3    layer.2                6.0          28.0     50.0",
            "8 samples a pipeline and step; schedule 1f1b with 4 micro-batches; bubble 20.0 % if stages are equal",
        )
    )


def test_plan_with_times_predicts_the_step() -> None:
    """4 micro-batches, 2 rows each: stages of 4 units x (1 + 2) x 2 rows = 24 s a micro-batch, 5 of them in a row."""
    plan = plan_of(2, times=times_of(8), num_microbatches=4)
    assert str(plan).endswith("schedule 1f1b with 4 micro-batches; predicted 120 s (bubble 20.0 %)")
    assert plan.predict(8, 4).seconds == 120
    assert plan.predict(8, 1).seconds == pytest.approx(2 * 96)
    with pytest.raises(ValueError, match="times is None"):
        plan_of(2).predict(8, 4)


def test_prediction_counts_reduction_and_update() -> None:
    """8 ranks, 4 replicas: 400 trainable bytes a stage, 2 (4 - 1) / 4 of them sent instead of 2 (8 - 1) / 8."""
    times = dataclasses.replace(times_of(8), update_seconds_per_byte=1.0, reduce_seconds_per_byte=7.0)
    assert plan_of(2, times=times).predict(8, 4).seconds_at_end == pytest.approx(400 * (1 + 7 * (3 / 4) / (7 / 8)))
