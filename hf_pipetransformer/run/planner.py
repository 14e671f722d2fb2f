"""The plans of one training: the first, and those after each freeze."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..pipeline.devices import memory_budget
from ..pipeline.mesh import ProcessMesh
from ..planning.costs import UnitCost
from ..planning.elastic_policy import ElasticPolicy
from ..planning.plan import PipelinePlan
from ..planning.plan_choice import largest_stage_bytes
from ..planning.unit_times import ModelTimes
from ..training_args import PipeTransformerTrainingArguments


class Planner:
    """Makes the plans that the arguments ask for. Collective over all processes when it is made.

    Args:
        args: of the training.
        unit_costs: of the model.
        times: measured, the same on every process; None: go by FLOPs.
        mesh: the processes.
        may_replicate: freed devices may become replicas; not where the rows of a batch depend on one another.
    """

    def __init__(
        self,
        args: PipeTransformerTrainingArguments,
        unit_costs: Sequence[UnitCost],
        times: ModelTimes | None,
        mesh: ProcessMesh,
        may_replicate: bool = True,
    ) -> None:
        self._args = args
        budgets = mesh.gather_objects(memory_budget(args.device, args.world_size))
        self._budget = min((budget for budget in budgets if budget is not None), default=None)
        self.times = times
        self._policy = ElasticPolicy(
            args.pipeline_parallel_size,
            args.per_device_train_batch_size,
            args.elastic and may_replicate,
            self._budget,
            args.pipeline_schedule,
            args.num_microbatches,
        )
        self.first = self._policy.first(unit_costs, mesh.world_size, times)
        """The plan to begin with."""
        self.num_cached = 0
        """Layers that were to count as cached when the plan in force was made; fewer do where too few others are
        left."""

    def next(self, plan: PipelinePlan, num_frozen: int, num_cached: int) -> PipelinePlan:
        """The plan that follows `plan` when so many layers are frozen and cached."""
        self.num_cached = num_cached
        return self._policy.next(plan, self.first, num_frozen, num_cached)

    def facts_of(self, plan: PipelinePlan) -> dict[str, Any]:
        """A plan of this training in plain values for JSON, and what it was made for."""
        args = self._args
        return {
            "asked": [
                plan.world_size,
                args.pipeline_parallel_size,
                args.pipeline_schedule,
                args.num_microbatches,
                args.per_device_train_batch_size,
                args.elastic,
            ],
            "bounds": list(plan.stage_bounds),
            "num_frozen": plan.num_frozen_layers,
            "num_cached": plan.num_cached_layers,
        }

    def again(self, facts: Mapping[str, Any], most_frozen: int) -> PipelinePlan | None:
        """The plan of which `facts_of` has told, in an earlier job.

        None if something else is asked for now, it freezes more than `most_frozen` layers, or takes more memory than
        there is now.
        """
        if facts["asked"] != self.facts_of(self.first)["asked"] or facts["num_frozen"] > most_frozen:
            return None
        bounds = tuple(facts["bounds"])
        if bounds[-1] != self.first.num_units:
            return None
        plan = replace(
            self.first,
            pipeline_parallel_size=len(bounds) - 1,
            data_parallel_size=self.first.world_size // (len(bounds) - 1),
            stage_bounds=bounds,
            num_frozen_layers=facts["num_frozen"],
            num_cached_layers=facts["num_cached"],
        )
        fits = self._budget is None or largest_stage_bytes(plan) <= max(self._budget, largest_stage_bytes(self.first))
        if not fits:
            return None
        self.num_cached = facts["counted_as_cached"]
        return plan
