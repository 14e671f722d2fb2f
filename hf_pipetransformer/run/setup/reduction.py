"""How the losses of a batch's parts add up to the loss of the batch, and which layouts this allows."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace

import torch

from ...data.numbered_batches import TrainingBatches
from ...errors import is_users
from ...logs import log_once
from ...model.layer_stack import LayerStack, why_whole
from ...model.loss_reading import LossReading, read_reduction
from ...model.loss_scaling import EXACT, HALF_PRECISION, LossReduction, NumItems, unexamined
from ...model.micro_batch import Batch, SampleBounds, naming_long_rows, numbers_of_rows
from ...model.placeholders import evaluation_mode
from ...planning.planner import Planner
from ...planning.tables import MIB
from ...randomness import seeded
from ..job import TrainingJob
from ..loss import Loss
from .probing import SampleCollator, found_by_each, without_autocast

logger = logging.getLogger(__name__)

LOSS_SAMPLE_ROWS = 4
"""Maximum number of samples on which the loss reduction is determined."""


# ---------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------


def find_reduction(
    loss: Loss, stack: LayerStack, data: TrainingBatches, collate: SampleCollator | None
) -> tuple[LossReduction, frozenset[str]]:
    """Find how the losses of a batch's parts add up: as the user declares, or from a transformers model's head.

    No other loss is assumed to add up, and none is run. A lazily loaded model that is split is read on process 0
    only. Collective over all processes.

    Args:
        loss: the trainer's loss.
        stack: the units of the model.
        data: the training batches.
        collate: collates samples; None without probing.

    Returns:
        How they add up, and the names of the parameters that may end a step without a gradient.

    Raises:
        ValueError: a way of adding up is declared, and the model is not called on the batch's own inputs.
    """
    job = loss.job
    plain = unexamined(loss.shifts_labels)
    if not job.sums_up and not job.args.uses_pipeline:
        return plain, frozenset()  # the whole batch has a single loss
    if not loss.is_stock:
        unreached = frozenset(stack.table.names)  # it may reach any parameter, or none
        declared = job.args.loss_reduction
        if declared is None:
            return replace(plain, reason="it is not a transformers model's own"), unreached
        if job.args.uses_pipeline and not stack.runner.takes_batch:
            raise ValueError(
                f"loss_reduction={declared!r}: the loss is computed on micro-batches, and each stage calls the model"
                " on the batch's own inputs, but the batch has none that the forward of the"
                f" {type(job.model).__name__} names."
                " Leave loss_reduction out: the loss then runs on whole batches, and may call the model on anything."
            )
        with evaluation_mode(job.model):  # restores the modes
            job.model.train()
            why = why_whole(stack)
        if why:
            return replace(plain, reason=why), unreached
        return replace(plain, kind="sum" if declared == "sum" else "mean"), unreached
    assert collate is not None
    sample, bounds = _sample_for_loss(loss, data, collate)

    def loss_of(rows: Batch, num_items: NumItems) -> torch.Tensor:
        with seeded(job.args.seed):
            return loss.of_batch(rows, num_items_in_batch=num_items)

    def read() -> LossReading:
        exactly = without_autocast() if loss.is_exact else nullcontext()
        with exactly, naming_long_rows(job.model, sample):
            return read_reduction(
                stack,
                sample,
                loss_of,
                shifts_labels=loss.shifts_labels,
                label_names=loss.label_names,
                passes_items=loss.passes_items(sample),
                tolerance=EXACT if loss.is_exact else HALF_PRECISION,
                bounds=bounds,
            )

    # results may differ between processes by rounding, or by a collator's random numbers
    found = found_by_each(job.mesh, collate.is_probed_once, read)
    unreached = frozenset(stack.table.names)
    # code of the user's may reach others from some step on, and a batch without images reaches no image tower
    has_towers = bool(getattr(getattr(job.model, "config", None), "sub_configs", None))
    if not has_towers and not any(is_users(type(module).forward) for module in job.model.modules()):
        unreached -= frozenset.intersection(*(theirs.reached for theirs in found))
    return found[0].reduction, unreached


def _sample_for_loss(loss: Loss, data: TrainingBatches, collate: SampleCollator) -> tuple[Batch, SampleBounds | None]:
    """Return a batch of as many samples as a training batch, at most `LOSS_SAMPLE_ROWS`, prepared as for a step.

    If its inputs have different numbers of rows, it is found out where samples begin in each of them.
    """
    job, rows = loss.job, min(LOSS_SAMPLE_ROWS, loss.job.rows_at_once)
    samples = data.spread_rows(max(rows, 2))
    try:
        batch = collate(samples)
    except Exception:
        if rows > 1:
            raise
        batch = collate(samples[:1])  # samples of different lengths that are trained one per batch
    bounds = None
    if len(numbers_of_rows(batch)) > 1:
        bounds = SampleBounds.found(batch, [collate(samples[:stop]) for stop in range(1, len(samples))])
    with seeded(job.args.seed):
        return job.on_models_device(dict(job.trainer._prepare_inputs(batch))), bounds


# ---------------------------------------------------------------------------------------------------------
# Layouts that the loss allows
# ---------------------------------------------------------------------------------------------------------


def is_driven(job: TrainingJob, reduction: LossReduction) -> bool:
    """Whether the loss drives the pipeline (`StepLoss.drive`): it is not known to add up over micro-batches."""
    return job.args.uses_pipeline and reduction.kind == "whole"


def say_how_loss_adds_up(job: TrainingJob, reduction: LossReduction, planner: Planner) -> None:
    """Log in one line how the first layout is limited by a loss that is not known to add up."""
    name = type(job.model).__name__
    parts = planner.first.data_parallel_size * job.args.gradient_accumulation_steps
    averaged = ""
    if reduction.kind == "whole" and parts > 1:
        averaged = (
            f" Each of the {parts} parts of a batch has a loss of its own: replicas' are averaged, as under DDP, and"
            " accumulated ones count as in the stock Trainer."
        )
    if not is_driven(job, reduction):
        if averaged:
            log_once(logger, logging.INFO, "The loss of %s: %s.%s", name, reduction.reason, averaged)
        return
    log_once(
        logger,
        logging.INFO,
        "The loss of %s runs on whole batches and drives the pipeline (%s): a stage keeps the activations of all"
        " micro-batches, up to %s MiB.%s If the losses of a batch's parts add up, loss_reduction='sum' or 'mean'"
        " allows other schedules, and replicas in the place of frozen layers.",
        name,
        reduction.reason or "the losses of a batch's parts do not add up",
        f"{max(planner.stage_bytes(planner.first)) / MIB:,.0f}",
        averaged,
    )
