"""Predictions for a layout: the memory of each stage, and the time of a step.

A prediction follows from a layout, the counted costs of the model's units, and their measured times. A training and a
forecast use the same `CostModel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from .costs import Cost, UnitCost, step_flops
from .layout import Layout
from .schedules import schedule_of_step
from .tables import MIB, align
from .timeline import StepPrediction, simulate
from .unit_times import ModelTimes

ADAM_BYTES_PER_PARAMETER_BYTE = 2.0
"""Adam keeps two moments in the parameter's own precision (fp32 parameters: 8 bytes of state per 4 bytes)."""
SHARE_OF_A_REDUCTION = 0.5
"""Time of an all-gather or a reduce-scatter, as a share of a ring all-reduce of as many bytes."""
WORTH_LOADING = 0.9
"""Loading must take less than this fraction of the computing time."""


@dataclass(frozen=True)
class CostModel:
    """Costs and times of a model on its devices. Pure: its predictions are the same on every process.

    Attributes:
        unit_costs: cost of each of the L units, in execution order.
        times: measured times of the model's parts on a device, the same on every process; None without measurements.
        memory_budget_bytes: bytes that a stage may take on a device; None if unknown: every stage then fits.
        autocasts: whether autocast computes in 16 bits (`bf16=True`, `fp16=True`), and keeps copies of weights.
    """

    unit_costs: tuple[UnitCost, ...] = field(repr=False)
    times: ModelTimes | None = field(default=None, repr=False)
    memory_budget_bytes: int | None = None
    autocasts: bool = False

    # -- time ------------------------------------------------------------------------------------------------

    def predict(self, layout: Layout) -> StepPrediction:
        """Predict the time of a training step on a full batch from measured times.

        Raises:
            ValueError: `times` is None.
        """
        m = layout.num_microbatches
        forward, backward = self.stage_seconds(layout)
        timeline = simulate(forward, backward, m, layout.schedule, layout.num_virtual_stages)
        at_end = max(self._seconds_at_end(layout, stage) for stage in range(layout.pipeline_parallel_size))
        return StepPrediction(timeline, at_end)

    def stage_seconds(self, layout: Layout) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the forward and the backward seconds of a micro-batch in each virtual stage, from measured times."""
        rows = layout.rows_per_pipeline / layout.num_microbatches
        seconds = [self._seconds_of(layout, range(*bounds), rows) for bounds in pairwise(layout.stage_bounds)]
        forward, backward = zip(*seconds, strict=True)
        return forward, backward

    @property
    def _measured(self) -> ModelTimes:
        if self.times is None:
            raise ValueError("times is None, but a step can only be predicted from measured times. Pass times.")
        return self.times

    def _seconds_of(self, layout: Layout, units: range, rows: float) -> tuple[float, float]:
        """Return the forward and backward seconds of a micro-batch in a virtual stage."""
        forward, backward = map(sum, zip(*(self._unit_seconds(layout, unit, rows) for unit in units), strict=True))
        return self._measured.prologue.forward.of(rows) + forward, backward

    def _unit_seconds(self, layout: Layout, unit: int, rows: float) -> tuple[float, float]:
        """Return the seconds of a unit's forward and backward for a micro-batch; the last unit includes the head.

        The first unit includes the backward of the prologue.
        """
        times = self._measured
        forward = times.units[unit].forward.of(rows) if unit >= layout.num_cached_layers else 0.0
        backward = times.units[unit].backward.of(rows) if unit >= layout.num_frozen_layers else 0.0
        if unit == 0 and not layout.num_frozen_layers:
            backward += times.prologue.backward.of(rows)
        if unit == layout.num_units - 1:
            forward += times.head.forward.of(rows)
            backward += times.head.backward.of(rows)
        return forward, backward

    def _reduce_seconds_per_byte(self, layout: Layout) -> float:
        """Return the seconds per byte of an all-reduce over the R replicas. The measured one ran over all ranks."""
        r, world = layout.data_parallel_size, layout.world_size
        # a ring of n ranks sends 2 (n - 1) / n of the bytes
        share = (r - 1) / r * world / (world - 1) if world > 1 else 0.0
        return share * self._measured.reduce_seconds_per_byte

    def _seconds_at_end(self, layout: Layout, stage: int) -> float:
        """Return the seconds of a stage's gradient reduction over replicas and of its optimizer step."""
        trainable, per_byte = self._trainable_bytes(layout, stage), self._reduce_seconds_per_byte(layout)
        update = trainable * self._measured.update_seconds_per_byte
        if not layout.shards_optimizer:
            return update + trainable * per_byte
        # each replica updates its part and sends it to the others, which is a gather
        return update / layout.data_parallel_size + trainable * per_byte * (1 + SHARE_OF_A_REDUCTION)

    # -- memory ----------------------------------------------------------------------------------------------

    def stage_bytes(self, layout: Layout) -> list[int]:
        """Predict the bytes that training takes on the device of each stage, with a full batch.

        Counts parameters, gradients and Adam's state (a replica's share, if it is sharded). For each micro-batch in
        flight, it adds the activations and autocast's copies of weights, and for all micro-batches at once the tensors
        received from neighbouring stages, as PyTorch allocates them. It does not include the allocator's
        fragmentation, workspaces and communication buffers.
        """
        return [
            self._state_bytes(layout, stage) + self._activation_bytes(layout, stage)
            for stage in range(layout.pipeline_parallel_size)
        ]

    def fits(self, layout: Layout) -> bool:
        """Whether the stages are predicted to fit the devices. True if the memory budget is unknown."""
        return self.memory_budget_bytes is None or max(self.stage_bytes(layout)) <= self.memory_budget_bytes

    def largest_bytes_with_whole_model(self, layout: Layout, model_bytes: int) -> int:
        """Predict the bytes of the largest stage if its process holds the other stages' weights as well.

        Args:
            layout: the layout.
            model_bytes: bytes of the parameters of the whole model.
        """
        stages = enumerate(self.stage_bytes(layout))
        return model_bytes + max(size - self.parameter_bytes_of(layout, stage) for stage, size in stages)

    def parameter_bytes_of(self, layout: Layout, stage: int) -> int:
        """Return the bytes of a stage's parameters. A parameter shared by several of its units counts once."""
        return sum(
            {n: size for k in layout.units_of(stage) for n, size in self.unit_costs[k].parameters.items()}.values()
        )

    def _trained(self, layout: Layout, units: Sequence[int]) -> list[Cost]:
        """Return the training costs of units: the full cost of active units, the head's cost of frozen ones."""
        costs = self.unit_costs
        return [costs[k] if k >= layout.num_frozen_layers else costs[k].head for k in units]

    def _trainable_bytes(self, layout: Layout, stage: int) -> int:
        # the sum counts a parameter shared by several units more than once, but memory holds it once
        trained = self._trained(layout, layout.units_of(stage))
        return min(sum(cost.trainable_bytes for cost in trained), self.parameter_bytes_of(layout, stage))

    def _state_bytes(self, layout: Layout, stage: int) -> int:
        """Return the bytes of a stage's parameters, gradients and optimizer state on one device."""
        trainable = self._trainable_bytes(layout, stage)
        updated: float = trainable
        if layout.shards_optimizer:  # replicas shard whole parameters
            updated = max(trainable / layout.data_parallel_size, self._largest_trained(layout, stage))
        return self.parameter_bytes_of(layout, stage) + round(trainable + updated * ADAM_BYTES_PER_PARAMETER_BYTE)

    def _largest_trained(self, layout: Layout, stage: int) -> int:
        """Return the bytes of the largest parameter that may be trained in a stage's active units."""
        costs = [self.unit_costs[unit] for unit in layout.units_of(stage) if unit >= layout.num_frozen_layers]
        sizes = [size for cost in costs for size in cost.parameters.values() if size <= cost.trainable_bytes]
        return max(sizes, default=0)

    def _activation_bytes(self, layout: Layout, stage: int) -> int:
        """Return the bytes of a stage's stored activations at their peak, and of its receive buffers."""
        k, m, v = layout.pipeline_parallel_size, layout.num_microbatches, layout.num_virtual_stages
        per_forward = [
            self._kept_bytes(layout, units, layout.rows_per_pipeline // m) for units in layout.ranges_of(stage)
        ]
        schedule = schedule_of_step(layout.schedule, k, m, v)
        changes = (
            per_forward[part] * ((kind == "forward") - schedule.frees_activations(kind))
            for kind, part, _ in schedule.order(stage, k, m, v)
        )
        return max(accumulate(changes)) + self.received_bytes(layout, stage)

    def _kept_bytes(self, layout: Layout, units: Sequence[int], rows: int) -> int:
        """Return the bytes that a forward of `rows` samples keeps in units: activations and autocast's copies."""
        trained = self._trained(layout, units)
        copies = {name: size for cost in trained for name, size in cost.copies.items()}  # one copy per weight
        copied = sum(copies.values()) + sum(cost.untrained_copies_bytes for cost in trained)
        return rows * sum(cost.activation_bytes for cost in trained) + self.autocasts * copied

    def received_bytes(self, layout: Layout, stage: int) -> int:
        """Return the bytes of a stage's receive buffers for the tensors of a full batch and their gradients.

        Schedules for other batch shapes keep buffers of their own, up to `pipeline.schedule.KEPT_BYTES` in total.
        """
        ranges = layout.ranges_of(stage)
        boundaries = [bound for units in ranges for bound in (units.start, units.stop) if 0 < bound < layout.num_units]
        return layout.rows_per_pipeline * sum(self.unit_costs[bound - 1].boundary_bytes for bound in boundaries)

    # -- text ------------------------------------------------------------------------------------------------

    def describe(self, layout: Layout) -> str:
        """Return a table of the stages (units, memory, share of the work) and the predicted time of a step."""
        flops = step_flops(self.unit_costs, layout.num_frozen_layers, layout.num_cached_layers)
        rows = [("stage", "units", "first unit", "parameters MiB", "training MiB", "FLOPs %")]
        for stage, size in enumerate(self.stage_bytes(layout)):
            units = layout.units_of(stage)
            rows.append(
                (
                    str(stage),
                    " ".join(map(_named, layout.ranges_of(stage))),
                    self.unit_costs[units[0]].name,
                    f"{self.parameter_bytes_of(layout, stage) / MIB:,.1f}",
                    f"{size / MIB:,.1f}",
                    f"{100 * sum(flops[unit] for unit in units) / sum(flops):.1f}" if sum(flops) else "-",
                )
            )
        return "\n".join((str(layout), *align(rows, left=(1, 2)), self._describe_step(layout)))

    def _describe_step(self, layout: Layout) -> str:
        """Return the line about the schedule, micro-batches, bubble and time of a step."""
        k, v, m = layout.pipeline_parallel_size, layout.num_virtual_stages, layout.num_microbatches
        rows = layout.rows_per_pipeline
        words = [f"{rows} sample{'' if rows == 1 else 's'} a pipeline and step"]
        if k > 1:
            virtual = f", {v} virtual stages per stage" if v > 1 else ""
            words.append(f"schedule {layout.runs_as} with {m} micro-batch{'' if m == 1 else 'es'}{virtual}")
        if self.times is not None:
            prediction = self.predict(layout)
            bubble = f" (bubble {100 * prediction.timeline.bubble:.1f} %)" if k > 1 else ""
            words.append(f"predicted {prediction.seconds:.3g} s{bubble}")
        elif k > 1:
            timeline = simulate([1.0] * k * v, [2.0] * k * v, m, layout.schedule, v)
            words.append(f"bubble {100 * timeline.bubble:.1f} % if stages are equal")
        return "; ".join(words)


def is_worth_loading(loading: float, computing: float, hidden: float = 0.0) -> bool:
    """Whether loading from the cache is enough faster than computing.

    Args:
        loading: seconds to load one sample from the store.
        computing: seconds to compute the cached layers for one sample.
        hidden: seconds of one sample's step during which the next batch is loaded without any waiting.
    """
    return loading - hidden < WORTH_LOADING * computing


def _named(units: range) -> str:
    return f"{units.start}-{units.stop - 1}" if len(units) > 1 else str(units.start)
