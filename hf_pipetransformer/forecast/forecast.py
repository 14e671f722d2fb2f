"""Forecast of a whole training, before anything is launched.

    freeze policy -> f in each epoch
    AutoCache     -> c in each epoch      number of these f layers that come from the cache
    planner       -> plan of each epoch   make_plan at the start, replan where f or c changes, as the trainer does
    plan.predict  -> step                 plus the time to load what is cached
    choose_slices -> step                 instead, where sequences are cut along their tokens and that is faster

The forecast is compared with static layouts, in which nothing is frozen, and with the bound from the counted FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal

from ..freezing.policies import FreezePolicy
from ..freezing.schedule_cost import frozen_in_epochs
from ..planning.cached_layers import boundary_to_cache, is_worth_loading, most_cached_layers
from ..planning.costs import UnitCost
from ..planning.elastic_policy import ElasticPolicy
from ..planning.plan import PipelinePlan, StepPrediction, step_flops
from ..planning.plan_choice import ScheduleChoice, choose_schedule
from ..planning.schedules import AUTO_SCHEDULE
from ..planning.sharding_choice import AUTO, ShardingChoice
from ..planning.unit_times import ModelTimes
from ..token_slices.slice_planning import RowSlices, whole_rows
from ..token_slices.slice_timeline import choose_slices, seconds_of_slices
from .device_table import CacheHost, Device
from .fsdp import FsdpRun, fsdp_run
from .workload import Workload, frozen_latency, stage_latencies


@dataclass(frozen=True)
class Job:
    """A training.

    Args:
        num_devices: number of devices, with one process each.
        batch: number of samples in the global batch; each device contributes an equal part.
        gradient_accumulation_steps: number of batches, run one after the other, in which the global batch is run.
        num_epochs: number of epochs; freezing is decided at the start of each.
        num_samples: number of samples in an epoch.
        freeze_policy: a policy that needs no gradients.
        max_frozen_layers: the user's upper bound on the number of frozen layers.
        pipeline_parallel_size: K, or "auto".
        is_elastic: whether the layers are repacked into fewer stages after a freeze.
        caches: whether frozen layers' outputs are cached; not if sequences are split, as the cache stores
            whole samples.
        token_slices: "auto" splits the sequences of a causal language model along their tokens as well.
        plan_by: "counts", or "times" to choose K and M by predicted steps, as the training argument of this name.
        replica_sharding: what the replicas of a stage divide among them, or "auto" to choose it by memory and K, where
            that is "auto" as well, by predicted steps; nothing in the comparison with plain DDP.
        schedule: name of the schedule, or "auto" to choose it as the training does, by what `plan_by` says.
        virtual_pipeline_parallel_size: virtual stages per stage of an interleaved schedule.

    Raises:
        ValueError: a number is too small, or the batch cannot be divided equally.
    """

    num_devices: int
    batch: int
    num_epochs: int
    num_samples: int
    freeze_policy: FreezePolicy
    max_frozen_layers: int | None = None
    pipeline_parallel_size: int | Literal["auto"] = "auto"
    is_elastic: bool = True
    caches: bool = True
    schedule: str = "1f1b"
    num_microbatches: int | Literal["auto"] = "auto"
    token_slices: Literal["off", "auto"] = "off"
    plan_by: str = "counts"
    replica_sharding: str = "none"
    virtual_pipeline_parallel_size: int = 1
    gradient_accumulation_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("num_devices", "batch", "num_epochs", "num_samples", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        parts = self.num_devices * self.gradient_accumulation_steps
        if self.batch % parts:
            below = self.batch - self.batch % parts
            steps = self.gradient_accumulation_steps
            times = "" if steps == 1 else f" times gradient_accumulation_steps={steps}"
            raise ValueError(
                f"batch is {self.batch}, but must be a multiple of the {self.num_devices} devices{times}. Set it to"
                f" {f'{below} or ' if below else ''}{below + parts}."
            )
        if self.freeze_policy.needs_gradient_norms:
            raise ValueError(
                f"{type(self.freeze_policy).__name__} decides from gradients, which are only known during training."
                " Use the freeze policy 'alpha' or 'schedule' for a forecast."
            )

    @property
    def rows_per_device(self) -> int:
        """Samples of a device in one of the batches of a step, `per_device_train_batch_size`."""
        return self.batch // (self.num_devices * self.gradient_accumulation_steps)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.batch)

    def num_frozen(self, num_layers: int, max_frozen: int) -> list[int]:
        """f in each epoch.

        Args:
            num_layers: L.
            max_frozen: the largest number of layers that can be frozen while something is left to train.
        """
        return frozen_in_epochs(
            self.freeze_policy,
            num_layers,
            max_frozen,
            self.num_epochs,
            self.steps_per_epoch,
            self.max_frozen_layers,
        )


@dataclass(frozen=True)
class Machine:
    """The machine that the training runs on.

    Attributes:
        times: times of the model's parts.
        memory_budget_bytes: memory that a stage may use on a device; None if unknown, in which case everything fits.
        devices_per_node: number of devices that share a cache.
        host: resources of a node for the cache.
        device: the device from whose table entry `times` was derived; None if it was measured.
        flat_tokens: number of tokens below which a slice takes no less time.
    """

    times: ModelTimes
    memory_budget_bytes: int | None
    devices_per_node: int
    host: CacheHost
    device: Device | None = None
    flat_tokens: int = 1

    def with_devices(self, num_devices: int, unit_costs: Sequence[UnitCost]) -> Machine:
        """The same machine with another number of devices."""
        if self.device is None:
            return self
        return replace(self, times=self.device.times(unit_costs, num_devices))

    def num_nodes(self, num_devices: int) -> int:
        return -(-num_devices // self.devices_per_node)


@dataclass(frozen=True)
class SlicedStep:
    """Forward and backward of a step whose batch `choose_slices` splits along tokens, or into other groups of samples.

    Attributes:
        parts: the parts of a pipeline's batch, and the slices of each.
        seconds: time until the last stage has finished.
        busy_seconds: part of this time in which a device computes, averaged over the stages.
        frozen_seconds: part of this time spent on frozen layers.
    """

    parts: tuple[RowSlices, ...]
    seconds: float
    busy_seconds: float
    frozen_seconds: float


@dataclass(frozen=True)
class Epoch:
    """One epoch, counted from 1.

    Attributes:
        num_frozen: f.
        num_cached: number of the frozen layers whose output comes from the cache.
        puts: number of layers whose output is stored in the cache during this epoch; 0 if nothing is stored.
        plan: the plan in effect.
        prediction: prediction for a step with whole sequences, without loading.
        load_seconds: time to load cached outputs in a step.
        num_steps: number of steps in the epoch.
        sliced: prediction for a step that the dynamic program splits along tokens; None if it splits no sequence
            because that saves too little, or if splitting is off.
        num_batches: number of batches of a step, run one after the other; `prediction` and `sliced` are for one.
    """

    number: int
    num_frozen: int
    num_cached: int
    puts: int
    plan: PipelinePlan
    prediction: StepPrediction
    load_seconds: float
    num_steps: int
    sliced: SlicedStep | None = None
    num_batches: int = 1

    @property
    def step_seconds(self) -> float:
        computing = self.prediction.timeline.seconds if self.sliced is None else self.sliced.seconds
        return self.num_batches * computing + self.prediction.seconds_at_end + self.load_seconds

    @property
    def uncut_step_seconds(self) -> float:
        """Time of a step with whole sequences."""
        return _seconds_of_batches(self.prediction, self.num_batches) + self.load_seconds

    @property
    def num_microbatches(self) -> int:
        """Number of parts of a pipeline's batch."""
        return self.prediction.num_microbatches if self.sliced is None else len(self.sliced.parts)

    @property
    def stage_bytes(self) -> list[int]:
        """Memory of each stage."""
        return _stage_bytes(self.plan, self.prediction.num_microbatches, self.sliced)

    @property
    def bubble(self) -> float:
        """Fraction of forward and backward in which a device waits, 0 to 1."""
        if self.sliced is None:
            return self.prediction.timeline.bubble
        return 1 - self.sliced.busy_seconds / self.sliced.seconds

    @property
    def seconds(self) -> float:
        return self.step_seconds * self.num_steps

    @property
    def samples_per_second(self) -> float:
        return self.num_batches * self.plan.rows_per_device * self.plan.world_size / self.step_seconds

    @cached_property
    def shares(self) -> dict[str, float]:
        """Fractions of a step's time by activity, averaged over the stages; they add up to 1."""
        plan, times, m = self.plan, self.plan.times, self.prediction.num_microbatches
        assert times is not None
        k, timeline = plan.pipeline_parallel_size, self.prediction.timeline
        if self.sliced is not None:
            computing, busy, frozen = self.sliced.seconds, self.sliced.busy_seconds, self.sliced.frozen_seconds
        else:
            computing, busy = timeline.seconds, sum(span.end - span.start for span in timeline.spans) / k
            frozen_units = range(self.plan.num_cached_layers, self.num_frozen)
            frozen = m * sum(times.units[unit].forward.of(plan.rows_per_pipeline / m) for unit in frozen_units) / k
        of_batch = {
            "active layers": busy - frozen,
            "frozen layers": frozen,
            "waiting": computing - busy,
        }
        seconds = {
            **{part: self.num_batches * value for part, value in of_batch.items()},
            "reduction, optimizer": self.prediction.seconds_at_end,
            "loading": self.load_seconds,
        }
        return {part: value / self.step_seconds for part, value in seconds.items()}

    @property
    def limit(self) -> str:
        """The activity that takes most of a step."""
        return max(self.shares, key=lambda part: self.shares[part])


@dataclass(frozen=True)
class StaticRun:
    """A training in one layout in which nothing is frozen.

    Attributes:
        plan: the plan of this layout.
        seconds: time of the training; infinite if the plan does not fit.
        missing_bytes: memory that the largest stage needs beyond the device's; 0 if it fits.
        num_microbatches: number of parts of a pipeline's batch.
        largest_bytes: memory of the largest stage.
    """

    plan: PipelinePlan
    seconds: float
    missing_bytes: int
    num_microbatches: int
    largest_bytes: int

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0


@dataclass(frozen=True)
class Forecast:
    """Forecast of the whole training.

    Attributes:
        epochs: the epochs in order.
        ddp: plain DDP, K = 1.
        best_static: the fastest of all static layouts that fit.
        static_pipeline: a static pipeline with K > 1: the requested K, or that of the first epoch, or else the
            smallest possible; None if no K > 1 is possible.
        fsdp: plain FSDP over all devices; None if there is one device.
        sharding_choice: what the sharding and the first plan were chosen from; None if the sharding was given.
        flop_bound: FLOPs of the training without freezing divided by those with freezing.
        cache_bytes: size of the largest generation on a node; 0 if nothing is cached.
        cache_peak_bytes: largest size of the two generations that exist together after a freeze.
        cache_off: why nothing is cached, or no longer; None if the cache is used.
    """

    job: Job
    workload: Workload
    machine: Machine
    epochs: tuple[Epoch, ...]
    ddp: StaticRun
    best_static: StaticRun
    static_pipeline: StaticRun | None
    fsdp: FsdpRun | None
    sharding_choice: ShardingChoice | None
    flop_bound: float
    cache_bytes: float
    cache_peak_bytes: float
    cache_off: str | None

    @property
    def seconds(self) -> float:
        return sum(epoch.seconds for epoch in self.epochs)

    @property
    def first(self) -> PipelinePlan:
        return self.epochs[0].plan

    @property
    def schedule_choice(self) -> ScheduleChoice | None:
        """What the first plan's schedule was chosen from; None if it was given, or if there is one stage."""
        k = self.first.pipeline_parallel_size
        return choose_schedule(self.first, k) if self.job.schedule == AUTO_SCHEDULE and k > 1 else None

    @property
    def periods(self) -> list[tuple[Epoch, ...]]:
        """Groups of consecutive epochs with the same configuration."""

        def alike(epoch: Epoch) -> tuple[int, ...]:
            return (epoch.num_frozen, epoch.num_cached, epoch.puts, epoch.plan.pipeline_parallel_size)

        return [tuple(epochs) for _, epochs in groupby(self.epochs, alike)]

    @property
    def fastest_plain(self) -> StaticRun | FsdpRun:
        """What is fastest without freezing: a static layout, or FSDP where the best layout is a pipeline.

        Where DDP is possible, FSDP would only look faster: DDP's all-reduce is counted as if nothing hid it.
        """
        fsdp, static = self.fsdp, self.best_static
        if fsdp is None or static.plan.pipeline_parallel_size == 1:
            return static
        return fsdp if fsdp.seconds < static.seconds else static

    def speed_up_over(self, plain: StaticRun | FsdpRun) -> float | None:
        """Speed-up over a training without freezing; None if that does not fit."""
        return plain.seconds / self.seconds if plain.fits else None


def forecast(job: Job, workload: Workload, machine: Machine) -> Forecast:
    """Predict a training.

    Raises:
        ValueError: no plan is possible, as in `make_plan`.
    """
    epochs, cache_off = _Course(job, workload, machine).run()
    costs = workload.unit_costs
    lengths = [k for k in range(1, min(job.num_devices, len(costs)) + 1) if job.num_devices % k == 0]
    statics = {k: _static_run(job, workload, machine, k) for k in lengths}
    asked = job.pipeline_parallel_size
    longer = asked if isinstance(asked, int) and asked > 1 else epochs[0].plan.pipeline_parallel_size
    if longer == 1:
        longer = next((k for k in lengths if k > 1), 1)
    frozen = [step_flops(costs, epoch.num_frozen, epoch.plan.num_cached_layers) for epoch in epochs]
    with_freezing, without = sum(map(sum, frozen)), len(epochs) * sum(step_flops(costs, 0))
    node_rows = job.num_samples / machine.num_nodes(job.num_devices)
    sizes = {f: workload.cache_row_bytes(f) * node_rows for f in {epoch.puts for epoch in epochs} if f}
    live = [
        sum(sizes.get(f, 0.0) for f in {epoch.puts, epoch.num_cached}) for epoch in epochs
    ]  # the generation that is read is kept until the next one is complete
    return Forecast(
        job,
        workload,
        machine,
        tuple(epochs),
        _static_run(replace(job, replica_sharding="none"), workload, machine, 1),
        min(statics.values(), key=lambda static: (not static.fits, static.seconds)),
        statics[longer] if longer > 1 else None,
        _fsdp_run(job, workload, machine) if job.num_devices > 1 else None,
        _choose_sharding(job, workload, machine) if job.replica_sharding == AUTO else None,
        without / with_freezing if with_freezing else 1.0,
        max(sizes.values(), default=0.0),
        max(live),
        cache_off,
    )


class _Course:
    """Simulates the epochs with the decisions of the trainer."""

    def __init__(self, job: Job, workload: Workload, machine: Machine) -> None:
        self._job, self._workload, self._machine = job, workload, machine
        self._policy = _elastic_policy(job, machine)
        self.first = plan_at_start(job, workload, machine)
        self._boundary = 0  # number of layers whose output is in the store, or is being stored
        self._refused = 0  # number of layers whose output is not worth caching
        self._off: str | None = None if job.caches else "switched off"
        if job.caches and job.token_slices != "off":
            self._off = f"token_slices={job.token_slices!r} cuts sequences, and the cache keeps whole samples"

    def run(self) -> tuple[list[Epoch], str | None]:
        job, costs = self._job, self._workload.unit_costs
        plan, cached, epochs = self.first, 0, list[Epoch]()
        prediction, sliced = predict_step(job, self._workload, self._machine, plan)
        for index, frozen in enumerate(job.num_frozen(len(costs), self._workload.max_frozen)):
            before = (plan.num_frozen_layers, cached)
            if self._boundary > cached:  # the previous epoch has filled the cache
                cached = self._boundary if self._pays(plan) else 0
            if (frozen, cached) != before:
                plan = self._policy.next(plan, self.first, frozen, cached)
                self._fill(plan)
                prediction, sliced = predict_step(job, self._workload, self._machine, plan)
            writes = self._off is None and self._boundary > cached and index + 1 < job.num_epochs
            epochs.append(
                Epoch(
                    index + 1,
                    frozen,
                    cached,
                    self._boundary if writes else 0,
                    plan,
                    prediction,
                    self._load_seconds(cached, self._boundary if writes else 0),
                    job.steps_per_epoch,
                    sliced,
                    job.gradient_accumulation_steps,
                )
            )
        return epochs, self._off

    def _fill(self, plan: PipelinePlan) -> None:
        """Choose the boundary whose outputs are stored from now on, as `AutoCache.freeze` does."""
        if self._off is not None and not self._refused:
            return
        nodes = [str(rank // self._machine.devices_per_node) for rank in range(plan.world_size)]
        highest = most_cached_layers(plan, plan.num_frozen_layers, nodes)
        boundary = boundary_to_cache(self._workload.cacheable, highest)
        if highest and not self._workload.cacheable:
            self._off = "more than one tensor is read above each of this model's layers"
        elif boundary > max(self._boundary, self._refused):
            self._off = None
            disk, needed = self._machine.host.disk_bytes, self._node_bytes(boundary) + self._node_bytes(self._boundary)
            if disk is not None and needed > disk:
                self._off = (
                    f"a node would keep {needed / 2**30:,.1f} GiB, and its store may take {disk / 2**30:,.1f} GiB"
                )
                self._boundary = self._refused = 0
            else:
                self._boundary = boundary

    def _pays(self, plan: PipelinePlan) -> bool:
        """Whether loading a sample is faster than computing it by the margin that `AutoCache` requires.

        The first stages of a node read at the same time, so each of them has its samples when all have been loaded.
        """
        job, parts = self._job, self._job.gradient_accumulation_steps
        rows_of_node = job.batch / parts / self._machine.num_nodes(job.num_devices)
        loading = self._load_seconds(self._boundary) / parts / min(plan.rows_per_pipeline, rows_of_node)
        computing = sum(unit.forward.per_row for unit in self._machine.times.units[: self._boundary])
        if is_worth_loading(loading, computing):
            return True
        self._off = (
            f"loading would take {1e3 * loading:.3g} ms a sample, computing the {self._boundary} frozen layers"
            f" {1e3 * computing:.3g} ms"
        )
        self._boundary, self._refused = 0, self._boundary
        return False

    def _node_bytes(self, boundary: int) -> float:
        if not boundary:
            return 0.0
        nodes = self._machine.num_nodes(self._job.num_devices)
        return self._workload.cache_row_bytes(boundary) * self._job.num_samples / nodes

    def _load_seconds(self, cached: int, puts: int = 0) -> float:
        """Loading time of a step, for all samples of a node, whose first stages read at the same time.

        What is being stored displaces what is read from the page cache.
        """
        if not cached:
            return 0.0
        host, nodes = self._machine.host, self._machine.num_nodes(self._job.num_devices)
        live = self._node_bytes(cached) + self._node_bytes(puts)
        in_memory = host.memory_bytes is None or live <= host.memory_bytes
        speed = host.read_bytes_per_second if in_memory else host.disk_bytes_per_second
        return self._workload.cache_row_bytes(cached) * self._job.batch / nodes / speed


def plan_at_start(job: Job, workload: Workload, machine: Machine) -> PipelinePlan:
    """The plan at the start of the training.

    Raises:
        ValueError: as `make_plan`.
    """
    if job.replica_sharding == AUTO:
        return _choose_sharding(job, workload, machine).plan
    return _elastic_policy(job, machine).first(workload.unit_costs, job.num_devices, machine.times)


def _choose_sharding(job: Job, workload: Workload, machine: Machine) -> ShardingChoice:
    """Choose what replicas divide; K by predicted steps, even where the plans go by counts.

    What is chosen here is set in the training by the user, so no training depends on these times.
    """
    return _elastic_policy(job, machine).choose_sharding(
        workload.unit_costs, job.num_devices, machine.times, lambda plan: plain_step_seconds(job, plan)
    )


def plain_step_seconds(job: Job, plan: PipelinePlan) -> float:
    """Predict the seconds of a step under a plan, without loading and slices of sequences."""
    rows = plan.rows_per_pipeline
    return _seconds_of_batches(plan.predict(rows, plan.num_microbatches_for(rows)), job.gradient_accumulation_steps)


def _seconds_of_batches(prediction: StepPrediction, num_batches: int) -> float:
    """Seconds of a step of several batches, after which gradients are reduced and the optimizer runs once."""
    return num_batches * prediction.timeline.seconds + prediction.seconds_at_end


def _elastic_policy(job: Job, machine: Machine) -> ElasticPolicy:
    return ElasticPolicy(
        job.pipeline_parallel_size,
        job.rows_per_device,
        job.is_elastic,
        machine.memory_budget_bytes,
        job.schedule,
        job.num_microbatches,
        job.plan_by,
        job.replica_sharding,
        job.virtual_pipeline_parallel_size,
    )


def predict_step(
    job: Job, workload: Workload, machine: Machine, plan: PipelinePlan
) -> tuple[StepPrediction, SlicedStep | None]:
    """Predict a step with whole sequences, and a step as the trainer splits its batch, if that is a different one."""
    rows = plan.rows_per_pipeline
    m = plan.num_microbatches_for(rows)
    whole = plan.predict(rows, m)
    if job.token_slices == "off" or plan.pipeline_parallel_size == 1:
        return whole, None
    stages = stage_latencies(plan, workload, machine.flat_tokens)
    parts, seconds = choose_slices(stages, rows, workload.tokens, m, chooses_parts=plan.num_microbatches is None)
    if parts == whole_rows(rows, workload.tokens, m):
        return whole, None
    k, frozen = len(stages), frozen_latency(plan, workload, machine.flat_tokens)
    busy = sum(sum(seconds_of_slices(stage.both, parts).values()) for stage in stages) / k
    return whole, SlicedStep(parts, seconds, busy, sum(seconds_of_slices(frozen, parts).values()) / k)


def _stage_bytes(plan: PipelinePlan, num_microbatches: int, sliced: SlicedStep | None) -> list[int]:
    """Memory of each stage. With slices, stage s keeps all slices of the first K - s parts."""
    k = plan.pipeline_parallel_size
    if sliced is None:
        return [plan.stage_bytes(s, rows=plan.rows_per_pipeline, num_microbatches=num_microbatches) for s in range(k)]
    kept = [sum(part.rows for part in sliced.parts[: k - stage]) for stage in range(k)]  # the largest parts come first
    return [plan.stage_bytes(stage, rows=rows, num_microbatches=1) for stage, rows in enumerate(kept)]


def _static_run(job: Job, workload: Workload, machine: Machine, k: int) -> StaticRun:
    plan = plan_at_start(replace(job, pipeline_parallel_size=k), workload, machine)
    prediction, sliced = predict_step(job, workload, machine, plan)
    parts = job.gradient_accumulation_steps
    epoch = Epoch(1, 0, 0, 0, plan, prediction, 0.0, job.steps_per_epoch, sliced, parts)
    largest, budget = max(epoch.stage_bytes), machine.memory_budget_bytes
    missing = 0 if budget is None else max(largest - budget, 0)
    seconds = float("inf") if missing else epoch.seconds * job.num_epochs
    return StaticRun(plan, seconds, missing, epoch.num_microbatches, largest)


def _fsdp_run(job: Job, workload: Workload, machine: Machine) -> FsdpRun:
    return fsdp_run(
        workload.unit_costs,
        machine.times,
        job.num_devices,
        job.batch // job.num_devices,
        job.steps_per_epoch * job.num_epochs,
        machine.memory_budget_bytes,
    )


def forecast_seconds(job: Job, workload: Workload, machine: Machine) -> float:
    """Predicted seconds of a training, without the comparison with static layouts. Raises the same as `forecast`."""
    machine = machine.with_devices(job.num_devices, workload.unit_costs)
    return sum(epoch.seconds for epoch in _Course(job, workload, machine).run()[0])
