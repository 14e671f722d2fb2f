"""The number of micro-batches M, chosen by trying the promising numbers in real training steps.

A prediction does not know a device's caches, the sizes that its kernels prefer, or its network. So for each (number of
samples, size of a sample), the values of M that are predicted to be about as fast as the best one take turns in the
first training steps; the one with the fastest step is kept. Nothing is computed for the sake of measuring only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..model.micro_batch import Batch, batch_rows

WORTH_A_TRIAL = 0.15
"""Values of M that are predicted to take longer than the best one by more than this fraction are not tried."""
MOST_CANDIDATES = 3
TRIES = 2
"""Number of steps with each candidate. The fastest one counts, because disturbances only make a step slower."""


class MicrobatchTrials:
    """The trials of one pipeline under one plan. All its stages see the same batches, so they make the same choice.

    Args:
        promising: returns the candidates for M for a batch's number of samples, the most promising first.
        slowest: returns the maximum of each number over the stages; collective over the pipeline.
        synchronise: waits until the device has finished its work.
    """

    def __init__(
        self,
        promising: Callable[[int], Sequence[int]],
        slowest: Callable[[torch.Tensor], torch.Tensor],
        synchronise: Callable[[], None] = lambda: None,
    ) -> None:
        self._promising = promising
        self._slowest = slowest
        self._synchronise = synchronise
        self._settled: dict[tuple[int, int], int] = {}
        self._tried: dict[tuple[int, int], dict[int, list[float]]] = {}

    @property
    def settled(self) -> dict[tuple[int, int], int]:
        """The chosen M by (samples, elements per sample, rounded up to a power of two)."""
        return dict(self._settled)

    def settle(self, settled: Mapping[tuple[int, int], int]) -> None:
        """Adopt what an earlier job has chosen, without new trials."""
        self._settled.update(settled)

    @contextmanager
    def number_for(self, batch: Batch) -> Iterator[int]:
        """Inside, run the step of `batch` with the yielded number of micro-batches. Collective over the pipeline."""
        rows, elements = batch_rows(batch), _elements_per_row(batch)
        key = (rows, 1 << (elements - 1).bit_length())
        tried = self._tried.get(key)
        if tried is None and key not in self._settled:
            candidates = tuple(self._promising(rows))[:MOST_CANDIDATES]
            tried = self._tried[key] = {m: [] for m in candidates}
            if len(candidates) == 1:
                self._settled[key] = candidates[0]
        if key in self._settled:
            yield self._settled[key]
            return
        assert tried is not None
        m = min(tried, key=lambda m: len(tried[m]))
        self._synchronise()
        began = time.perf_counter()
        yield m
        self._synchronise()
        tried[m].append((time.perf_counter() - began) / elements)  # samples of similar lengths have the same key
        if all(len(seconds) == TRIES for seconds in tried.values()):
            fastest = self._slowest(torch.tensor([min(seconds) for seconds in tried.values()], dtype=torch.float64))
            self._settled[key] = list(tried)[int(fastest.argmin())]


def _elements_per_row(batch: Batch) -> int:
    rows = batch_rows(batch)
    tensors = [v for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 0 and v.shape[0] == rows]
    return max(tensor.numel() // rows for tensor in tensors) or 1
