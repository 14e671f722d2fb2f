"""`replica_sharding="auto"`: how many stages, and whether their replicas divide the optimizer state.

    K = 1   none | optimizer ─┐
    K = 2   none | optimizer ─┤   of each K the least sharding    of these the shortest pipeline
    K = 4   none | optimizer ─┤   that fits
    K = 8   one replica: none ┘

Memory decides and not time: sharding moves as much and saves no time but that of the optimizer, and predictions count
DDP's reduction as if nothing hid it.

The choice is made once, for the plan that a training begins with. When layers freeze and K falls, the replicas that
are added divide the same (`replan` leaves `replica_sharding` as it is). One replica has nothing to divide, so `"none"`
is chosen, and nothing is divided when replicas are added later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .plan import MIB, REPLICA_SHARDINGS, PipelinePlan
from .plan_choice import fits, largest_stage_bytes, lengths, make_plan

if TYPE_CHECKING:
    from .costs import UnitCost

AUTO = "auto"
"""The name with which the sharding is chosen."""


@dataclass(frozen=True)
class ShardingChoice:
    """The plan that a training begins with, and what it was chosen from.

    Attributes:
        plan: the chosen plan; its `replica_sharding` is a name of `REPLICA_SHARDINGS`.
        considered: for each number of stages, in ascending order, the plan with the least sharding that fits, or if
            none fits, the one that needs least memory.
    """

    plan: PipelinePlan
    considered: tuple[PipelinePlan, ...]


def choose_sharding(
    unit_costs: Sequence[UnitCost],
    world_size: int,
    pipeline_parallel_size: int | Literal["auto"],
    **arguments: Any,
) -> ShardingChoice:
    """Choose what replicas divide, and the number of stages if that is "auto".

    Args:
        unit_costs: costs of the model's units.
        world_size: number of ranks.
        pipeline_parallel_size: number of stages K, or "auto".
        **arguments: as for `make_plan`, which makes the plans.

    Raises:
        ValueError: under the same conditions as `make_plan`, or if K is "auto" and nothing fits.
    """
    auto = pipeline_parallel_size == "auto"
    ks = lengths(world_size, min(world_size, len(unit_costs))) if auto else (pipeline_parallel_size,)
    considered = tuple(_least_sharding(unit_costs, world_size, k, **arguments) for k in ks)
    shortest = next(filter(fits, considered), None if auto else considered[0])
    if shortest is not None:
        return ShardingChoice(shortest, considered)
    smallest = min(considered, key=largest_stage_bytes)
    assert smallest.memory_budget_bytes is not None
    raise ValueError(
        "pipeline_parallel_size and replica_sharding are 'auto', but no pipeline fits: the smallest, with"
        f" {smallest.pipeline_parallel_size} stages and replica_sharding={smallest.replica_sharding!r}, still needs"
        f" {largest_stage_bytes(smallest) / MIB:,.0f} MiB, but a device has"
        f" {smallest.memory_budget_bytes / MIB:,.0f} MiB. Use more devices, reduce per_device_train_batch_size (now"
        f" {smallest.rows_per_device}), enable gradient checkpointing, or freeze parameters."
    )


def _least_sharding(
    unit_costs: Sequence[UnitCost], world_size: int, k: int | Literal["auto"], **arguments: Any
) -> PipelinePlan:
    """Return the plan of K stages with the least sharding that fits, or the one that needs least memory."""
    plans = [make_plan(unit_costs, world_size, k, replica_sharding=each, **arguments) for each in REPLICA_SHARDINGS]
    return next(filter(fits, plans), min(plans, key=largest_stage_bytes))
