"""The layout: the units that each rank holds, and the number of pipelines that run side by side.

A `Layout` is an immutable value. The `Planner` makes it, and all code that runs or moves a model reads it. Only the
layout stores the numbers of frozen and of cached layers.

    rank = replica * K + placement.position_of(stage)            K = 4, R = 2

                stage 0   stage 1   stage 2   stage 3
    replica 0   rank 3    rank 2    rank 1    rank 0
    replica 1   rank 7    rank 6    rank 5    rank 4

A stage is the set of units on one rank of a pipeline: one contiguous range of units or, with an interleaved schedule,
V ranges (virtual stages). The schedule decides the ranges and their ranks (`placement`). Rank 0 computes the loss.

    K = 2, V = 2, stage_bounds (0, 3, 6, 9, 12), interleaved1f1b

    stage 0   units 0 1 2              units 6 7 8
    stage 1              units 3 4 5              units 9 10 11
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from .partition import choose_num_microbatches, more_microbatches
from .placement import Placement
from .schedules import schedule_named, schedule_of_step

REPLICA_SHARDINGS = ("none", "optimizer")
"""State that the replicas of a stage may shard: none, or the optimizer state (ZeRO-1)."""
AUTO: Final = "auto"
"""Value of an argument that lets the planner choose."""


@dataclass(frozen=True)
class Layout:
    """How a model runs on the ranks: K stages × R replicas, and the units of each stage.

    Attributes:
        pipeline_parallel_size: number of stages K.
        data_parallel_size: number of pipelines R.
        stage_bounds: `(0, ..., L)`, length V * K + 1; virtual stage i consists of the units
            `[stage_bounds[i], stage_bounds[i + 1])`.
        schedule: name of the schedule.
        rows_per_device: samples of a full batch per rank; a pipeline's batch has K times as many.
        requested_microbatches: the user's number of micro-batches per step and pipeline; None to choose it by the
            number of samples of each batch (`choose_num_microbatches`).
        most_rows: upper bound on the samples of a micro-batch for which the stages fit their devices; None for no
            bound.
        num_frozen_layers: f; the first f units run forward only, and their parameters have neither gradients nor
            optimizer state. A stage may consist of frozen units alone.
        num_cached_layers: c <= f; the outputs of the first c units are read from the activation cache, so these units
            count as free. The first virtual stage holds them all, for samples that are not in the cache.
        replica_sharding: state that the replicas of a stage shard, one of `REPLICA_SHARDINGS`.

    Examples:
        >>> layout = Layout(pipeline_parallel_size=2, data_parallel_size=2, stage_bounds=(0, 6, 12), rows_per_device=8)
        >>> layout.world_size, layout.rows_per_pipeline, layout.ranks_of_stage(0)
        (4, 16, (1, 3))
        >>> layout.units_of(1)
        (6, 7, 8, 9, 10, 11)

    Raises:
        ValueError: the numbers contradict one another.
    """

    pipeline_parallel_size: int
    data_parallel_size: int
    stage_bounds: tuple[int, ...]
    schedule: str = "1f1b"
    rows_per_device: int = 1
    requested_microbatches: int | None = None
    most_rows: int | None = None
    num_frozen_layers: int = 0
    num_cached_layers: int = 0
    replica_sharding: str = "none"

    def __post_init__(self) -> None:
        if self.rows_per_device < 1:
            raise ValueError(
                f"rows_per_device is {self.rows_per_device}, but must be at least 1. Increase"
                " per_device_train_batch_size."
            )
        if self.requested_microbatches is not None and self.requested_microbatches < 1:
            raise ValueError(
                f"num_microbatches is {self.requested_microbatches}, but must be at least 1. Increase it, or set it to"
                " 'auto'."
            )
        if self.replica_sharding not in REPLICA_SHARDINGS:
            raise ValueError(
                f"replica_sharding is {self.replica_sharding!r}, but must be one of"
                f" {', '.join(map(repr, (*REPLICA_SHARDINGS, AUTO)))}."
            )
        k, bounds, v = self.pipeline_parallel_size, self.stage_bounds, self.num_virtual_stages
        most = schedule_named(self.schedule).most_virtual_stages or v
        assert 1 <= v <= (most if k > 1 else 1), (self.schedule, bounds)
        assert len(bounds) == v * k + 1 and bounds[0] == 0, bounds
        assert all(a < b for a, b in pairwise(bounds)), bounds
        if not 0 <= self.num_frozen_layers <= self.num_units:
            raise ValueError(
                f"num_frozen_layers is {self.num_frozen_layers}, but must be between 0 and {self.num_units}, the"
                " number of units."
            )
        if not 0 <= self.num_cached_layers <= min(self.num_frozen_layers, bounds[1]):
            raise ValueError(
                f"num_cached_layers is {self.num_cached_layers}, but must be between 0 and num_frozen_layers"
                f" ({self.num_frozen_layers}), and the first virtual stage, which has {bounds[1]} units, must contain"
                " them all."
            )

    @property
    def world_size(self) -> int:
        """Number of ranks, K * R."""
        return self.pipeline_parallel_size * self.data_parallel_size

    @property
    def num_units(self) -> int:
        """Number of units L."""
        return self.stage_bounds[-1]

    def __str__(self) -> str:
        """Return the sizes in words. `CostModel.describe` adds a table of the stages."""
        k, r, world, units = self.pipeline_parallel_size, self.data_parallel_size, self.world_size, self.num_units
        return (
            f"{k} stage{_s(k)} × {r} pipeline{_s(r)} = {world} rank{_s(world)}, {units} unit{_s(units)}"
            + (f", {self.num_frozen_layers} frozen" if self.num_frozen_layers else "")
            + (f", {self.num_cached_layers} cached" if self.num_cached_layers else "")
            + (", replicas divide the optimizer state" if self.shards_optimizer else "")
        )

    # -- stages and ranks ----------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """The placement of virtual stages on stages."""
        return schedule_named(self.schedule).placement(self.pipeline_parallel_size, self.num_virtual_stages)

    def stage_of(self, rank: int) -> int:
        """Return the stage that a rank runs."""
        return self.placement.position_of(rank % self.pipeline_parallel_size)

    def replica_of(self, rank: int) -> int:
        """Return the pipeline (replica) that a rank belongs to."""
        return rank // self.pipeline_parallel_size

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold the same stage, one per pipeline: a data-parallel group."""
        return tuple(range(self.placement.position_of(stage), self.world_size, self.pipeline_parallel_size))

    def ranks_of_pipeline(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of one pipeline in stage order."""
        first = replica * self.pipeline_parallel_size
        return tuple(first + self.placement.position_of(stage) for stage in range(self.pipeline_parallel_size))

    @property
    def shards_optimizer(self) -> bool:
        """Whether the replicas of a stage shard the optimizer state."""
        return self.replica_sharding != "none" and self.data_parallel_size > 1

    @property
    def num_virtual_stages(self) -> int:
        """Number of virtual stages per stage V; 1 if each stage is one contiguous range of units."""
        return (len(self.stage_bounds) - 1) // self.pipeline_parallel_size

    def ranges_of(self, stage: int) -> tuple[range, ...]:
        """Return the units of each of a stage's virtual stages."""
        return tuple(range(*self.stage_bounds[index : index + 2]) for index in self.placement.held_by(stage))

    def units_of(self, stage: int) -> tuple[int, ...]:
        """Return the units that a stage holds."""
        return tuple(unit for units in self.ranges_of(stage) for unit in units)

    # -- micro-batches -------------------------------------------------------------------------------------------

    @property
    def runs_as(self) -> str:
        """Name of the schedule that runs: an interleaved schedule with one virtual stage is 1F1B."""
        k = self.pipeline_parallel_size
        enough = k * schedule_named(self.schedule).microbatches_per_stage
        return schedule_of_step(self.schedule, k, enough, self.num_virtual_stages).name

    @property
    def rows_per_pipeline(self) -> int:
        """Number of samples in a full batch of one pipeline and step."""
        return self.rows_per_device * self.pipeline_parallel_size

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches M of a full batch."""
        return self.num_microbatches_for(self.rows_per_pipeline)

    def num_microbatches_for(self, rows: int) -> int:
        """Return the number of micro-batches M into which a pipeline's batch is split, a divisor of its samples.

        It is derived from the requested number or, without one, chosen by a fixed rule (`choose_num_microbatches`). If
        stages fit only with smaller micro-batches, it is the next larger number that fits.
        """
        k, most = self.pipeline_parallel_size, self.most_rows or rows
        by_rule = choose_num_microbatches(rows, k, self.requested_microbatches, self.runs_as)
        tried = (by_rule, *more_microbatches(rows, k, by_rule, self.runs_as))
        return next((m for m in tried if rows <= most * m), by_rule)

    # -- cached layers -------------------------------------------------------------------------------------------

    def most_cached(self, num_frozen: int) -> int:
        """Return the maximum number of cached units among `num_frozen` frozen ones.

        The first stage holds all cached units, and every other stage needs one unit of its own. It follows that the
        last unit's outputs are cached only if the first stage also has the head (K = 1).
        """
        return min(num_frozen, self.num_units - self.pipeline_parallel_size + 1)

    def most_cached_on(self, nodes: Sequence[str], num_frozen: int) -> int:
        """Return the maximum number of cached units among `num_frozen` frozen ones, if each node has its own store.

        The outputs must be written to the store of the first stage's node, which reads them.

        Args:
            nodes: name of each rank's node.
            num_frozen: number of frozen units.
        """
        highest = self.most_cached(num_frozen)
        for replica in range(self.data_parallel_size):
            here = [nodes[rank] for rank in self.ranks_of_pipeline(replica)]
            near = next((stage for stage, node in enumerate(here) if node != here[0]), len(here))
            highest = min(highest, self.stage_bounds[near])
        return highest


def _s(number: int) -> str:
    return "" if number == 1 else "s"
