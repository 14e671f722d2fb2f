"""Loss reductions: how the losses of micro-batches and replicas add up to the loss of the whole batch.

With n = `num_items_in_batch` and c = the number of items in a part of the batch:

    sum      loss(part, n) = S(part) / n    parts get the global n and are added
    mean     loss(part)    = S(part) / c    parts are weighted by their share of the items
    whole    unknown: the loss is computed on whole batches. The losses of replicas and of accumulated batches are
             averaged, as under DDP, and each gets its share of n

`loss_reading` determines the reduction of a transformers model's loss. Users may specify it for their own loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .micro_batch import Batch, batch_rows

IGNORED = -100
"""The label of a position that the loss ignores."""

Kind = Literal["sum", "mean", "whole"]
Items = Literal["labels", "shifted_labels", "positions", "rows"]

POSITIONS = ("start_positions", "end_positions")
"""The labels of question answering."""

NumItems = int | float | None
"""`num_items_in_batch` as the Trainer passes it to a loss; None if it passes none."""


@dataclass(frozen=True)
class LossReduction:
    """How losses of parts add up to the loss of the whole batch.

    Attributes:
        kind: one of the kinds described at the top of this module.
        items: the counted items: "labels" (that are not ignored), "shifted_labels" (the same without each sample's
            first label), "positions" (inside of the text: models ignore answers outside), or "rows" (samples).
        key: name of the counted input; unused for "rows".
        reason: why the kind is "whole".
        ignored: the label of an item that is not counted.
    """

    kind: Kind
    items: Items = "labels"
    key: str = "labels"
    reason: str = field(default="", compare=False)
    ignored: int = IGNORED

    def count(self, batch: Batch) -> int | float:
        """Number of items in a batch: tokens or samples that have a label."""
        return self.counts([batch])[0]

    def counts(self, batches: Sequence[Batch]) -> list[int | float]:
        """`count` of several batches. On an accelerator, reading them waits for the device once, not for each.

        A batch that does not show its number of samples counts as one.

        Raises:
            ValueError: an answer begins inside of the text and ends outside. The loss then has two divisors.
        """
        counted = [self._counted(batch) for batch in batches]
        read = iter(torch.stack(on_device).tolist() if (on_device := [c for c in counted if c is not None]) else [])
        read = map(_refusing_halves, read) if self.items == "positions" else read
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
        if self.items == "positions":
            starts, ends = (batch[name] < batch["input_ids"].shape[1] for name in POSITIONS)
            return starts.sum().float().where(starts.eq(ends).all(), math.nan)
        if self.items == "shifted_labels" and values is not batch.get("shift_labels"):
            values = values[..., 1:]
        if self.kind == "mean" and values.is_floating_point():
            return torch.ones_like(values, dtype=torch.int64).sum()  # a target may have the value of an ignored label
        return values.ne(self.ignored).sum()

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


def _refusing_halves(count: float) -> int:
    if math.isnan(count):
        raise ValueError(
            "start_positions and end_positions: an answer begins inside of the text and ends outside (or the other way"
            " round). The model leaves out only one of the two, so the losses of a batch's parts do not add up. Give"
            " such a sample the same position for both: of a token that stands for 'no answer' (0), or the length of"
            " the text to leave it out."
        )
    return int(count)


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
ROUNDING = 2e-7
"""The difference in float32 at which all reductions fit equally well. An untrained head gives all items nearly one
loss: a wrong reduction is then within `EXACT`, but the right one fits far better."""


@dataclass(frozen=True)
class Misfit:
    """How far the losses of parts are from adding up to the loss of the whole.

    Attributes:
        relative: the difference, relative to the sum of the parts' absolute values.
        reason: the contradiction in words.
    """

    relative: float
    reason: str


def misfit(
    reduction: LossReduction, batch: Batch, parts: Sequence[Batch], items: NumItems, losses: Sequence[float]
) -> Misfit:
    """Return how far a reduction is from the losses of a batch and its parts.

    Args:
        reduction: how the losses should add up.
        batch: the whole.
        parts: its parts.
        items: `num_items_in_batch` of the whole.
        losses: the loss of the whole, and the losses of the parts, each computed with `items`.
    """
    count = reduction.count(batch) if reduction.kind == "mean" else items
    if reduction.kind == "mean" and not count:
        return Misfit(math.inf, f"it has no {reduction.items} to count")
    whole, *of_parts = losses
    weights = [reduction.weight(part, count) for part in parts]
    # a mean over no items is not a number
    weighted = [weight * loss for weight, loss in zip(weights, of_parts, strict=True) if weight]
    total, scale = sum(weighted), max(sum(map(abs, weighted)), abs(whole))
    relative = max(abs(total - whole) - ABSOLUTE, 0.0) / scale if math.isfinite(total) else math.inf
    return Misfit(relative, f"the parts of a batch add up to {total:.6g}, but the whole batch gives {whole:.6g}")


def candidates_for(
    batch: Batch, shifts_labels: bool, label_names: Sequence[str], passes_items: bool, ignored: int = IGNORED
) -> list[LossReduction]:
    """Return the reductions that are worth trying, the most likely first.

    Args:
        batch: a few samples.
        shifts_labels: whether the model predicts label i + 1 at position i.
        label_names: names of the inputs that are labels.
        passes_items: whether the Trainer passes `num_items_in_batch`, the divisor of a sum.
        ignored: the label that the model ignores.
    """
    tokens = _token_items(shifts_labels)
    found = [LossReduction("sum", tokens)] if passes_items else []
    found.append(LossReduction("mean", tokens))
    for name in dict.fromkeys(("labels", *label_names)):
        for kind in ("labels", "shifted_labels"):
            if _is_labels(batch.get(name)) and (kind == "labels" or batch[name].dim() > 1):
                found.append(LossReduction("mean", kind, name, ignored=ignored))
    if all(_is_labels(batch.get(name)) for name in (*POSITIONS, "input_ids")):
        found.insert(0, LossReduction("mean", "positions", POSITIONS[0]))
    return list(dict.fromkeys([*found, LossReduction("mean", "rows")]))


def _is_labels(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and not value.is_floating_point()


def _token_items(shifts_labels: bool) -> Items:
    return "shifted_labels" if shifts_labels else "labels"


def variants_of(batch: Batch, label_names: Sequence[str], ignored: int = IGNORED) -> list[Batch]:
    """The same samples, with items that a loss may leave out in unequal numbers; the first ones are unchanged.

    Args:
        batch: a few samples of the data.
        label_names: names of the inputs that are labels.
        ignored: the label that the model ignores.
    """
    rows = batch_rows(batch)
    found = [batch, with_unequal_labels(batch, label_names, ignored)]
    masks = {
        name: _with_unequal_counts(value, 0)
        for name, value in batch.items()
        if "mask" in name and isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == rows
        if bool(value.eq(1).any()) and bool((value.eq(0) | value.eq(1)).all())  # no mask that is added to scores
    }
    if masks:
        found.append({**batch, **masks})
    if all(_is_labels(batch.get(name)) for name in (*POSITIONS, "input_ids")):
        outside = torch.arange(rows, device=batch["input_ids"].device) == 0
        found.append({**batch, **{n: batch[n].masked_fill(outside, batch["input_ids"].shape[1]) for n in POSITIONS}})
    return found


def with_unequal_labels(batch: Batch, label_names: Sequence[str], ignored: int = IGNORED) -> Batch:
    """The same samples with unequal numbers of labels.

    Samples of a dataset often have equal numbers of labels. Then a mean over samples equals a mean over tokens.

    Args:
        batch: a few samples of the data.
        label_names: names of the inputs that are labels.
        ignored: the label that the model ignores.
    """
    rows = batch_rows(batch)
    labels = {name: batch[name] for name in label_names if _is_labels(batch.get(name))}
    of_tokens = {name: value for name, value in labels.items() if value.dim() > 1 and value.shape[0] == rows}
    return {**batch, **{name: _with_unequal_counts(value, ignored) for name, value in of_tokens.items()}}


def _with_unequal_counts(values: torch.Tensor, ignored: int) -> torch.Tensor:
    """Keep one of k + 1 parts of the items in sample k (k modulo 4): all, half, a third, ..."""
    changed = values.clone(memory_format=torch.contiguous_format)
    flat = changed.view(len(changed), -1)
    if not flat.ne(ignored).any():
        flat.fill_(0 if ignored else 1)  # a loss without any counted item would be uninformative
    for row, items in enumerate(flat):
        counted = items.ne(ignored).nonzero().flatten()[1:]  # the first may not count, if labels are shifted
        items[counted[: len(counted) * (row % 4) // (row % 4 + 1)]] = ignored
    return changed
