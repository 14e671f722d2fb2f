"""Reads off how the loss of a transformers model adds up, from the head and the loss alone.

    1. Run the layers once on a few samples, and once on the first of them: which dimension is that of the samples,
       and does a sample's state depend on the others?
    2. Change what the layers return a little, so that no two samples, and no two tokens, have the same loss.
    3. Compute the loss of the whole, and of unequal parts with unequal numbers of labels, each from those states.

The loss is transformers' own, so nothing has to be tried that users' code could do: no state, no gradients. What fits
none of `loss_scaling`'s ways of adding up is computed on whole batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch

from ..errors import is_out_of_memory
from ..randomness import global_state_kept, seed_all
from .layer_range import Carry, Unit
from .layer_stack import LayerStack, has_router_loss, why_whole
from .loss_scaling import (
    LossReduction,
    NumItems,
    Tolerance,
    candidates_for,
    items_passed,
    unexamined,
    why_not,
)
from .micro_batch import Batch, batch_rows, slice_rows
from .nested import tensors_of
from .placeholders import evaluation_mode, reachable_leaves

ComputeLoss = Callable[[Batch, NumItems], torch.Tensor]
"""Computes the loss of a batch, 0-dimensional, for `num_items_in_batch`."""

SPREAD = 0.2
"""Size of the change of what the layers return, relative to its own spread."""


@dataclass(frozen=True)
class LossReading:
    """What was read off.

    Attributes:
        reduction: how the losses of parts add up.
        reached: names of the parameters that the loss reaches.
    """

    reduction: LossReduction
    reached: frozenset[str]


def read_reduction(
    stack: LayerStack,
    batches: Sequence[Batch],
    compute_loss: ComputeLoss,
    *,
    shifts_labels: bool,
    label_names: Sequence[str],
    passes_items: bool,
    tolerance: Tolerance,
    blocks: int,
) -> LossReading:
    """Read off how a loss adds up. Afterwards the model and all random generators are as before.

    Args:
        stack: the units of the whole model.
        batches: a batch of a few samples, and the same samples with other labels (`label_variants`).
        compute_loss: computes the loss.
        shifts_labels: whether the model predicts label i + 1 at position i.
        label_names: names of the inputs that are labels.
        passes_items: whether the Trainer passes `num_items_in_batch`.
        tolerance: tolerance of the comparisons.
        blocks: number of rows that the collator has made of each sample, perhaps in blocks.
    """
    first = batches[0]
    items = items_passed(first, shifts_labels, passes_items)
    runner = stack.runner
    runner.install()
    try:
        with global_state_kept(), evaluation_mode(stack.model):
            stack.model.train()  # where batch normalisation normalises by the batch
            why = why_whole(stack)
            stack.model.eval()
            carry, reached = _run_whole(stack, first, items, compute_loss)
            if has_router_loss(stack.model):
                why = why or "the router loss (output_router_logits=True) compares all tokens of a batch"
            if why:
                return LossReading(unexamined(shifts_labels, why), reached)
            found = unexamined(shifts_labels, "it has one sample")
            for rows_of_sample in sorted({1, blocks}):
                if batch_rows(first) < 2 * rows_of_sample:
                    continue
                try:
                    head = _Head(stack, first, carry, compute_loss, rows_of_sample)
                except _MixedSamplesError as error:
                    return LossReading(unexamined(shifts_labels, str(error)), reached)
                found = _read(head, batches, shifts_labels, label_names, passes_items, tolerance, rows_of_sample)
                if found.kind != "whole":
                    break
            return LossReading(found, reached)
    finally:
        runner.remove()


def _run_whole(
    stack: LayerStack, batch: Batch, items: NumItems, compute_loss: ComputeLoss
) -> tuple[Carry, frozenset[str]]:
    """Compute the loss once; return what the layers have returned, and the names of parameters that it reaches."""
    carry: Carry = {}

    def note(unit: Unit, output: object) -> None:
        carry[unit.stack] = tuple(tensor.detach() for tensor in tensors_of(output))

    table = stack.table
    noting = stack.runner.to_the_end(0, None, note) if stack.units else nullcontext()
    with torch.enable_grad(), table.all_trainable(), noting:
        seed_all(0)
        leaves = reachable_leaves([compute_loss(dict(batch), items)])
    names = {id(table[name]): name for name in table.names}
    return carry, frozenset(names[id(leaf)] for leaf in leaves if id(leaf) in names)


class _MixedSamplesError(Exception):
    """The state of a sample depends on the others."""


class _Head:
    """Computes losses of rows of a batch from what the layers have returned for all of them."""

    def __init__(
        self, stack: LayerStack, batch: Batch, carry: Carry, compute_loss: ComputeLoss, rows_of_sample: int
    ) -> None:
        self._stack, self._compute_loss, self._blocks = stack, compute_loss, rows_of_sample
        self.rows = batch_rows(batch)
        self._carry: Carry = {}
        if not stack.units:
            return
        one = slice_rows(batch, 0, 1, rows_of_sample)
        with torch.no_grad():
            alone = stack.runner.run(0, stack.num_units, None, one)
        generator = torch.Generator().manual_seed(0)
        self._dimensions: dict[int, tuple[int | None, ...]] = {}
        for of, values in carry.items():
            dimensions = []
            for whole, part in zip(values, alone[of], strict=True):
                different = [d for d, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
                if len(different) > 1:
                    raise _MixedSamplesError("the shapes inside the model depend on the samples together")
                dimensions.append(different[0] if different else None)
            self._dimensions[of] = tuple(dimensions)
            cut = self._rows_of(of, values, 0, 1)
            if not all(_close(a, b) for a, b in zip(cut, alone[of], strict=True)):
                raise _MixedSamplesError("the layers' outputs for a sample depend on the other samples of its batch")
            self._carry[of] = tuple(_changed(value, generator) for value in values)

    @torch.no_grad()
    def loss(self, batch: Batch, items: NumItems, start: int, stop: int) -> float:
        """The loss of some samples of the batch, which may have other labels."""
        rows = slice_rows(batch, start, stop, self._blocks)
        if not self._stack.units:
            return float(self._compute_loss(rows, items))
        carry = {of: self._rows_of(of, values, start, stop) for of, values in self._carry.items()}
        with self._stack.runner.to_the_end(self._stack.num_units, _copied(carry)):
            return float(self._compute_loss(rows, items))

    def _rows_of(self, of: int, values: Sequence[torch.Tensor], start: int, stop: int) -> tuple[torch.Tensor, ...]:
        return tuple(
            value if dimension is None else self._cut(value, dimension, start, stop)
            for value, dimension in zip(values, self._dimensions[of], strict=True)
        )

    def _cut(self, value: torch.Tensor, dimension: int, start: int, stop: int) -> torch.Tensor:
        samples = self.rows // self._blocks
        each = value.shape[dimension] // self._blocks // samples  # a sample may have several rows (windows, choices)
        blocks = value.chunk(self._blocks, dimension)
        return torch.cat([block.narrow(dimension, start * each, (stop - start) * each) for block in blocks], dimension)


def _read(
    head: _Head,
    batches: Sequence[Batch],
    shifts_labels: bool,
    label_names: Sequence[str],
    passes_items: bool,
    tolerance: Tolerance,
    blocks: int,
) -> LossReduction:
    samples = head.rows // blocks
    spans = list(pairwise(sorted({0, 1, max(1, samples // 2), samples})))
    candidates: list[LossReduction] | None = None
    reason = ""
    for number, batch in enumerate(batches):
        items = items_passed(batch, shifts_labels, passes_items)
        try:
            whole = head.loss(batch, items, 0, samples)
            if not math.isfinite(whole) or whole == 0:
                continue  # no sample has a label
            doubled = head.loss(batch, 2 * items, 0, samples) if items is not None else whole
            parts = [slice_rows(batch, *span, blocks) for span in spans]

            def loss_of(index: int, asked: NumItems, batch: Batch = batch) -> float:
                return head.loss(batch, asked, *spans[index])

            if candidates is None:
                candidates = candidates_for(batch, whole, doubled, shifts_labels, label_names, tolerance, blocks)
            fitting = []
            for reduction in candidates:
                found = why_not(reduction, batch, parts, items, whole, loss_of, tolerance)
                if found is None:
                    fitting.append(reduction)
                reason = found or reason
            candidates = fitting
        except Exception as error:
            if is_out_of_memory(error) or number == 0:
                raise
            continue  # labels that the model does not accept
        if not candidates:
            return unexamined(shifts_labels, reason)
    if candidates is None:
        return unexamined(shifts_labels, "it is 0 or not finite on the first samples")
    return candidates[0]


def _changed(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not value.is_floating_point() or value.numel() < 2:
        return value
    noise = torch.randn(value.shape, generator=generator).to(value)
    return value + noise * (SPREAD * value.float().std().to(value))


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(other.float().abs().max()) if other.numel() else 0.0
    loose = one.dtype in (torch.float16, torch.bfloat16)
    return torch.allclose(one.float(), other.float(), rtol=0, atol=(5e-2 if loose else 1e-3) * max(scale, 1e-6))


def _copied(carry: Carry) -> Carry:
    """Copies, because a model may change values in place."""
    return {of: tuple(value.clone() for value in values) for of, values in carry.items()}
