"""Forecast of a whole training, before anything is launched.

    freeze policy -> f in each epoch
    cache         -> c in each epoch      number of these f layers that come from the cache
    planner       -> layout of each epoch   the first, and another where f or c changes, as the trainer makes them
    predict       -> step                 plus the time to load what is cached

The forecast is compared with static layouts and FSDP, in which nothing is frozen, and with the bound from the counted
FLOPs. All of them are layouts (`planning.layout`), and their steps and memory are what a `CostModel` predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ..freezing.policies import FreezePolicy
from ..freezing.schedule_cost import frozen_in_epochs
from ..planning.costs import step_flops
from ..planning.layout import AUTO, Layout
from ..planning.planner import Planner, Request
from ..planning.predictions import CostModel, is_worth_loading
from ..planning.timeline import StepPrediction
from .device_table import Device
from .fully_sharded import FullySharded
from .workload import Workload

BEST, DDP, PIPELINE, FSDP = "best static layout", "plain DDP", "static pipeline", "plain FSDP"
"""Names of the trainings without freezing that a forecast is compared with."""


@dataclass(frozen=True)
class Job:
    """A training.

    Args:
        num_devices: number of devices, with one process each.
        batch: number of samples in the global batch; each device contributes an equal part.
        num_epochs: number of epochs; freezing is decided at the start of each.
        num_samples: number of samples in an epoch.
        freeze_policy: a policy that needs no gradients.
        max_frozen_layers: the user's upper bound on the number of frozen layers.
        pipeline_parallel_size: K, or "auto".
        is_elastic: whether the layers are repacked into fewer stages after a freeze.
        caches: whether frozen layers' outputs are cached.
        schedule: name of the schedule.
        num_microbatches: M, or "auto".
        replica_sharding: what the replicas of a stage divide among them, or "auto"; nothing in the comparison with
            plain DDP.
        virtual_pipeline_parallel_size: virtual stages per stage of an interleaved schedule.
        gradient_accumulation_steps: number of batches, run one after the other, in which the global batch is run.

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
        """Number of steps in an epoch."""
        return -(-self.num_samples // self.batch)

    def num_frozen(self, workload: Workload) -> list[int]:
        """Return f in each epoch."""
        num_layers, most, bound = len(workload.unit_costs), workload.max_frozen, self.max_frozen_layers
        return frozen_in_epochs(self.freeze_policy, num_layers, most, self.num_epochs, self.steps_per_epoch, bound)


@dataclass(frozen=True)
class Step:
    """What a step takes under a layout.

    Attributes:
        costs: predicts it.
        layout: the layout.
        num_batches: number of batches of the step, run one after the other; gradients are reduced, and the optimizer
            runs, once after them.
        load_seconds: time to load cached outputs.
        puts: number of layers whose output is stored in the cache; 0 if nothing is stored.
    """

    costs: CostModel
    layout: Layout
    num_batches: int = 1
    load_seconds: float = 0.0
    puts: int = 0

    @cached_property
    def prediction(self) -> StepPrediction:
        """Prediction for one of the batches, without loading."""
        return self.costs.predict(self.layout)

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        prediction = self.prediction
        return self.num_batches * prediction.timeline.seconds + prediction.seconds_at_end + self.load_seconds

    @property
    def stage_bytes(self) -> list[int]:
        """Memory of each stage."""
        return self.costs.stage_bytes(self.layout)

    @property
    def fits(self) -> bool:
        """Whether the largest stage fits a device."""
        return self.costs.fits(self.layout)

    @property
    def samples_per_second(self) -> float:
        """Samples of the global batch per second."""
        layout = self.layout
        return self.num_batches * layout.rows_per_pipeline * layout.data_parallel_size / self.seconds

    @cached_property
    def shares(self) -> dict[str, float]:
        """Fractions of the time by activity, averaged over the stages; they add up to 1."""
        layout, timeline, times = self.layout, self.prediction.timeline, self.costs.times
        assert times is not None
        k, m = layout.pipeline_parallel_size, layout.num_microbatches
        rows = layout.rows_per_pipeline / m
        busy = sum(span.end - span.start for span in timeline.spans) / k
        frozen_units = times.units[layout.num_cached_layers : layout.num_frozen_layers]
        frozen = m * sum(unit.forward.of(rows) for unit in frozen_units) / k
        of_batch = {
            "active layers": busy - frozen,
            "frozen layers": frozen,
            "waiting": timeline.seconds - busy,
        }
        seconds = {
            **{part: self.num_batches * value for part, value in of_batch.items()},
            "reduction, optimizer": self.prediction.seconds_at_end,
            "loading": self.load_seconds,
        }
        return {part: value / self.seconds for part, value in seconds.items()}


@dataclass(frozen=True)
class Forecast:
    """Forecast of the whole training.

    Attributes:
        planner: has made the layouts.
        epochs: a step of each epoch in order.
        plain: name -> step of a training in which nothing is frozen: the fastest static layout that fits; plain DDP,
            K = 1; a static pipeline of the requested K, or of that of the first epoch, or else of the smallest one
            above 1; and FSDP in as few micro-batches as fit. What is not possible is left out.
        flop_bound: FLOPs of the training without freezing divided by those with freezing.
        cache_bytes: size of the largest generation on a node; 0 if nothing is cached.
        cache_peak_bytes: largest size of the two generations that exist together after a freeze.
        cache_off: why nothing is cached, or no longer; None if the cache is used.
    """

    job: Job
    workload: Workload
    device: Device
    planner: Planner
    epochs: tuple[Step, ...]
    plain: Mapping[str, Step]
    flop_bound: float
    cache_bytes: float
    cache_peak_bytes: float
    cache_off: str | None

    @property
    def seconds(self) -> float:
        """Seconds of the training."""
        return self.job.steps_per_epoch * sum(step.seconds for step in self.epochs)

    @property
    def first(self) -> Layout:
        """The layout that the training begins with."""
        return self.epochs[0].layout

    @property
    def sharding_choice(self) -> list[Step]:
        """What the sharding and the first layout were chosen from; nothing if the sharding was given."""
        considered = self.planner.considered if self.job.replica_sharding == AUTO else ()
        return [self.step_in(each) for each in considered]

    def step_in(self, layout: Layout) -> Step:
        """Return a step of this training under a layout, without the cache."""
        return Step(self.planner, layout, self.job.gradient_accumulation_steps)

    @property
    def freezes(self) -> bool:
        """Whether a layer freezes."""
        return self.epochs[-1].layout.num_frozen_layers > 0

    @property
    def fastest_plain(self) -> str:
        """What is fastest without freezing: a static layout, or FSDP where the best layout is a pipeline.

        Where DDP is possible, FSDP would only look faster: DDP's all-reduce is counted as if nothing hid it.
        """
        best, fsdp = self.plain[BEST], self.plain.get(FSDP)
        if fsdp is None or best.layout.pipeline_parallel_size == 1 or not fsdp.fits:
            return BEST
        return FSDP if not best.fits or fsdp.seconds < best.seconds else BEST

    def seconds_of(self, name: str) -> float | None:
        """Return the seconds of a training without freezing; None if it does not fit."""
        step = self.plain[name]
        return step.seconds * self.job.steps_per_epoch * self.job.num_epochs if step.fits else None

    def speed_up_over(self, name: str) -> float | None:
        """Return the speed-up over a training without freezing; None if that does not fit."""
        plain = self.seconds_of(name)
        return None if plain is None else plain / self.seconds


def forecast(job: Job, workload: Workload, device: Device) -> Forecast:
    """Predict a training on devices of this kind.

    Raises:
        ValueError: no layout is possible, as in `Planner`.
    """
    course = _Course(job, workload, device)
    (epochs, cache_off), planner = course.run(), course.planner
    costs, layouts = workload.unit_costs, [step.layout for step in epochs]
    frozen = [step_flops(costs, each.num_frozen_layers, each.num_cached_layers) for each in layouts]
    with_freezing, without = sum(map(sum, frozen)), len(epochs) * sum(step_flops(costs, 0))
    node_rows = job.num_samples / device.num_nodes(job.num_devices)
    sizes = {f: workload.cache_row_bytes(f) * node_rows for f in {step.puts for step in epochs} if f}
    # the generation that is read is kept until the next one is complete
    live = [sum(sizes.get(f, 0.0) for f in {step.puts, step.layout.num_cached_layers}) for step in epochs]
    return Forecast(
        job,
        workload,
        device,
        planner,
        tuple(epochs),
        _plain_steps(job, workload, device, planner.first.pipeline_parallel_size),
        without / with_freezing if with_freezing else 1.0,
        max(sizes.values(), default=0.0),
        max(live),
        cache_off,
    )


def _plain_steps(job: Job, workload: Workload, device: Device, k: int) -> dict[str, Step]:
    """Return the trainings without freezing, as in `Forecast.plain`, beside one that begins with K stages."""
    costs, devices, parts = workload.unit_costs, job.num_devices, job.gradient_accumulation_steps

    def static(k: int, **changes: str) -> Step:
        planner = _planner(replace(job, pipeline_parallel_size=k, **changes), workload, device)  # type: ignore[arg-type]
        return Step(planner, planner.first, parts)

    statics = {k: static(k) for k in range(1, min(devices, len(costs)) + 1) if devices % k == 0}
    asked = job.pipeline_parallel_size
    longer = asked if isinstance(asked, int) and asked > 1 else k
    if longer == 1:
        longer = next((k for k in statics if k > 1), 1)
    found = {
        BEST: min(statics.values(), key=lambda step: (not step.fits, step.seconds)),
        DDP: static(1, replica_sharding="none"),
    }
    if longer > 1:
        found[PIPELINE] = statics[longer]
    if devices > 1:
        rows, sharded = (
            job.batch // devices,
            FullySharded(costs, device.times(costs, devices), device.memory_budget_bytes),
        )
        in_parts = [Step(sharded, sharded.layout(devices, rows // m), m) for m in range(1, rows + 1) if rows % m == 0]
        found[FSDP] = next((step for step in in_parts if step.fits), in_parts[-1])
    return found


class _Course:
    """Simulates the epochs with the decisions of the trainer."""

    def __init__(self, job: Job, workload: Workload, device: Device) -> None:
        self._job, self._workload, self._device = job, workload, device
        self.planner = _planner(job, workload, device)
        self._times = device.times(workload.unit_costs, job.num_devices)
        self._boundary = 0  # number of layers whose output is in the store, or is being stored
        self._refused = 0  # number of layers whose output is not worth caching
        self._off: str | None = None if job.caches else "switched off"

    def run(self) -> tuple[list[Step], str | None]:
        """Return a step of each epoch, and why nothing is cached or no longer."""
        job = self._job
        layout, cached, epochs = self.planner.first, 0, list[Step]()
        for index, frozen in enumerate(job.num_frozen(self._workload)):
            if self._boundary > cached:  # the previous epoch has filled the cache
                cached = self._boundary if self._pays(layout) else 0
            if (frozen, cached) != (layout.num_frozen_layers, layout.num_cached_layers):
                layout = self.planner.next(layout, frozen, cached)
                self._fill(layout)
            writes = self._off is None and self._boundary > cached and index + 1 < job.num_epochs
            puts = self._boundary if writes else 0
            loading = self._load_seconds(cached, puts)
            epochs.append(Step(self.planner, layout, job.gradient_accumulation_steps, loading, puts))
        return epochs, self._off

    def _fill(self, layout: Layout) -> None:
        """Choose the boundary whose outputs are stored from now on, as the training's cache does."""
        if self._off is not None and not self._refused:
            return
        nodes = [str(rank // self._device.devices_per_node) for rank in range(layout.world_size)]
        highest = layout.most_cached_on(nodes, layout.num_frozen_layers)
        boundary = max((each for each in self._workload.cacheable if each <= highest), default=0)
        if highest and not self._workload.cacheable:
            self._off = "more than one tensor is read above each of this model's layers"
        elif boundary > max(self._boundary, self._refused):
            self._off = None
            disk, needed = self._device.host.disk_bytes, self._node_bytes(boundary) + self._node_bytes(self._boundary)
            if disk is not None and needed > disk:
                self._off = (
                    f"a node would keep {needed / 2**30:,.1f} GiB, and its store may take {disk / 2**30:,.1f} GiB"
                )
                self._boundary = self._refused = 0
            else:
                self._boundary = boundary

    def _pays(self, layout: Layout) -> bool:
        """Whether loading a sample is faster than computing it by the margin that the training's cache requires.

        The first stages of a node read at the same time, so each of them has its samples when all have been loaded.
        """
        job, parts = self._job, self._job.gradient_accumulation_steps
        rows_of_node = job.batch / parts / self._device.num_nodes(job.num_devices)
        loading = self._load_seconds(self._boundary) / parts / min(layout.rows_per_pipeline, rows_of_node)
        computing = sum(unit.forward.per_row for unit in self._times.units[: self._boundary])
        if is_worth_loading(loading, computing):
            return True
        self._off = (
            f"loading would take {1e3 * loading:.3g} ms a sample, computing the {self._boundary} frozen layers"
            f" {1e3 * computing:.3g} ms"
        )
        self._boundary, self._refused = 0, self._boundary
        return False

    def _node_bytes(self, boundary: int) -> float:
        nodes = self._device.num_nodes(self._job.num_devices)
        return self._workload.cache_row_bytes(boundary) * self._job.num_samples / nodes if boundary else 0.0

    def _load_seconds(self, cached: int, puts: int = 0) -> float:
        """Loading time of a step, for all samples of a node, whose first stages read at the same time.

        What is being stored displaces what is read from the page cache.
        """
        if not cached:
            return 0.0
        host, nodes = self._device.host, self._device.num_nodes(self._job.num_devices)
        live = self._node_bytes(cached) + self._node_bytes(puts)
        in_memory = host.memory_bytes is None or live <= host.memory_bytes
        speed = host.read_bytes_per_second if in_memory else host.disk_bytes_per_second
        return self._workload.cache_row_bytes(cached) * self._job.batch / nodes / speed


def _planner(job: Job, workload: Workload, device: Device) -> Planner:
    return Planner(
        unit_costs=workload.unit_costs,
        times=device.times(workload.unit_costs, job.num_devices),
        memory_budget_bytes=device.memory_budget_bytes,
        autocasts=device.autocasts,
        world_size=job.num_devices,
        request=Request(
            job.pipeline_parallel_size,
            job.rows_per_device,
            job.is_elastic,
            job.schedule,
            job.num_microbatches,
            job.replica_sharding,
            job.virtual_pipeline_parallel_size,
        ),
    )
