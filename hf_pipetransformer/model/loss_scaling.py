"""Loss reductions: how the losses of micro-batches and replicas add up to the loss of the whole batch.

With n = `num_items_in_batch` and c = the number of items in a part of the batch:

    sum      loss(part, n) = S(part) / n    parts get the global n and are added
    mean     loss(part)    = S(part) / c    parts are weighted by their share of the items
    whole    unknown: the loss is computed on whole batches. The losses of replicas and of accumulated batches are
             averaged, as under DDP, and each gets its share of n

`loss_reading` determines the reduction of a transformers model's loss. Users may specify it for their own loss.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        items: the counted items: "labels" (that are not ignored), "shifted_labels" (the same without each sample's
            first label), or "rows" (samples).
        key: name of the counted input; unused for "rows".
        reason: why the kind is "whole".
    """

    kind: Kind
    items: Items = "labels"
    key: str = "labels"
    reason: str = field(default="", compare=False)

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
        """The counted input; None if samples are counted."""
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
    """The reduction if no other kind fits, or if no losses are added up: one process without accumulation."""
    return LossReduction("whole", _token_items(shifts_labels), reason=reason)


EXACT = 1e-4
"""The largest difference that rounding explains in float32, relative to the sum of the parts' absolute values."""
HALF_PRECISION = 3e-2
"""The same in half precision."""
ABSOLUTE = 1e-7


def why_not(
    reduction: LossReduction,
    batch: Batch,
    parts: Sequence[Batch],
    items: NumItems,
    losses: Sequence[float],
    tolerance: float,
) -> str | None:
    """Return the contradiction to a reduction; None if the losses of the parts add up to the loss of the whole.

    Args:
        reduction: how the losses should add up.
        batch: the whole.
        parts: its parts.
        items: `num_items_in_batch` of the whole.
        losses: the loss of the whole, and the losses of the parts, each computed with `items`.
        tolerance: the largest difference that rounding explains.
    """
    count = reduction.count(batch) if reduction.kind == "mean" else items
    if reduction.kind == "mean" and not count:
        return f"it has no {reduction.items} to count"
    whole, *of_parts = losses
    weights = [reduction.weight(part, count) for part in parts]
    # a mean over no items is not a number
    weighted = [weight * loss for weight, loss in zip(weights, of_parts, strict=True) if weight]
    total, scale = sum(weighted), max(sum(map(abs, weighted)), abs(whole))
    if not abs(total - whole) <= tolerance * scale + ABSOLUTE:
        return f"the parts of a batch add up to {total:.6g}, but the whole batch gives {whole:.6g}"
    return None


def candidates_for(
    batch: Batch, shifts_labels: bool, label_names: Sequence[str], passes_items: bool
) -> list[LossReduction]:
    """Return the reductions that are worth trying, the most likely first.

    Args:
        batch: a few samples.
        shifts_labels: whether the model predicts label i + 1 at position i.
        label_names: names of the inputs that are labels.
        passes_items: whether the Trainer passes `num_items_in_batch`, the divisor of a sum.
    """
    tokens = _token_items(shifts_labels)
    found = [LossReduction("sum", tokens)] if passes_items else []
    found.append(LossReduction("mean", tokens))
    for name in dict.fromkeys(("labels", *label_names)):
        for kind in ("labels", "shifted_labels"):
            if _is_labels(batch.get(name)) and (kind == "labels" or batch[name].dim() > 1):
                found.append(LossReduction("mean", kind, name))
    return list(dict.fromkeys([*found, LossReduction("mean", "rows")]))


def _is_labels(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and not value.is_floating_point()


def _token_items(shifts_labels: bool) -> Items:
    return "shifted_labels" if shifts_labels else "labels"


def with_unequal_labels(batch: Batch, label_names: Sequence[str]) -> Batch:
    """The same samples with unequal numbers of labels.

    Samples of a dataset often have equal numbers of labels. Then a mean over samples equals a mean over tokens.

    Args:
        batch: a few samples of the data.
        label_names: names of the inputs that are labels.
    """
    rows = batch_rows(batch)
    labels = {name: batch[name] for name in label_names if _is_labels(batch.get(name))}
    of_tokens = {name: value for name, value in labels.items() if value.dim() > 1 and value.shape[0] == rows}
    return {**batch, **{name: _with_unequal_counts(value) for name, value in of_tokens.items()}}


def _with_unequal_counts(labels: torch.Tensor) -> torch.Tensor:
    """Keep one of k + 1 parts of the labels in sample k (k modulo 4): all, half, a third, ..."""
    labels = labels.clone()
    flat = labels.view(len(labels), -1)
    if not flat.ne(IGNORED).any():
        flat.zero_()  # a loss without any counted label would be uninformative
    for row, values in enumerate(flat):
        counted = values.ne(IGNORED).nonzero().flatten()[1:]  # the first may not count, if labels are shifted
        values[counted[: len(counted) * (row % 4) // (row % 4 + 1)]] = IGNORED
    return labels
