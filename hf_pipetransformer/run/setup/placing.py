"""Before a model is placed: probe the model and its loss, and choose the first layout.

    examine        units, how the loss adds up, token slices, times; then the planner, which decides by them
    first_layout   the layout of the arguments, or of the job that is resumed

`PipelineRun.place` calls these in this order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...data.numbered_batches import TrainingBatches
from ...model.loss_scaling import LossReduction
from ...pipeline.engines.dispatch import DRIVEN, SLICES
from ...planning.layout import Layout
from ...planning.planner import Planner
from ...planning.unit_times import ModelTimes
from ...randomness import generators_kept
from ..job import COST_SAMPLE_ROWS, TrainingJob
from ..lazy_model import sparing_memory
from ..loss import Loss
from .consistency import check_same_size
from .cutting import CutModel, FindUnits, make_planner, time_model
from .probing import SampleCollator
from .reduction import find_reduction, is_driven, say_how_loss_adds_up

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Findings:
    """The results of probing a model and its loss on a few samples.

    Attributes:
        cut: the model, split into units. `cut.pipeline.stack` says how the loss calls it (`runner.called`), and why it
            must run whole batches, if it must (`whole_because`).
        loss: the trainer's loss.
        reduction: how the losses of a batch's parts add up.
        unreached: names of the parameters that may end a step without a gradient.
        slicing: how sequences are split along their tokens (`Execution.slicing`); None for whole sequences.
        times: the times of the units, if they were measured.
        planner: chooses layouts by these results.
    """

    cut: CutModel
    loss: Loss
    reduction: LossReduction
    unreached: frozenset[str]
    slicing: object | None
    times: ModelTimes | None
    planner: Planner

    @property
    def is_driven(self) -> bool:
        """Whether the loss drives the pipeline."""
        return self.planner.request.is_driven


def examine(
    job: TrainingJob, data: TrainingBatches, find_units: FindUnits, on_slices: Callable[[Any], None]
) -> Findings:
    """Examine the model and its loss on a few samples. Collective over all processes.

    Args:
        job: the training job.
        data: the training batches.
        find_units: finds the units of the trainer's model.
        on_slices: called with the slices of each new shape of batch (`SlicePlan`).
    """
    if data.is_shared:
        check_same_size(job.mesh, data.dataset)
    rows: list[Any] = []
    collate: SampleCollator | None = None
    if job.is_probed:
        rows, collate = data.sample_rows(COST_SAMPLE_ROWS), SampleCollator(job, data.collate_fn, data.is_shared)
    with generators_kept(job.trainer, job.model), sparing_memory(job.model):
        cut = find_units(rows, collate)
        loss, stack = Loss(job), cut.pipeline.stack
        reduction, unreached = find_reduction(loss, stack, data, collate)
        if is_driven(job, reduction):
            DRIVEN.load_everywhere("engine", job.mesh)
        slicing: object | None = None
        if job.args.slices_tokens:
            assert collate is not None
            find_slicing = SLICES.load_everywhere("slicing_setup", job.mesh).find_slicing
            slicing = find_slicing(loss, reduction, stack, rows, collate, on_slices)
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
    return Findings(cut, loss, reduction, unreached, slicing, times, planner)


def first_layout(planner: Planner, kept: Mapping[str, Any], num_frozen: int) -> tuple[Layout, bool]:
    """Return the first layout, and whether it is the layout of a resumed job.

    A newly made layout might differ from the resumed job's: it depends on earlier freezes, which are not recorded.

    Args:
        planner: makes layouts.
        kept: this package's state in the checkpoint; empty for a new training.
        num_frozen: number of layers that are frozen from the first step on.
    """
    resumed = planner.from_state_dict(kept["layout"], num_frozen) if kept.get("layout") is not None else None
    layout = resumed or planner.first
    if layout.num_frozen_layers < num_frozen:
        layout = planner.next(layout, num_frozen, layout.num_cached_layers)
    return layout, resumed is not None
