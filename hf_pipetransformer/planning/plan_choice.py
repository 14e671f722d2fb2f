"""AutoPipe: choose the split into stages and the number of stages (PipeTransformer, ICML 2021, section 3.2).

    make_plan         before training: K as requested, or the shortest pipeline that fits
    choose_schedule   for make_plan, at each K: the schedule with the shortest step, simpler ones preferred
    replan            after more layers are frozen: pipeline compression, then the split; the schedule stays

All are pure functions: the same arguments give the same plan on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from .costs import step_flops, unit_flops
from .partition import balance_holders, check_pipeline_size, split_min_max
from .plan import MIB, PipelinePlan
from .schedules import AUTO_SCHEDULE, INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE_V, schedule_named
from .timeline import simulate

if TYPE_CHECKING:
    from .costs import UnitCost
    from .unit_times import ModelTimes

SCHEDULES_TO_CHOOSE_FROM = (
    (ONE_F_ONE_B.name, 1),
    (INTERLEAVED.name, 2),
    (INTERLEAVED.name, 3),
    (ZERO_BUBBLE_V.name, 2),
)
"""Schedules and their virtual stages per stage, from the simplest to the one of which the simulation leaves out most:
of a split backward, weights of linear layers are taken to be half, always. GPipe takes as long as 1F1B, and more
memory."""

WORTH_A_FURTHER_SCHEDULE = 0.1
"""Fraction by which each of these schedules must be predicted to be faster than the one before (`choose_schedule`)."""


def make_plan(
    unit_costs: Sequence[UnitCost],
    world_size: int,
    pipeline_parallel_size: int | Literal["auto"],
    *,
    schedule: str = "1f1b",
    num_microbatches: int | Literal["auto"] = "auto",
    rows_per_device: int,
    memory_budget_bytes: int | None,
    num_frozen_layers: int = 0,
    num_cached_layers: int = 0,
    times: ModelTimes | None = None,
    replica_sharding: str = "none",
    virtual_pipeline_parallel_size: int = 1,
    autocasts: bool = False,
) -> PipelinePlan:
    """Make the plan: choose K if that is requested, and split the units by their cost in a step.

    With `"auto"`, the planner considers the pipelines whose largest stage fits the memory of a device, and takes the
    shortest one: it idles least and leaves most replicas. Without a known budget every pipeline is assumed to fit.

    Args:
        unit_costs: Cost of each unit in execution order.
        world_size: Number of ranks.
        pipeline_parallel_size: Number of stages K, or `"auto"`.
        schedule: name of the schedule, or `"auto"` to choose it and V for each K considered (`choose_schedule`).
        num_microbatches: Micro-batches per step and pipeline, or `"auto"`.
        rows_per_device: Samples per device and step; a pipeline's batch has K times as many.
        memory_budget_bytes: Bytes that a device has for training, or None if unknown. Used for `"auto"` only.
        num_frozen_layers: f, the number of units at the bottom that are frozen.
        num_cached_layers: c <= f, the number of these whose outputs are cached.
        times: Times measured on this machine, used to predict steps.
        replica_sharding: what the replicas of a stage divide among them.
        virtual_pipeline_parallel_size: Virtual stages per stage V of an interleaved schedule, if there are units for
            so many.
        autocasts: Whether autocast computes in 16 bits, and keeps copies of weights.

    Raises:
        ValueError: If K does not divide the world size or exceeds the number of units, a number is too small, a name
            is unknown, or `"auto"` finds no K that fits.
    """
    units = tuple(unit_costs)
    whole = PipelinePlan(
        world_size=world_size,
        pipeline_parallel_size=1,
        data_parallel_size=world_size,
        stage_bounds=(0, len(units)),
        schedule=ONE_F_ONE_B.name if schedule == AUTO_SCHEDULE else schedule,
        num_microbatches=None if num_microbatches == "auto" else num_microbatches,
        unit_costs=units,
        num_frozen_layers=num_frozen_layers,
        num_cached_layers=num_cached_layers,
        rows_per_device=rows_per_device,
        times=times,
        memory_budget_bytes=memory_budget_bytes,
        replica_sharding=replica_sharding,
        virtual_pipeline_parallel_size=virtual_pipeline_parallel_size,
        autocasts=autocasts,
    )

    def in_stages(k: int) -> PipelinePlan:
        return choose_schedule(whole, k).chosen.plan if schedule == AUTO_SCHEDULE else _with_stages(whole, k)

    if pipeline_parallel_size != "auto":
        return in_stages(pipeline_parallel_size)
    candidates = [in_stages(k) for k in lengths(world_size, min(world_size, len(units)))]
    shortest = next(filter(fits, candidates), None)
    if shortest is not None:
        return shortest
    assert memory_budget_bytes is not None
    raise ValueError(
        f"pipeline_parallel_size is 'auto', but no pipeline fits: with {candidates[-1].pipeline_parallel_size} stages"
        f" the largest stage still needs {largest_stage_bytes(candidates[-1]) / MIB:,.0f} MiB, but a device has"
        f" {memory_budget_bytes / MIB:,.0f} MiB. Use more devices, reduce per_device_train_batch_size (now"
        f" {rows_per_device}), enable gradient checkpointing, or freeze parameters."
    )


@dataclass(frozen=True)
class ConsideredSchedule:
    """A plan with one of the schedules to choose from.

    Attributes:
        plan: the plan.
        fits: whether its largest stage fits a device.
        step: predicted time of a step in relation to the same plan with 1F1B.
        weighed: this, increased by `WORTH_A_FURTHER_SCHEDULE` for each simpler schedule.
    """

    plan: PipelinePlan
    fits: bool
    step: float
    weighed: float


@dataclass(frozen=True)
class ScheduleChoice:
    """A chosen schedule, and what it was chosen from.

    Attributes:
        chosen: the chosen one of those that were considered.
        considered: those of `SCHEDULES_TO_CHOOSE_FROM` for which there are units, in this order; with one stage only
            the first.
    """

    chosen: ConsideredSchedule
    considered: tuple[ConsideredSchedule, ...]


def choose_schedule(plan: PipelinePlan, k: int) -> ScheduleChoice:
    """Choose the schedule, and with it the number of virtual stages per stage, for a pipeline of K stages.

    It is the one with the least weighed step of those that fit, or the first where none fits. Steps are simulated with
    the number of micro-batches that each plan has, by FLOPs, which are the same in every run.

    Steps are weighed because the simulation leaves out what further virtual stages cost: messages, splitting a
    backward, and the calls of each part. On two CPU processes (MiniLM-L6, M = 4; medians of
    docs/benchmarks.md, which scatter by about 0.05) a step took, in relation to 1F1B:

                    predicted by FLOPs   measured   chosen if predicted below
        V = 2       0.89                 0.92       0.91
        V = 3       0.87                 0.95       0.83
        ZBV         0.87                 0.92       0.75

    Args:
        plan: Any plan of the model and ranks; its schedule and number of stages are not considered.
        k: Number of stages K.
    """
    whole = _in_one_stage(plan)
    considered: list[ConsideredSchedule] = []
    first = 0.0
    for simpler, (schedule, v) in enumerate(SCHEDULES_TO_CHOOSE_FROM):
        each = _with_stages(replace(whole, schedule=schedule, virtual_pipeline_parallel_size=v), k)
        if each.num_virtual_stages < v:
            continue  # too few units
        flops = predicted_flops(each)
        first = first or flops
        step = flops / first if first else 1.0
        weighed = round(step * (1 + WORTH_A_FURTHER_SCHEDULE) ** simpler, 9)  # so that rounding decides nothing
        considered.append(ConsideredSchedule(each, fits(each), step, weighed))
    fitting = [each for each in considered if each.fits] or considered[:1]
    return ScheduleChoice(min(fitting, key=lambda each: each.weighed), tuple(considered))


def replan(
    plan: PipelinePlan,
    num_frozen_layers: int,
    memory_budget_bytes: int,
    *,
    num_cached_layers: int = 0,
    is_elastic: bool = True,
) -> PipelinePlan:
    """Make the plan that follows `plan` when more layers are frozen: pipeline compression, then the split.

    K never grows. Of the shorter pipelines whose largest stage fits, the shortest one is taken.

    Args:
        plan: The plan in force.
        num_frozen_layers: The new f, not less than before.
        memory_budget_bytes: Bytes that a stage may take. The paper's criterion is the largest stage at the start of
            training, `largest_stage_bytes(start)`.
        num_cached_layers: The new c; it may also fall, when the cache is disabled.
        is_elastic: Whether K may fall; otherwise only the split changes.

    Raises:
        ValueError: If a number is out of range.
    """
    # first with one stage, for which any number of layers may be cached; then split
    frozen = replace(_in_one_stage(plan), num_frozen_layers=num_frozen_layers, num_cached_layers=num_cached_layers)
    same_length = _with_stages(frozen, plan.pipeline_parallel_size)
    if not is_elastic:
        return same_length
    shorter = (_with_stages(frozen, k) for k in lengths(plan.world_size, plan.pipeline_parallel_size - 1))
    return next((each for each in shorter if largest_stage_bytes(each) <= memory_budget_bytes), same_length)


def largest_stage_bytes(plan: PipelinePlan) -> int:
    """Predict the bytes that the largest stage of a plan takes in training."""
    rows = plan.rows_per_pipeline
    m = plan.num_microbatches_for(rows)
    return max(plan.stage_bytes(stage, rows=rows, num_microbatches=m) for stage in range(plan.pipeline_parallel_size))


def fits(plan: PipelinePlan) -> bool:
    """Whether the stages of a plan are predicted to fit its devices; they do where the budget is unknown."""
    return plan.memory_budget_bytes is None or largest_stage_bytes(plan) <= plan.memory_budget_bytes


def largest_bytes_with_whole_model(plan: PipelinePlan, model_bytes: int) -> int:
    """Predict the bytes that the largest stage takes if its process gets the other stages' weights as well.

    Args:
        plan: the plan.
        model_bytes: bytes of the parameters of the whole model.
    """
    rows = plan.rows_per_pipeline
    m = plan.num_microbatches_for(rows)
    stages = range(plan.pipeline_parallel_size)
    return model_bytes + max(
        plan.stage_bytes(stage, rows=rows, num_microbatches=m) - plan.parameter_bytes_of(stage) for stage in stages
    )


def _in_one_stage(plan: PipelinePlan) -> PipelinePlan:
    return replace(
        plan, pipeline_parallel_size=1, data_parallel_size=plan.world_size, stage_bounds=(0, plan.num_units)
    )


def _with_stages(plan: PipelinePlan, k: int) -> PipelinePlan:
    """Return the plan with K stages, split anew.

    Each stage has as many virtual stages as requested, or as many as the units that are not cached allow.
    """
    check_pipeline_size(plan.world_size, k, plan.num_units)
    left = (plan.num_units - plan.num_cached_layers) // k
    v = max(1, min(plan.virtual_pipeline_parallel_size, left)) if k > 1 else 1
    costs = step_flops(plan.unit_costs, plan.num_frozen_layers, plan.num_cached_layers)
    # the first virtual stage holds all cached units; if too few units are left for the others, fewer count as cached
    first = min(plan.num_cached_layers, plan.num_units - k * v)
    placement = schedule_named(plan.schedule).placement(k, v)
    bounds = balance_holders(
        split_min_max(costs[first:], k * v), costs[first:], [placement.held_by(stage) for stage in range(k)]
    )
    return replace(
        plan,
        pipeline_parallel_size=k,
        data_parallel_size=plan.world_size // k,
        stage_bounds=(0, *(first + bound for bound in bounds[1:])),
        num_cached_layers=plan.num_cached_layers if k == 1 else first,
    )


def lengths(world_size: int, longest: int) -> list[int]:
    """Return the possible numbers of stages up to `longest`, ascending."""
    return [k for k in range(1, longest + 1) if world_size % k == 0]


def predicted_flops(plan: PipelinePlan) -> float:
    """Simulate a step on a full batch, in FLOPs instead of seconds, with the number of micro-batches it has."""
    m = plan.num_microbatches_for(plan.rows_per_pipeline)
    rows = plan.rows_per_pipeline / m
    flops = unit_flops(plan.unit_costs, plan.num_frozen_layers, plan.num_cached_layers)
    forward, backward = (
        [rows * sum(each[start:stop]) for start, stop in pairwise(plan.stage_bounds)]
        for each in zip(*flops, strict=True)
    )
    return simulate(forward, backward, m, plan.schedule, plan.num_virtual_stages).seconds
