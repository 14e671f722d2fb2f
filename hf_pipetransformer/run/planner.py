"""The plans of one training: the first one, and one after each freeze."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..pipeline.devices import memory_budget
from ..pipeline.mesh import ProcessMesh
from ..planning.costs import UnitCost
from ..planning.elastic_policy import ElasticPolicy
from ..planning.plan import PipelinePlan
from ..planning.plan_choice import ScheduleChoice, choose_schedule, largest_stage_bytes
from ..planning.schedules import AUTO_SCHEDULE, GPIPE
from ..planning.unit_times import ModelTimes
from ..training_args import PipeTransformerTrainingArguments


class Planner:
    """Makes plans according to the training arguments. Creating it is collective over all processes.

    Args:
        args: the training arguments.
        unit_costs: the costs of the model's units.
        times: measured times, the same on every process; None if nothing was measured.
        mesh: the processes.
        may_replicate: whether freed devices may become replicas; False if the samples of a batch depend on one
            another.
        is_driven: whether the loss drives the pipeline: all forwards come first, as in GPipe, and each stage has
            layers that follow one another.
        autocasts: whether autocast computes in 16 bits, and keeps copies of weights.
    """

    def __init__(
        self,
        args: PipeTransformerTrainingArguments,
        unit_costs: Sequence[UnitCost],
        times: ModelTimes | None,
        mesh: ProcessMesh,
        may_replicate: bool = True,
        *,
        is_driven: bool = False,
        autocasts: bool = False,
    ) -> None:
        self._args = args
        self._schedule = GPIPE.name if is_driven else args.schedule_to_plan
        budgets = mesh.gather_objects(memory_budget(args.device, args.world_size))
        self._budget = min((budget for budget in budgets if budget is not None), default=None)
        self._policy = ElasticPolicy(
            args.pipeline_parallel_size,
            args.per_device_train_batch_size,
            args.elastic and may_replicate,
            self._budget,
            self._schedule,
            args.num_microbatches,
            args.replica_sharding,
            1 if is_driven else args.num_virtual_stages,
            autocasts,
        )
        self.first = self._policy.first(unit_costs, mesh.world_size, times)
        """The plan with which training begins."""
        self.num_cached = 0
        """Number of layers that the plan in force was asked to count as cached.

        The plan counts fewer of them if too few other layers are left.
        """

    @property
    def schedule_choice(self) -> ScheduleChoice | None:
        """What the schedule of the first plan was chosen from; None if it was given, or if there is one stage."""
        k = self.first.pipeline_parallel_size
        return choose_schedule(self.first, k) if self._schedule == AUTO_SCHEDULE and k > 1 else None

    def next(self, plan: PipelinePlan, num_frozen: int, num_cached: int) -> PipelinePlan:
        """Return the plan that follows `plan` when `num_frozen` layers are frozen and `num_cached` are cached."""
        self.num_cached = num_cached
        return self._policy.next(plan, self.first, num_frozen, num_cached)

    def facts_of(self, plan: PipelinePlan) -> dict[str, Any]:
        """Return a plan of this training, and the arguments it was made for, in plain values for JSON."""
        args = self._args
        return {
            "asked": [
                plan.world_size,
                args.pipeline_parallel_size,
                args.pipeline_schedule,
                args.num_microbatches,
                args.per_device_train_batch_size,
                args.elastic,
                "counts",  # earlier versions could also choose by measured times
                args.num_virtual_stages,
            ],
            "stages": plan.pipeline_parallel_size,
            "bounds": list(plan.stage_bounds),
            "num_frozen": plan.num_frozen_layers,
            "num_cached": plan.num_cached_layers,
            "counted_as_cached": self.num_cached,
            "schedule": plan.schedule,
            "virtual_stages": plan.virtual_pipeline_parallel_size,
        }

    def again(self, facts: Mapping[str, Any], most_frozen: int) -> PipelinePlan | None:
        """Restore the plan that `facts_of` has described in an earlier job.

        Returns:
            The plan; None if the arguments are different now, or if the plan freezes more than `most_frozen` layers or
            needs more memory than is available now.

        Raises:
            ValueError: they describe no plan.
        """
        if facts["asked"] != self.facts_of(self.first)["asked"] or facts["num_frozen"] > most_frozen:
            return None
        bounds = tuple(facts["bounds"])
        if bounds[-1] != self.first.num_units:
            return None
        try:
            plan = replace(
                self.first,
                pipeline_parallel_size=facts["stages"],
                data_parallel_size=self.first.world_size // facts["stages"],
                stage_bounds=bounds,
                # older checkpoints do not name the schedule, which was always given
                schedule=facts.get("schedule", self.first.schedule),
                virtual_pipeline_parallel_size=facts.get("virtual_stages", self.first.virtual_pipeline_parallel_size),
                num_frozen_layers=facts["num_frozen"],
                num_cached_layers=facts["num_cached"],
            )
        except ValueError as error:
            raise ValueError(
                f"trainer_state.json: stateful_callbacks.PipelineState.attributes.memory.layout is no plan: {error}"
            ) from error
        fits = self._budget is None or largest_stage_bytes(plan) <= max(self._budget, largest_stage_bytes(self.first))
        if not fits:
            return None
        self.num_cached = facts["counted_as_cached"]
        return plan
