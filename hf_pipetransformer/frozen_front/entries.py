"""What a frozen front has returned for one sample, as bytes in the store."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..cache.activation_store import ActivationStore, GenerationWriter
from ..cache.entry_format import bytes_of

ALIGNMENT = 16
"""Of each tensor of an entry, in bytes."""


class FrontEntries:
    """Reads and writes the entries of one generation of the store, in one process.

    Args:
        store: the store of this node.
        number, fingerprint: name of the generation.
        writer: number that identifies this process.
        capacity: expected number of entries.
    """

    def __init__(self, store: ActivationStore, number: int, fingerprint: str, writer: int, capacity: int) -> None:
        self.failure: OSError | None = None
        """Why nothing is stored any more, if something failed."""
        self._store, self._name, self._number, self._capacity = store, (number, fingerprint), writer, capacity
        self._reader = store.reader(number, fingerprint)
        self._writer: GenerationWriter | None = None

    @property
    def exists(self) -> bool:
        return self._name in self._store.generations()

    def read(
        self, keys: Sequence[bytes], shapes: Sequence[tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> list[torch.Tensor] | None:
        """The tensors of these samples, one row each; None unless all samples are in the store.

        Args:
            keys: of the samples.
            shapes: of the tensors, with all rows.
            device: where they are needed.
        """
        sizes = [math.prod(shape[1:]) * dtype.itemsize for dtype, shape in shapes]
        starts = _starts(sizes)
        buffer = torch.empty((len(keys), starts[-1]), dtype=torch.uint8)
        if not all(self._reader.read_into(keys, [bytes_of(row) for row in buffer])):
            return None
        return [
            buffer[:, start : start + size].contiguous().view(dtype).view(shape).to(device)
            for start, size, (dtype, shape) in zip(starts, sizes, shapes, strict=False)
        ]

    def write(self, keys: Sequence[bytes], tensors: Sequence[torch.Tensor]) -> None:
        """Store the tensors of these samples, one row each. After an error nothing more is stored."""
        if self.failure is not None:
            return
        rows = [t.detach().cpu().contiguous().view(len(keys), -1).view(torch.uint8) for t in tensors]
        starts = _starts([row.shape[1] for row in rows])
        buffer = torch.zeros((len(keys), starts[-1]), dtype=torch.uint8)
        for start, row in zip(starts, rows, strict=False):
            buffer[:, start : start + row.shape[1]] = row
        try:
            if self._writer is None:
                number, fingerprint = self._name
                self._writer = self._store.writer(number, fingerprint, writer=self._number, capacity=self._capacity)
            self._writer.put(keys, [bytes_of(row) for row in buffer])
        except OSError as error:
            self.failure = error

    def close(self, deletes: bool = False) -> None:
        """Close the files, and delete the generation if it is of no use to anybody."""
        self._reader.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if deletes:
            self._store.delete(*self._name)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each tensor of an entry begins, and where the entry ends."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return starts
