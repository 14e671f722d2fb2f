"""Forecasts against closed forms: equal layers of a second a sample forward and two backward."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from layouts import times_of, unit

from hf_pipetransformer import PipeTransformerTrainingArguments
from hf_pipetransformer.forecast.advice import advise
from hf_pipetransformer.forecast.device_table import Device
from hf_pipetransformer.forecast.forecast import BEST, DDP, FSDP, PIPELINE, Job, Values, forecast, step_values
from hf_pipetransformer.forecast.workload import Workload
from hf_pipetransformer.parts.freezing.policies import (
    AdaptivePolicy,
    AlphaPolicy,
    FreezePolicy,
    NeverFreeze,
    SchedulePolicy,
)
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.planning.costs import Cost
from hf_pipetransformer.planning.planner import Request
from hf_pipetransformer.planning.unit_times import ModelTimes
from hf_pipetransformer.run.setup.cutting import make_planner

ROW_BYTES, MEMORY_BYTES = 10, 100
"""Bytes of a sample's cached output; of a unit's parameters (its gradients: as many, its optimizer state: twice)."""
LONG = {"num_samples": 3200}


def workload(cacheable: bool = True, activation_bytes: int = 0) -> Workload:
    """Twelve equal units, of 3 FLOPs a sample in a training step."""
    costs = tuple(
        unit(i, activation_bytes=activation_bytes, boundary_bytes=ROW_BYTES if i < 11 else 0) for i in range(12)
    )
    return Workload(costs, 12, frozenset(range(1, 13)) if cacheable else frozenset())


@dataclasses.dataclass(frozen=True)
class Machine(Device):
    """Every unit takes a second for each sample."""

    memory_budget_bytes: int | None = None  # type: ignore[assignment]
    reduce: float = 0.0

    def times(self, of: Workload, num_devices: int) -> ModelTimes:
        return dataclasses.replace(times_of(12), reduce_seconds_per_byte=self.reduce)


def machine(budget: int | None = None, per_node: int = 8, reduce: float = 0.0, **host: Any) -> Device:
    reading = {"read_bytes_per_second": 1e12, "disk_bytes_per_second": 1e12, "host_memory_bytes": None, **host}
    return Machine(
        "toy", 1, 1, 1, 1, 1, devices_per_node=per_node, memory_budget_bytes=budget, reduce=reduce, **reading
    )


def job(devices: int = 1, epochs: int = 1, policy: FreezePolicy | None = None, **changes: Any) -> Job:
    """Steps of 16 samples, two of them in an epoch."""
    asked = {field.name: changes.pop(field.name) for field in dataclasses.fields(Request) if field.name in changes}
    arguments: dict[str, Any] = {"batch": 16, "num_samples": 32, **changes}
    request = Request(**{"pipeline_parallel_size": "auto", **asked})
    return Job(devices, num_epochs=epochs, freeze_policy=policy or NeverFreeze(), asked=request, **arguments)


def made(*arguments: Any, on: Device | None = None, of: Workload | None = None, **changes: Any) -> Values:
    return forecast(job(*arguments, **changes), of or workload(), on or machine())


def each(result: Values, name: str) -> list[Any]:
    return [step[name] for step in result["epochs"]]


def plain(result: Values, name: str) -> Any:
    return result["fsdp"] if name == FSDP else result["compared_with"][name.replace(" ", "_")]


def test_one_device_takes_what_its_layers_take() -> None:
    """A frozen and cached layer is free, a frozen one costs a third: 16 samples, 2 steps an epoch."""
    result = made(1, 4, SchedulePolicy({1: 4, 3: 8}))
    active, frozen = 3 * 16, 16
    assert each(result, "num_frozen_layers") == [0, 4, 4, 8]
    assert each(result, "num_cached_layers") == [0, 0, 4, 4]
    assert each(result, "puts") == [0, 4, 0, 0]  # no later epoch would read outputs stored in the last one
    steps = [12 * active, 8 * active + 4 * frozen, 8 * active, 4 * active + 4 * frozen]
    assert each(result, "step_seconds") == pytest.approx(steps)
    assert result["seconds"] == pytest.approx(2 * sum(steps))
    assert each(result, "samples_per_second") == pytest.approx([16 / step for step in steps])
    bound = 4 * 36 / (36 + 28 + 24 + 16)
    assert result["flop_bound"] == pytest.approx(bound) == plain(result, DDP)["speed_up"]
    uncached = made(1, 4, SchedulePolicy({1: 4, 3: 8}), caches=False)
    assert uncached["flop_bound"] == pytest.approx(4 * 36 / (36 + 28 + 28 + (4 * 3 + 8)))


def test_static_pipeline_has_the_bubble_of_equal_stages() -> None:
    """(M + K - 1) / M times plain DDP, if only layers take time."""
    result = made(4, pipeline_parallel_size=4, num_microbatches=4)
    ddp = plain(result, DDP)
    assert plain(result, PIPELINE)["step_seconds"] == pytest.approx(ddp["step_seconds"] * (4 + 3) / 4)
    assert plain(result, BEST)["stages"] == 1
    assert result["epochs"][0]["shares"]["waiting"] == pytest.approx(3 / 7)
    assert ddp["speed_up"] == pytest.approx(4 / 7)
    assert plain(made(4), PIPELINE)["stages"] == 2, "the shortest one"
    assert len(made(1)["compared_with"]) == 2 and made(1)["fsdp"] is None


def test_shares_add_up_and_name_the_limit() -> None:
    slow = made(2, 3, SchedulePolicy({1: 10}), on=reading(1.0))  # 10 s a sample, two readers
    for shares in each(slow, "shares"):
        assert sum(shares.values()) == pytest.approx(1)
    most = lambda shares: max(shares, key=shares.__getitem__)  # noqa: E731
    assert list(map(most, each(slow, "shares"))) == ["active layers", "frozen layers", "frozen layers"]
    assert "loading would take 2e+04 ms a sample" in slow["cache"]["off"]
    fast = made(2, 3, SchedulePolicy({1: 12}), on=reading(4.0))
    assert most(fast["epochs"][2]["shares"]) == "loading"


def test_a_step_of_several_batches() -> None:
    """Two batches of two samples on each of four devices: as long as one of four; 1,200 bytes are reduced once."""
    of, on = workload(activation_bytes=10), machine(reduce=0.1)
    one, two = (made(4, of=of, on=on, gradient_accumulation_steps=n) for n in (1, 2))
    first, second = one["epochs"][0], two["epochs"][0]
    assert first["step_seconds"] == second["step_seconds"] == pytest.approx(12 * 3 * 4 + 1200 * 0.1)
    assert first["samples_per_second"] == second["samples_per_second"]
    assert first["shares"] == pytest.approx(second["shares"])
    assert plain(one, DDP)["stage_bytes"][0] - plain(two, DDP)["stage_bytes"][0] == 2 * 12 * 10
    assert all(plain(one, name)["seconds"] == plain(two, name)["seconds"] for name in (DDP, FSDP))


def test_fsdp_divides_all_but_two_layers() -> None:
    """FSDP takes as few batches as fit. Its first gather is not hidden; with slow links no transfer is."""
    fast = plain(made(4, of=workload(activation_bytes=10)), FSDP)
    assert fast["step_seconds"] == pytest.approx(12 * 3 * 4) and fast["num_microbatches"] == 1
    shards = 12 * MEMORY_BYTES * (1 + 1 + 2) // 4 + 4 * MEMORY_BYTES
    assert fast["stage_bytes"] == [shards + 4 * 12 * 10]
    halves = plain(made(4, of=workload(activation_bytes=10), on=machine(fast["stage_bytes"][0] - 1)), FSDP)
    assert halves["fits"] and halves["num_microbatches"] == 2 and halves["stage_bytes"] == [shards + 2 * 12 * 10]
    slow = plain(made(4, on=machine(reduce=10.0)), FSDP)
    assert slow["step_seconds"] == pytest.approx(12 * 3 * 0.5 * 10.0 * MEMORY_BYTES)


# ------------------------------------------------------------------------------------------ the cache
def reading(speed: float, **host: Any) -> Device:
    """A machine that reads so many bytes a second, from memory or from disk."""
    return machine(read_bytes_per_second=speed, disk_bytes_per_second=speed, **host)


def test_reading_takes_the_time_of_a_nodes_samples() -> None:
    """16 samples x 10 bytes over two nodes at 8 bytes/s; from disk where generations exceed the memory."""
    course = (2, 4, SchedulePolicy({1: 6, 3: 7}))
    host = {"per_node": 1, "read_bytes_per_second": 8.0, "disk_bytes_per_second": 4.0}
    assert each(made(*course, on=machine(host_memory_bytes=160.0, **host)), "load_seconds") == [0, 0, 10, 10]
    small = made(*course, on=machine(host_memory_bytes=159.0, **host))
    assert small["epochs"][2]["load_seconds"] == 20
    assert any("then it is read from disk" in sentence for sentence in advise(small))


def test_first_stages_of_a_node_read_at_once() -> None:
    """A sample is read in 2.5 s and computed in 6: that pays for one reader, and not for four that share the disk."""
    options = {"on": reading(4.0), "is_elastic": False}
    four, one = (made(4, 3, SchedulePolicy({1: 6}), pipeline_parallel_size=k, **options) for k in (4, 1))
    assert (four["epochs"][2]["num_cached_layers"], one["epochs"][2]["num_cached_layers"]) == (6, 0)


@pytest.mark.parametrize(("stages", "per_node"), [(3, 8), (2, 1)])
def test_only_what_the_first_stage_can_read_is_put(stages: int, per_node: int) -> None:
    """Each other stage keeps a unit, and entries on another node cannot be read."""
    options: dict[str, Any] = {"batch": 18, "pipeline_parallel_size": stages, "is_elastic": False}
    filling = made(stages, 3, SchedulePolicy({1: 12}), on=machine(per_node=per_node), **options)["epochs"][1]
    assert 0 < filling["puts"] == (10 if per_node > stages else filling["stage_bounds"][1]) < 11


def test_cache_size_counts_both_generations() -> None:
    result = made(1, 4, SchedulePolicy({1: 4, 2: 8}))
    assert (each(result, "num_cached_layers"), each(result, "puts")) == ([0, 0, 4, 8], [0, 4, 8, 0])
    sizes = result["cache"]
    assert (sizes["generation_bytes_per_node"], sizes["peak_bytes_per_node"]) == (32 * ROW_BYTES, 2 * 32 * ROW_BYTES)
    two_nodes = made(2, 4, SchedulePolicy({1: 4, 2: 8}), on=machine(per_node=1))
    assert two_nodes["cache"]["generation_bytes_per_node"] == 16 * ROW_BYTES
    full = made(1, 3, SchedulePolicy({1: 4}), on=machine(host_disk_bytes=32 * ROW_BYTES - 1))
    other = made(1, 3, SchedulePolicy({1: 4}), of=workload(cacheable=False))
    for result, why in ((full, "a node would keep"), (other, "more than one tensor")):
        assert each(result, "num_cached_layers") == [0, 0, 0] and why in result["cache"]["off"]
        assert any("Frozen layers are not cached: " in sentence for sentence in advise(result))


# ------------------------------------------------------------------------------------------ as the trainer
def fitting(k: int) -> int:
    """Just enough memory for K of eight stages at the start."""
    return int(made(8, pipeline_parallel_size=k)["epochs"][0]["largest_stage_bytes"])


@pytest.mark.parametrize("stages", ["auto", 1, 4])
@pytest.mark.parametrize("is_elastic", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_layouts_are_those_of_the_trainer(
    stages: Any, is_elastic: bool, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forecast has the layouts of the trainer's `Planner`, given the same f and c."""
    budget = fitting(4)
    monkeypatch.setattr("hf_pipetransformer.run.setup.cutting.memory_budget", lambda device, processes: budget)
    args = PipeTransformerTrainingArguments(
        output_dir=str(tmp_path), elastic=is_elastic, per_device_train_batch_size=2, pipeline_schedule=schedule
    )
    args.pipeline_parallel_size = stages  # afterwards: there is one process here
    mesh = ProcessMesh(timedelta(seconds=10))
    mesh.world_size = 8
    planner = make_planner(args, workload().unit_costs, mesh, times_of(12))
    options = {"pipeline_parallel_size": stages, "is_elastic": is_elastic, "schedule": schedule}
    result = made(8, 7, AlphaPolicy(1 / 3), on=machine(budget), **options)
    layout = planner.first
    for step in result["epochs"]:
        if step["epoch"] > 1:
            layout = planner.next(layout, step["num_frozen_layers"], step["num_cached_layers"])
        expected = step_values(layout, planner, 1, step["load_seconds"], step["puts"])
        assert {name: step[name] for name in expected} == expected
    sizes = each(result, "stages")
    assert sizes[0] == (4 if stages == "auto" else stages)
    assert (sizes[-1] < sizes[0]) == (is_elastic and sizes[0] > 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 1}, "batch is 1, but must be a multiple of the 2 devices. Set it to 2"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"policy": AdaptivePolicy()}, "AdaptivePolicy decides from gradients.*'alpha' or 'schedule'"),
    ],
)
def test_impossible_jobs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(2, **changes)


# ------------------------------------------------------------------------------------------ advice
def advice(*arguments: Any, **changes: Any) -> str:
    return "\n".join(advise(made(*arguments, **{**LONG, **changes})))


def test_advice_k_1_throughout() -> None:
    policy = SchedulePolicy({1: 6})
    assert advice(4, 8, policy) == (
        "Use one stage throughout (pipeline_parallel_size=1), with freezing and the cache: a pipeline gains nothing"
        " here."
    )
    assert "with freezing but no cache" in advice(4, 8, policy, caches=False)
    assert "which is plain DDP" in advice(4, 8) and "which is plain training on one device" in advice(1, 8)
    asked = {"pipeline_parallel_size": 2, "batch": 64, "num_microbatches": 32}  # 33 / 32 of plain DDP's time
    assert advice(4, **asked) == (
        "Train with these settings, pipeline_parallel_size=2: no other layout is predicted to be much faster."
    )
    assert "pipeline_parallel_size=1 is predicted to be" in advice(8, 2, pipeline_parallel_size=4)


def test_advice_little_gain() -> None:
    """The last of four epochs runs one layer of twelve without its backward: 144 / 142."""
    said = advice(4, 4, SchedulePolicy({3: 1}))
    assert "Do not freeze: this training is predicted to be 1.01 times as fast as the best static layout" in said
    assert "which is plain DDP" in said and "with freezing" not in said, "no line contradicts another"
    assert "Do not freeze" not in advice(4, 4, SchedulePolicy({1: 6}))


def test_advice_what_does_not_fit() -> None:
    on = machine(fitting(4))
    said = advice(8, 6, AlphaPolicy(1 / 3), on=on)
    assert (
        "Plain DDP does not fit" in said and "Hence 4 stages at the start" in said and "fewer stages suffice" in said
    )
    assert "This training does not fit: with K = 2" in advice(8, pipeline_parallel_size=2, on=on)


def test_advice_on_sharding() -> None:
    """One stage needs 4,800 bytes, with sharding 3,000 or 1,600; one of two 2,400 or 1,800, one of four 1,200."""

    def said(budget: int, reduce: float, k: Any = "auto") -> str:
        return advice(4, on=machine(budget, reduce=reduce), replica_sharding="auto", pipeline_parallel_size=k)

    assert "Set replica_sharding='optimizer': the least sharding that fits." in said(3000, 0.01)
    assert "Set replica_sharding='optimizer'" in said(1900, 0.01, k=2)
    assert "pipeline_parallel_size=4 with replica_sharding='none' is predicted to be" in said(4800, 4.0)
    assert "Set replica_sharding" not in said(1599, 0.01, k=1), "nothing fits"


def test_advice_where_freezing_gains_less_than_fsdp() -> None:
    """A model that needs four stages: freezing one layer does not make up for the bubble."""
    on = machine(12 * MEMORY_BYTES + 6 * MEMORY_BYTES)
    few = advice(4, 3, SchedulePolicy({2: 1}), on=on)
    assert "Use FSDP with plain transformers instead" in few and "FSDP can freeze layers as well" in few
    assert "Do not freeze" not in few, "which would name another layout"
    none = advice(4, 3, on=on)
    assert "Use FSDP with plain transformers instead: it is predicted to be 1." in none and "freez" not in none
    assert "Use FSDP" not in advice(4, 9, SchedulePolicy({1: 11}), on=on)
    # where DDP is possible, its reduction would be hidden as well, though it is not counted so
    assert "FSDP" not in advice(4, 3, SchedulePolicy({2: 1}), on=machine(reduce=1e-3))


# ------------------------------------------------------------------------------------------ the device table
def test_times_of_a_device_with_a_head() -> None:
    """10 of the last unit's 25 FLOPs are the head's, at 50 a second; it trains on when all units are cached."""
    peak, memory, link, network = 100.0, 18.0, 4.0, 2.0
    device = Device(
        "toy", peak, 1e12, memory, link, network, efficiency=0.5, seconds_per_unit=0.25, devices_per_node=4
    )
    reading = {"read_bytes_per_second": 1e12, "disk_bytes_per_second": 1e12}
    on = dataclasses.replace(device, host_memory_bytes=None, **reading)
    last = dataclasses.replace(unit(1, flops=25.0, boundary_bytes=ROW_BYTES), head=Cost(10.0))
    of = Workload((unit(0, flops=25.0, boundary_bytes=ROW_BYTES), last), 2, frozenset({1, 2}))
    for devices, link in ((1, 4.0), (4, 4.0), (8, 2.0)):  # eight are on two nodes
        options = {"batch": 16 * devices, "num_samples": 16 * devices, "pipeline_parallel_size": 1}
        result = made(devices, 3, SchedulePolicy({1: 2}), of=of, on=on, **options)
        assert each(result, "num_cached_layers") == [0, 0, 2]
        bytes_reduced = 200 * 2 * (devices - 1) / devices
        whole = 16 * 3 * 50 / 50 + 2 * 3 * 0.25 + 200 * 9.0 / 18.0 + bytes_reduced / link
        frozen, cached = (16 * (flops + 3 * 10) / 50 + calls * 0.25 for flops, calls in ((40, 2), (0, 0)))
        assert each(result, "step_seconds") == pytest.approx([whole, frozen, cached])
