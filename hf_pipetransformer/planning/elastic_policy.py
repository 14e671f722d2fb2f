"""The rules for the first plan of a training and for the plans that follow when layers are frozen or cached.

A running training (`run.planner`) and a forecast use the same policy, so they make the same plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .plan import PipelinePlan
from .plan_choice import largest_stage_bytes, make_plan, replan
from .sharding_choice import AUTO, ShardingChoice, choose_sharding

if TYPE_CHECKING:
    from .costs import UnitCost
    from .unit_times import ModelTimes


@dataclass(frozen=True)
class ElasticPolicy:
    """What the user has requested and what a device offers. Pure: the same on every process.

    Args:
        pipeline_parallel_size: K at the start, or "auto".
        rows_per_device: samples per device and step.
        is_elastic: whether freezing may shorten the pipeline and turn the freed devices into replicas; otherwise only
            the split into stages changes.
        memory_budget_bytes: bytes that a stage may take on a device; None if unknown, and then every stage fits.
        schedule: name of the schedule, or "auto", with which it and the number of virtual stages are chosen once, for
            the first plan, and kept by the plans that follow (`plan_choice.choose_schedule`).
        num_microbatches: micro-batches per step and pipeline, or "auto".
        replica_sharding: what the replicas of a stage divide among them, or "auto", with which it is chosen once, for
            the first plan, and kept by the plans that follow (`sharding_choice`).
        virtual_pipeline_parallel_size: virtual stages per stage of an interleaved schedule.
        autocasts: whether autocast computes in 16 bits, and keeps copies of weights.
    """

    pipeline_parallel_size: int | Literal["auto"]
    rows_per_device: int
    is_elastic: bool
    memory_budget_bytes: int | None
    schedule: str = "1f1b"
    num_microbatches: int | Literal["auto"] = "auto"
    replica_sharding: str = "none"
    virtual_pipeline_parallel_size: int = 1
    autocasts: bool = False

    def first(self, unit_costs: Sequence[UnitCost], world_size: int, times: ModelTimes | None) -> PipelinePlan:
        """Make the plan that the training begins with.

        Args:
            unit_costs: costs of the model's units.
            world_size: number of devices.
            times: times of the model's parts, from which steps are predicted; None if there are none.

        Raises:
            ValueError: under the same conditions as `make_plan`.
        """
        if self.replica_sharding == AUTO:
            return self.choose_sharding(unit_costs, world_size, times).plan
        return make_plan(
            unit_costs,
            world_size,
            self.pipeline_parallel_size,
            replica_sharding=self.replica_sharding,
            **self._arguments(times),
        )

    def choose_sharding(
        self, unit_costs: Sequence[UnitCost], world_size: int, times: ModelTimes | None
    ) -> ShardingChoice:
        """Choose what replicas divide, whatever `replica_sharding` says, and the number of stages if that is "auto".

        Args:
            unit_costs: costs of the model's units.
            world_size: number of devices.
            times: times of the model's parts; None if there are none.

        Raises:
            ValueError: under the same conditions as there.
        """
        return choose_sharding(unit_costs, world_size, self.pipeline_parallel_size, **self._arguments(times))

    def _arguments(self, times: ModelTimes | None) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "num_microbatches": self.num_microbatches,
            "rows_per_device": self.rows_per_device,
            "memory_budget_bytes": self.memory_budget_bytes,
            "times": times,
            "virtual_pipeline_parallel_size": self.virtual_pipeline_parallel_size,
            "autocasts": self.autocasts,
        }

    def next(self, plan: PipelinePlan, first: PipelinePlan, num_frozen: int, num_cached: int) -> PipelinePlan:
        """Make the plan that follows another one.

        If K was chosen by the memory of a device, a stage may take all of that memory. If the user has chosen K, that
        choice shows what a device can hold: no more than the largest stage at the start.

        Args:
            plan: the plan in force.
            first: the plan that the training began with.
            num_frozen: number of layers that are frozen from now on.
            num_cached: number of these whose outputs come from the cache.
        """
        budget = self.memory_budget_bytes if self.pipeline_parallel_size == "auto" else None
        return replan(
            plan,
            num_frozen,
            largest_stage_bytes(first) if budget is None else budget,
            num_cached_layers=num_cached,
            is_elastic=self.is_elastic,
        )
