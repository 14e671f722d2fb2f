"""Which plan a training begins with, and which one follows once more layers are frozen or cached.

A running training (`run.planner`) and a forecast ask the same policy, so they plan alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .plan import PipelinePlan
from .planner import largest_stage_bytes, make_plan, replan

if TYPE_CHECKING:
    from .costs import UnitCost
    from .unit_times import ModelTimes


@dataclass(frozen=True)
class ElasticPolicy:
    """What was asked for, and what a device has. Pure: the same on every process.

    Args:
        pipeline_parallel_size: K at the start, or "auto".
        rows_per_device: of a step.
        is_elastic: a freeze may shorten the pipeline, and devices that it leaves free become replicas; otherwise only
            the split into stages changes.
        memory_budget_bytes: that a stage may take on a device; None: not known, everything fits.
        schedule: "1f1b" or "gpipe".
        num_microbatches: of a step and pipeline, or "auto".
    """

    pipeline_parallel_size: int | Literal["auto"]
    rows_per_device: int
    is_elastic: bool
    memory_budget_bytes: int | None
    schedule: str = "1f1b"
    num_microbatches: int | Literal["auto"] = "auto"

    def first(self, unit_costs: Sequence[UnitCost], world_size: int, times: ModelTimes | None) -> PipelinePlan:
        """The plan to begin with.

        Args:
            unit_costs: of the model.
            world_size: number of devices.
            times: of the model's parts; None: go by FLOPs.

        Raises:
            ValueError: as `make_plan`.
        """
        return make_plan(
            unit_costs,
            world_size,
            self.pipeline_parallel_size,
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            rows_per_device=self.rows_per_device,
            memory_budget_bytes=self.memory_budget_bytes,
            times=times,
        )

    def next(self, plan: PipelinePlan, first: PipelinePlan, num_frozen: int, num_cached: int) -> PipelinePlan:
        """The plan that follows another one.

        A stage may take what a device has, where K was chosen by that. A number of stages that the user chose says
        what a device can hold: no more than at the start.

        Args:
            plan: in force.
            first: the plan that the training began with.
            num_frozen: layers that are frozen from now on.
            num_cached: of these so many come from the cache.
        """
        budget = self.memory_budget_bytes if self.pipeline_parallel_size == "auto" else None
        return replan(
            plan,
            num_frozen,
            largest_stage_bytes(first) if budget is None else budget,
            num_cached_layers=num_cached,
            compression="fit" if self.is_elastic else "none",
        )
