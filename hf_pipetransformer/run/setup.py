"""Setup before the first step: probes on a few samples of the training data, with the user's own collator and loss.

    1. units    cutting.find_units     units into which the model can be split; makes weights equal on all processes
    2. loss     find_reduction         how the losses of a batch's parts combine to the loss of the batch
    3. slices   find_windows           whether sequences can be split along their tokens, if that is requested
    4. times    cutting.time_model     seconds of each unit, if a decision depends on them

`PipelineRun.place` continues from there with the plan, the cache and the stages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..data.numbered_batches import TrainingBatches
from ..errors import UnsupportedModelError, is_out_of_memory
from ..logs import log_once
from ..model.layer_stack import LayerStack, has_router_loss
from ..model.left_as_found import left_as_found
from ..model.loss_probe import LossProbe, probe_loss
from ..model.loss_scaling import EXACT, HALF_PRECISION, LossReduction, label_variants, unexamined
from ..model.micro_batch import Batch, batch_rows, naming_long_rows, slice_rows
from ..planning.plan import MIB, PipelinePlan
from ..planning.unit_times import ModelTimes
from ..randomness import generators_kept, seeded
from ..token_slices.kv_slices import Windows
from ..token_slices.slices import sequence_length
from ..token_slices.slicing_probe import informative_samples, probe_slicing, without_autocast
from .cutting import SAMPLE_ROWS
from .job import TrainingJob
from .lazy_model import is_lazy
from .loss import TrainersLoss
from .probed_once import found_by_each
from .samples import SampleCollator, elements_of_a_row, is_padded_further, of_different_classes

logger = logging.getLogger(__name__)

LOSS_SAMPLE_ROWS = 4
"""Maximum number of samples on which the loss reduction is determined."""
ROWS_APART = 1
"""Number of short samples, and of long samples, used to test whether a loss depends on padding."""
SAMPLES_TO_CHOOSE_FROM = 32
"""Number of samples from which those with different classes are chosen to probe the loss."""


@dataclass(frozen=True)
class Setup:
    """The results of the setup.

    Attributes:
        reduction: how the losses of parts combine to the loss of the whole batch.
        loss_is_random: whether the loss draws random numbers in training mode, other than for dropout.
        times: times of the model's units, the same on every process; None if not measured.
    """

    reduction: LossReduction
    loss_is_random: bool
    times: ModelTimes | None


# ---------------------------------------------------------------------------------------------------------
# The loss
# ---------------------------------------------------------------------------------------------------------


def find_reduction(
    loss: TrainersLoss, stack: LayerStack, data: TrainingBatches, collate: SampleCollator | None
) -> tuple[LossReduction, bool]:
    """Probe the loss, including a user-defined one, on the whole model with a few samples.

    A lazily loaded model that is split is probed on process 0 only. Collective over all processes.

    Args:
        loss: the trainer's loss.
        stack: the units of the model; the names of parameters without a gradient are added to `stack.unreached`, and
            `stack.rows_per_sample` and `stack.is_random` are set.
        data: the training batches.
        collate: collates samples; None if nothing is probed.

    Returns:
        The loss reduction, and whether the loss draws random numbers other than for dropout.
    """
    job = loss.job
    if job.sums_nothing_up and not job.args.uses_pipeline:
        return unexamined(loss.shifts_labels), False  # nothing is added up
    if job.args.loss_reduction is not None:
        items = unexamined(loss.shifts_labels).items
        return LossReduction("sum" if job.args.loss_reduction == "sum" else "mean", items), False
    if not loss.is_stock:
        return unexamined(loss.shifts_labels, "compute_loss is the user's own"), False
    assert collate is not None
    sample, num_samples = _sample_for_loss(loss, data, collate)
    rows = batch_rows(sample)
    variants = label_variants(
        sample,
        loss.label_names,
        _classes_of(job, sample),
        # a user-defined loss may use labels as indices, and an index of -100 destroys the CUDA context
        may_ignore=loss.is_stock or job.device.type == "cpu" or loss.has_ignored(sample),
        model_inputs=[name for name in sample if name not in stack.runner.called.kept_back],
    )

    def probe() -> LossProbe:
        exactly = without_autocast() if loss.is_exact else nullcontext()
        with exactly, naming_long_rows(job.model, sample):
            return probe_loss(
                stack,
                variants,
                loss.of_batch,
                others=(job.trainer,),
                shifts_labels=loss.shifts_labels,
                label_names=loss.label_names,
                passes_items=loss.passes_items(sample),
                is_cut=job.args.uses_pipeline,
                apart=_collated_apart(job, data, collate),
                tolerance=EXACT if loss.is_exact else HALF_PRECISION,
                blocks=rows // num_samples if rows % num_samples == 0 else 1,
                recalls=is_lazy(job.model),
            )

    # results may differ between processes by rounding, or by what a collator draws
    found = found_by_each(job.mesh, job.is_probed_once(collate), probe)
    reduction = found[0].reduction
    reason = stack.fails_on_parts
    if has_router_loss(job.model):  # its share of the loss is too small for the probe
        reason = "the router loss (output_router_logits=True) compares all tokens of a batch"
    if reason:
        reduction = replace(unexamined(loss.shifts_labels, reason), blocks=reduction.blocks)
    stack.unreached |= frozenset[str]().union(*(theirs.without_gradient for theirs in found))
    stack.rows_per_sample = reduction.blocks
    stack.is_random = found[0].is_random
    if reduction.kind != "whole" and reduction.reason:
        log_once(logger, logging.WARNING, "The loss of %s: %s.", type(job.model).__name__, reduction.reason)
    return reduction, found[0].is_random


def _classes_of(job: TrainingJob, sample: Batch) -> Sequence[int]:
    """Return all class labels of the model if the sample's labels are classes, otherwise an empty sequence."""
    num_labels = getattr(getattr(job.model, "config", None), "num_labels", 0)
    labels = sample.get("labels")
    are_classes = (
        isinstance(labels, torch.Tensor)
        and not labels.is_floating_point()
        and labels.numel() > 0
        and int(labels.min()) >= 0
        and int(labels.max()) < num_labels
    )
    return range(num_labels) if are_classes else ()


def _sample_for_loss(loss: TrainersLoss, data: TrainingBatches, collate: SampleCollator) -> tuple[Batch, int]:
    """Return a batch of samples of different classes, prepared as for a step, and their number.

    The number is that of a training batch, and at most `LOSS_SAMPLE_ROWS`.
    """
    samples = data.spread_rows(SAMPLES_TO_CHOOSE_FROM)
    rows = min(LOSS_SAMPLE_ROWS, loss.job.rows_at_once, len(samples))
    chosen = of_different_classes(samples, loss.label_names)
    chosen = chosen[: max(rows, 2)]
    try:
        batch = collate(chosen)
    except Exception:
        if rows > 1:
            raise
        chosen = chosen[:1]
        batch = collate(chosen)  # samples of different lengths that are trained one per batch
    return _prepared(loss.job, batch)[0], len(chosen)


def _collated_apart(job: TrainingJob, data: TrainingBatches, collate: SampleCollator) -> tuple[Batch, ...]:
    """Return a batch, its short samples and its long samples, each collated separately as replicas do.

    The batches are prepared as for a step. The result is empty if they would show nothing: if all samples have
    one length, or the collator draws at random, packs or sorts.
    """
    samples = data.spread_rows(SAMPLES_TO_CHOOSE_FROM)
    half = min(ROWS_APART, job.rows_at_once // 2)
    if not half or len(samples) < 2 * half:
        return ()
    try:
        with generators_kept(collate.collate_fn):
            alone = [collate.by_seed([sample]) for sample in samples]
        order = sorted(range(len(samples)), key=lambda index: elements_of_a_row(alone[index]))
        short, long = ([samples[index] for index in some] for some in (order[:half], order[-half:]))
        found = [collate(rows) for rows in ([*short, *long], short, long)]
    except Exception as error:  # the collator accepts only samples of one length
        if is_out_of_memory(error):
            raise
        return ()
    if not is_padded_further(found[1], slice_rows(found[0], 0, half)):
        return ()
    return _prepared(job, *found)


def _prepared(job: TrainingJob, *batches: Batch) -> tuple[Batch, ...]:
    with left_as_found(job.trainer), seeded(job.args.seed):
        return tuple(job.on_models_device(dict(job.trainer._prepare_inputs(batch))) for batch in batches)


# ---------------------------------------------------------------------------------------------------------
# Token slices
# ---------------------------------------------------------------------------------------------------------


def find_windows(
    loss: TrainersLoss, reduction: LossReduction, stack: LayerStack, rows: Sequence[Any], collate: SampleCollator
) -> Windows:
    """Probe whether sequences can be split along their tokens, before the model is split into stages.

    Collective over all processes.

    Raises:
        UnsupportedModelError: they cannot be split for this model or loss, or the probe has failed.
    """
    job = loss.job
    if reduction.kind not in ("sum", "mean") or reduction.blocks > 1:
        raise UnsupportedModelError(
            job.model,
            "its loss is not a plain sum or mean over samples or tokens, so token slices would change it.",
            "Set token_slices='off'.",
        )
    batches = collate.apart(rows)
    # a collator may have packed the samples into fewer sequences
    were_packed = sum(map(batch_rows, batches)) != len(rows)
    few = rows[:SAMPLE_ROWS] if were_packed else [rows[i] for i in informative_samples(batches)]
    plain = collate(few[: job.rows_at_once])
    *_, sample = label_variants(plain, ("labels",), (), may_ignore=True)
    num_items = max(reduction.count(sample), 1)
    is_exact = loss.is_exact  # in half precision rounding is larger than an error in a small gradient
    windows: Windows | None = None
    failure: Exception | None = None
    try:
        with without_autocast() if is_exact else nullcontext():
            windows = probe_slicing(
                stack,
                sample,
                lambda part: loss.of_part(reduction, job.model, part, num_items),
                loss_tolerance=1e-3 if is_exact else 1e-2,
                gradient_tolerance=1e-3 if is_exact else 1e-1,
            )
    except Exception as error:  # one process may run out of memory, and the others must learn of it
        failure = error
    mine = windows if failure is None else f"{type(failure).__name__}: {failure}"
    everyone = job.mesh.gather_objects(mine)
    if failure is not None and not isinstance(failure, (RuntimeError, MemoryError)):
        raise failure
    for rank, why in enumerate(everyone):
        if isinstance(why, str):
            raise UnsupportedModelError(
                job.model,
                f"the check of token slices failed on process {rank} ({why}). It needs memory for the gradients"
                f" of the whole model and for {batch_rows(sample)} samples of {sequence_length(sample)} tokens.",
                "Use shorter samples, or set token_slices='off'.",
            ) from failure
    found = [theirs for theirs in everyone if isinstance(theirs, Windows)]
    # rounding may make the processes disagree, and if one stage alone refused packed sequences, the others would
    # hang
    return replace(
        found[0],
        separates_documents=all(theirs.separates_documents for theirs in found),
        allows_left_padding=all(theirs.allows_left_padding for theirs in found),
    )


# What the loss allows of a plan
# ---------------------------------------------------------------------------------------------------------


def is_driven(job: TrainingJob, reduction: LossReduction) -> bool:
    """Whether the loss drives the pipeline (`pipeline.served_calls`): it is not known to add up over micro-batches."""
    return job.args.uses_pipeline and reduction.kind == "whole"


def may_replicate(job: TrainingJob, reduction: LossReduction) -> bool:
    """Whether freed processes may become replicas. They may not if these would change the loss."""
    return not job.args.uses_pipeline or (reduction.kind != "whole" and not reduction.depends_on_padding)


def say_how_loss_adds_up(job: TrainingJob, reduction: LossReduction, plan: PipelinePlan) -> None:
    """Say in one line what a loss that is not known to add up means for a plan."""
    name = type(job.model).__name__
    parts = plan.data_parallel_size * job.args.gradient_accumulation_steps
    if reduction.depends_on_padding and parts > 1:
        log_once(
            logger,
            logging.WARNING,
            "The loss of %s depends on the length to which samples are padded. As with plain DDP or gradient"
            " accumulation, each process and micro-batch pads its own samples, so the result differs from that of"
            " one process with the whole batch. Pad all samples to the same length to avoid this.",
            name,
        )
    if not is_driven(job, reduction):
        return
    rows = plan.rows_per_pipeline
    held = max(
        plan.stage_bytes(stage, rows=rows, num_microbatches=plan.num_microbatches_for(rows))
        for stage in range(plan.pipeline_parallel_size)
    )
    averaged = f" Each of the {parts} parts of a batch has its own loss, and they are averaged, as under DDP."
    log_once(
        logger,
        logging.INFO,
        "The loss of %s runs on whole batches and drives the pipeline (%s): a stage keeps the activations of all"
        " micro-batches, up to %s MiB.%s If the losses of a batch's parts add up, loss_reduction='sum' or 'mean'"
        " allows other schedules, and replicas in the place of frozen layers.",
        name,
        reduction.reason or "the losses of a batch's parts do not add up",
        f"{held / MIB:,.0f}",
        averaged if parts > 1 else "",
    )
