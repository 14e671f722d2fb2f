"""How a model's loss adds up, so that micro-batches and replicas give the loss of the one big batch.

Found by trying, once, on a few rows: whether a model honours `num_items_in_batch` cannot be told from its signature.

    sum     loss(rows, n) = (sum over rows) / n      micro-batches get the global n and are added
    mean    loss(rows)    = mean over the items      micro-batches are weighted by their share of the items
    whole   neither: the rows depend on one another (contrastive losses): exact only in one micro-batch
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .micro_batch import Batch, batch_rows, slice_rows

IGNORED = -100
"""The label of a position that does not count."""

LossOf = Callable[[Batch, int], float]
"""The loss of a batch when `num_items_in_batch` is the given number."""


Items = Literal["labels", "shifted_labels", "rows"]


@dataclass(frozen=True)
class LossReduction:
    """How losses of parts make the loss of the whole.

    Attributes:
        kind: "sum", "mean" or "whole", see above.
        items: what is counted: "labels" (not ignored), "shifted_labels" (those, without each row's first), "rows".
    """

    kind: Literal["sum", "mean", "whole"]
    items: Items

    def count(self, batch: Batch) -> int:
        """Items in a batch: tokens or rows that have a label."""
        labels, shifted = batch.get("labels"), batch.get("shift_labels")
        if self.items == "shifted_labels" or labels is None:
            labels = shifted if shifted is not None else labels
        if self.items == "rows" or not isinstance(labels, torch.Tensor):
            return batch_rows(batch)
        if self.items == "shifted_labels" and "shift_labels" not in batch:
            labels = labels[..., 1:]
        return int(labels.ne(IGNORED).sum())

    def weight(self, micro_batch: Batch, num_items: int) -> float:
        """Factor on a micro-batch's loss; `num_items` counts the whole batch, over all replicas and accumulation."""
        return 1.0 if self.kind == "sum" else self.count(micro_batch) / num_items


def unexamined(shifts_labels: bool) -> LossReduction:
    """For one process without accumulation, where nothing is ever added up."""
    return LossReduction("whole", _token_items(shifts_labels))


def with_distinct_labels(batch: Batch, config: Any) -> Batch:
    """The same rows with other labels, such that different ways of adding up losses give different results.

    The first rows of a dataset often have one class, or one number of tokens. Then a mean over rows cannot be told
    from a mean over tokens, nor a class-weighted loss from either.

    Args:
        batch: a few rows.
        config: of the model; says how many classes there are.
    """
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.shape[:1] != (batch_rows(batch),):
        return batch
    labels = labels.clone()
    if labels.dim() == 1:
        if getattr(config, "num_labels", 0) < 2:
            return batch
        return {**batch, "labels": torch.arange(len(labels), device=labels.device) % 2}
    flat = labels.view(len(labels), -1)
    if not flat.ne(IGNORED).any():
        flat.zero_()  # from a loss over nothing nothing can be learnt
    for row, values in enumerate(flat):
        counted = values.ne(IGNORED).nonzero().flatten()[1:]  # the first may not count: shifted labels
        values[counted[: min(row, len(counted) - 1)]] = IGNORED
    return {**batch, "labels": labels}


def find_loss_reduction(loss_of: LossOf, batch: Batch, shifts_labels: bool, tolerance: float = 2e-3) -> LossReduction:
    """Try how the loss of `batch` follows from the losses of its rows.

    Args:
        loss_of: the loss as the Trainer computes it, in evaluation mode.
        batch: at least two rows, `with_distinct_labels`.
        shifts_labels: whether the model is known to predict label i + 1 at position i.
        tolerance: relative, for the comparisons; larger for models in half precision.
    """

    def close(a: float, b: float) -> bool:
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-6)

    rows = [slice_rows(batch, i, i + 1) for i in range(batch_rows(batch))]
    whole, doubled = loss_of(batch, 1), loss_of(batch, 2)
    if not math.isfinite(whole):  # nothing can be compared; most losses are means
        return LossReduction("mean", _token_items(shifts_labels))
    try:
        losses = [loss_of(row, 1) for row in rows]
    except Exception:  # whatever the model says to a part of its inputs: they cannot be cut by rows
        return unexamined(shifts_labels)
    if whole != 0 and close(whole, 2 * doubled):
        return (
            LossReduction("sum", _token_items(shifts_labels))
            if close(sum(losses), whole)
            else unexamined(shifts_labels)
        )
    candidates: tuple[Items, ...] = (_token_items(shifts_labels), "labels", "shifted_labels", "rows")
    for items in candidates:
        reduction = LossReduction("mean", items)
        counts = [reduction.count(row) for row in rows]
        counted = [(c, loss) for c, loss in zip(counts, losses, strict=True) if c]  # a row without items may give NaN
        if counted and close(sum(c * loss for c, loss in counted) / sum(counts), whole):
            return reduction
    return unexamined(shifts_labels)


def _token_items(shifts_labels: bool) -> Items:
    return "shifted_labels" if shifts_labels else "labels"
