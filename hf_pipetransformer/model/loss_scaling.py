"""How a loss adds up, so that micro-batches and replicas give the loss of the whole batch.

With n = `num_items_in_batch` and c = the number of items in a part of the batch:

    sum      loss(part, n) = S(part) / n    parts get the global n and are added
    mean     loss(part)    = S(part) / c    parts are weighted by their share of the items
    whole    not known to be one of these: it is computed on whole batches. Those of replicas and of accumulated
             batches are averaged, as under DDP, and each gets its share of n

`loss_reading` reads off which of them the loss of a transformers model is; for a loss of their own, users may say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .micro_batch import Batch, batch_rows

IGNORED = -100
"""The label of a position that the loss ignores."""

Kind = Literal["sum", "mean", "whole"]
Items = Literal["labels", "shifted_labels", "rows"]

NumItems = int | float | None
"""`num_items_in_batch` as the Trainer passes it to a loss; None if it passes none."""


@dataclass(frozen=True)
class LossReduction:
    """How losses of parts add up to the loss of the whole batch.

    Attributes:
        kind: one of the kinds described at the top of this module.
        items: what is counted: "labels" (that are not ignored), "shifted_labels" (the same without each sample's first
            label), or "rows" (samples).
        key: name of the input that is counted; unused for "rows".
        reason: why it is "whole".
        blocks: number of rows that the collator makes of a sample, block by block (`micro_batch`).
    """

    kind: Kind
    items: Items = "labels"
    key: str = "labels"
    reason: str = field(default="", compare=False)
    blocks: int = 1

    def count(self, batch: Batch) -> int | float:
        """Number of items in a batch: tokens or samples that have a label."""
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
        if self.items == "shifted_labels" and values is not batch.get("shift_labels"):
            values = values[..., 1:]
        return values.ne(IGNORED).sum()

    def weight(self, batch: Batch, num_items: NumItems, count: int | float | None = None) -> float:
        """The factor by which the loss of a part of a batch is multiplied before losses are added; not for "whole".

        Args:
            batch: the part.
            num_items: number of items of the whole batch, over all replicas and accumulated micro-batches.
            count: `count(batch)`, if it is known.
        """
        if self.kind == "sum":
            return 1.0
        assert num_items is not None
        return (self.count(batch) if count is None else count) / num_items


def items_passed(batch: Batch, shifts_labels: bool, passes_items: bool) -> NumItems:
    """`num_items_in_batch` of a probed batch; None if the Trainer passes none."""
    return max(LossReduction("sum", _token_items(shifts_labels)).count(batch), 1) if passes_items else None


def unexamined(shifts_labels: bool, reason: str = "") -> LossReduction:
    """The reduction for one process without accumulation, where nothing is added up, or if no other kind fits."""
    return LossReduction("whole", _token_items(shifts_labels), reason=reason)


@dataclass(frozen=True)
class Tolerance:
    """Differences that rounding explains, relative to the sum of the parts' absolute values."""

    value: float


EXACT = Tolerance(1e-4)
HALF_PRECISION = Tolerance(3e-2)
ABSOLUTE = 1e-7


def why_not(
    reduction: LossReduction,
    batch: Batch,
    parts: Sequence[Batch],
    items: NumItems,
    whole: float,
    loss_of: Callable[[int, NumItems], float],
    tolerance: Tolerance,
) -> str | None:
    """Return what contradicts a reduction; None if the losses of the parts add up to the loss of the whole.

    Args:
        reduction: how the losses should add up.
        batch: the whole.
        parts: its parts.
        items: `num_items_in_batch` of the whole.
        whole: the loss of the whole.
        loss_of: the loss of a part, by its index, for a number of items.
        tolerance: the differences that are accepted.
    """
    count = reduction.count(batch) if reduction.kind == "mean" else items
    if reduction.kind == "mean" and not count:
        return f"it has no {reduction.items} to count"
    weights = [reduction.weight(part, count) for part in parts]
    # a mean over no items is not a number
    weighted = [weight * loss_of(index, items) for index, weight in enumerate(weights) if weight]
    total = sum(weighted)
    scale = max(sum(map(abs, weighted)), abs(whole))
    if not abs(total - whole) <= tolerance.value * scale + ABSOLUTE:
        return f"the parts of a batch add up to {total:.6g}, but the whole batch gives {whole:.6g}"
    return None


def candidates_for(
    batch: Batch,
    whole: float,
    doubled: float,
    shifts_labels: bool,
    label_names: Sequence[str],
    tolerance: Tolerance,
    blocks: int,
) -> list[LossReduction]:
    """Return the reductions that are worth trying, the most likely first.

    Args:
        batch: a few samples.
        whole: their loss.
        doubled: the same for twice the number of items.
        shifts_labels: whether the model predicts label i + 1 at position i.
        label_names: names of the inputs that are labels.
        tolerance: the differences that rounding explains.
        blocks: number of rows of each sample.
    """
    tokens = _token_items(shifts_labels)
    scale = max(abs(whole), abs(doubled))
    if abs(whole - doubled) > tolerance.value * scale + ABSOLUTE:
        is_sum = abs(2 * doubled - whole) <= tolerance.value * scale + ABSOLUTE
        return [LossReduction("sum", tokens, blocks=blocks)] if is_sum else []
    found = [LossReduction("mean", tokens, blocks=blocks)]
    for name in dict.fromkeys(("labels", *label_names)):
        for kind in ("labels", "shifted_labels"):
            if _is_labels(batch.get(name)) and (kind == "labels" or batch[name].dim() > 1):
                found.append(LossReduction("mean", kind, name, blocks=blocks))
    return list(dict.fromkeys([*found, LossReduction("mean", "rows", blocks=blocks)]))


def _is_labels(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and not value.is_floating_point()


def _token_items(shifts_labels: bool) -> Items:
    return "shifted_labels" if shifts_labels else "labels"


# ------------------------------------------------------------------------------------ what the loss is tried on
MAX_CLASS_VARIANTS = 8
"""Maximum number of batches that are created to show every class to the loss."""


def label_variants(
    batch: Batch,
    label_names: Sequence[str],
    classes: Sequence[int],
    model_inputs: Sequence[str] = (),
) -> list[Batch]:
    """The same samples with other labels, such that different ways of adding up losses give different results.

    Neighbouring samples of a dataset often have the same class, or the same number of tokens. Then a mean over samples
    cannot be distinguished from a mean over tokens, nor a class-weighted loss from either.

    Args:
        batch: a few samples of the data.
        label_names: names of the inputs that are labels.
        classes: values that labels of samples may have; if empty, only those in the batch.
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
        if batch[name].dim() > 1 and not batch[name].is_floating_point()
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
