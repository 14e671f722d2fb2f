"""Before a model is placed: what is found out about it and its loss, what may be cached, and which layout comes first.

    examine        units, how the loss adds up, token slices, times; then the planner, which decides by them
    find_cache     whether frozen layers' outputs may be cached, or why not
    first_layout   what the arguments ask for, or the layout of the job that is resumed

`PipelineRun.place` calls these in this order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.numbered_batches import TrainingBatches
from ..model.loss_scaling import LossReduction
from ..parts.prefix_cache.cache_control import AutoCache
from ..parts.prefix_cache.cache_setup import check_folder, make_cache
from ..planning.layout import Layout
from ..planning.planner import Planner
from ..planning.unit_times import ModelTimes
from ..randomness import generators_kept
from ..token_slices.slice_timeline import SlicePlan
from ..token_slices.token_schedule import Slicing
from .consistency import check_same_size
from .cutting import CutModel, make_planner, time_model
from .evaluation import FindUnits
from .job import COST_SAMPLE_ROWS, TrainingJob
from .lazy_model import sparing_memory
from .loss import TrainersLoss
from .probing import SampleCollator
from .setup import find_reduction, find_windows, is_driven, say_how_loss_adds_up

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examined:
    """A model and its loss, as they were found on a few samples.

    Attributes:
        cut: the model, split into units.
        loss: the trainer's loss.
        reduction: how the losses of a batch's parts add up.
        slicing: splits sequences along their tokens; None if that is not asked for.
        times: of the units, if they were measured.
        planner: decides by all of this.
    """

    cut: CutModel
    loss: TrainersLoss
    reduction: LossReduction
    slicing: Slicing | None
    times: ModelTimes | None
    planner: Planner

    @property
    def is_driven(self) -> bool:
        """Whether the loss drives the pipeline."""
        return self.planner.request.is_driven


def examine(
    job: TrainingJob, data: TrainingBatches, find_units: FindUnits, tell_slices: Callable[[SlicePlan], None]
) -> Examined:
    """Examine the model and its loss on a few samples. Collective over all processes.

    Args:
        job: the training job.
        data: the training batches.
        find_units: finds the units of the trainer's model.
        tell_slices: called with the slices of each new shape of batch.
    """
    if data.is_shared:
        check_same_size(job.mesh, data.dataset)
    rows: list[Any] = []
    collate: SampleCollator | None = None
    if job.is_probed:
        rows, collate = data.sample_rows(COST_SAMPLE_ROWS), SampleCollator(job, data.collate_fn, data.is_shared)
    with generators_kept(job.trainer, job.model), sparing_memory(job.model):
        cut = find_units(rows, collate)
        loss, stack = TrainersLoss(job), cut.pipeline.stack
        reduction = find_reduction(loss, stack, data, collate)
        slicing: Slicing | None = None
        if job.args.slices_tokens:
            assert collate is not None
            windows = find_windows(loss, reduction, stack, rows, collate)
            slicing = Slicing(job.args.token_slices, windows, tell_slices)
        times = time_model(job, cut, rows, collate)
    planner = make_planner(
        job.args,
        cut.unit_costs,
        job.mesh,
        times,
        is_driven=is_driven(job, reduction),
        autocasts=job.mixed_precision in ("bf16", "fp16"),
    )
    say_how_loss_adds_up(job, reduction, planner)
    return Examined(cut, loss, reduction, slicing, times, planner)


def find_cache(
    job: TrainingJob, found: Examined, data: TrainingBatches, generations: Path, most: int | None
) -> AutoCache | str:
    """Return the cache of frozen layers' outputs, or why there is none. Collective over all processes.

    Args:
        job: the training job.
        found: the model and its loss.
        data: the training batches.
        generations: this training's name in the folder of the store.
        most: number of layers that will be frozen at most, if it is known.

    Raises:
        ValueError: there is none, with `activation_cache="on"`. Every process raises it.
    """
    pipeline, costs, must = found.cut.pipeline, found.cut.unit_costs, job.args.activation_cache == "on"
    if found.is_driven and not pipeline.stack.runner.takes_batch:
        why = "the loss calls the model on inputs of its own, which are looked up with one stage only"
        if must:
            raise ValueError(
                f"activation_cache='on': {why}. Set pipeline_parallel_size=1, or activation_cache='auto' to train"
                " without the cache."
            )
        return why
    trouble = check_folder(job, data, costs, generations)
    if trouble is not None:
        return trouble
    with generators_kept(job.trainer, job.model), sparing_memory(job.model):
        return make_cache(pipeline, found.times, job, data, costs, generations, most)


def first_layout(planner: Planner, kept: Mapping[str, Any], num_frozen: int) -> tuple[Layout, bool]:
    """Return the layout to begin with, and whether it is the one that a resumed job had.

    A newly made layout might differ from that, because the sequence of freezes that led to it is not recorded.

    Args:
        planner: makes layouts.
        kept: what the checkpoint says; empty for a new training.
        num_frozen: number of layers that are frozen from the first step on.
    """
    again = planner.again(kept["layout"], num_frozen) if kept.get("layout") is not None else None
    layout = again or planner.first
    if layout.num_frozen_layers < num_frozen:
        layout = planner.next(layout, num_frozen, layout.num_cached_layers)
    return layout, again is not None
