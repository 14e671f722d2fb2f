"""A temporary file for tensors that a process has no memory for.

What rank 0 saves of a model that does not fit one process arrives here, tensor by tensor, and the stock method that
writes the checkpoint reads it from here. The pages are those of a file: the kernel writes them to the disk and takes
them back when memory is needed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

WRITTEN_AT_ONCE = 2**24


class SpillFile:
    """Space for tensors in a file without a name. It vanishes with this object and the tensors that were opened.

    Args:
        folder: a folder on the disk that the file takes space of; created if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._like: list[torch.Tensor] = []
        self._offsets: list[int] = []
        self._end = 0
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def reserve(self, like: Iterable[torch.Tensor]) -> range:
        """Reserve space for tensors of these shapes and dtypes (meta tensors suffice), and return their numbers.

        Raises:
            OSError: the disk has no space for them. Without this, writing to them would end the process by a SIGBUS.
        """
        first, begin = len(self._like), self._end
        for tensor in like:
            self._like.append(tensor.to("meta"))
            self._offsets.append(self._end)
            self._end += -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._end > begin:
            _allocate(self._file.fileno(), begin, self._end - begin)
        return range(first, len(self._like))

    def open(self, number: int) -> torch.Tensor:
        """The tensor with this number. Its pages are freed when the last reference to it is gone; its values stay."""
        like = self._like[number]
        if like.nbytes == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        pages = mmap.mmap(self._file.fileno(), like.nbytes, offset=self._offsets[number])
        return torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype).view(like.shape)


def _allocate(file: int, begin: int, size: int) -> None:
    """Give a part of a file its space on the disk; where the system cannot (macOS), by writing zeros."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, begin, size)
        return
    for offset in range(0, size, WRITTEN_AT_ONCE):
        os.pwrite(file, bytes(min(WRITTEN_AT_ONCE, size - offset)), begin + offset)
