"""How a model's loss adds up, so that micro-batches and replicas give the loss of the one big batch.

Found by trying, once, on a few samples: whether a model honours `num_items_in_batch` cannot be told from its
signature. With n = `num_items_in_batch` and c = the number of items in a part of the batch:

    sum               loss(part, n) = S(part) / n         parts get the global n and are added
    sum_and_constant  loss(part, n) = S(part) / n + r     r is the same for every part (a penalty on the weights), or a
                                                          mean over rows: a part that has the share w of the rows gets
                                                          n w, and its loss counts w times: S / n + w r
    mean              loss(part)    = S(part) / c + r     parts are weighted by their share of the items
    plain_sum         loss(part)    = S(part)             parts are added
    whole             none of these: the rows depend on one another (contrastive losses), or count by their class:
                      exact only in one micro-batch
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from .micro_batch import Batch, batch_rows, slice_rows

IGNORED = -100
"""The label of a position that does not count."""

Kind = Literal["sum", "sum_and_constant", "mean", "plain_sum", "whole"]
Items = Literal["labels", "shifted_labels", "rows", "total"]

NO_NUMBER = "it is no number on the rows that are examined, and is taken for a mean, as most losses are"

NumItems = int | float | None
"""`num_items_in_batch` as the Trainer gives it to a loss; None where it gives none."""


@dataclass(frozen=True)
class LossReduction:
    """How losses of parts make the loss of the whole.

    Attributes:
        kind: see above.
        items: what is counted: "labels" (not ignored), "shifted_labels" (those, without each row's first), "rows", or
            "total", the sum of an input's values (a mask, sample weights).
        key: the input that is counted; not of "rows".
        reason: why no other kind than "whole" was found, or why a kind was not tried.
        depends_on_padding: parts that are collated by themselves, and padded to other lengths, do not give the whole.
    """

    kind: Kind
    items: Items = "labels"
    key: str = "labels"
    reason: str = field(default="", compare=False)
    depends_on_padding: bool = field(default=False, compare=False)

    def count(self, batch: Batch) -> int | float:
        """Items in a batch: tokens or rows that have a label, or the sum of their weights."""
        values = batch.get(self.key)
        shifted = batch.get("shift_labels") if self.key == "labels" else None
        if isinstance(shifted, torch.Tensor) and (self.items == "shifted_labels" or values is None):
            values = shifted
        if self.items == "rows" or not isinstance(values, torch.Tensor):
            return batch_rows(batch)
        if self.items == "total":
            return float(values.double().sum())
        if self.items == "shifted_labels" and values is not shifted:
            values = values[..., 1:]
        return int(values.ne(IGNORED).sum())

    def part(self, batch: Batch, num_items: NumItems, share: float) -> tuple[NumItems, float]:
        """How the loss of a part of a batch is asked for, and how it counts.

        Args:
            batch: the part.
            num_items: of the whole batch, over all replicas and accumulated micro-batches.
            share: of the whole batch's rows that are in this part.

        Returns:
            `num_items_in_batch` for the loss of the part, and the factor on its result.
        """
        if self.kind in ("sum", "plain_sum"):
            return num_items, 1.0
        if self.kind == "mean":
            assert num_items is not None
            return num_items, self.count(batch) / num_items
        if self.kind == "sum_and_constant" and num_items is not None and share > 0:
            return num_items * share, share
        return num_items, share


def items_passed(batch: Batch, shifts_labels: bool, passes_items: bool) -> NumItems:
    """`num_items_in_batch` of an examined batch; None where the Trainer passes none."""
    return max(LossReduction("sum", _token_items(shifts_labels)).count(batch), 1) if passes_items else None


def unexamined(shifts_labels: bool, reason: str = "") -> LossReduction:
    """For one process without accumulation, where nothing is ever added up; or where no other kind fits."""
    return LossReduction("whole", _token_items(shifts_labels), reason=reason)


@dataclass(frozen=True)
class LossOutcome:
    """What a loss gives for one batch.

    Attributes:
        value: the loss.
        gradient: of some parameters, flat; None where it was not asked for.
    """

    value: float
    gradient: torch.Tensor | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the loss, and its gradient, are numbers."""
        return abs(self.value) < float("inf") and (self.gradient is None or bool(self.gradient.isfinite().all()))


LossOf = Callable[[Batch, NumItems], LossOutcome]
"""Computes a batch's loss for a number of items, the same for the same arguments."""


@dataclass(frozen=True)
class Tolerance:
    """What rounding explains, relative to the sum of the parts' absolute values.

    Attributes:
        value: of losses.
        gradient: of gradients, by their 2-norm.
    """

    value: float
    gradient: float


EXACT = Tolerance(1e-4, 1e-3)
HALF_PRECISION = Tolerance(3e-2, 1e-1)
ABSOLUTE = 1e-7


def difference(parts: Sequence[tuple[float, LossOutcome]], whole: LossOutcome, allowed: Tolerance) -> str | None:
    """How weighted parts differ from the whole; None where rounding explains it.

    Args:
        parts: factors and outcomes.
        whole: what they should add up to.
        allowed: the largest differences.
    """
    value = sum(weight * part.value for weight, part in parts)
    scale = max(sum(abs(weight * part.value) for weight, part in parts), abs(whole.value))
    if not abs(value - whole.value) <= allowed.value * scale + ABSOLUTE:
        return f"the parts of a batch give {value:.6g} and the whole batch {whole.value:.6g}"
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
) -> LossReduction:
    """Try how the loss of a batch follows from the losses of its rows.

    Args:
        loss_of: the loss as the Trainer computes it.
        batches: variants of the same rows, the first one as the data has it (`label_variants`). The reduction must fit
            all of them. One for which the loss fails, or is no number, counts only if it is the first.
        shifts_labels: whether the model is known to predict label i + 1 at position i.
        label_names: inputs that are labels.
        passes_items: whether the Trainer passes `num_items_in_batch` to this loss.
        apart: a batch, and its parts as they are where each is collated by itself, as replicas do.
        tolerance: of the comparisons.

    Returns:
        The reduction; of kind "whole" if no other fits, with the reason.
    """
    candidates: list[LossReduction] | None = None
    reason = ""
    for number, batch in enumerate(batches):
        if batch_rows(batch) < 2:
            return _of_a_single_row(loss_of, batch, shifts_labels, passes_items, tolerance)
        items = items_passed(batch, shifts_labels, passes_items)
        try:
            whole = loss_of(batch, items)
            if number and not whole.is_finite:
                continue
            if not whole.is_finite:  # nothing can be compared
                return LossReduction("mean", _token_items(shifts_labels), reason=NO_NUMBER)
        except Exception:
            if number:  # a variant that the user's loss does not take
                continue
            raise
        if candidates is None:
            doubled = loss_of(batch, 2 * items) if items is not None else whole
            candidates = list(_candidates(batch, whole, doubled, shifts_labels, label_names, tolerance))
        parts = _unequal_parts(batch)
        outcomes: dict[tuple[int, NumItems], LossOutcome] = {}
        fitting = []
        for reduction in candidates:
            try:
                found = _check(reduction, loss_of, batch, parts, items, whole, outcomes, tolerance)
            except Exception as error:  # whatever the model says to a part of its inputs
                found = f"a part of a batch fails ({type(error).__name__}: {error})"
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
    """What speaks against a reduction; None if the parts give the whole."""
    rows = batch_rows(batch)
    count = reduction.count(batch) if reduction.kind == "mean" else items
    if reduction.kind == "mean" and not (count and count > 0):
        return f"it has no {reduction.items} to count"
    weighted = []
    for index, part in enumerate(parts):
        share = batch_rows(part) / rows
        asked, weight = reduction.part(part, count, share)
        if reduction.kind == "mean":
            asked = items  # which does not matter to a mean
            if not weight:
                continue  # a mean over no item is no number
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
    """The reductions that are worth trying, the likeliest first."""
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
    """A mask, or weights: numbers that are not negative, not ids."""
    if value.dim() > 2 or not value.numel() or value.is_complex():
        return False
    if not value.is_floating_point() and value.dtype != torch.bool:
        return bool(((value == 0) | (value == 1)).all())
    return bool((value >= 0).all()) if value.is_floating_point() else True


def _unequal_parts(batch: Batch) -> list[Batch]:
    """Parts of one row, of half, and of the rest: where a weight is missing, it shows."""
    rows = batch_rows(batch)
    bounds = sorted({0, 1, max(1, rows // 2), rows})
    return [slice_rows(batch, start, stop) for start, stop in itertools.pairwise(bounds)]


def _of_a_single_row(
    loss_of: LossOf, batch: Batch, shifts_labels: bool, passes_items: bool, tolerance: Tolerance
) -> LossReduction:
    """Of a batch that cannot be divided: only whether the loss depends on the number of items can be seen."""
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
"""So many batches at most are made to show every class to the loss."""


def label_variants(
    batch: Batch,
    label_names: Sequence[str],
    classes: Sequence[int],
    may_ignore: bool,
    model_inputs: Sequence[str] = (),
) -> list[Batch]:
    """The same rows with other labels, such that different ways of adding up losses give different results.

    Rows that stand next to one another in a dataset often have one class, or one number of tokens. Then a mean over
    rows cannot be told from a mean over tokens, nor a class-weighted loss from either.

    Args:
        batch: a few rows of data.
        label_names: inputs that are labels.
        classes: values that labels of rows may have; none: only those in the batch.
        may_ignore: labels may be set to `IGNORED`.
        model_inputs: inputs that are not to be changed.

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
    # factors of at most 1 keep targets between 0 and 1 where they are
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
    """Row k keeps one of k + 1 parts of its labels: all, half, a third, ..."""
    labels = labels.clone()
    flat = labels.view(len(labels), -1)
    if not flat.ne(IGNORED).any():
        flat.zero_()  # from a loss over nothing nothing can be learnt
    for row, values in enumerate(flat):
        counted = values.ne(IGNORED).nonzero().flatten()[1:]  # the first may not count: shifted labels
        values[counted[: len(counted) * (row % 4) // (row % 4 + 1)]] = IGNORED
    return labels
