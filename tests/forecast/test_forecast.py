from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from test_plan import times_of, unit
from test_workload import tiny

from hf_pipetransformer import PipeTransformerTrainingArguments
from hf_pipetransformer.forecast.device_table import CacheHost, Device
from hf_pipetransformer.forecast.forecast import Forecast, Job, Machine, forecast, forecast_seconds
from hf_pipetransformer.forecast.forecast_text import advise, as_text, as_values, describe_parts
from hf_pipetransformer.forecast.workload import Workload, measure_pair_shares, measure_workload, stage_latencies
from hf_pipetransformer.freezing.policies import AdaptivePolicy, AlphaPolicy, FreezePolicy, NeverFreeze, SchedulePolicy
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.planning.costs import HeadCost
from hf_pipetransformer.planning.plan import PipelinePlan
from hf_pipetransformer.planning.plan_choice import largest_stage_bytes, make_plan
from hf_pipetransformer.planning.unit_times import ModelTimes, PartTimes, Seconds
from hf_pipetransformer.run.planner import Planner
from hf_pipetransformer.token_slices.slice_planning import RowSlices, plan_slices

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
    arguments: dict[str, Any] = {"batch": 16, "num_samples": 32, **changes}
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
    assert [epoch.samples_per_second for epoch in result.epochs] == pytest.approx([16 / step for step in steps])


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
    host = CacheHost(read_bytes_per_second=1.0, disk_bytes_per_second=1.0)  # 10 s for a row, and two read at once
    slow = forecast(job(2, 3, SchedulePolicy({1: 10})), workload(), machine(host=host))
    for epoch in slow.epochs:
        assert sum(epoch.shares.values()) == pytest.approx(1)
    assert [epoch.limit for epoch in slow.epochs] == ["active layers", "frozen layers", "frozen layers"]
    assert slow.cache_off is not None and "loading would take 2e+04 ms a sample" in slow.cache_off
    fast = dataclasses.replace(machine(), host=CacheHost(4.0, 4.0))
    assert forecast(job(2, 3, SchedulePolicy({1: 12})), workload(), fast).epochs[2].limit == "loading"


def test_a_step_of_several_batches() -> None:
    """Two batches of two rows on each of four devices: as long as one of four; 1,200 bytes are reduced once."""
    times = dataclasses.replace(times_of(12), reduce_seconds_per_byte=0.1, update_seconds_per_byte=0.2)
    costs = tuple(dataclasses.replace(cost, activation_bytes=10) for cost in workload().unit_costs)
    rows = dataclasses.replace(workload(), unit_costs=costs)
    computer = dataclasses.replace(machine(), times=times)
    one, two = (forecast(job(4, gradient_accumulation_steps=n), rows, computer) for n in (1, 2))
    assert one.epochs[0].step_seconds == two.epochs[0].step_seconds == pytest.approx(12 * 3 * 4 + 1200 * 0.3)
    assert one.epochs[0].samples_per_second == two.epochs[0].samples_per_second
    assert one.epochs[0].shares == pytest.approx(two.epochs[0].shares)
    assert one.ddp.largest_bytes - two.ddp.largest_bytes == 2 * 12 * 10
    assert one.ddp.seconds == two.ddp.seconds and one.fsdp == two.fsdp


def test_advice_on_sharding() -> None:
    """One stage needs 4,800 bytes, with sharding 3,000; one of two 2,400 or 1,800, one of four 1,200."""

    def advice(budget: int, reduce: float, k: Any = "auto") -> str:
        times = dataclasses.replace(times_of(12), reduce_seconds_per_byte=reduce)
        course = job(4, replica_sharding="auto", pipeline_parallel_size=k)
        return advise(forecast(course, workload(), dataclasses.replace(machine(budget=budget), times=times)))[0]

    assert "replica_sharding='optimizer', pipeline_parallel_size='auto' (K = 1 at the start): the" in advice(
        3000, 0.01
    )
    assert advice(1900, 0.01, k=2) == "Set replica_sharding='optimizer': the least sharding with which 2 stages fit."
    assert "Set replica_sharding='none', pipeline_parallel_size='auto' (K = 4 at" in advice(1700, 4.0)
    # by counts, 'auto' would find one stage, whose reduction takes too long
    assert "Set replica_sharding='none', pipeline_parallel_size=4 (K = 4 at" in advice(4800, 4.0)
    assert "Set replica_sharding" not in advice(1599, 0.01, k=1), "nothing fits"


def test_reading_takes_the_time_of_a_nodes_rows() -> None:
    """16 rows x 10 bytes over two nodes at 8 bytes/s; from disk where generations exceed the memory."""
    host = CacheHost(read_bytes_per_second=8.0, disk_bytes_per_second=4.0, memory_bytes=160.0)
    course = job(2, 4, SchedulePolicy({1: 6, 3: 7}))
    epochs = forecast(course, workload(), machine(host=host, per_node=1)).epochs
    assert [epoch.load_seconds for epoch in epochs] == [0, 0, 10, 10]
    small = dataclasses.replace(host, memory_bytes=159.0)
    assert forecast(course, workload(), machine(host=small, per_node=1)).epochs[2].load_seconds == 20


def test_first_stages_of_a_node_read_at_once() -> None:
    """A row is read in 2.5 s and computed in 6: that pays for one reader, and not for four that share the disk."""
    host = CacheHost(read_bytes_per_second=4.0, disk_bytes_per_second=4.0)

    def made_with(k: int) -> Forecast:
        course = job(4, 3, SchedulePolicy({1: 6}), pipeline_parallel_size=k, is_elastic=False)
        return forecast(course, workload(), machine(host=host))

    assert made_with(4).epochs[2].num_cached == 6
    assert made_with(1).epochs[2].num_cached == 0
    assert "loading would take 1e+04 ms a sample" in str(made_with(1).cache_off)


@pytest.mark.parametrize(("stages", "per_node"), [(3, 8), (2, 1)])
def test_only_what_the_first_stage_can_read_is_put(stages: int, per_node: int) -> None:
    """Each other stage keeps a unit, and what lies on another node cannot be read: as `AutoCache` has it."""
    course = job(stages, 3, SchedulePolicy({1: 12}), batch=18, pipeline_parallel_size=stages, is_elastic=False)
    filling = forecast(course, workload(), machine(per_node=per_node)).epochs[1]
    assert filling.puts == (10 if per_node > stages else filling.plan.stage_bounds[1])
    assert 0 < filling.puts < 11


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
@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_plans_are_those_of_the_trainer(
    stages: Any, is_elastic: bool, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forecast's plans and those of `Planner`, which the trainer asks, given the same f and c."""
    budget = fitting(4)
    monkeypatch.setattr("hf_pipetransformer.run.planner.memory_budget", lambda device, processes: budget)
    args = PipeTransformerTrainingArguments(
        output_dir=str(tmp_path), elastic=is_elastic, per_device_train_batch_size=2, pipeline_schedule=schedule
    )
    args.pipeline_parallel_size = stages  # afterwards: there is one process here
    mesh = ProcessMesh(timedelta(seconds=10))
    mesh.world_size = 8
    layouts = Planner(args, workload().unit_costs, times_of(12), mesh)
    course = job(8, 7, AlphaPolicy(1 / 3), pipeline_parallel_size=stages, is_elastic=is_elastic, schedule=schedule)
    result = forecast(course, workload(), machine(budget=budget))
    epochs = result.epochs
    assert layouts.schedule_choice == result.schedule_choice
    assert (result.schedule_choice is None) == (schedule != "auto" or stages == 1)
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
        ({"batch": 15}, "batch is 15, but must be a multiple of the 2 devices. Set it to 14 or 16"),
        ({"batch": 1}, "batch is 1, but must be a multiple of the 2 devices. Set it to 2"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"policy": AdaptivePolicy()}, "AdaptivePolicy decides from gradients.*'alpha' or 'schedule'"),
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


def test_advice_where_nothing_is_to_be_changed() -> None:
    """Two stages with 32 micro-batches take 33 / 32 of plain DDP's time."""
    result = made(4, pipeline_parallel_size=2, batch=64, num_microbatches=32, **LONG)
    assert advise(result) == ["Train it so, K = 2 at the start: no other layout is predicted to be much faster."]


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


# ------------------------------------------------------------------------------------------ slices along the tokens
TOKENS = 512


def long_rows(activation_bytes: int = 0) -> Workload:
    """Rows of which a quarter of the time goes into pairs of tokens."""
    units = tuple(unit(i, activation_bytes=activation_bytes, boundary_bytes=ROW_BYTES) for i in range(12))
    return dataclasses.replace(workload(), unit_costs=units, tokens=TOKENS, pair_shares=(0.25,) * 12)


def slicing_machine(fixed: float = 0.01, budget: int | None = None) -> Machine:
    return dataclasses.replace(machine(budget=budget), times=times_of(12, fixed), flat_tokens=32)


def cut(devices: int = 4, policy: FreezePolicy | None = None, epochs: int = 2, **changes: Any) -> Forecast:
    """One row a device, in a pipeline of all of them."""
    arguments: dict[str, Any] = {"pipeline_parallel_size": devices, "is_elastic": False, "token_slices": "auto"}
    arguments = {"batch": devices, **arguments, **changes}
    return forecast(job(devices, epochs, policy, **arguments), long_rows(), slicing_machine())


@pytest.mark.parametrize("frozen", [0, 2, 5])
@pytest.mark.parametrize("flat_tokens", [1, 10**6])
def test_terms_of_a_latency_add_up_to_a_whole_row(frozen: int, flat_tokens: int) -> None:
    """Those of `plan.predict`, for each stage; cut, a row takes the fixed cost of each slice and otherwise as long."""
    part = PartTimes(Seconds(0.5, 1.0), Seconds(0.25, 3.0))
    times = dataclasses.replace(times_of(12, fixed=0.125), prologue=part, head=part)
    plan = make_plan(
        long_rows().unit_costs,
        3,
        3,
        rows_per_device=2,
        memory_budget_bytes=None,
        num_frozen_layers=frozen,
        times=times,
    )
    for rows in (1, 6):
        spans = plan.predict(rows, 1).timeline.spans
        for stage, latency in enumerate(stage_latencies(plan, long_rows(), flat_tokens)):
            for kind, slices in (("forward", latency.forward), ("backward", latency.backward)):
                seconds = sum(span.end - span.start for span in spans if (span.stage, span.kind) == (stage, kind))
                assert slices.seconds(rows, TOKENS, 0) == pytest.approx(seconds)
            both = latency.both
            if flat_tokens == 1:
                pieces = both.seconds(rows, 200, 0) + both.seconds(rows, TOKENS - 200, 200)
                assert pieces == pytest.approx(both.seconds(rows, TOKENS, 0) + both.fixed)
            assert both.flat_tokens <= TOKENS  # a row of its own is never taken to be slower than it is


@pytest.mark.parametrize("tokens", [1, 7, 64, 200])
def test_share_of_pairs_is_that_of_attention(tokens: int) -> None:
    """Two products of T x T x 32, 2 FLOPs each."""
    model = tiny("llama")
    flops = [unit.forward_flops for unit in measure_workload(model, tokens).unit_costs]
    assert measure_pair_shares(model, tokens) == pytest.approx([2 * 2 * tokens**2 * 32 / of_unit for of_unit in flops])


def test_few_long_rows_gain_by_slices() -> None:
    """Whole, four rows in four equal stages take 7 / 4 of the stages' own time."""
    epoch = cut().epochs[0]
    assert epoch.sliced is not None and sum(part.rows for part in epoch.sliced.parts) == 4
    assert all(sum(part.lengths) == TOKENS and len(part.lengths) > 1 for part in epoch.sliced.parts)
    own = 4 * 3 * 3 * 1.01
    assert epoch.uncut_step_seconds == pytest.approx(own * 7 / 4)
    assert own < epoch.sliced.busy_seconds < epoch.step_seconds < own * 1.35
    assert sum(epoch.shares.values()) == pytest.approx(1)
    assert epoch.shares["waiting"] == pytest.approx(epoch.bubble) and epoch.bubble < 0.2


def test_equal_stages_take_what_the_planner_says() -> None:
    epoch = cut().epochs[0]
    assert epoch.sliced is not None
    latencies = [stage.both for stage in stage_latencies(epoch.plan, long_rows(), 32)]
    assert epoch.sliced.seconds == pytest.approx(plan_slices(latencies, 4, TOKENS).seconds, rel=0.01)


def test_frozen_layers_in_slices() -> None:
    """A stage of frozen layers alone waits for no gradients; shares are those of the slices' own time."""
    epoch = cut(policy=SchedulePolicy({1: 4})).epochs[1]
    assert epoch.sliced is not None and epoch.step_seconds < epoch.uncut_step_seconds
    assert sum(epoch.shares.values()) == pytest.approx(1)
    assert 4 * 4 <= epoch.shares["frozen layers"] * epoch.step_seconds * 4 < 1.2 * 4 * 4
    assert min(epoch.shares.values()) >= 0


def test_many_rows_stay_whole() -> None:
    result = cut(2, batch=64, num_microbatches=32)
    assert [epoch.sliced for epoch in result.epochs] == [None, None]
    epoch = result.epochs[0]
    assert epoch.step_seconds == epoch.uncut_step_seconds == epoch.prediction.seconds
    text = as_text(result, "title", ())
    assert f"token slices gain too little here: {epoch.num_microbatches} micro-batches fill the pipeline" in text
    assert "Set token_slices='off': too little is gained" in advice(result)


def test_one_stage_is_untouched() -> None:
    off, on = (
        cut(policy=SchedulePolicy({1: 6}), pipeline_parallel_size=1, token_slices=asked, caches=False)
        for asked in ("off", "auto")
    )
    assert on.epochs == off.epochs
    assert (on.ddp, on.seconds) == (off.ddp, off.seconds)
    assert "Token slices" not in as_text(off, "", ())
    assert "epoch 1: one stage, nothing to cut" in as_text(on, "", ())


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_rows_too_short_to_be_cut(tokens: int) -> None:
    """They have fewer tokens than a device computes at once."""
    short = dataclasses.replace(long_rows(), tokens=tokens)
    course = job(4, 1, batch=4, pipeline_parallel_size=4, token_slices="auto")
    result = forecast(course, short, slicing_machine())
    assert result.epochs[0].sliced is None
    assert "with 4 micro-batches devices wait 43% of the time, and slices would not save 15%" in as_text(
        result, "", ()
    )


def test_rows_are_cut_as_asked_for() -> None:
    for m in (1, 2, 4):
        epoch = cut(num_microbatches=m).epochs[0]
        assert epoch.sliced is not None and [part.rows for part in epoch.sliced.parts] == [4 // m] * m
        assert epoch.num_microbatches == m


def test_many_rows_in_more_parts_are_what_the_trainer_runs() -> None:
    """Of whole rows the planner tries 4 K micro-batches at most; no sequence is cut."""
    epoch = cut(2, batch=64, plan_by="times").epochs[0]
    assert epoch.prediction.num_microbatches == 8
    assert epoch.sliced is not None and {part.lengths for part in epoch.sliced.parts} == {(TOKENS,)}
    assert len(epoch.sliced.parts) > 8 and epoch.step_seconds < 0.98 * epoch.uncut_step_seconds


def test_sequences_that_are_cut_are_not_cached() -> None:
    policy = SchedulePolicy({1: 9})
    result = cut(policy=policy, epochs=8)
    assert {(epoch.num_cached, epoch.puts) for epoch in result.epochs} == {(0, 0)}
    assert "Frozen layers are not cached: token_slices='auto' cuts sequences" in advice(result)
    assert "the activation cache is off: it keeps whole samples" in as_text(result, "", ())
    assert any(epoch.num_cached for epoch in cut(policy=policy, epochs=8, token_slices="off").epochs)


def test_advice_that_the_cache_gains_more() -> None:
    """Of two stages the second one alone computes, once the layers of the first are cached."""
    result = cut(2, batch=16, policy=SchedulePolicy({1: 10}), epochs=20)
    assert "Set token_slices='off': frozen layers are then cached, which is predicted to be" in advice(result)


def test_slices_keep_no_more_rows_than_micro_batches() -> None:
    """By time alone parts would have more rows than one; of eight whole rows the first stage keeps four."""
    course = job(4, 1, batch=8, pipeline_parallel_size=4, token_slices="auto")
    epoch = forecast(course, long_rows(activation_bytes=1000), slicing_machine()).epochs[0]
    assert epoch.sliced is not None and sum(part.rows for part in epoch.sliced.parts[:4]) <= 4
    assert max(epoch.stage_bytes) <= largest_stage_bytes(epoch.plan)


def test_cuts_in_words_and_values() -> None:
    assert describe_parts([RowSlices(2, (48, 16, 16)), RowSlices(2, (48, 16, 16)), RowSlices(1, (80,))]) == (
        "2 parts of 2 samples in 3 slices (48 + 2×16 tokens), 1 part of 1 sample in one slice"
    )
    assert (
        describe_parts([RowSlices(1, tuple(range(20, 10, -1)))]) == "1 part of 1 sample in 10 slices (20 to 11 tokens)"
    )
    result = cut()
    values, epoch = as_values(result, "", "", ()), result.epochs[0]
    assert values["token_slices"] == "auto" and epoch.sliced is not None
    assert values["epochs"][0]["slices"] == [[part.rows, list(part.lengths)] for part in epoch.sliced.parts]
    assert f"×{epoch.uncut_step_seconds / epoch.step_seconds:.2f} over 4 micro-batches" in as_text(result, "", ())


# ------------------------------------------------------------------------------------------ the device table
DEVICE = Device("toy", 100.0, 1000, 18.0, 4.0, 2.0, efficiency=0.5, seconds_per_unit=0.25, devices_per_node=4)


def test_times_of_a_device() -> None:
    times = DEVICE.times([unit(0, flops=25.0)], 4)
    assert times.units == (PartTimes(Seconds(0.25, 0.5), Seconds(0.5, 1.0)),)
    assert times.update_seconds_per_byte == 0.5
    assert times.reduce_seconds_per_byte == 2 * 3 / 4 / 4.0
    assert DEVICE.times([unit(0)], 8).reduce_seconds_per_byte == 2 * 7 / 8 / 2.0  # over the network
    assert DEVICE.times([unit(0)], 1).reduce_seconds_per_byte == 0


def test_a_device_goes_on_training_the_head() -> None:
    """10 of the last unit's 25 FLOPs, at 50 a second; all units are frozen and cached."""
    last = dataclasses.replace(unit(1, flops=25.0, boundary_bytes=ROW_BYTES), head=HeadCost(10.0))
    units = (unit(0, flops=25.0, boundary_bytes=ROW_BYTES), last)
    times = DEVICE.times(units, 1)
    assert times.units[1] == PartTimes(Seconds(0.25, 0.3), Seconds(0.5, 0.6))
    assert times.head == PartTimes(Seconds(0.0, 0.2), Seconds(0.0, 0.4))
    course = job(1, 3, SchedulePolicy({1: 2}))
    fast_cache = CacheHost(1e12, 1e12)
    result = forecast(course, Workload(units, 2, frozenset({1, 2})), Machine(times, None, 1, fast_cache, DEVICE))
    assert result.epochs[2].num_cached == 2
    assert result.epochs[2].prediction.timeline.seconds == pytest.approx(16 * (0.2 + 0.4))


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
