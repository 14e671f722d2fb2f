"""Forecast of a whole training, without launching it.

    freeze policy -> f in each epoch
    cache         -> c in each epoch        number of these f layers that come from the cache
    planner       -> layout of each epoch   the first, and another where f or c changes, as the trainer makes them
    cost model    -> step                   plus the time to load cached outputs

The forecast is compared with static layouts and FSDP without freezing, and with the bound from the counted FLOPs. All
of them are layouts (`planning.layout`), and a `CostModel` predicts their steps and memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..parts.freezing.policies import FreezePolicy
from ..parts.freezing.schedule_cost import frozen_in_epochs
from ..planning.costs import step_flops
from ..planning.layout import AUTO, Layout
from ..planning.planner import Planner, Request
from ..planning.predictions import CostModel, is_worth_loading
from .device_table import Device
from .fully_sharded import FullySharded
from .workload import Workload

BEST, DDP, PIPELINE, FSDP = "best static layout", "plain DDP", "static pipeline", "plain FSDP"
"""Names of the trainings without freezing in a forecast's comparison."""
Values = dict[str, Any]
"""Plain values for JSON, text and advice: times in seconds, sizes in bytes."""
SWITCHED_OFF = "switched off"
"""Reason for no caching if the user has disabled it."""


@dataclass(frozen=True)
class Job:
    """A training.

    Args:
        num_devices: number of devices, with one process each.
        batch: number of samples in the global batch; each device contributes an equal part.
        num_epochs: number of epochs; freezing is decided at the start of each.
        num_samples: number of samples in an epoch.
        freeze_policy: a policy that needs no gradients.
        asked: the request to the planner. Its samples per device are derived from the batch.
        max_frozen_layers: the user's upper bound on the number of frozen layers.
        caches: whether frozen layers' outputs are cached.
        gradient_accumulation_steps: number of consecutive batches that the global batch is split into.

    Raises:
        ValueError: a number is too small, or the batch cannot be divided equally.
    """

    num_devices: int
    batch: int
    num_epochs: int
    num_samples: int
    freeze_policy: FreezePolicy
    asked: Request
    max_frozen_layers: int | None = None
    caches: bool = True
    gradient_accumulation_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("num_devices", "batch", "num_epochs", "num_samples", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        steps, parts = self.gradient_accumulation_steps, self.num_devices * self.gradient_accumulation_steps
        if self.batch % parts:
            below = self.batch - self.batch % parts
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
    def request(self) -> Request:
        """The request to the planner, with the samples per device in one batch of a step."""
        return replace(self.asked, rows_per_device=self.batch // (self.num_devices * self.gradient_accumulation_steps))

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch."""
        return -(-self.num_samples // self.batch)


def forecast(job: Job, workload: Workload, device: Device) -> Values:
    """Predict a training on devices of this kind.

    Returns:
        The job's numbers and: "epochs", with a step of each epoch (`step_values`); "sharding_choice", the steps of the
        candidates for the sharding and the first layout; "compared_with" and "fsdp" (`_plain_steps`), and the name of
        the fastest; "flop_bound", FLOPs without freezing over FLOPs with freezing; and "cache", with the bytes per
        node of the largest generation and of the two generations that coexist after a freeze, and the reason if it is
        off.

    Raises:
        ValueError: no layout is possible, as in `Planner`.
    """
    costs, world = workload.unit_costs, job.num_devices
    planner = Planner(
        unit_costs=costs,
        times=device.times(workload, world),
        memory_budget_bytes=device.memory_budget_bytes,
        autocasts=workload.autocasts,
        world_size=world,
        request=job.request,
    )
    cache = _Cache(job, workload, device, planner)
    epochs, cache_off = _course(cache)
    statics, plain = _plain_steps(job, planner)
    seconds = sum(step["seconds"] for step in epochs)
    for step in plain.values():
        step["seconds"] = job.num_epochs * job.steps_per_epoch * step["step_seconds"] if step["fits"] else None
        step["speed_up"] = step["seconds"] / seconds if step["fits"] else None
    fastest = _fastest(plain)
    gain = plain[fastest]["speed_up"] if epochs[-1]["num_frozen_layers"] else None
    stages, asked = {step["stages"] for step in epochs}, planner.request.pipeline_parallel_size
    choice = [
        {**step, "chosen": step["stages"] == planner.first.pipeline_parallel_size}
        for step in statics
        if asked in (AUTO, step["stages"])
    ]
    flops = sum(sum(step_flops(costs, step["num_frozen_layers"], step["num_cached_layers"])) for step in epochs)
    return {
        "devices": world,
        "batch": job.batch,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "samples": job.num_samples,
        "steps_per_epoch": job.steps_per_epoch,
        "memory_budget_bytes": device.memory_budget_bytes,
        "replica_sharding": planner.first.replica_sharding,
        "sharding_choice": choice if planner.request.replica_sharding == AUTO else None,
        "pipeline_schedule": planner.first.schedule,
        "epochs": epochs,
        "seconds": seconds,
        "compared_with": {name.replace(" ", "_"): step for name, step in plain.items() if name != FSDP},
        "fsdp": plain.get(FSDP),
        # maximum number of NCCL communicators of a process, without tied weights. All are kept, because numbers of
        # stages recur: one of all processes, and for each K one of the pipeline, one of the replicas, and one for each
        # neighbour
        "communicators": (world > 1) + sum((k > 1) + (k < world) + min(k - 1, 2) for k in stages if world > 1),
        "flop_bound": len(epochs) * sum(step_flops(costs, 0)) / flops if flops else 1.0,
        "fastest_plain": fastest,
        # epochs of the fastest training without freezing in the time of this training
        "plain_epochs_of_equal_cost": None if gain is None else len(epochs) / gain,
        "cache": {
            "generation_bytes_per_node": max(cache.node_bytes(step["puts"]) for step in epochs),
            # the old generation is kept until the next one is complete
            "peak_bytes_per_node": max(
                sum(map(cache.node_bytes, {step["puts"], step["num_cached_layers"]})) for step in epochs
            ),
            "off": cache_off,
            "host_memory_bytes": device.host_memory_bytes,
            "host_disk_bytes": device.host_disk_bytes,
        },
    }


def step_values(
    layout: Layout, costs: CostModel, num_batches: int = 1, load_seconds: float = 0.0, puts: int = 0
) -> Values:
    """Predict a step.

    Args:
        layout: the layout.
        costs: predicts the step. It must have times.
        num_batches: number of consecutive batches in the step. Gradients are reduced, and the optimizer runs, once at
            the end.
        load_seconds: time to load cached outputs.
        puts: number of layers below the stored outputs; 0 if none are stored.

    Returns:
        The numbers of the layout and the arguments, and: "stage_layers", the number of layers in each virtual stage of
        each stage; "receive_bytes", each stage's bytes for receive buffers; "fits", whether the largest stage fits a
        device; and "shares", activity -> fraction of the step's seconds, averaged over the stages.
    """
    assert costs.times is not None
    k, m, rows = layout.pipeline_parallel_size, layout.num_microbatches, layout.rows_per_pipeline
    prediction, stage_bytes = costs.predict(layout), costs.stage_bytes(layout)
    timeline, at_end = prediction.timeline, prediction.seconds_at_end
    seconds = num_batches * timeline.seconds + at_end + load_seconds
    frozen_units = costs.times.units[layout.num_cached_layers : layout.num_frozen_layers]
    frozen = m * sum(unit.forward.of(rows / m) for unit in frozen_units) / k
    waiting = timeline.bubble * timeline.seconds
    spent = {
        "active layers": num_batches * (timeline.seconds - waiting - frozen),
        "frozen layers": num_batches * frozen,
        "waiting": num_batches * waiting,
        "reduction, optimizer": at_end,
        "loading": load_seconds,
    }
    return {
        "replica_sharding": layout.replica_sharding,
        "pipeline_schedule": layout.schedule,
        "stages": k,
        "replicas": layout.data_parallel_size,
        "virtual_stages": layout.num_virtual_stages,
        "num_microbatches": m,
        "num_frozen_layers": layout.num_frozen_layers,
        "num_cached_layers": layout.num_cached_layers,
        "puts": puts,
        "stage_bounds": list(layout.stage_bounds),
        "stage_layers": [list(map(len, layout.ranges_of(stage))) for stage in range(k)],
        "stage_bytes": stage_bytes,
        "largest_stage_bytes": max(stage_bytes),
        "receive_bytes": [costs.received_bytes(layout, stage) for stage in range(k)],
        "fits": costs.fits(layout),
        "bubble": timeline.bubble,
        "load_seconds": load_seconds,
        "step_seconds": seconds,
        "samples_per_second": num_batches * rows * layout.data_parallel_size / seconds,
        "shares": {activity: value / seconds for activity, value in spent.items()},
    }


def plain_trainings(values: Values) -> dict[str, Values]:
    """Return the trainings without freezing in the comparison, by name."""
    found = {name.replace("_", " "): step for name, step in values["compared_with"].items()}
    return found if values["fsdp"] is None else {**found, FSDP: values["fsdp"]}


def _plain_steps(job: Job, planner: Planner) -> tuple[list[Values], dict[str, Values]]:
    """Return a step of each static layout, one per number of stages, and of the trainings without freezing.

    The trainings are the fastest static layout that fits; plain DDP, K = 1; a static pipeline with the first layout's
    K, or with the smallest K above 1; and FSDP with the fewest micro-batches that fit. Impossible ones are omitted.
    """
    parts, k = job.gradient_accumulation_steps, planner.first.pipeline_parallel_size
    of_any_size = replace(planner, request=replace(planner.request, pipeline_parallel_size=AUTO))
    statics = [step_values(layout, planner, parts) for layout in of_any_size.considered]
    found = {
        BEST: min(statics, key=lambda step: (not step["fits"], step["step_seconds"])),
        DDP: step_values(planner.in_stages(1, sharding="none"), planner, parts),
    }
    longer = next((step for step in statics if step["stages"] > 1 and k in (1, step["stages"])), None)
    if longer is not None:
        found[PIPELINE] = longer
    if job.num_devices > 1:
        rows = job.batch // job.num_devices
        sharded = FullySharded(planner.unit_costs, planner.times, planner.memory_budget_bytes)
        for m in (m for m in range(1, rows + 1) if rows % m == 0):
            step = step_values(sharded.layout(job.num_devices, rows // m), sharded, m)
            found[FSDP] = {**step, "num_microbatches": m}
            if step["fits"]:
                break
    return statics, {name: dict(step) for name, step in found.items()}


def _fastest(plain: Mapping[str, Values]) -> str:
    """Return the fastest training without freezing: a static layout, or FSDP if the best layout is a pipeline.

    If DDP is possible, FSDP only looks faster: the prediction does not overlap DDP's all-reduce with the backward.
    """
    best, fsdp = plain[BEST], plain.get(FSDP)
    if fsdp is None or best["stages"] == 1 or not fsdp["fits"]:
        return BEST
    return FSDP if not best["fits"] or fsdp["step_seconds"] < best["step_seconds"] else BEST


def _course(cache: _Cache) -> tuple[list[Values], str | None]:
    """Return a step of each epoch under the trainer's decisions, and the reason if caching stops."""
    job, workload, planner = cache.job, cache.workload, cache.planner
    layout, epochs = planner.first, list[Values]()
    cached = stored = refused = 0  # numbers of layers: read, in the store, not worth reading
    off = None if job.caches else SWITCHED_OFF
    num_layers, most, steps = len(workload.unit_costs), workload.max_frozen, job.steps_per_epoch
    course = frozen_in_epochs(job.freeze_policy, num_layers, most, job.num_epochs, steps, job.max_frozen_layers)
    for number, frozen in enumerate(course, 1):
        if stored > cached:  # the previous epoch has filled the cache
            off = cache.why_slow(layout, stored)
            stored, refused = (stored, refused) if off is None else (0, stored)
        cached = stored
        if (frozen, cached) != (layout.num_frozen_layers, layout.num_cached_layers):
            layout = planner.next(layout, frozen, cached)
            if job.caches:
                stored, off = cache.fill(layout, cached, refused) or (stored, off)
        puts = stored if stored > cached and number < job.num_epochs else 0
        loading = cache.sample_seconds(cached, puts) * job.batch / cache.num_nodes
        step = step_values(layout, planner, job.gradient_accumulation_steps, loading, puts)
        epochs.append({"epoch": number, **step, "seconds": steps * step["step_seconds"]})
    return epochs, off


@dataclass(frozen=True)
class _Cache:
    """The cache of a node: its size and speed, and the training's decisions about it."""

    job: Job
    workload: Workload
    device: Device
    planner: Planner

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.device.num_nodes(self.job.num_devices)

    def node_bytes(self, boundary: int) -> float:
        """Return the bytes of a generation: the outputs of layer `boundary` for all samples of the node."""
        samples = self.job.num_samples / self.num_nodes
        return self.workload.cache_row_bytes(boundary) * samples if boundary else 0.0

    def sample_seconds(self, cached: int, puts: int = 0) -> float:
        """Return the seconds to load a sample. Stored outputs displace older ones from the page cache."""
        if not cached:
            return 0.0
        memory, live = self.device.host_memory_bytes, self.node_bytes(cached) + self.node_bytes(puts)
        in_memory = memory is None or live <= memory
        speed = self.device.read_bytes_per_second if in_memory else self.device.disk_bytes_per_second
        return self.workload.cache_row_bytes(cached) / speed

    def fill(self, layout: Layout, cached: int, refused: int) -> tuple[int, str | None] | None:
        """Return the boundary to store at from now on, and the reason if it is limited; None if it stays."""
        nodes = [str(rank // self.device.devices_per_node) for rank in range(layout.world_size)]
        highest, disk = layout.most_cached_on(nodes, layout.num_frozen_layers), self.device.host_disk_bytes
        boundary = max((each for each in self.workload.cacheable if each <= highest), default=0)
        if highest and not self.workload.cacheable:
            return 0, "more than one tensor is read above each of this model's layers"
        if boundary <= max(cached, refused):
            return None
        needed = self.node_bytes(boundary) + self.node_bytes(cached)
        if disk is not None and needed > disk:
            why = f"a node would keep {needed / 2**30:,.1f} GiB, and its store may take {disk / 2**30:,.1f} GiB"
            return cached, why
        return boundary, None

    def why_slow(self, layout: Layout, boundary: int) -> str | None:
        """Return why loading a sample is not worth it, or None. A training decides the same when the cache is full.

        The first stages of a node read at the same time: each waits until the samples of all are loaded.
        """
        assert self.planner.times is not None
        readers = self.job.batch / self.num_nodes / self.job.gradient_accumulation_steps / layout.rows_per_pipeline
        loading = self.sample_seconds(boundary) * max(readers, 1.0)
        computing = sum(unit.forward.per_row for unit in self.planner.times.units[:boundary])
        if is_worth_loading(loading, computing):
            return None
        return (
            f"loading would take {1e3 * loading:.3g} ms a sample, computing the {boundary} frozen layers"
            f" {1e3 * computing:.3g} ms"
        )
