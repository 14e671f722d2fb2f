"""The outputs of a frozen front for one sample, as bytes in the store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..prefix_cache.cache.activation_files import FileWriter
from ..prefix_cache.cache.batch_entries import BatchEntries, bytes_of
from ..prefix_cache.cache.file_store import FileStore, StoreFull
from .divided import EACH, Rows

TOKENS = -1
"""Placeholder in shapes: the batch's number of columns; in an entry, the sample's number of tokens."""


@dataclass(frozen=True)
class Leaf:
    """A stored tensor: its type, and the shape of one row; `TOKENS` stands for the width of the batch.

    The first dimension is the number of entries for each row: `shape[0]`, or the row's patches divided by `per`.
    `TOKENS` can only be the second.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    per: int = EACH

    @property
    def has_columns(self) -> bool:
        return TOKENS in self.shape

    def sized(self, width: int) -> tuple[int, ...]:
        return tuple(width if size == TOKENS else size for size in self.shape)

    def length(self, rows: Rows) -> int:
        """Number of entries of all rows."""
        return sum(rows.patches) // self.per if self.per else rows.count * self.shape[0]

    def row_bytes(self, width: int, patches: int = 0) -> int:
        times = patches // self.per if self.per else self.shape[0]
        return times * math.prod(self.sized(width)[1:]) * self.dtype.itemsize


def dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """A tensor's dimensions in memory order; None if its memory has gaps or repeated values."""
    if tensor.layout is not torch.strided:
        return None
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    return order if tensor.permute(order).is_contiguous() else None


class FrontEntries:
    """Reads and writes the entries of one generation of the store. An entry holds a sample's leaves in a row.

    Args:
        store: the store of this node.
        number: number of the generation.
        fingerprint: fingerprint of the generation.
    """

    def __init__(self, store: FileStore, number: int, fingerprint: str) -> None:
        self.failure: OSError | None = None
        """The error that has ended writing, if there was one."""
        self.full: str | None = None
        """Why no more samples fit, if the store has reached its size limit. Its entries are still read."""
        self.name = number, fingerprint
        self._store = store
        self._reader = store.reader(number, fingerprint)
        self._writer: FileWriter | None = None

    @property
    def exists(self) -> bool:
        return self.name in self._store.generations()

    def read(
        self,
        entries: BatchEntries,
        rows: Rows,
        leaves: Sequence[Leaf],
        device: torch.device,
        keeps_padding: bool = False,
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Read the stored entries of these samples.

        Args:
            entries: the rows' entries. Leaves that are as wide as the batch have their columns.
            rows: the rows.
            leaves: the tensors of an entry.
            device: device of the tensors.
            keeps_padding: whether padding is read as well, from entries that are at least as wide as the batch.

        Returns:
            The rows that are not in the store, and the tensors. In the tensors, missing rows are undefined, and
            padding repeats the last token. No tensors if all rows are missing.
        """
        keys, width = entries.digests, entries.width
        lengths = self._widths(keys, leaves, width) if keeps_padding else entries.lengths
        patches = rows.patches or [0] * rows.count
        sizes = [[leaf.row_bytes(*one) for leaf in leaves] for one in zip(lengths, patches, strict=True)]
        buffers = [torch.empty(sum(of_row), dtype=torch.uint8) for of_row in sizes]
        found = self._reader.read_into(keys, [bytes_of(buffer) for buffer in buffers])
        missing = [row for row, is_found in enumerate(found) if not is_found]
        if len(missing) == len(keys):
            return missing, []
        tensors = []
        columns = zip(*(buffer.split(of_row) for buffer, of_row in zip(buffers, sizes, strict=True)), strict=True)
        for leaf, parts in zip(leaves, columns, strict=True):
            if not leaf.has_columns:
                tensors.append(torch.cat(parts).view(leaf.dtype).view(-1, *leaf.shape[1:]).to(device))
                continue
            whole = torch.zeros((len(keys), *leaf.sized(width)), dtype=leaf.dtype)
            for into, part, length, is_found in zip(whole, parts, lengths, found, strict=True):
                if is_found:
                    stored = part.clone().view(leaf.dtype).view(leaf.sized(length))[:, :width]
                    own = into.narrow(1, 0, stored.shape[1])
                    own.copy_(stored)
                    into[:, length:] = own[:, -1:]  # real values, because a norm of zeros has no gradient
            tensors.append(whole.flatten(0, 1).to(device))
        return missing, tensors

    def _widths(self, keys: Sequence[bytes], leaves: Sequence[Leaf], width: int) -> tuple[int, ...]:
        """Numbers of columns of the widest entries; the batch's width if no entry is wide enough."""
        fixed = sum(leaf.row_bytes(0) for leaf in leaves)
        of_column = sum(leaf.row_bytes(1) for leaf in leaves) - fixed
        widths = [(size - fixed) // max(of_column, 1) for size in self._reader.sizes(keys)]
        return tuple(max(of_entry, width) for of_entry in widths)

    def write(
        self,
        entries: BatchEntries,
        rows: Rows,
        tensors: Sequence[torch.Tensor],
        leaves: Sequence[Leaf],
        keeps_padding: bool = False,
    ) -> int:
        """Store the tensors of these samples, and return the number of new ones. An error ends all further writing.

        Args:
            entries: the rows' entries.
            rows: the rows.
            tensors: the tensors, each with some entries for each row.
            leaves: the tensors of an entry.
            keeps_padding: whether all columns are stored, and not the samples' own tokens only.
        """
        if self.failure is not None or self.full is not None:
            return 0
        parts: list[list[torch.Tensor]] = [[] for _ in entries.digests]
        for tensor, leaf in zip(tensors, leaves, strict=True):
            for row, values in enumerate(tensor.detach().cpu().split(rows.sizes(len(tensor)))):
                own = values[:, : entries.lengths[row]] if leaf.has_columns and not keeps_padding else values
                parts[row].append(own.contiguous().view(-1).view(torch.uint8))
        try:
            if self._writer is None:
                self._writer = self._store.writer(*self.name)
            return self._writer.put(entries.digests, [bytes_of(torch.cat(of_row)) for of_row in parts])
        except StoreFull as error:
            self.full = error.strerror
        except OSError as error:
            self.failure = error
        return 0

    def close(self, deletes: bool = False) -> None:
        """Close the files. With `deletes`, delete the generation."""
        self._reader.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if deletes:
            self._store.delete(*self.name)
