"""Weights that are mapped from files and not in memory, as after `from_pretrained` of a safetensors checkpoint.

transformers maps a checkpoint's files privately (copy-on-write). An unread weight costs no memory. A weight that is
read costs page cache, which all processes of a host share and which the kernel frees when memory is needed. Only pages
that a process writes to cost its own memory. So every process can have the whole model, even if it is larger than the
memory:

    a module's weights   mapped ──forward──> read from the file ──`give_back`──> mapped
    its stage's weights  mapped ──`into_memory`──> a copy in this process's memory, and no mapping

The kernel would free the read pages by itself, but memory limits (of containers, of batch systems) may count them
until then.

A page that this process has written to differs from the file, and is never given back. The kernel lists these pages
(`/proc/self/pagemap`), so no bookkeeping is needed. On systems without this list (not Linux), no page is given back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from .placeholders import set_values, values_of

PAGE = mmap.PAGESIZE
MAPPINGS = Path("/proc/self/maps")
PAGES = Path("/proc/self/pagemap")
WRITTEN_AT_ONCE = 2**24
GIVE_BACK_S = 0.02
"""Interval for giving back pages that are only passed on, in seconds."""
IS_PRESENT, IS_SWAPPED, IS_OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
"""Bits of the kernel's 8-byte entry for each page. A page in memory that is not a file's was written to."""


class TensorLike(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """The place of a mapped tensor's values: bytes [offset, offset + size) of a file."""

    file: Path
    offset: int
    size: int
    is_private: bool
    """Whether the file does not change when this process writes to the tensor."""


@dataclass(frozen=True)
class _Mapping:
    """Addresses [start, stop) of this process, which hold a file from `offset` on."""

    start: int
    stop: int
    offset: int
    file: Path
    is_private: bool


class FileMappings:
    """The current writable mappings of files in this process."""

    def __init__(self) -> None:
        found = []
        for line in _lines_of(MAPPINGS):
            addresses, permissions, offset, _, _, *path = line.split(maxsplit=5)
            if permissions.startswith("rw") and path and path[0].startswith("/"):
                start, stop = (int(address, 16) for address in addresses.split("-"))
                found.append(_Mapping(start, stop, int(offset, 16), Path(path[0]), permissions.endswith("p")))
        self._found = sorted(found, key=lambda mapping: mapping.start)
        self._starts = [mapping.start for mapping in self._found]

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """The bytes of the file that a tensor is mapped from; None if it is not mapped, or not contiguous."""
        if tensor.device.type != "cpu" or tensor.nbytes == 0 or not tensor.is_contiguous():
            return None
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address + tensor.nbytes > self._found[index].stop:
            return None
        mapping = self._found[index]
        return Place(mapping.file, mapping.offset + address - mapping.start, tensor.nbytes, mapping.is_private)

    def places_in(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Place]:
        """The places of those tensors that are mapped, by name."""
        return {
            name: place for name, tensor in tensors.items() if (place := self._place_of_values(tensor)) is not None
        }

    def _place_of_values(self, tensor: torch.Tensor) -> Place | None:
        values = values_of(tensor)
        return self.place_of(values[0]) if len(values) == 1 else None


def is_written(tensor: torch.Tensor) -> bool:
    """Whether this process has written to a privately mapped tensor. Neighbours on its pages count as well.

    False if the kernel does not tell.
    """
    return bool(_has_own_pages(tensor))


def _has_own_pages(tensor: torch.Tensor) -> bool | None:
    """`is_written`; None if the kernel does not tell."""
    first = tensor.data_ptr() // PAGE
    count = -(-(tensor.data_ptr() + tensor.nbytes) // PAGE) - first
    try:
        with PAGES.open("rb", buffering=0) as file:
            file.seek(first * 8)
            entries = np.frombuffer(file.read(count * 8), dtype=np.uint64)
    except (OSError, ValueError):
        return None
    if len(entries) != count:
        return None
    own = ((entries & IS_PRESENT) != 0) & ((entries & IS_OF_FILE) == 0) | ((entries & IS_SWAPPED) != 0)
    return bool(own.any())


def give_back(tensor: torch.Tensor) -> None:
    """Give the pages of a mapped tensor back to the kernel; they are read from the file again when they are needed.

    Pages at its ends, which it shares with its neighbours, are kept. All pages are kept if this process has written to
    one of them, or if the kernel does not tell.

    Args:
        tensor: a tensor that `FileMappings` has found; it must still be mapped.
    """
    begin = -(-tensor.data_ptr() // PAGE) * PAGE
    size = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE - begin
    if size > 0 and _has_own_pages(tensor) is False:
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@contextmanager
def giving_back(model: nn.Module) -> Iterator[None]:
    """Inside, each module gives back the pages of its mapped weights after its forward; at the end all modules do.

    So a model can run in the memory of its largest layer. Weights saved by autograd stay valid. Modules do not change:
    the hook is torch's global hook for all modules of the process.
    """
    mappings = FileMappings()

    def forward_is_over(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            for value in values_of(parameter):
                if mappings.place_of(value) is not None:  # a placeholder in its place is not mapped
                    give_back(value)

    hook = register_module_forward_hook(forward_is_over)
    try:
        yield
    finally:
        hook.remove()
        forward_is_over(model)


def into_memory(parameters: Iterable[torch.Tensor]) -> None:
    """Copy the mapped ones among the parameters into memory of this process, one after the other.

    They remain the same objects. Afterwards the file may be changed or removed.
    """
    mappings = FileMappings()
    for parameter in parameters:
        values = values_of(parameter)
        if any(mappings.place_of(value) is not None for value in values):
            set_values(parameter, [value.clone() for value in values])
            for value in values:
                if mappings.place_of(value) is not None:
                    give_back(value)


def tensors_in_file(folder: Path, likes: Sequence[TensorLike], are_passed_on: bool = False) -> list[torch.Tensor]:
    """Return empty tensors in a temporary file without a name, which vanishes with the last of them.

    Their pages belong to a file: the kernel writes them to the disk and frees them when memory is needed.

    Args:
        folder: a folder on the disk for the file; created if it is missing.
        likes: the shapes and dtypes of the tensors.
        are_passed_on: whether the tensors are only filled and then read in a row, for a save. Then a thread gives
            their pages back continuously while any of the tensors exists, to bound the memory.

    Raises:
        OSError: the disk has no space for them. Without this check, writing to them could end the process by a SIGBUS.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begins = [0, *accumulate(-(-like.num_bytes // PAGE) * PAGE for like in likes)]
    if not begins[-1]:
        return [torch.empty(like.shape, dtype=like.dtype) for like in likes]
    with tempfile.TemporaryFile(dir=folder) as file:
        _allocate(file.fileno(), begins[-1])
        pages = mmap.mmap(file.fileno(), begins[-1])
    if are_passed_on and hasattr(mmap, "MADV_DONTNEED"):
        threading.Thread(target=_give_back_again_and_again, args=(weakref.ref(pages),), daemon=True).start()
    return [
        torch.frombuffer(pages, dtype=like.dtype, count=like.shape.numel(), offset=begin).view(like.shape)
        if like.num_bytes
        else torch.empty(like.shape, dtype=like.dtype)
        for like, begin in zip(likes, begins, strict=False)
    ]


def _give_back_again_and_again(pages: weakref.ref[mmap.mmap]) -> None:
    """Give the pages of a mapping back until it is gone. The mapping is shared, so written values are in the file."""
    while (mapping := pages()) is not None:
        mapping.madvise(mmap.MADV_DONTNEED)
        del mapping
        time.sleep(GIVE_BACK_S)


def _allocate(file: int, size: int) -> None:
    """Give a file its space on the disk; where the system cannot (macOS), by writing zeros."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    for offset in range(0, size, WRITTEN_AT_ONCE):
        os.pwrite(file, bytes(min(WRITTEN_AT_ONCE, size - offset)), offset)


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
