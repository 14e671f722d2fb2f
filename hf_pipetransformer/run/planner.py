"""The planner of a training, from its arguments and the memory of its devices."""

from __future__ import annotations

from collections.abc import Sequence

from ..pipeline.devices import memory_budget
from ..pipeline.mesh import ProcessMesh
from ..planning.costs import UnitCost
from ..planning.planner import Planner, Request
from ..planning.unit_times import ModelTimes
from ..training_args import PipeTransformerTrainingArguments


def make_planner(
    args: PipeTransformerTrainingArguments,
    unit_costs: Sequence[UnitCost],
    mesh: ProcessMesh,
    times: ModelTimes | None = None,
    *,
    is_driven: bool = False,
    autocasts: bool = False,
) -> Planner:
    """Make the planner, the same on every process. Collective over all processes.

    Args:
        args: the training arguments.
        unit_costs: the costs of the model's units.
        mesh: the processes.
        times: measured times, the same on every process; None if nothing was measured.
        is_driven: whether the loss drives the pipeline.
        autocasts: whether autocast computes in 16 bits, and keeps copies of weights.
    """
    budgets = mesh.gather_objects(memory_budget(args.device, args.world_size))
    return Planner(
        unit_costs=tuple(unit_costs),
        times=times,
        memory_budget_bytes=min((budget for budget in budgets if budget is not None), default=None),
        autocasts=autocasts,
        world_size=mesh.world_size,
        request=Request(
            args.pipeline_parallel_size,
            args.per_device_train_batch_size,
            args.elastic,
            args.pipeline_schedule,
            args.num_microbatches,
            args.replica_sharding,
            args.num_virtual_stages,
            is_driven,
        ),
    )
