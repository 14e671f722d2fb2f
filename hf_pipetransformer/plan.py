"""The plan: which stage holds which units, and how many pipelines run side by side.

A `PipelinePlan` is an immutable value made once by `make_plan` and passed to every other part.

    rank = replica * K + stage            world 8, K = 4, R = 2

                stage 0   stage 1   stage 2   stage 3
    replica 0   rank 0    rank 1    rank 2    rank 3
    replica 1   rank 4    rank 5    rank 6    rank 7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from .partition import MICROBATCHES_PER_STAGE, check_schedule, choose_num_microbatches, split_min_max

if TYPE_CHECKING:
    from .costs import UnitCost

MIB = 2**20

ADAM_BYTES_PER_PARAMETER_BYTE = 2.0
"""Two moments of the parameter's own precision (fp32 parameters: 8 bytes of state to 4 bytes)."""


@dataclass(frozen=True)
class PipelinePlan:
    """How a model runs on the ranks: K stages × R replicas, and which units each stage holds.

    Args:
        world_size: Number of ranks, K * R.
        pipeline_parallel_size: Number of stages K.
        data_parallel_size: Number of pipelines R.
        stage_bounds: `(0, ..., L)`, length K + 1; stage s holds the units `[stage_bounds[s], stage_bounds[s + 1])`.
        schedule: `"1f1b"` or `"gpipe"`.
        num_microbatches: Micro-batches per step and pipeline as asked for, or None to choose by the
            rows of each batch (`choose_num_microbatches`).
        unit_costs: Cost of each of the L units, in execution order.
        num_frozen_layers: f; the first f units run forward only, and their parameters have neither gradients nor
            optimizer state. A stage may consist of frozen units alone.

    Raises:
        ValueError: If the numbers contradict one another.
    """

    world_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    stage_bounds: tuple[int, ...]
    schedule: str
    num_microbatches: int | None
    unit_costs: tuple[UnitCost, ...] = field(repr=False, hash=False)
    num_frozen_layers: int = 0

    def __post_init__(self) -> None:
        k, num_units = self.pipeline_parallel_size, len(self.unit_costs)
        _check_pipeline_size(self.world_size, k, num_units)
        if self.data_parallel_size != self.world_size // k:
            raise ValueError(
                f"data_parallel_size is {self.data_parallel_size}, but {self.world_size} ranks in pipelines of {k} "
                f"form {self.world_size // k} pipelines: set it to {self.world_size // k}."
            )
        bounds = self.stage_bounds
        if (
            len(bounds) != k + 1
            or (bounds[0], bounds[-1]) != (0, num_units)
            or any(b <= a for a, b in pairwise(bounds))
        ):
            raise ValueError(
                f"stage_bounds is {bounds}, but {k} stages of {num_units} units need {k + 1} strictly increasing "
                f"bounds from 0 to {num_units}: use split_min_max(costs, {k})."
            )
        check_schedule(self.schedule)
        _check_num_microbatches(self.num_microbatches)
        if not 0 <= self.num_frozen_layers <= num_units:
            raise ValueError(
                f"num_frozen_layers is {self.num_frozen_layers}, but must be between 0 and {num_units}, the number of"
                " units."
            )

    # -- who is where ----------------------------------------------------------------------------------------

    @property
    def num_units(self) -> int:
        """Number of units L."""
        return len(self.unit_costs)

    def stage_of(self, rank: int) -> int:
        """Return the stage that a rank runs."""
        return self._checked("rank", rank, self.world_size) % self.pipeline_parallel_size

    def replica_of(self, rank: int) -> int:
        """Return the pipeline (replica) that a rank belongs to."""
        return self._checked("rank", rank, self.world_size) // self.pipeline_parallel_size

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold the same stage, one per pipeline: a data-parallel group."""
        self._checked("stage", stage, self.pipeline_parallel_size)
        return tuple(range(stage, self.world_size, self.pipeline_parallel_size))

    def ranks_of_pipeline(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of one pipeline in stage order."""
        self._checked("replica", replica, self.data_parallel_size)
        first = replica * self.pipeline_parallel_size
        return tuple(range(first, first + self.pipeline_parallel_size))

    def units_of(self, stage: int) -> range:
        """Return the units that a stage holds."""
        self._checked("stage", stage, self.pipeline_parallel_size)
        return range(self.stage_bounds[stage], self.stage_bounds[stage + 1])

    # -- what it costs ---------------------------------------------------------------------------------------

    def bubble_fraction(self, num_microbatches: int) -> float:
        """Return the share of a step in which a stage idles, (K - 1) / (M + K - 1), for equal stages.

        Args:
            num_microbatches: Micro-batches per step M.

        Raises:
            ValueError: If M is below 1.
        """
        _check_num_microbatches(num_microbatches)
        return (self.pipeline_parallel_size - 1) / (num_microbatches + self.pipeline_parallel_size - 1)

    def step_flops_of(self, stage: int) -> float:
        """Return the FLOPs of one row in a stage in a training step: frozen units run forward only."""
        return sum(step_flops(self.unit_costs, self.num_frozen_layers)[unit] for unit in self.units_of(stage))

    def forward_flops_of(self, stage: int) -> float:
        """Return the forward FLOPs of one row in a stage."""
        return sum(self.unit_costs[unit].forward_flops for unit in self.units_of(stage))

    def parameter_bytes_of(self, stage: int) -> int:
        """Return the bytes of a stage's parameters; one that several of its units need counts once."""
        parameters: dict[str, int] = {}
        for unit in self.units_of(stage):
            parameters.update(self.unit_costs[unit].parameters)
        return sum(parameters.values())

    def microbatches_in_flight(self, stage: int, num_microbatches: int) -> int:
        """Return of how many micro-batches a stage keeps activations at once.

        GPipe keeps all M. Under 1F1B stage s keeps K - s; with fewer than K micro-batches 1F1B falls back to GPipe.
        """
        self._checked("stage", stage, self.pipeline_parallel_size)
        _check_num_microbatches(num_microbatches)
        if self.schedule == "gpipe" or num_microbatches < self.pipeline_parallel_size:
            return num_microbatches
        return self.pipeline_parallel_size - stage

    def stage_bytes(
        self,
        stage: int,
        *,
        rows: int,
        num_microbatches: int,
        optimizer_bytes_per_parameter_byte: float = ADAM_BYTES_PER_PARAMETER_BYTE,
    ) -> int:
        """Predict the bytes that training a stage takes on its device.

        Parameters + gradients + optimizer state + activations of the micro-batches in flight + what is
        received from the neighbours (PyTorch allocates that for all micro-batches at once). The allocator's
        waste, workspaces and communication buffers are not in it.

        Args:
            stage: The stage.
            rows: Rows of the batch of one pipeline and step.
            num_microbatches: Micro-batches per step M.
            optimizer_bytes_per_parameter_byte: Bytes of optimizer state per byte of trainable parameter;
                Adam 2, SGD with momentum 1, SGD 0.

        Raises:
            ValueError: If a number is below its least value or M does not divide the rows.
        """
        _check_num_microbatches(num_microbatches)
        if rows < 1 or rows % num_microbatches:
            raise ValueError(
                f"rows is {rows} and num_microbatches {num_microbatches}, but micro-batches have one size: "
                f"choose a divisor of the rows, for instance by choose_num_microbatches."
            )
        if optimizer_bytes_per_parameter_byte < 0:
            raise ValueError(
                f"optimizer_bytes_per_parameter_byte is {optimizer_bytes_per_parameter_byte}, but must be at least 0."
            )
        active = [self.unit_costs[unit] for unit in self.units_of(stage) if unit >= self.num_frozen_layers]
        parameters = self.parameter_bytes_of(stage)
        # A trainable parameter of several units of this stage appears in the sum more than once, but in memory once.
        trainable = min(sum(unit.trainable_bytes for unit in active), parameters)
        rows_in_flight = self.microbatches_in_flight(stage, num_microbatches) * rows // num_microbatches
        activations = sum(unit.activation_bytes for unit in active) * rows_in_flight
        received = 0
        if stage > 0:
            received += self.unit_costs[self.stage_bounds[stage] - 1].boundary_bytes * rows
        if stage < self.pipeline_parallel_size - 1:
            received += self.unit_costs[self.stage_bounds[stage + 1] - 1].boundary_bytes * rows
        state = round(trainable * (1 + optimizer_bytes_per_parameter_byte))
        return parameters + state + activations + received

    def __str__(self) -> str:
        """Return a table of the stages: units, memory of parameters and activations, share of the FLOPs."""
        k, r = self.pipeline_parallel_size, self.data_parallel_size
        total_flops = sum(step_flops(self.unit_costs, self.num_frozen_layers))
        rows = [("stage", "units", "first unit", "parameters MiB", "activations MiB/row", "FLOPs %")]
        for stage in range(k):
            units = self.units_of(stage)
            flops = self.step_flops_of(stage)
            rows.append(
                (
                    str(stage),
                    f"{units.start}-{units.stop - 1}" if len(units) > 1 else str(units.start),
                    self.unit_costs[units.start].name,
                    f"{self.parameter_bytes_of(stage) / MIB:,.1f}",
                    f"{sum(self.unit_costs[unit].activation_bytes for unit in units) / MIB:,.2f}",
                    f"{100 * flops / total_flops:.1f}" if total_flops else "-",
                )
            )
        head = (
            f"{k} stage{_s(k)} × {r} pipeline{_s(r)} = {self.world_size} rank{_s(self.world_size)}, "
            f"{self.num_units} unit{_s(self.num_units)}"
            + (f", {self.num_frozen_layers} frozen" if self.num_frozen_layers else "")
        )
        return "\n".join((head, *align(rows, left=(1, 2)), self._describe_schedule()))

    def _describe_schedule(self) -> str:
        """Return the line about schedule, micro-batches and bubble."""
        if self.pipeline_parallel_size == 1:
            return "no schedule, no bubble (one stage)"
        if self.num_microbatches is not None:
            m, how = self.num_microbatches, f"up to {self.num_microbatches} micro-batches"
        else:
            m = MICROBATCHES_PER_STAGE * self.pipeline_parallel_size
            how = f"micro-batches chosen by the rows, preferably {m}"
        return f"schedule {self.schedule}, {how}; bubble {100 * self.bubble_fraction(m):.1f} % at {m}"

    @staticmethod
    def _checked(field_name: str, value: int, number: int) -> int:
        if not 0 <= value < number:
            raise ValueError(f"{field_name} is {value}, but must be between 0 and {number - 1} in this plan.")
        return value


def make_plan(
    unit_costs: Sequence[UnitCost],
    world_size: int,
    pipeline_parallel_size: int | Literal["auto"],
    *,
    schedule: str = "1f1b",
    num_microbatches: int | Literal["auto"] = "auto",
    rows_per_pipeline_device: int,
    memory_budget_bytes: int | None,
    num_frozen_layers: int = 0,
) -> PipelinePlan:
    """Make the plan: choose K where that is asked for, and split the units by their FLOPs.

    AutoPipe's load balancing (PipeTransformer, ICML 2021, section 3.2). `"auto"` takes the smallest K whose
    largest stage fits the memory of a device, because a shorter pipeline idles less and leaves more
    replicas. Without a known budget everything is taken to fit: K = 1.

    A pure function: the same arguments give the same plan on every rank.

    Args:
        unit_costs: Cost of each unit in execution order.
        world_size: Number of ranks.
        pipeline_parallel_size: Number of stages K, or `"auto"`.
        schedule: `"1f1b"` or `"gpipe"`.
        num_microbatches: Micro-batches per step and pipeline, or `"auto"`.
        rows_per_pipeline_device: Rows per device and step; a pipeline's batch has K times as many.
        memory_budget_bytes: Bytes that a device has for training, or None if unknown. Looked at for `"auto"` only.
        num_frozen_layers: f, the units at the bottom that are frozen.

    Raises:
        ValueError: If K does not divide the world or exceeds the number of units, a number is too small,
            the schedule is unknown, or `"auto"` finds no K that fits.
    """
    units = tuple(unit_costs)
    requested = None if num_microbatches == "auto" else num_microbatches
    if rows_per_pipeline_device < 1:
        raise ValueError(
            f"rows_per_pipeline_device is {rows_per_pipeline_device}, but at least 1 row is needed: "
            f"raise per_device_train_batch_size."
        )

    def plan_of(k: int) -> PipelinePlan:
        _check_pipeline_size(world_size, k, len(units))
        bounds = split_min_max(step_flops(units, num_frozen_layers), k)
        return PipelinePlan(world_size, k, world_size // k, bounds, schedule, requested, units, num_frozen_layers)

    if pipeline_parallel_size != "auto":
        return plan_of(pipeline_parallel_size)
    if memory_budget_bytes is None:
        return plan_of(1)

    _check_pipeline_size(world_size, 1, len(units))
    candidates = [k for k in range(1, min(world_size, len(units)) + 1) if world_size % k == 0]
    needed = 0
    for k in candidates:
        plan = plan_of(k)
        rows = rows_per_pipeline_device * k
        m = choose_num_microbatches(rows, k, requested, schedule)
        needed = max(plan.stage_bytes(stage, rows=rows, num_microbatches=m) for stage in range(k))
        if needed <= memory_budget_bytes:
            return plan
    raise ValueError(
        f"pipeline_parallel_size is 'auto', but no pipeline fits: with {candidates[-1]} stages the largest still "
        f"needs {needed / MIB:,.0f} MiB, and a device has {memory_budget_bytes / MIB:,.0f} MiB. Use more devices, a "
        f"smaller per_device_train_batch_size (now {rows_per_pipeline_device}), gradient checkpointing, or freeze "
        f"parameters."
    )


def step_flops(unit_costs: Sequence[UnitCost], num_frozen_layers: int) -> list[float]:
    """Return the FLOPs of each unit in a training step: a backward costs two forwards, a frozen unit has none."""
    return [unit.forward_flops * (1 if index < num_frozen_layers else 3) for index, unit in enumerate(unit_costs)]


def replan(
    plan: PipelinePlan,
    num_frozen_layers: int,
    start: PipelinePlan,
    rows_per_pipeline_device: int,
    compress: bool = True,
) -> PipelinePlan:
    """Make the plan that follows `plan` once more layers are frozen: pipeline compression, then the split.

    PipeTransformer, ICML 2021, section 3.2: K falls as soon as the largest stage of a shorter pipeline needs no more
    memory than the largest stage did at the start. Of the K that fit, the shortest is taken: what is left idles least,
    and the freed devices become replicas.

    A pure function: the same arguments give the same plan on every rank.

    Args:
        plan: The plan in force.
        num_frozen_layers: f from now on, not less than before.
        start: The plan at the start of training, whose largest stage is the measure.
        rows_per_pipeline_device: Rows per device and step; a pipeline's batch has K times as many.
        compress: Let K fall; otherwise only the split changes.
    """

    def candidate(k: int) -> PipelinePlan:
        bounds = split_min_max(step_flops(plan.unit_costs, num_frozen_layers), k)
        return replace(
            plan,
            pipeline_parallel_size=k,
            data_parallel_size=plan.world_size // k,
            stage_bounds=bounds,
            num_frozen_layers=num_frozen_layers,
        )

    def largest_stage_bytes(of: PipelinePlan) -> int:
        k = of.pipeline_parallel_size
        rows = rows_per_pipeline_device * k
        m = choose_num_microbatches(rows, k, of.num_microbatches, of.schedule)
        return max(of.stage_bytes(stage, rows=rows, num_microbatches=m) for stage in range(k))

    budget = largest_stage_bytes(start)
    if not compress:
        return candidate(plan.pipeline_parallel_size)
    shorter = [k for k in range(1, plan.pipeline_parallel_size) if plan.world_size % k == 0]
    fitting = (c for c in map(candidate, shorter) if largest_stage_bytes(c) <= budget)
    return next(fitting, candidate(plan.pipeline_parallel_size))


def align(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Return the rows as lines with aligned columns, numbers to the right.

    Args:
        rows: Cells, the header first; every row has as many.
        left: Columns that are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _check_pipeline_size(world_size: int, k: int, num_units: int) -> None:
    """Check that pipelines of K stages fill the world and that each stage gets a unit."""
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}, but at least 1 rank is needed.")
    if num_units < 1:
        raise ValueError("unit_costs is empty, but a plan needs at least 1 unit: measure the model's costs first.")
    if k < 1 or world_size % k:
        divisors = ", ".join(str(d) for d in range(1, world_size + 1) if world_size % d == 0)
        hint = ""
        if world_size == 1:
            hint = (
                " One process was started: launch several with torchrun --nproc_per_node, or accelerate launch "
                "--multi_gpu (its --cpu starts only one)."
            )
        raise ValueError(
            f"pipeline_parallel_size is {k}, but must divide the world size {world_size}: "
            f"choose one of {divisors}.{hint}"
        )
    if k > num_units:
        raise ValueError(
            f"pipeline_parallel_size is {k}, but the model has {num_units} unit{_s(num_units)} and every stage needs "
            f"one: choose at most {num_units}."
        )


def _check_num_microbatches(num_microbatches: int | None) -> None:
    if num_microbatches is not None and num_microbatches < 1:
        raise ValueError(
            f"num_microbatches is {num_microbatches}, but at least 1 is needed: raise it, or leave it to 'auto'."
        )


def _s(number: int) -> str:
    return "" if number == 1 else "s"
