"""Determines how the loss of a transformers model adds up, from the head and the loss alone.

    1. Run the layers once on a few samples, and once on the first of them. This shows the samples' dimension, and
       whether a sample's state depends on the others.
    2. Change the layers' outputs a little, to give all samples and tokens different losses.
    3. Compute the loss of the whole, and of unequal parts with unequal numbers of labels, each from those states.

The loss is transformers' own, so state and gradients of users' code need no test. A loss that fits no reduction in
`loss_scaling` is computed on whole batches.
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
from .layer_stack import LayerStack, why_whole
from .loss_scaling import (
    EXACT,
    IGNORED,
    ROUNDING,
    LossReduction,
    NumItems,
    candidates_for,
    items_passed,
    misfit,
    unexamined,
    variants_of,
)
from .micro_batch import Batch, SampleBounds, batch_rows, numbers_of_rows, slice_rows
from .nested import are_close, tensors_of
from .placeholders import evaluation_mode, reachable_leaves
from .refusals import has_router_loss
from .zero_weights import zeros_filled

ComputeLoss = Callable[[Batch, NumItems], torch.Tensor]
"""Computes the loss of a batch, 0-dimensional, for `num_items_in_batch`."""

SPREAD = 0.2
"""Size of the change of the layers' outputs, relative to their standard deviation."""


@dataclass(frozen=True)
class LossReading:
    """The result of `read_reduction`.

    Attributes:
        reduction: how the losses of parts add up.
        reached: names of the parameters that the loss reaches.
    """

    reduction: LossReduction
    reached: frozenset[str]


def read_reduction(
    stack: LayerStack,
    batch: Batch,
    compute_loss: ComputeLoss,
    *,
    shifts_labels: bool,
    label_names: Sequence[str],
    passes_items: bool,
    tolerance: float,
    bounds: SampleBounds | None = None,
) -> LossReading:
    """Determine how a loss adds up. Restores the model and all random generators.

    Args:
        stack: the units of the whole model.
        batch: a batch of a few samples.
        compute_loss: computes the loss.
        shifts_labels: whether the model predicts label i + 1 at position i.
        label_names: names of the inputs that are labels.
        passes_items: whether the Trainer passes `num_items_in_batch`.
        tolerance: the largest difference of losses that rounding explains.
        bounds: the first rows of the samples, if inputs have different numbers of rows.
    """
    items = items_passed(batch, shifts_labels, passes_items)
    rows = batch_rows(batch) if bounds is None else bounds.count
    stack.runner.install()
    try:
        with global_state_kept(), zeros_filled(stack.model), evaluation_mode(stack.model):
            stack.model.train()  # where batch normalisation normalises by the batch
            why = why_whole(stack)
            stack.model.eval()
            carry, reached = _run_whole(stack, batch, items, compute_loss)
            if has_router_loss(stack.model):
                why = why or "the router loss (output_router_logits=True) compares all tokens of a batch"
            elif rows < 2:
                why = why or "it has one sample"
            if why:
                return LossReading(unexamined(shifts_labels, why), reached)
            try:
                head = _Head(stack, batch, carry, compute_loss, bounds)
                ignored = getattr(getattr(stack.model, "config", None), "semantic_loss_ignore_index", IGNORED)
                candidates = candidates_for(batch, shifts_labels, label_names, passes_items, ignored)
                batches = variants_of(batch, label_names, ignored)
                found = _read(head, batches, candidates, shifts_labels, passes_items, tolerance)
            except _MixedSamplesError as error:
                found = unexamined(shifts_labels, str(error))
            except Exception as error:  # the model does not run on the supposed rows of some samples
                if is_out_of_memory(error) or len(numbers_of_rows(batch)) == 1:
                    raise
                why = f"it fails on some of the samples, whose inputs have different numbers of rows ({error})"
                found = unexamined(shifts_labels, why)
            return LossReading(found, reached)
    finally:
        stack.runner.remove()


def _run_whole(
    stack: LayerStack, batch: Batch, items: NumItems, compute_loss: ComputeLoss
) -> tuple[Carry, frozenset[str]]:
    """Compute the loss once; return the layers' outputs, and the names of the parameters that the loss reaches."""
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
    """Computes losses of some samples of a batch from the layers' outputs for all samples."""

    def __init__(
        self,
        stack: LayerStack,
        batch: Batch,
        carry: Carry,
        compute_loss: ComputeLoss,
        bounds: SampleBounds | None,
    ) -> None:
        self._stack, self._compute_loss = stack, compute_loss
        self.rows = batch_rows(batch) if bounds is None else bounds.count
        self.samples: Callable[[Batch, int, int], Batch] = slice_rows if bounds is None else bounds.cut
        self._carry: Carry = {}
        self._dimensions: dict[int, tuple[int | None, ...]] = {}  # of the samples, by stack
        if not stack.units:
            return
        with torch.no_grad():
            alone = stack.runner.run(0, stack.num_units, None, self.samples(batch, 0, 1))
        generator = torch.Generator().manual_seed(0)
        for of, values in carry.items():
            pairs = list(zip(values, alone[of], strict=True))
            self._dimensions[of] = tuple(_dimension_of_samples(*pair) for pair in pairs)
            cut = self._cut(of, values, 0, 1)
            # in a batch of another size, other kernels may run
            if not all(are_close(a, b, 1e-3, 5e-2) for a, b in zip(cut, alone[of], strict=True)):
                raise _MixedSamplesError("the layers' outputs for a sample depend on the other samples of its batch")
            self._carry[of] = tuple(_changed(value, generator) for value in values)

    @torch.no_grad()
    def loss(self, batch: Batch, items: NumItems, start: int, stop: int) -> float:
        """The loss of some samples of the batch, which may have other labels."""
        samples = self.samples(batch, start, stop)
        if not self._stack.units:
            return float(self._compute_loss(samples, items))
        # copies, because a model may change values in place
        carry = {
            of: tuple(v.clone() for v in self._cut(of, values, start, stop)) for of, values in self._carry.items()
        }
        with self._stack.runner.to_the_end(self._stack.num_units, carry):
            return float(self._compute_loss(samples, items))

    def _cut(self, of: int, values: Sequence[torch.Tensor], start: int, stop: int) -> tuple[torch.Tensor, ...]:
        cut = []
        for value, dimension in zip(values, self._dimensions[of], strict=True):
            if dimension is not None:
                each = value.shape[dimension] // self.rows  # a sample may have several rows (windows, choices)
                value = value.narrow(dimension, start * each, (stop - start) * each)
            cut.append(value)
        return tuple(cut)


def _read(
    head: _Head,
    batches: Sequence[Batch],
    candidates: Sequence[LossReduction],
    shifts_labels: bool,
    passes_items: bool,
    tolerance: float,
) -> LossReduction:
    """Return the way of adding up that fits all of these batches of the same samples best, the first of equals."""
    spans = list(pairwise(sorted({0, 1, max(1, head.rows // 2), head.rows})))
    reason, is_informed = "it is 0 or not finite on the first samples", False
    worst = dict.fromkeys(candidates, ROUNDING if tolerance == EXACT else tolerance)
    for number, batch in enumerate(batches):
        items = items_passed(batch, shifts_labels, passes_items)
        try:
            losses = [head.loss(batch, items, *span) for span in ((0, head.rows), *spans)]
        except Exception as error:
            if is_out_of_memory(error) or number == 0:
                raise
            continue  # labels that the model does not accept
        if not math.isfinite(losses[0]) or losses[0] == 0:
            continue  # no sample has a label
        is_informed = True
        parts = [head.samples(batch, *span) for span in spans]
        for reduction in list(worst):
            found = misfit(reduction, batch, parts, items, losses)
            worst[reduction] = max(worst[reduction], found.relative)
            if found.relative > tolerance:
                reason = found.reason
                del worst[reduction]
    if not worst or not is_informed:
        return unexamined(shifts_labels, reason)
    return next(reduction for reduction, relative in worst.items() if relative <= 10 * min(worst.values()))


def _dimension_of_samples(whole: torch.Tensor, part: torch.Tensor) -> int | None:
    """The dimension that differs between a value for all samples and for one sample; None if none differs."""
    different = [d for d, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    if len(different) > 1:
        raise _MixedSamplesError("the shapes inside the model depend on the samples together")
    return different[0] if different else None


def _changed(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not value.is_floating_point() or value.numel() < 2:
        return value
    noise = torch.randn(value.shape, generator=generator).to(value)
    return value + noise * (SPREAD * value.float().std().to(value))
