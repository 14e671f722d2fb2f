from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from test_plan import times_of, unit

from hf_pipetransformer import PipeTransformerTrainingArguments
from hf_pipetransformer.forecast.device_table import CacheHost, Device
from hf_pipetransformer.forecast.forecast import Forecast, Job, Machine, forecast, forecast_seconds
from hf_pipetransformer.forecast.forecast_text import advise
from hf_pipetransformer.forecast.workload import Workload
from hf_pipetransformer.freezing import AdaptivePolicy, AlphaPolicy, FreezePolicy, NeverFreeze, SchedulePolicy
from hf_pipetransformer.layouts import Layouts
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.planning.plan import PipelinePlan
from hf_pipetransformer.planning.planner import largest_stage_bytes
from hf_pipetransformer.planning.unit_times import ModelTimes, PartTimes, Seconds

ROW_BYTES = 10
MEMORY_BYTES = 100
"""Of a unit's parameters; twice as much for its optimizer state, as much for its gradients."""


def workload(units: int = 12, cacheable: bool = True, row_bytes: int = ROW_BYTES) -> Workload:
    """Equal units, of 3 FLOPs a row in a training step."""
    costs = tuple(unit(i, boundary_bytes=row_bytes if i < units - 1 else 0) for i in range(units))
    return Workload(costs, units, frozenset(range(1, units + 1)) if cacheable else frozenset())


def machine(units: int = 12, budget: int | None = None, host: CacheHost | None = None, per_node: int = 8) -> Machine:
    """A second a row and unit forward, two backward; the cache takes no time."""
    return Machine(times_of(units), budget, per_node, host or CacheHost(1e12, 1e12))


def job(devices: int = 1, epochs: int = 1, policy: FreezePolicy | None = None, **changes: Any) -> Job:
    """Steps of 16 rows, two of them in an epoch."""
    arguments: dict[str, Any] = {"batch_rows": 16, "num_samples": 32, **changes}
    return Job(devices, num_epochs=epochs, freeze_policy=policy or NeverFreeze(), **arguments)


def made(devices: int = 1, epochs: int = 1, policy: FreezePolicy | None = None, **changes: Any) -> Forecast:
    return forecast(job(devices, epochs, policy, **changes), workload(), machine())


# ------------------------------------------------------------------------------------------ closed forms
def test_alpha_freezes_by_the_closed_form() -> None:
    """L = 12, alpha = 1/3: the table of the paper's code, one decision for each epoch."""
    course = job(epochs=8, policy=AlphaPolicy(1 / 3))
    assert course.num_frozen(12, 12) == [0, 4, 7, 9, 10, 11, 11, 12]
    assert course.num_frozen(12, max_frozen=11) == [0, 4, 7, 9, 10, 11, 11, 11]
    assert dataclasses.replace(course, max_frozen_layers=6).num_frozen(12, 12) == [0, 4, 6, 6, 6, 6, 6, 6]
    assert job(epochs=4, policy=SchedulePolicy({1: 3, 3: 5})).num_frozen(12, 12) == [0, 3, 3, 5]


def test_one_device_takes_what_its_layers_take() -> None:
    """Layers that are frozen and cached cost nothing, frozen ones a third: 16 rows, 2 steps an epoch."""
    result = made(epochs=4, policy=SchedulePolicy({1: 4, 3: 8}))
    active, frozen = 3 * 16, 16
    assert [epoch.num_frozen for epoch in result.epochs] == [0, 4, 4, 8]
    assert [epoch.num_cached for epoch in result.epochs] == [0, 0, 4, 4]
    assert [epoch.puts for epoch in result.epochs] == [0, 4, 0, 0]  # nobody would read what the last epoch puts
    steps = [12 * active, 8 * active + 4 * frozen, 8 * active, 4 * active + 4 * frozen]
    assert [epoch.prediction.seconds for epoch in result.epochs] == steps
    assert result.seconds == pytest.approx(2 * sum(steps))
    assert [epoch.rows_per_second for epoch in result.epochs] == pytest.approx([16 / step for step in steps])


def test_flop_bound_by_hand() -> None:
    """12 units x 3 in each of 4 epochs, over 36 + (8 x 3 + 4) + 8 x 3 + (4 x 3 + 4)."""
    result = made(epochs=4, policy=SchedulePolicy({1: 4, 3: 8}))
    assert result.flop_bound == pytest.approx(4 * 36 / (36 + 28 + 24 + 16))
    assert result.speed_up_over(result.ddp) == pytest.approx(result.flop_bound)
    uncached = made(epochs=4, policy=SchedulePolicy({1: 4, 3: 8}), caches=False)
    assert uncached.flop_bound == pytest.approx(4 * 36 / (36 + 28 + 28 + (4 * 3 + 8)))
    assert [epoch.num_cached for epoch in uncached.epochs] == [0, 0, 0, 0]


def test_without_overhead_devices_divide_the_time() -> None:
    one, four = made(1), made(4)
    assert one.seconds == 2 * 12 * 3 * 16
    assert four.seconds == one.seconds / 4
    assert four.best_static.plan.pipeline_parallel_size == 1
    assert one.static_pipeline is None


def test_static_pipeline_has_the_bubble_of_equal_stages() -> None:
    """(M + K - 1) / M times plain DDP, where nothing but layers costs anything."""
    result = made(4, pipeline_parallel_size=4, num_microbatches=4)
    assert result.static_pipeline is not None
    assert result.static_pipeline.seconds == pytest.approx(result.ddp.seconds * (4 + 3) / 4)
    assert result.epochs[0].shares["waiting"] == pytest.approx(3 / 7)
    assert result.speed_up_over(result.ddp) == pytest.approx(4 / 7)
    assert result.first.pipeline_parallel_size == 4
    assert made(4).static_pipeline is not None  # K = 1 is chosen: compared with the shortest one


def test_shares_add_up_and_name_the_limit() -> None:
    host = CacheHost(read_bytes_per_second=1.0, disk_bytes_per_second=1.0)  # 10 s for a row
    slow = forecast(job(2, 3, SchedulePolicy({1: 10})), workload(), machine(host=host))
    for epoch in slow.epochs:
        assert sum(epoch.shares.values()) == pytest.approx(1)
    assert [epoch.limit for epoch in slow.epochs] == ["active layers", "frozen layers", "frozen layers"]
    assert slow.cache_off is not None and "loading would take 1e+04 ms a row" in slow.cache_off
    fast = dataclasses.replace(machine(), host=CacheHost(4.0, 4.0))
    assert forecast(job(2, 3, SchedulePolicy({1: 12})), workload(), fast).epochs[2].limit == "loading"


def test_reading_takes_the_time_of_a_nodes_rows() -> None:
    """16 rows x 10 bytes over two nodes at 8 bytes/s; from disk where generations exceed the memory."""
    host = CacheHost(read_bytes_per_second=8.0, disk_bytes_per_second=4.0, memory_bytes=160.0)
    course = job(2, 4, SchedulePolicy({1: 6, 3: 7}))
    epochs = forecast(course, workload(), machine(host=host, per_node=1)).epochs
    assert [epoch.load_seconds for epoch in epochs] == [0, 0, 10, 10]
    small = dataclasses.replace(host, memory_bytes=159.0)
    assert forecast(course, workload(), machine(host=small, per_node=1)).epochs[2].load_seconds == 20


def test_cache_size_counts_both_generations() -> None:
    result = made(epochs=4, policy=SchedulePolicy({1: 4, 2: 8}))
    assert [(epoch.num_cached, epoch.puts) for epoch in result.epochs] == [(0, 0), (0, 4), (4, 8), (8, 0)]
    assert result.cache_bytes == 32 * ROW_BYTES
    assert result.cache_peak_bytes == 2 * 32 * ROW_BYTES
    two_nodes = forecast(job(2, 4, SchedulePolicy({1: 4, 2: 8})), workload(), machine(per_node=1))
    assert two_nodes.cache_bytes == 16 * ROW_BYTES


def test_a_store_that_does_not_fit_the_disk_is_none() -> None:
    host = CacheHost(1e12, 1e12, disk_bytes=32 * ROW_BYTES - 1)
    result = forecast(job(1, 3, SchedulePolicy({1: 4})), workload(), machine(host=host))
    assert [epoch.num_cached for epoch in result.epochs] == [0, 0, 0]
    assert result.cache_off is not None and "a node would keep" in result.cache_off


def test_a_model_that_cannot_be_cached_trains_uncached() -> None:
    result = forecast(job(1, 3, SchedulePolicy({1: 4})), workload(cacheable=False), machine())
    assert [epoch.num_cached for epoch in result.epochs] == [0, 0, 0]
    assert "Frozen layers are not cached: more than one tensor" in "\n".join(advise(result))


# ------------------------------------------------------------------------------------------ as the trainer
def fitting(k: int, devices: int = 8) -> int:
    """Just enough memory for K stages at the start."""
    plan = made(devices, pipeline_parallel_size=k).first
    return largest_stage_bytes(plan)


@pytest.mark.parametrize("stages", ["auto", 1, 4])
@pytest.mark.parametrize("is_elastic", [True, False])
def test_plans_are_those_of_the_trainer(
    stages: Any, is_elastic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forecast's plans and those of `Layouts`, which the trainer asks, given the same f and c."""
    budget = fitting(4)
    monkeypatch.setattr("hf_pipetransformer.layouts.memory_budget", lambda device, processes: budget)
    args = PipeTransformerTrainingArguments(
        output_dir=str(tmp_path), elastic=is_elastic, per_device_train_batch_size=2
    )
    args.pipeline_parallel_size = stages  # afterwards: there is one process here
    mesh = ProcessMesh(timedelta(seconds=10))
    mesh.world_size = 8
    layouts = Layouts(args, workload().unit_costs, times_of(12), mesh)
    course = job(8, 7, AlphaPolicy(1 / 3), pipeline_parallel_size=stages, is_elastic=is_elastic)
    epochs = forecast(course, workload(), machine(budget=budget)).epochs
    plan: PipelinePlan = layouts.first
    for epoch in epochs:
        if epoch.number > 1:
            plan = layouts.next(plan, epoch.num_frozen, epoch.num_cached)
        assert epoch.plan == plan
    sizes = [epoch.plan.pipeline_parallel_size for epoch in epochs]
    assert sizes[0] == (4 if stages == "auto" else stages)
    assert (sizes[-1] < sizes[0]) == (is_elastic and sizes[0] > 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_rows": 15}, "batch_rows is 15, but 2 devices bring the same number of rows each: take 14 or 16"),
        ({"batch_rows": 1}, "batch_rows is 1, but 2 devices.*take 2"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"policy": AdaptivePolicy()}, "AdaptivePolicy decides by gradients.*'alpha' or 'schedule'"),
    ],
)
def test_impossible_jobs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(2, **changes)


def test_no_plan_is_possible() -> None:
    with pytest.raises(ValueError, match="no pipeline fits: with 8 stages"):
        forecast(job(8), workload(), machine(budget=1))
    with pytest.raises(ValueError, match="must divide the world size 8"):
        made(8, pipeline_parallel_size=3)


# ------------------------------------------------------------------------------------------ advice
def advice(result: Forecast) -> str:
    return "\n".join(advise(result))


LONG = {"num_samples": 3200}


def test_advice_k_1_throughout() -> None:
    policy = SchedulePolicy({1: 6})
    assert advice(made(4, 8, policy, **LONG)) == (
        "K = 1 throughout: freeze + cache only (pipeline_parallel_size=1); pipelining adds nothing here."
    )
    assert "throughout: freeze only" in advice(made(4, 8, policy, caches=False, **LONG))
    assert "throughout: plain DDP" in advice(made(4, 8, **LONG))


def test_advice_little_gain() -> None:
    """The last of four epochs runs one layer of twelve without its backward: 144 / 142."""
    result = made(4, 4, SchedulePolicy({3: 1}), **LONG)
    assert "Gain below 15% (×1.01 over the best static layout): do not freeze" in advice(result)
    assert "do not freeze" not in advice(made(4, 4, SchedulePolicy({1: 6}), **LONG))


def test_advice_what_does_not_fit() -> None:
    budget = fitting(4)
    result = forecast(job(8, 6, AlphaPolicy(1 / 3), **LONG), workload(), machine(budget=budget))
    assert not result.ddp.fits and result.speed_up_over(result.ddp) is None
    assert "Plain DDP does not fit" in advice(result) and "Hence 4 stages at the start" in advice(result)
    assert "fewer stages do" in advice(result)
    too_few = forecast(job(8, pipeline_parallel_size=2, **LONG), workload(), machine(budget=budget))
    assert "It does not fit: with K = 2" in advice(too_few)


def test_advice_a_pipeline_that_was_asked_for() -> None:
    """Where all fits one device: M = 8 of 8 rows, 2 x 4: 9 / 8 of DDP's time; K = 4 of 16 rows: 19 / 16."""
    result = made(8, 2, pipeline_parallel_size=4, **LONG)
    assert "K = 4 was asked for; pipeline_parallel_size='auto' is predicted to be" in advice(result)


def test_advice_too_short_for_so_many_devices() -> None:
    """The reduction takes as long as a device's computing is short: eight devices are no faster than one."""
    times = dataclasses.replace(times_of(12), reduce_seconds_per_byte=1.0)  # 1,200 bytes of parameters
    slow = Machine(times, None, 8, CacheHost(1e12, 1e12))
    result = forecast(job(8, 1, pipeline_parallel_size=1), workload(), slow)
    assert "Too short for so many devices: use 1, which take" in advice(result)
    assert forecast_seconds(job(1, 1), workload(), slow) < result.seconds
    assert "Too short" not in advice(made(8, 1, **LONG))
    short = forecast(job(2, 1), workload(), Machine(_scaled(times_of(12), 1e-3), None, 8, CacheHost(1e12, 1e12)))
    assert "use 1, which take 1.2 s where 2 take 0.6 s" in advice(short)


def test_advice_cache_beyond_memory() -> None:
    host = CacheHost(1e12, 1e12, memory_bytes=100.0)
    result = forecast(job(1, 4, SchedulePolicy({1: 4})), workload(), machine(host=host))
    assert "it is read from disk" in advice(result)


def _scaled(times: ModelTimes, factor: float) -> ModelTimes:
    def line(seconds: Seconds) -> Seconds:
        return Seconds(seconds.fixed * factor, seconds.per_row * factor)

    return dataclasses.replace(
        times, units=tuple(PartTimes(line(part.forward), line(part.backward)) for part in times.units)
    )


# ------------------------------------------------------------------------------------------ the device table
DEVICE = Device("toy", 100.0, 1000, 18.0, 4.0, 2.0, efficiency=0.5, seconds_per_unit=0.25, devices_per_node=4)


def test_times_of_a_device() -> None:
    times = DEVICE.times([unit(0, flops=25.0)], 4)
    assert times.units == (PartTimes(Seconds(0.25, 0.5), Seconds(0.5, 1.0)),)
    assert times.update_seconds_per_byte == 0.5
    assert times.reduce_seconds_per_byte == 2 * 3 / 4 / 4.0
    assert DEVICE.times([unit(0)], 8).reduce_seconds_per_byte == 2 * 7 / 8 / 2.0  # over the network
    assert DEVICE.times([unit(0)], 1).reduce_seconds_per_byte == 0


def test_a_rings_reduction_does_not_depend_on_who_measured_it() -> None:
    """A table's ring of 8, asked for groups of 4 in two stages, is a ring of 4."""
    costs = workload().unit_costs
    eight = forecast(
        job(8, pipeline_parallel_size=2, num_microbatches=2),
        workload(),
        Machine(DEVICE.times(costs, 8), None, 4, DEVICE.host, DEVICE),
    ).first
    ring_of_4 = 2 * 3 / 4 / 2.0 * 600  # half of the parameters
    assert eight.predict(4, 2).seconds_at_end == pytest.approx(ring_of_4 + 600 * 0.5)
