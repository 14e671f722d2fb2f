"""The planner: the first layout of a training, and the next layout when layers are frozen or cached.

AutoPipe (PipeTransformer, ICML 2021, section 3.2). Layouts are a pure function of a `Planner`'s fields: every process
makes the same layouts, and a forecast makes the layouts of the training.

    first       K = 1   none | optimizer ─┐
                K = 2   none | optimizer ─┤   for each K the least sharding    then the shortest pipeline
                K = 4   none | optimizer ─┤   that fits
                K = 8   one replica: none ┘
    next        pipeline compression, then the split; the schedule and the sharding stay

Memory decides the sharding, not time. Sharding moves as many bytes and saves only the optimizer's time, and
predictions do not count that DDP's reduction overlaps with the backward. A single replica cannot shard, so `"none"` is
chosen, and stays when replicas are added later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from .costs import step_flops
from .layout import AUTO, REPLICA_SHARDINGS, Layout
from .partition import balance_holders, check_pipeline_size, more_microbatches, split_min_max
from .predictions import CostModel
from .schedules import GPIPE, schedule_named
from .tables import MIB


@dataclass(frozen=True)
class Request:
    """The user's requests for the layout.

    Attributes:
        pipeline_parallel_size: number of stages K at the start; `"auto"` for the shortest pipeline that fits.
        rows_per_device: samples per device and step; a pipeline's batch has K times as many.
        is_elastic: whether freezing may shorten the pipeline and turn the freed devices into replicas; otherwise only
            the split into stages changes.
        schedule: name of the schedule.
        num_microbatches: micro-batches per step and pipeline, or `"auto"`.
        replica_sharding: state that the replicas of a stage shard; `"auto"` to choose it once, for the first layout.
        virtual_pipeline_parallel_size: virtual stages per stage V of an interleaved schedule, if there are units for
            so many.
        is_driven: whether the loss drives the pipeline. Then all forwards come first, as in GPipe, each stage has
            consecutive layers, and freed devices do not become replicas, which would change the loss.
    """

    pipeline_parallel_size: int | Literal["auto"] = 1
    rows_per_device: int = 1
    is_elastic: bool = True
    schedule: str = "1f1b"
    num_microbatches: int | Literal["auto"] = "auto"
    replica_sharding: str = "none"
    virtual_pipeline_parallel_size: int = 1
    is_driven: bool = False


@dataclass(frozen=True, kw_only=True)
class Planner(CostModel):
    """Makes the layouts of one training or forecast.

    Attributes:
        world_size: number of ranks.
        request: the user's requests.

    Examples:
        >>> from hf_pipetransformer.planning.costs import UnitCost
        >>> sizes = {f"layer.{k}": 4_000_000 for k in range(12)}
        >>> units = [
        ...     UnitCost(name=name, forward_flops=1e9, parameters={name: size}, trainable_bytes=size)
        ...     for name, size in sizes.items()
        ... ]
        >>> request = Request(pipeline_parallel_size=4, rows_per_device=8)
        >>> planner = Planner(unit_costs=tuple(units), world_size=4, request=request)
        >>> planner.first.stage_bounds
        (0, 3, 6, 9, 12)
        >>> layout = planner.next(planner.first, num_frozen=8, num_cached=0)  # two stages now fit
        >>> layout.pipeline_parallel_size, layout.data_parallel_size
        (2, 2)
    """

    world_size: int
    request: Request

    # -- the first layout ------------------------------------------------------------------------------------

    @cached_property
    def first(self) -> Layout:
        """The first layout of the training.

        Raises:
            ValueError: K does not divide the world size or exceeds the number of units, a number is too small, a name
                is unknown, or K is "auto" and no layout fits.
        """
        considered = self.considered
        if self.request.pipeline_parallel_size != AUTO:
            return considered[0]
        shortest = next(filter(self.fits, considered), None)
        if shortest is not None:
            return shortest
        smallest = min(considered, key=self._largest)
        assert self.memory_budget_bytes is not None
        raise ValueError(
            "pipeline_parallel_size is 'auto', but no pipeline fits: with"
            f" {smallest.pipeline_parallel_size} stages and replica_sharding={smallest.replica_sharding!r} the largest"
            f" stage still needs {self._largest(smallest) / MIB:,.0f} MiB, but a device has"
            f" {self.memory_budget_bytes / MIB:,.0f} MiB. Use more devices, reduce per_device_train_batch_size (now"
            f" {self.request.rows_per_device}), enable gradient checkpointing, or freeze parameters."
        )

    @cached_property
    def considered(self) -> tuple[Layout, ...]:
        """The candidates for the first layout, one for each number of stages, in ascending order.

        Each has the least sharding that fits or, if none fits, the sharding that needs the least memory.
        """
        k, sharding = self.request.pipeline_parallel_size, self.request.replica_sharding
        ks = self._lengths(min(self.world_size, len(self.unit_costs))) if k == AUTO else [k]
        shardings = REPLICA_SHARDINGS if sharding == AUTO else (sharding,)
        found = []
        for size in ks:
            layouts = [self.in_stages(size, sharding=each) for each in shardings]
            found.append(next(filter(self.fits, layouts), min(layouts, key=self._largest)))
        return tuple(found)

    # -- the layouts that follow -----------------------------------------------------------------------------

    def next(self, layout: Layout, num_frozen: int, num_cached: int) -> Layout:
        """Return the next layout when more layers are frozen: compress the pipeline, then split the units.

        K never grows. The result has the fewest stages that fit. If the planner has chosen K by the memory of a
        device, a stage may take all of that memory. If the user has chosen K, a stage may take as much as the largest
        stage at the start, which is the paper's criterion.

        Args:
            layout: the current layout.
            num_frozen: number of frozen layers from now on, not less than before.
            num_cached: number of cached layers among them. It may fall, when the cache is disabled.

        Raises:
            ValueError: a number is out of range.
        """
        longest = layout.pipeline_parallel_size
        if self.request.is_elastic and not self.request.is_driven:
            budget = self.memory_budget_bytes if self.request.pipeline_parallel_size == AUTO else None
            most = self._largest(self.first) if budget is None else budget
            for k in self._lengths(longest - 1):
                shorter = self.in_stages(k, num_frozen, num_cached)
                if self._largest(shorter) <= most:
                    return shorter
        return self.in_stages(longest, num_frozen, num_cached)

    def in_stages(self, k: int, num_frozen: int = 0, num_cached: int = 0, sharding: str | None = None) -> Layout:
        """Return a layout with K stages, split by the units' cost in a step.

        Each stage has the requested number of virtual stages, or as many as the uncached units allow.

        Args:
            k: number of stages K.
            num_frozen: number of frozen layers.
            num_cached: number of cached layers among them. If there are too many stages, fewer layers count as cached.
            sharding: state that the replicas of a stage shard; None for the first layout's value.

        Raises:
            ValueError: K does not divide the world size or exceeds the number of units, or a number is out of range.
        """
        request, num_units = self.request, len(self.unit_costs)
        check_pipeline_size(self.world_size, k, num_units)
        schedule = GPIPE if request.is_driven else schedule_named(request.schedule)
        most = 1 if request.is_driven else request.virtual_pipeline_parallel_size
        cached = min(num_cached, num_units - k + 1)
        v = max(1, min(most, (num_units - cached) // k)) if k > 1 else 1
        first = min(cached, num_units - k * v)  # the first virtual stage holds all cached units
        costs = step_flops(self.unit_costs, num_frozen, cached)[first:]
        placement = schedule.placement(k, v)
        held = [placement.held_by(stage) for stage in range(k)]
        bounds = balance_holders(split_min_max(costs, k * v), costs, held)
        layout = Layout(
            k,
            self.world_size // k,
            (0, *(first + bound for bound in bounds[1:])),
            schedule.name,
            request.rows_per_device,
            None if request.num_microbatches == AUTO else request.num_microbatches,
            num_frozen_layers=num_frozen,
            num_cached_layers=cached,
            replica_sharding=self.first.replica_sharding if sharding is None else sharding,
        )
        return self._in_small_micro_batches(layout)

    def _in_small_micro_batches(self, layout: Layout) -> Layout:
        """Return the layout with more micro-batches, if no number is requested and only this makes it fit."""
        k, rows = layout.pipeline_parallel_size, layout.rows_per_pipeline
        if layout.requested_microbatches is None and k > 1 and not self.fits(layout):
            for m in more_microbatches(rows, k, layout.num_microbatches, layout.runs_as):
                smaller = replace(layout, most_rows=rows // m)
                if self.fits(smaller):
                    return smaller
        return layout

    def _largest(self, layout: Layout) -> int:
        return max(self.stage_bytes(layout))

    def _lengths(self, longest: int) -> list[int]:
        """Return the possible numbers of stages up to `longest`, ascending."""
        return [k for k in range(1, longest + 1) if self.world_size % k == 0]

    # -- layouts in checkpoints ------------------------------------------------------------------------------

    @property
    def _asked(self) -> list[Any]:
        request = self.request
        return [
            self.world_size,
            request.pipeline_parallel_size,
            request.schedule,
            request.num_microbatches,
            request.rows_per_device,
            request.is_elastic,
            "counts",  # earlier versions could also split by measured times
            request.virtual_pipeline_parallel_size,
        ]

    def state_dict(self, layout: Layout) -> dict[str, Any]:
        """Return the request and the numbers of a layout of this training, in plain values for JSON."""
        return {
            "asked": self._asked,
            "stages": layout.pipeline_parallel_size,
            "units": layout.num_units,
            "num_frozen": layout.num_frozen_layers,
            "counted_as_cached": layout.num_cached_layers,
        }

    def from_state_dict(self, state: Mapping[str, Any], most_frozen: int) -> Layout | None:
        """Recreate the layout that `state_dict` has described in an earlier job.

        Returns:
            The layout; None if the request has changed, or if the layout freezes more than `most_frozen` layers or
            needs more memory than is available now.

        Raises:
            ValueError: `state` does not describe a layout.
        """
        first = self.first
        units = state["units"] if "units" in state else state["bounds"][-1]  # written by earlier versions
        if state["asked"] != self._asked or state["num_frozen"] > most_frozen or units != first.num_units:
            return None
        try:
            layout = self.in_stages(state["stages"], state["num_frozen"], state["counted_as_cached"])
        except ValueError as error:
            raise ValueError(
                f"trainer_state.json: stateful_callbacks.PipelineState.attributes.memory.layout is no layout: {error}"
            ) from error
        fits = self.fits(layout) or self._largest(layout) <= self._largest(first)
        return layout if fits else None
