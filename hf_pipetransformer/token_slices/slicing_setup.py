"""Setup before the first step: probe with the trainer's loss whether sequences can be split along their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..errors import UnsupportedModelError
from ..model.layer_stack import LayerStack
from ..model.loss_scaling import LossReduction, with_unequal_labels
from ..model.micro_batch import Batch, batch_rows
from ..run.loss import Loss
from ..run.setup.cutting import SAMPLE_ROWS
from ..run.setup.probing import SampleCollator, found_by_each, without_autocast
from .engine import Slicing
from .kv_slices import Windows
from .slice_timeline import SlicePlan
from .slices import sequence_length
from .slicing_probe import informative_samples, probe_slicing


def find_slicing(
    loss: Loss,
    reduction: LossReduction,
    stack: LayerStack,
    rows: Sequence[Any],
    collate: SampleCollator,
    on_plan: Callable[[SlicePlan], None],
) -> Slicing:
    """Probe whether sequences can be split along their tokens, before the model is split into stages.

    Collective over all processes.

    Args:
        loss: the trainer's loss.
        reduction: how the losses of a batch's parts add up.
        stack: the units of the whole model.
        rows: samples.
        collate: collates these samples.
        on_plan: called with the slices of each new batch shape.

    Raises:
        UnsupportedModelError: sequences cannot be split for this model or loss, or the probe has failed.
    """
    job = loss.job
    if reduction.kind not in ("sum", "mean"):
        raise UnsupportedModelError(
            job.model,
            "its loss is not a plain sum or mean over samples or tokens, so token slices would change it.",
            "Set token_slices='off'.",
        )
    if job.overrides_loss or job.trainer.compute_loss_func is not None:
        raise UnsupportedModelError(
            job.model,
            "whether token slices change its loss is tried on a few samples, and a loss of your own (compute_loss or"
            " compute_loss_func) is not run before the first step.",
            "Set token_slices='off'.",
        )
    batches = collate.in_batches(rows)
    # a collator may have packed the samples into fewer sequences
    were_packed = sum(map(batch_rows, batches)) != len(rows)
    few = rows[:SAMPLE_ROWS] if were_packed else [rows[i] for i in informative_samples(batches)]
    plain = collate(few[: job.rows_at_once])
    sample = with_unequal_labels(plain, ("labels",))
    num_items = max(reduction.count(sample), 1)
    is_exact = loss.is_exact  # in half precision, rounding hides an error in a small gradient

    def loss_of(part: Batch) -> torch.Tensor:
        return loss.of_part(reduction, job.model, part, num_items)

    def probe() -> Windows:
        try:
            with without_autocast() if is_exact else nullcontext():
                return probe_slicing(
                    stack,
                    sample,
                    loss_of,
                    loss_tolerance=1e-3 if is_exact else 1e-2,
                    gradient_tolerance=1e-3 if is_exact else 1e-1,
                )
        except (RuntimeError, MemoryError) as error:  # one process may run out of memory
            raise UnsupportedModelError(
                job.model,
                f"the check of token slices failed on process {job.mesh.rank} ({type(error).__name__}: {error}). It"
                f" needs memory for the gradients of the whole model and for {batch_rows(sample)} samples of"
                f" {sequence_length(sample)} tokens.",
                "Use shorter samples, or set token_slices='off'.",
            ) from error

    found = found_by_each(job.mesh, False, probe)
    # rounding may make the processes disagree. If a single stage refused packed sequences, the others would hang
    windows = replace(found[0], separates_documents=all(theirs.separates_documents for theirs in found))
    return Slicing(job.args.token_slices, windows, on_plan)
