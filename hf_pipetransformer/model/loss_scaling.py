"""How a model's loss adds up, so that micro-batches and replicas give the loss of the whole batch.

This is found by trying, once, on a few samples, because a model's signature does not show whether it honours
`num_items_in_batch`. With n = `num_items_in_batch` and c = the number of items in a part of the batch:

    sum               loss(part, n) = S(part) / n         parts get the global n and are added
    sum_and_constant  loss(part, n) = S(part) / n + r     r is the same for every part (a penalty on the weights), or a
                                                          mean over samples: a part with the share w of the samples
                                                          gets n w, and its loss is weighted by w: S / n + w r
    mean              loss(part)    = S(part) / c + r     parts are weighted by their share of the items
    plain_sum         loss(part)    = S(part)             parts are added
    whole             none of these: the samples depend on one another (contrastive losses), or are weighted by their
                      class: exact only in one micro-batch
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from .micro_batch import Batch, batch_rows, slice_rows

IGNORED = -100
"""The label of a position that the loss ignores."""

Kind = Literal["sum", "sum_and_constant", "mean", "plain_sum", "whole"]
Items = Literal["labels", "shifted_labels", "rows", "total"]

NO_NUMBER = "it is not finite on the probed samples, so it is assumed to be a mean, as most losses are"

NumItems = int | float | None
"""`num_items_in_batch` as the Trainer passes it to a loss; None if it passes none."""


@dataclass(frozen=True)
class LossReduction:
    """How losses of parts add up to the loss of the whole batch.

    Attributes:
        kind: one of the kinds described at the top of this module.
        items: what is counted: "labels" (that are not ignored), "shifted_labels" (the same without each sample's first
            label), "rows" (samples), or "total", the sum of an input's values (a mask, sample weights).
        key: name of the input that is counted; unused for "rows".
        reason: why no other kind than "whole" was found, or why a kind was not tried.
        depends_on_padding: parts that are collated separately, and so padded to other lengths, do not add up to the
            whole.
        blocks: number of rows that the collator makes of a sample, block by block (`micro_batch`).
    """

    kind: Kind
    items: Items = "labels"
    key: str = "labels"
    reason: str = field(default="", compare=False)
    depends_on_padding: bool = field(default=False, compare=False)
    blocks: int = 1

    def count(self, batch: Batch) -> int | float:
        """Number of items in a batch: tokens or samples that have a label, or the sum of their weights."""
        return self.counts([batch])[0]

    def counts(self, batches: Sequence[Batch]) -> list[int | float]:
        """`count` of several batches. On an accelerator, reading them waits for the device once, not for each.

        A batch that does not show its number of samples counts as one.
        """
        counted = [self._counted(batch) for batch in batches]
        read = iter(torch.stack(on_device).tolist() if (on_device := [c for c in counted if c is not None]) else [])
        return [batch_rows(b, default=1) if c is None else next(read) for b, c in zip(batches, counted, strict=True)]

    def source(self, batch: Batch) -> torch.Tensor | None:
        """The input whose values are counted; None if samples are."""
        values = batch.get(self.key)
        shifted = batch.get("shift_labels") if self.key == "labels" else None
        if isinstance(shifted, torch.Tensor) and (self.items == "shifted_labels" or values is None):
            values = shifted
        return values if self.items != "rows" and isinstance(values, torch.Tensor) else None

    def _counted(self, batch: Batch) -> torch.Tensor | None:
        values = self.source(batch)
        if values is None:
            return None
        if self.items == "total":
            return values.double().sum()
        if self.items == "shifted_labels" and values is not batch.get("shift_labels"):
            values = values[..., 1:]
        return values.ne(IGNORED).sum()

    def part(
        self, batch: Batch, num_items: NumItems, share: float, count: int | float | None = None
    ) -> tuple[NumItems, float]:
        """How to compute the loss of a part of a batch, and how to weight it.

        Args:
            batch: the part.
            num_items: number of items of the whole batch, over all replicas and accumulated micro-batches.
            share: fraction of the whole batch's samples that are in this part.
            count: `count(batch)`, if it is known.

        Returns:
            `num_items_in_batch` for the loss of the part, and the factor by which its result is multiplied.
        """
        if self.kind in ("sum", "plain_sum"):
            return num_items, 1.0
        if self.kind == "mean":
            assert num_items is not None
            return num_items, (self.count(batch) if count is None else count) / num_items
        if self.kind in ("sum_and_constant", "whole") and num_items is not None and share > 0:
            # "whole": as under DDP, where the loss divides by the number of all items, is multiplied by the number of
            # processes, and is averaged over them
            return num_items * share, share
        return num_items, share


def items_passed(batch: Batch, shifts_labels: bool, passes_items: bool) -> NumItems:
    """`num_items_in_batch` of a probed batch; None if the Trainer passes none."""
    return max(LossReduction("sum", _token_items(shifts_labels)).count(batch), 1) if passes_items else None


def unexamined(shifts_labels: bool, reason: str = "") -> LossReduction:
    """The reduction for one process without accumulation, where nothing is added up, or if no other kind fits."""
    return LossReduction("whole", _token_items(shifts_labels), reason=reason)


@dataclass(frozen=True)
class LossOutcome:
    """The loss of one batch, and optionally its gradient.

    Attributes:
        value: the loss.
        gradient: gradient of some parameters, flattened; None if it was not requested.
    """

    value: float
    gradient: torch.Tensor | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the loss and its gradient are finite."""
        return abs(self.value) < float("inf") and (self.gradient is None or bool(self.gradient.isfinite().all()))


LossOf = Callable[[Batch, NumItems], LossOutcome]
"""Computes a batch's loss for a number of items; deterministic."""


@dataclass(frozen=True)
class Tolerance:
    """Differences that rounding explains, relative to the sum of the parts' absolute values.

    Attributes:
        value: tolerance of losses.
        gradient: tolerance of gradients, by their 2-norm.
    """

    value: float
    gradient: float


EXACT = Tolerance(1e-4, 1e-3)
HALF_PRECISION = Tolerance(3e-2, 1e-1)
ABSOLUTE = 1e-7


def difference(parts: Sequence[tuple[float, LossOutcome]], whole: LossOutcome, allowed: Tolerance) -> str | None:
    """Describe how weighted parts differ from the whole; None if rounding explains the difference.

    Args:
        parts: factors and outcomes of the parts.
        whole: the outcome that the parts should add up to.
        allowed: the largest differences that are accepted.
    """
    value = sum(weight * part.value for weight, part in parts)
    scale = max(sum(abs(weight * part.value) for weight, part in parts), abs(whole.value))
    if not abs(value - whole.value) <= allowed.value * scale + ABSOLUTE:
        return f"the parts of a batch add up to {value:.6g}, but the whole batch gives {whole.value:.6g}"
    if whole.gradient is None:
        return None
    total = torch.zeros_like(whole.gradient)
    size = float(whole.gradient.norm())
    parts_size = 0.0
    for weight, part in parts:
        if part.gradient is not None and weight:
            total += weight * part.gradient
            parts_size += abs(weight) * float(part.gradient.norm())
    error = float((total - whole.gradient).norm())
    if not error <= allowed.gradient * max(size, parts_size) + ABSOLUTE:
        return f"the gradients of a batch's parts differ from the whole batch's by {error / max(size, 1e-30):.1%}"
    return None


def find_loss_reduction(
    loss_of: LossOf,
    batches: Sequence[Batch],
    *,
    shifts_labels: bool,
    label_names: Sequence[str] = ("labels",),
    passes_items: bool = True,
    apart: Sequence[Batch] = (),
    tolerance: Tolerance = EXACT,
    blocks: int = 1,
) -> LossReduction:
    """Find by trial how the loss of a batch follows from the losses of its samples.

    Args:
        loss_of: the loss as the Trainer computes it.
        batches: variants of the same samples (`label_variants`), the first one as it is in the data. The reduction
            must fit all of them. A variant for which the loss fails or is not finite counts only if it is the first.
        shifts_labels: whether the model is known to predict label i + 1 at position i.
        label_names: names of the inputs that are labels.
        passes_items: whether the Trainer passes `num_items_in_batch` to this loss.
        apart: a batch, followed by its parts as they are if each is collated separately, as replicas do.
        tolerance: tolerance of the comparisons.
        blocks: number of rows that the collator has made of each sample.

    Returns:
        The reduction; of kind "whole", with the reason, if no other kind fits.
    """
    candidates: list[LossReduction] | None = None
    reason = ""
    for number, batch in enumerate(batches):
        if batch_rows(batch) < 2 * blocks:
            return _of_a_single_row(loss_of, batch, shifts_labels, passes_items, tolerance)
        items = items_passed(batch, shifts_labels, passes_items)
        try:
            whole = loss_of(batch, items)
            if number and not whole.is_finite:
                continue
            if not whole.is_finite:  # nothing can be compared
                return LossReduction("mean", _token_items(shifts_labels), reason=NO_NUMBER)
        except Exception:
            if number:  # a variant that the user's loss does not accept
                continue
            raise
        if candidates is None:
            doubled = loss_of(batch, 2 * items) if items is not None else whole
            candidates = [
                replace(candidate, blocks=blocks)
                for candidate in _candidates(batch, whole, doubled, shifts_labels, label_names, tolerance)
            ]
        parts = _unequal_parts(batch, blocks)
        outcomes: dict[tuple[int, NumItems], LossOutcome] = {}
        fitting = []
        for reduction in candidates:
            try:
                found = _check(reduction, loss_of, batch, parts, items, whole, outcomes, tolerance)
            except Exception as error:  # the model may raise any error for a part of its inputs
                found = f"it fails on a part of a batch ({type(error).__name__}: {error})"
            if found is None:
                fitting.append(reduction)
            else:
                reason = found
        candidates = fitting
        if not candidates:
            return unexamined(shifts_labels, reason)
    assert candidates
    if not apart:
        return candidates[0]
    together, *parts = apart
    items = items_passed(together, shifts_labels, passes_items)
    whole = loss_of(together, items)
    outcomes = {}
    for reduction in candidates if whole.is_finite else ():
        if _check(reduction, loss_of, together, parts, items, whole, outcomes, tolerance) is None:
            return reduction
    return replace(candidates[0], depends_on_padding=whole.is_finite)


def _check(
    reduction: LossReduction,
    loss_of: LossOf,
    batch: Batch,
    parts: Sequence[Batch],
    items: NumItems,
    whole: LossOutcome,
    outcomes: dict[tuple[int, NumItems], LossOutcome],
    tolerance: Tolerance,
) -> str | None:
    """Return what contradicts a reduction; None if the parts add up to the whole."""
    rows = batch_rows(batch)
    count = reduction.count(batch) if reduction.kind == "mean" else items
    if reduction.kind == "mean" and not (count and count > 0):
        return f"it has no {reduction.items} to count"
    weighted = []
    for index, part in enumerate(parts):
        share = batch_rows(part) / rows
        asked, weight = reduction.part(part, count, share)
        if reduction.kind == "mean":
            asked = items  # has no influence on a mean
            if not weight:
                continue  # a mean over no items is not a number
        key = (index, asked)
        if key not in outcomes:
            outcomes[key] = loss_of(part, asked)
        weighted.append((weight, outcomes[key]))
    return difference(weighted, whole, tolerance)


def _candidates(
    batch: Batch,
    whole: LossOutcome,
    doubled: LossOutcome,
    shifts_labels: bool,
    label_names: Sequence[str],
    tolerance: Tolerance,
) -> Iterator[LossReduction]:
    """The reductions that are worth trying, the most likely first."""
    tokens = _token_items(shifts_labels)
    scale = max(abs(whole.value), abs(doubled.value))
    if abs(whole.value - doubled.value) > tolerance.value * scale + ABSOLUTE:
        constant = 2 * doubled.value - whole.value
        if abs(constant) <= tolerance.value * scale + ABSOLUTE:
            yield LossReduction("sum", tokens)
        yield LossReduction("sum_and_constant", tokens)
        return
    yield LossReduction("mean", tokens)
    for name in dict.fromkeys(("labels", *label_names)):
        for kind in ("labels", "shifted_labels"):
            if _is_labels(batch.get(name)) and (kind == "labels" or batch[name].dim() > 1):
                yield LossReduction("mean", kind, name)
    yield LossReduction("mean", "rows")
    rows = batch_rows(batch)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows and _is_weight(value):
            yield LossReduction("mean", "total", name)
    yield LossReduction("plain_sum", "rows")


def _is_labels(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and not value.is_floating_point()


def _is_weight(value: torch.Tensor) -> bool:
    """Whether a tensor may be a mask or weights: numbers that are not negative, and not ids."""
    if value.dim() > 2 or not value.numel() or value.is_complex():
        return False
    if not value.is_floating_point() and value.dtype != torch.bool:
        return bool(((value == 0) | (value == 1)).all())
    return bool((value >= 0).all()) if value.is_floating_point() else True


def _unequal_parts(batch: Batch, blocks: int) -> list[Batch]:
    """Parts of one sample, of up to half, and of the rest, of unequal sizes so that a missing weight shows."""
    samples = batch_rows(batch) // blocks
    bounds = sorted({0, 1, max(1, samples // 2), samples})
    return [slice_rows(batch, start, stop, blocks) for start, stop in itertools.pairwise(bounds)]


def _of_a_single_row(
    loss_of: LossOf, batch: Batch, shifts_labels: bool, passes_items: bool, tolerance: Tolerance
) -> LossReduction:
    """The reduction for a batch that cannot be divided: only the dependence on the number of items can be seen."""
    tokens = _token_items(shifts_labels)
    items = items_passed(batch, shifts_labels, passes_items)
    if items is not None:
        whole, doubled = loss_of(batch, items), loss_of(batch, 2 * items)
        if whole.is_finite:
            reduction = next(_candidates(batch, whole, doubled, shifts_labels, (), tolerance))
            if reduction.kind != "mean":
                return reduction
    return LossReduction("mean", tokens)


def _token_items(shifts_labels: bool) -> Items:
    return "shifted_labels" if shifts_labels else "labels"


# ------------------------------------------------------------------------------------ what the loss is tried on
MAX_CLASS_VARIANTS = 8
"""Maximum number of batches that are created to show every class to the loss."""


def label_variants(
    batch: Batch,
    label_names: Sequence[str],
    classes: Sequence[int],
    may_ignore: bool,
    model_inputs: Sequence[str] = (),
) -> list[Batch]:
    """The same samples with other labels, such that different ways of adding up losses give different results.

    Neighbouring samples of a dataset often have the same class, or the same number of tokens. Then a mean over samples
    cannot be distinguished from a mean over tokens, nor a class-weighted loss from either.

    Args:
        batch: a few samples of the data.
        label_names: names of the inputs that are labels.
        classes: values that labels of samples may have; if empty, only those in the batch.
        may_ignore: whether labels may be set to `IGNORED`.
        model_inputs: names of inputs that must not be changed.

    Returns:
        The batch itself, and its variants.
    """
    variants = [batch]
    rows = batch_rows(batch)
    names = [name for name in label_names if isinstance(batch.get(name), torch.Tensor) and batch[name].dim() > 0]
    names = [name for name in names if batch[name].shape[0] == rows]
    counted = {
        name: _with_unequal_counts(batch[name])
        for name in names
        if may_ignore and batch[name].dim() > 1 and not batch[name].is_floating_point()
    }
    if counted:
        variants.append({**batch, **counted})
    # factors of at most 1 leave targets between 0 and 1 in that range
    factors = 1 - torch.arange(rows, dtype=torch.float32) / (2 * rows)
    scaled = {
        name: value * factors.to(value).view(-1, *[1] * (value.dim() - 1))
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0 and value.shape[0] == rows
        if name in label_names or (value.dim() == 1 and name not in model_inputs)
    }
    if scaled:
        variants.append({**batch, **scaled})
    per_row = [name for name in names if batch[name].dim() == 1 and not batch[name].is_floating_point()]
    for name in per_row:
        known = list(classes) or sorted(set(batch[name].tolist()))
        if len(known) < 2:
            continue
        for turn in range(min(-(-len(known) // rows), MAX_CLASS_VARIANTS)):
            values = [known[(turn * rows + row) % len(known)] for row in range(rows)]
            variants.append({**batch, name: torch.tensor(values, dtype=batch[name].dtype, device=batch[name].device)})
    return variants


def _with_unequal_counts(labels: torch.Tensor) -> torch.Tensor:
    """Keep one of k + 1 parts of the labels in sample k (k modulo 4): all, half, a third, ..."""
    labels = labels.clone()
    flat = labels.view(len(labels), -1)
    if not flat.ne(IGNORED).any():
        flat.zero_()  # a loss without any counted label would show nothing
    for row, values in enumerate(flat):
        counted = values.ne(IGNORED).nonzero().flatten()[1:]  # the first may not count, if labels are shifted
        values[counted[: len(counted) * (row % 4) // (row % 4 + 1)]] = IGNORED
    return labels
