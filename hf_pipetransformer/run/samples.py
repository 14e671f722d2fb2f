"""A few rows of the user's data, as batches to try things on before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..model.micro_batch import Batch, on_device
from ..randomness import generators_kept, seeded


@dataclass(frozen=True)
class SampleCollator:
    """The user's collator, from which nothing is drawn that training would miss.

    Attributes:
        collate_fn: the user's.
        model: where it is the batches go, too.
        seed: of what the collator draws from the global generators.
        rows_at_once: rows that a batch of the training has, at most.
    """

    collate_fn: Callable[[list[Any]], Any]
    model: nn.Module
    seed: int
    rows_at_once: int

    def __call__(self, rows: Sequence[Any]) -> Batch:
        """A batch of these rows."""
        with generators_kept(self.collate_fn):
            return self.by_seed(rows)

    def by_seed(self, rows: Sequence[Any]) -> Batch:
        """Likewise; who calls keeps the collator's own generators."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        with seeded(self.seed):
            batch = dict(self.collate_fn(list(rows)))
        return on_device(batch, device)

    def apart(self, rows: Sequence[Any]) -> list[Batch]:
        """Batches of these rows, none larger than those of the training."""
        step = self.rows_at_once
        return [self(rows[start : start + step]) for start in range(0, len(rows), step)]

    def padded(self, rows: Sequence[Any]) -> Batch:
        """Rows padded as in a batch with the longest: short ones would make every stage seem to fit."""
        return max(self.apart(rows), key=elements_of_a_row)


def elements_of_a_row(batch: Mapping[str, Any]) -> int:
    """Of the largest input."""
    return max(
        (value[0].numel() for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()), default=0
    )


def is_padded_further(one: Batch, other: Batch) -> bool:
    """Whether the second batch is the first one with more padding."""
    is_longer = False
    if one.keys() != other.keys():
        return False
    for name, value in one.items():
        longer = other[name]
        if not isinstance(value, torch.Tensor) or not isinstance(longer, torch.Tensor) or value.dim() != longer.dim():
            continue
        if any(a > b for a, b in zip(value.shape, longer.shape, strict=True)):
            return False
        is_longer |= value.shape != longer.shape
        if not torch.equal(value, longer[tuple(slice(size) for size in value.shape)]):
            return False
    return is_longer


def of_different_classes(samples: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The samples in an order in which the first ones have as many different labels as possible."""
    seen: dict[Any, int] = {}

    def turn(sample: Any) -> int:
        label = None
        if isinstance(sample, Mapping):
            values = (sample.get(name) for name in (*names, "label", "label_ids"))
            label = next((float(value) for value in values if isinstance(value, (int, float))), None)
        seen[label] = seen.get(label, -1) + 1
        return seen[label]

    turns = [turn(sample) for sample in samples]
    return [samples[index] for index in sorted(range(len(samples)), key=turns.__getitem__)]
