"""Collate a few samples of the user's data into batches for the probes before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..model.micro_batch import Batch, with_name
from ..model.nested import on_device
from ..randomness import generators_kept, seeded


@dataclass(frozen=True)
class SampleCollator:
    """The user's collator for probes. Calls leave random generators, including the collator's own, unchanged.

    Attributes:
        collate_fn: the user's collator.
        model: the model, to whose device batches are moved.
        seed: seed of the global generators during a call of the collator.
        rows_at_once: maximum number of samples in a batch.
        is_shared: whether all processes have the same samples.
    """

    collate_fn: Callable[[list[Any]], Any]
    model: nn.Module
    seed: int
    rows_at_once: int
    is_shared: bool = True

    def __call__(self, rows: Sequence[Any]) -> Batch:
        """Collate these samples into a batch."""
        with generators_kept(self.collate_fn):
            return self.by_seed(rows)

    def by_seed(self, rows: Sequence[Any]) -> Batch:
        """Collate these samples into a batch. The caller must restore the collator's own generators."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        with seeded(self.seed):
            batch = dict(with_name(self.collate_fn(list(rows))))
        return on_device(batch, device)

    def apart(self, rows: Sequence[Any]) -> list[Batch]:
        """Collate these samples into batches of at most `rows_at_once` samples."""
        step = self.rows_at_once
        return [self(rows[start : start + step]) for start in range(0, len(rows), step)]

    def padded(self, rows: Sequence[Any]) -> Batch:
        """Return the batch with the longest samples; with short ones every stage would seem to fit into memory."""
        return max(self.apart(rows), key=elements_of_a_row)


def elements_of_a_row(batch: Mapping[str, Any]) -> int:
    """Return the number of elements of one sample in the batch's largest input."""
    return max(
        (value[0].numel() for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()), default=0
    )
