"""What a frozen front has returned for one sample, as bytes in the store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..cache.activation_files import FileWriter
from ..cache.entry_format import bytes_of
from ..cache.file_store import FileStore, StoreFull
from .rows import Tokens

ALIGNMENT = 16
"""Of each tensor of an entry, in bytes."""
TOKENS = -1
"""In a shape: as many as the batch has columns; in an entry, as many as the sample has tokens."""


@dataclass(frozen=True)
class Leaf:
    """A tensor that is stored: its type, and the shape of one row; `TOKENS` stands for the width of the batch.

    The first dimension is that of several entries for each row. `TOKENS` can only be the second.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def has_columns(self) -> bool:
        return TOKENS in self.shape

    def sized(self, width: int) -> tuple[int, ...]:
        return tuple(width if size == TOKENS else size for size in self.shape)

    def row_bytes(self, width: int) -> int:
        return math.prod(self.sized(width)) * self.dtype.itemsize


class _Layout:
    """Where the leaves are in the entries of some samples: those of one size first.

    Args:
        leaves: of each entry.
        rows: number of entries.
        lengths: number of each sample's own tokens; None if no leaf has columns.
    """

    def __init__(self, leaves: Sequence[Leaf], rows: int, lengths: Sequence[int] | None) -> None:
        self.lengths = [0] * rows if lengths is None else lengths
        self.fixed: dict[int, slice] = {}
        sizes = [0] * rows
        for index, leaf in enumerate(leaves):
            if not leaf.has_columns:
                size = leaf.row_bytes(0)
                self.fixed[index] = slice(sizes[0], sizes[0] + size)
                sizes = [sizes[0] + _aligned(size)] * rows
        self.by_length: dict[int, list[slice]] = {}
        for index, leaf in enumerate(leaves):
            if leaf.has_columns:
                lengths_of = [leaf.row_bytes(length) for length in self.lengths]
                self.by_length[index] = [slice(at, at + size) for at, size in zip(sizes, lengths_of, strict=True)]
                sizes = [at + _aligned(size) for at, size in zip(sizes, lengths_of, strict=True)]
        self.sizes = sizes

    def rows_of(self, buffer: torch.Tensor) -> list[memoryview]:
        """The memory of each entry in a buffer `[rows, max(sizes)]`."""
        return [bytes_of(row[:size]) for row, size in zip(buffer, self.sizes, strict=True)]


class FrontEntries:
    """Reads and writes the entries of one generation of the store, in one process.

    Args:
        store: the store of this node.
        number, fingerprint: name of the generation.
    """

    def __init__(self, store: FileStore, number: int, fingerprint: str) -> None:
        self.failure: OSError | None = None
        """Why nothing is stored any more, if something failed."""
        self.is_full = False
        """Whether the store has reached its size. What is in it is read."""
        self._store, self._name = store, (number, fingerprint)
        self._reader = store.reader(number, fingerprint)
        self._writer: FileWriter | None = None

    @property
    def exists(self) -> bool:
        return self._name in self._store.generations()

    def read(
        self, keys: Sequence[bytes], leaves: Sequence[Leaf], tokens: Tokens | None, device: torch.device
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Read what there is of these samples.

        Args:
            keys: of the samples.
            leaves: what an entry consists of.
            tokens: which columns of the leaves are stored, of those that are as wide as the batch.
            device: where the tensors are needed.

        Returns:
            The rows that are not in the store, and the tensors, in which these are undefined, and padding repeats the
            last token. No tensors if there is nothing.
        """
        layout = _Layout(leaves, len(keys), None if tokens is None else tokens.lengths)
        buffer = torch.empty((len(keys), max(layout.sizes)), dtype=torch.uint8)
        found = self._reader.read_into(keys, layout.rows_of(buffer))
        missing = [row for row, is_found in enumerate(found) if not is_found]
        if len(missing) == len(keys):
            return missing, []
        tensors = []
        for index, leaf in enumerate(leaves):
            shape = leaf.sized(0 if tokens is None else tokens.width)
            if index in layout.fixed:
                whole = buffer[:, layout.fixed[index]].contiguous().view(leaf.dtype).view(len(keys), *shape)
            else:
                whole = torch.zeros((len(keys), *shape), dtype=leaf.dtype)
                for row, part in enumerate(layout.by_length[index]):
                    if found[row]:
                        length = layout.lengths[row]
                        own = whole[row].narrow(1, 0, length)
                        own.copy_(buffer[row, part].view(leaf.dtype).view(own.shape))
                        whole[row][:, length:] = own[:, -1:]  # values as they occur: a norm of zeros has no gradient
            tensors.append(whole.flatten(0, 1).to(device))
        return missing, tensors

    def write(
        self,
        keys: Sequence[bytes],
        tensors: Sequence[torch.Tensor],
        leaves: Sequence[Leaf],
        lengths: Sequence[int] | None,
    ) -> int:
        """Store the tensors of these samples, and return how many were new. After an error nothing more is stored.

        Args:
            keys: of the samples.
            tensors: with some entries for each sample.
            leaves: what an entry consists of.
            lengths: numbers of the samples' own tokens; None if everything is stored.
        """
        if self.failure is not None or self.is_full:
            return 0
        layout = _Layout(leaves, len(keys), lengths)
        buffer = torch.zeros((len(keys), max(layout.sizes)), dtype=torch.uint8)
        for index, tensor in enumerate(tensors):
            values = tensor.detach().cpu().unflatten(0, (len(keys), -1))
            if index in layout.fixed:
                buffer[:, layout.fixed[index]] = values.contiguous().view(len(keys), -1).view(torch.uint8)
                continue
            for row, part in enumerate(layout.by_length[index]):
                own = values[row].narrow(1, 0, layout.lengths[row])
                buffer[row, part] = own.contiguous().view(-1).view(torch.uint8)
        try:
            if self._writer is None:
                self._writer = self._store.writer(*self._name)
            return self._writer.put(keys, layout.rows_of(buffer))
        except StoreFull:
            self.is_full = True
        except OSError as error:
            self.failure = error
        return 0

    def close(self, deletes: bool = False) -> None:
        """Close the files, and delete the generation if it is of no use to anybody."""
        self._reader.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if deletes:
            self._store.delete(*self._name)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
