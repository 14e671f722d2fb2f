"""The plan: which stage holds which units, and how many pipelines run side by side.

A `PipelinePlan` is an immutable value, created by the planner and passed to every other part.

    rank = replica * K + placement.position_of(stage)            world 8, K = 4, R = 2

                stage 0   stage 1   stage 2   stage 3
    replica 0   rank 3    rank 2    rank 1    rank 0
    replica 1   rank 7    rank 6    rank 5    rank 4

A stage is what one rank of a pipeline holds: one contiguous range of units, or with an interleaved schedule V of them,
its virtual stages. The schedule says which, and on which rank (`placement`): rank 0 computes the loss.

    K = 2, V = 2, stage_bounds (0, 3, 6, 9, 12), interleaved1f1b

    stage 0   units 0 1 2              units 6 7 8
    stage 1              units 3 4 5              units 9 10 11
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from .costs import copied_bytes, parameter_bytes, step_flops
from .partition import check_num_microbatches, check_pipeline_size, choose_num_microbatches, microbatch_candidates
from .placement import Placement
from .schedules import schedule_named, schedule_of_step
from .tables import align
from .timeline import StepPrediction, simulate

if TYPE_CHECKING:
    from .costs import HeadCost, UnitCost
    from .unit_times import ModelTimes

MIB = 2**20
ADAM_BYTES_PER_PARAMETER_BYTE = 2.0
"""Adam keeps two moments in the parameter's own precision (fp32 parameters: 8 bytes of state per 4 bytes)."""
SHARE_OF_A_REDUCTION = 0.5
"""A gather, or a reduction that scatters, takes this share of an all-reduce of as many bytes in a ring."""

REPLICA_SHARDINGS = ("none", "optimizer")
"""What the replicas of a stage may divide among them: nothing, or the optimizer's state (ZeRO-1)."""


@dataclass(frozen=True)
class PipelinePlan:
    """How a model runs on the ranks: K stages × R replicas, and which units each stage holds.

    Args:
        world_size: Number of ranks, K * R.
        pipeline_parallel_size: Number of stages K.
        data_parallel_size: Number of pipelines R.
        stage_bounds: `(0, ..., L)`, length V * K + 1; virtual stage i consists of the units
            `[stage_bounds[i], stage_bounds[i + 1])`.
        schedule: name of the schedule.
        num_microbatches: Micro-batches per step and pipeline as requested by the user, or None to choose by the
            number of samples of each batch (`choose_num_microbatches`).
        unit_costs: Cost of each of the L units, in execution order.
        num_frozen_layers: f; the first f units run forward only, and their parameters have neither gradients nor
            optimizer state. A stage may consist of frozen units alone.
        num_cached_layers: c <= f; the outputs of the first c units are read from the activation cache, and these
            units cost nothing. The first virtual stage holds them all, for samples that are not in the cache.
        rows_per_device: Samples of the global batch per rank; a pipeline's batch has K times as many.
        times: Measured times of the model's parts on a device, or None if nothing has been measured.
        memory_budget_bytes: Bytes that a stage may take on a device; None if unknown. Only the number of micro-batches
            depends on it.
        replica_sharding: What the replicas of a stage divide among them, one of `REPLICA_SHARDINGS`.
        virtual_pipeline_parallel_size: Virtual stages per stage as requested by the user; a plan has fewer
            (`num_virtual_stages`) if there are too few units for so many.
        autocasts: Whether autocast computes in 16 bits (`bf16=True`, `fp16=True`), and keeps copies of weights.

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
    num_cached_layers: int = 0
    rows_per_device: int = 1
    times: ModelTimes | None = field(default=None, repr=False, hash=False, compare=False)
    memory_budget_bytes: int | None = None
    replica_sharding: str = "none"
    virtual_pipeline_parallel_size: int = 1
    autocasts: bool = False

    def __post_init__(self) -> None:
        if self.replica_sharding not in REPLICA_SHARDINGS:
            raise ValueError(
                f"replica_sharding is {self.replica_sharding!r}, but must be one of"
                f" {', '.join(map(repr, REPLICA_SHARDINGS))}."
            )
        k, num_units = self.pipeline_parallel_size, len(self.unit_costs)
        check_pipeline_size(self.world_size, k, num_units)
        if self.data_parallel_size != self.world_size // k:
            raise ValueError(
                f"data_parallel_size is {self.data_parallel_size}, but {self.world_size} ranks in pipelines of {k} "
                f"form {self.world_size // k} pipelines. Set it to {self.world_size // k}."
            )
        schedule = schedule_named(self.schedule)
        bounds, v = self.stage_bounds, self.virtual_pipeline_parallel_size
        if v < 1 or v > (schedule.most_virtual_stages or v):
            fitting = f"between 1 and {schedule.most_virtual_stages}" if schedule.most_virtual_stages else "at least 1"
            raise ValueError(
                f"virtual_pipeline_parallel_size is {v} and schedule is {self.schedule!r}, with which the number of"
                f" virtual stages per stage must be {fitting}. Set virtual_pipeline_parallel_size to"
                f" {schedule.most_virtual_stages or 1}."
            )
        most = v if k > 1 else 1
        if (
            not 1 <= self.num_virtual_stages <= most
            or len(bounds) != self.num_virtual_stages * k + 1
            or (bounds[0], bounds[-1]) != (0, num_units)
            or any(b <= a for a, b in pairwise(bounds))
        ):
            raise ValueError(
                f"stage_bounds is {bounds}, but {k} stages of {num_units} units need {k * most + 1} strictly"
                f" increasing bounds from 0 to {num_units}. Use split_min_max(costs, {k * most})."
            )
        check_num_microbatches(self.num_microbatches)
        if self.rows_per_device < 1:
            raise ValueError(
                f"rows_per_device is {self.rows_per_device}, but must be at least 1. Increase"
                " per_device_train_batch_size."
            )
        if not 0 <= self.num_frozen_layers <= num_units:
            raise ValueError(
                f"num_frozen_layers is {self.num_frozen_layers}, but must be between 0 and {num_units}, the number of"
                " units."
            )
        if not 0 <= self.num_cached_layers <= min(self.num_frozen_layers, bounds[1]):
            raise ValueError(
                f"num_cached_layers is {self.num_cached_layers}, but must be between 0 and num_frozen_layers"
                f" ({self.num_frozen_layers}), and the first virtual stage, which has {bounds[1]} units, must contain"
                " them all."
            )

    # -- stages and ranks ----------------------------------------------------------------------------------------

    @property
    def num_units(self) -> int:
        """Number of units L."""
        return len(self.unit_costs)

    def stage_of(self, rank: int) -> int:
        """Return the stage that a rank runs."""
        return self.placement.position_of(self._checked("rank", rank, self.world_size) % self.pipeline_parallel_size)

    def replica_of(self, rank: int) -> int:
        """Return the pipeline (replica) that a rank belongs to."""
        return self._checked("rank", rank, self.world_size) // self.pipeline_parallel_size

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold the same stage, one per pipeline: a data-parallel group."""
        self._checked("stage", stage, self.pipeline_parallel_size)
        return tuple(range(self.placement.position_of(stage), self.world_size, self.pipeline_parallel_size))

    def ranks_of_pipeline(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of one pipeline in stage order."""
        self._checked("replica", replica, self.data_parallel_size)
        first = replica * self.pipeline_parallel_size
        return tuple(first + self.placement.position_of(stage) for stage in range(self.pipeline_parallel_size))

    @property
    def shards_optimizer(self) -> bool:
        """Whether the replicas of a stage divide the optimizer's state among them."""
        return self.replica_sharding != "none" and self.data_parallel_size > 1

    @property
    def num_virtual_stages(self) -> int:
        """Number of virtual stages per stage V; 1 if each stage is one contiguous range of units."""
        return (len(self.stage_bounds) - 1) // self.pipeline_parallel_size

    @property
    def placement(self) -> Placement:
        """Which stage holds which virtual stages."""
        return schedule_named(self.schedule).placement(self.pipeline_parallel_size, self.num_virtual_stages)

    def virtual_stages_of(self, stage: int) -> tuple[int, ...]:
        """Return the indices of the virtual stages that a stage holds."""
        self._checked("stage", stage, self.pipeline_parallel_size)
        return self.placement.held_by(stage)

    def ranges_of(self, stage: int) -> tuple[range, ...]:
        """Return the units of each of a stage's virtual stages."""
        return tuple(range(*self.stage_bounds[index : index + 2]) for index in self.virtual_stages_of(stage))

    def units_of(self, stage: int) -> tuple[int, ...]:
        """Return the units that a stage holds."""
        return tuple(unit for units in self.ranges_of(stage) for unit in units)

    @property
    def runs_as(self) -> str:
        """Name of the schedule that runs: an interleaved one with one virtual stage is 1F1B."""
        k = self.pipeline_parallel_size
        return schedule_of_step(self.schedule, k, k, self.num_virtual_stages).name

    # -- micro-batches ---------------------------------------------------------------------------------------

    @property
    def rows_per_pipeline(self) -> int:
        """Number of samples in a full batch of one pipeline and step."""
        return self.rows_per_device * self.pipeline_parallel_size

    def num_microbatches_for(self, rows: int) -> int:
        """Return the number of micro-batches M into which a pipeline's batch is split, a divisor of its samples.

        It is the requested number if there is one, otherwise it comes from a fixed rule (`choose_num_microbatches`),
        and where stages do not fit with that number it is the smallest larger one with which they do.
        """
        k, budget = self.pipeline_parallel_size, self.memory_budget_bytes
        by_rule = choose_num_microbatches(rows, k, self.num_microbatches, self.runs_as)
        if self.num_microbatches is not None or k == 1 or budget is None:
            return by_rule
        larger = (m for m in microbatch_candidates(rows, k, self.runs_as) if m > by_rule)
        for m in (by_rule, *larger):
            if all(self.stage_bytes(stage, rows=rows, num_microbatches=m) <= budget for stage in range(k)):
                return m
        return by_rule

    # -- costs ---------------------------------------------------------------------------------------

    def predict(self, rows: int, num_microbatches: int) -> StepPrediction:
        """Predict the time of a training step on one pipeline's batch from measured times.

        Args:
            rows: Number of samples of a pipeline's batch.
            num_microbatches: M.

        Raises:
            ValueError: If nothing has been measured, or M is below 1.
        """
        check_num_microbatches(num_microbatches)
        if self.times is None:
            raise ValueError("times is None, but a step can only be predicted from measured times. Pass times.")
        forward, backward = self.stage_seconds(rows / num_microbatches)
        timeline = simulate(forward, backward, num_microbatches, self.schedule, self.num_virtual_stages)
        at_end = max(self._seconds_at_end(stage) for stage in range(self.pipeline_parallel_size))
        return StepPrediction(num_microbatches, timeline, at_end)

    def stage_seconds(self, rows: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the forward and the backward seconds of a micro-batch in each virtual stage, from measured times.

        Args:
            rows: Number of samples of the micro-batch.
        """
        seconds = [self._seconds_of(index, rows) for index in range(len(self.stage_bounds) - 1)]
        forward, backward = zip(*seconds, strict=True)
        return forward, backward

    def _seconds_of(self, virtual_stage: int, rows: float) -> tuple[float, float]:
        """Return the forward and backward seconds of a micro-batch in a virtual stage."""
        times = self.times
        assert times is not None
        units = range(*self.stage_bounds[virtual_stage : virtual_stage + 2])
        forward, backward = map(sum, zip(*(self._unit_seconds(unit, rows) for unit in units), strict=True))
        return times.prologue.forward.of(rows) + forward, backward

    def _unit_seconds(self, unit: int, rows: float) -> tuple[float, float]:
        """Return the seconds that a unit computes in a micro-batch's forward and backward; the last one with the head.

        The backward of what precedes the units is the first one's.
        """
        times = self.times
        assert times is not None
        forward = times.units[unit].forward.of(rows) if unit >= self.num_cached_layers else 0.0
        backward = times.units[unit].backward.of(rows) if unit >= self.num_frozen_layers else 0.0
        if unit == 0 and not self.num_frozen_layers:
            backward += times.prologue.backward.of(rows)
        if unit == self.num_units - 1:
            forward += times.head.forward.of(rows)
            backward += times.head.backward.of(rows)
        return forward, backward

    @property
    def _share_of_ring(self) -> float:
        """Time of an all-reduce over the R replicas, in relation to the measured one, which had all ranks."""
        r, world = self.data_parallel_size, self.world_size
        # a ring of n ranks sends 2 (n - 1) / n of the bytes
        return (r - 1) / r * world / (world - 1) if world > 1 else 0.0

    def _seconds_at_end(self, stage: int) -> float:
        """Return the seconds of a stage's gradient reduction over replicas and of its optimizer step."""
        times = self.times
        assert times is not None
        trainable, per_byte = self._trainable_bytes(stage), self._share_of_ring * times.reduce_seconds_per_byte
        update = trainable * times.update_seconds_per_byte
        if not self.shards_optimizer:
            return update + trainable * per_byte
        # each replica updates its part and sends it to the others, which is a gather
        return update / self.data_parallel_size + trainable * per_byte * (1 + SHARE_OF_A_REDUCTION)

    def _trainable_bytes(self, stage: int) -> int:
        # a trainable parameter of several units of this stage appears in the sum more than once, but in memory once
        trained = self._trained(self.units_of(stage))
        return min(sum(cost.trainable_bytes for cost in trained), self.parameter_bytes_of(stage))

    def _trained(self, units: Sequence[int]) -> list[UnitCost | HeadCost]:
        """Return the costs of those of the units that are trained; of a frozen last unit only the head's remains."""
        costs = self.unit_costs
        return [costs[k] if k >= self.num_frozen_layers else costs[k].head for k in units]

    def forward_flops_of(self, stage: int) -> float:
        """Return the forward FLOPs of one sample in a stage."""
        return sum(self.unit_costs[unit].forward_flops for unit in self.units_of(stage))

    def parameter_bytes_of(self, stage: int) -> int:
        """Return the bytes of a stage's parameters; a parameter that several of its units need is counted once."""
        return parameter_bytes([self.unit_costs[unit] for unit in self.units_of(stage)])

    def _largest_kept(self, stage: int, num_microbatches: int, per_forward: Sequence[int]) -> int:
        """Return the largest sum of what a stage keeps from its forwards until their backwards.

        Args:
            stage: Index of the stage.
            num_microbatches: M.
            per_forward: What a micro-batch's forward adds to the sum in each of its virtual stages. `[V]`
        """
        self._checked("stage", stage, self.pipeline_parallel_size)
        check_num_microbatches(num_microbatches)
        k, m, v = self.pipeline_parallel_size, num_microbatches, self.num_virtual_stages
        schedule = schedule_of_step(self.schedule, k, m, v)
        changes = (
            per_forward[part] * ((kind == "forward") - schedule.frees_activations(kind))
            for kind, part, _ in schedule.order_of_work(stage, k, m, v)
        )
        return max(accumulate(changes))

    def stage_bytes(self, stage: int, *, rows: int, num_microbatches: int) -> int:
        """Predict the bytes that training a stage takes on its device.

        The sum of parameters, gradients, Adam's state (of a replica's part, if replicas divide it), activations of the
        micro-batches in flight and autocast's copies of weights for each of them, and the tensors received from
        neighbouring stages (PyTorch allocates these for all micro-batches at once). It does not include the
        allocator's fragmentation, workspaces and communication buffers.

        Args:
            stage: Index of the stage.
            rows: Number of samples of one pipeline's batch in one step.
            num_microbatches: Micro-batches per step M.

        Raises:
            ValueError: If a number is below its minimum, or M does not divide the number of samples.
        """
        check_num_microbatches(num_microbatches)
        if rows < 1 or rows % num_microbatches:
            raise ValueError(
                f"rows is {rows} and num_microbatches is {num_microbatches}, but all micro-batches must have the same "
                f"size. Set num_microbatches to a divisor of rows, for example with choose_num_microbatches."
            )
        ranges, rows_at_once = self.ranges_of(stage), rows // num_microbatches
        per_forward = [
            sum(cost.activation_bytes for cost in self._trained(units)) * rows_at_once + self._copied_bytes(units)
            for units in ranges
        ]
        activations = self._largest_kept(stage, num_microbatches, per_forward)
        boundaries = [bound for units in ranges for bound in (units.start, units.stop) if 0 < bound < self.num_units]
        received = sum(self.unit_costs[bound - 1].boundary_bytes for bound in boundaries) * rows
        return self._state_bytes(stage) + activations + received

    def _copied_bytes(self, units: Sequence[int]) -> int:
        """Return the bytes of copies of weights that autocast keeps from each forward of the units to its backward."""
        if not self.autocasts:
            return 0
        num_frozen = sum(unit < self.num_frozen_layers for unit in units)
        return copied_bytes([self.unit_costs[unit] for unit in units], num_frozen)

    def _state_bytes(self, stage: int) -> int:
        """Return the bytes of a stage's parameters, gradients and optimizer state on one device."""
        trainable = self._trainable_bytes(stage)
        updated: float = trainable
        if self.shards_optimizer:  # replicas divide whole parameters
            updated = max(trainable / self.data_parallel_size, self._largest_trained(stage))
        return self.parameter_bytes_of(stage) + round(trainable + updated * ADAM_BYTES_PER_PARAMETER_BYTE)

    def _largest_trained(self, stage: int) -> int:
        """Return the bytes of the largest parameter of a stage's trained units that is trained, by its size."""
        costs = [self.unit_costs[unit] for unit in self.units_of(stage) if unit >= self.num_frozen_layers]
        sizes = [size for cost in costs for size in cost.parameters.values() if size <= cost.trainable_bytes]
        return max(sizes, default=0)

    def __str__(self) -> str:
        """Return a table of the stages (units, memory, share of the work) and the predicted time of a step."""
        k, r = self.pipeline_parallel_size, self.data_parallel_size
        rows, m = self.rows_per_pipeline, self.num_microbatches_for(self.rows_per_pipeline)
        flops = step_flops(self.unit_costs, self.num_frozen_layers, self.num_cached_layers)
        table = [("stage", "units", "first unit", "parameters MiB", "training MiB", "FLOPs %")]
        for stage in range(k):
            units = self.units_of(stage)
            share = 100 * sum(flops[unit] for unit in units) / sum(flops) if sum(flops) else None
            table.append(
                (
                    str(stage),
                    " ".join(map(_named, self.ranges_of(stage))),
                    self.unit_costs[units[0]].name,
                    f"{self.parameter_bytes_of(stage) / MIB:,.1f}",
                    f"{self.stage_bytes(stage, rows=rows, num_microbatches=m) / MIB:,.1f}",
                    "-" if share is None else f"{share:.1f}",
                )
            )
        head = (
            f"{k} stage{_s(k)} × {r} pipeline{_s(r)} = {self.world_size} rank{_s(self.world_size)}, "
            f"{self.num_units} unit{_s(self.num_units)}"
            + (f", {self.num_frozen_layers} frozen" if self.num_frozen_layers else "")
            + (f", {self.num_cached_layers} cached" if self.num_cached_layers else "")
            + (", replicas divide the optimizer state" if self.shards_optimizer else "")
        )
        return "\n".join((head, *align(table, left=(1, 2)), self._describe_step(rows, m)))

    def _describe_step(self, rows: int, m: int) -> str:
        """Return the line about the schedule, micro-batches, bubble and time of a step."""
        k = self.pipeline_parallel_size
        words = [f"{rows} sample{_s(rows)} a pipeline and step"]
        if k > 1:
            virtual = f", {self.num_virtual_stages} virtual stages per stage" if self.num_virtual_stages > 1 else ""
            words.append(f"schedule {self.runs_as} with {m} micro-batch{'' if m == 1 else 'es'}{virtual}")
        if self.times is not None:
            prediction = self.predict(rows, m)
            bubble = f" (bubble {100 * prediction.timeline.bubble:.1f} %)" if k > 1 else ""
            words.append(f"predicted {prediction.seconds:.3g} s{bubble}")
        elif k > 1:
            equal = [1.0] * (len(self.stage_bounds) - 1)
            timeline = simulate(equal, [2.0] * len(equal), m, self.schedule, self.num_virtual_stages)
            words.append(f"bubble {100 * timeline.bubble:.1f} % if stages are equal")
        return "; ".join(words)

    @staticmethod
    def _checked(field_name: str, value: int, number: int) -> int:
        if not 0 <= value < number:
            raise ValueError(f"{field_name} is {value}, but must be between 0 and {number - 1} in this plan.")
        return value


def _named(units: range) -> str:
    return f"{units.start}-{units.stop - 1}" if len(units) > 1 else str(units.start)


def _s(number: int) -> str:
    return "" if number == 1 else "s"
