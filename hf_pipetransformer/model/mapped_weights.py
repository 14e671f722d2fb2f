"""Weights that are mapped from files and not in memory, as `from_pretrained` leaves those of a safetensors checkpoint.

transformers maps a checkpoint's files privately (copy-on-write): a weight costs no memory until it is read, then page
cache that all processes of a host share, and memory of this process only for the pages that it writes to. So every
process can have the whole model although no process has memory for it, if it gives back the pages that it has read:

    a module's weights   mapped ──forward──> read from the file ──`release`──> mapped
    its stage's weights  mapped ──`into_memory`──> a copy in this process's memory, and no mapping

A page that this process has written to differs from the file and is never given back. The kernel knows which pages
these are (`/proc/self/pagemap`), so no bookkeeping is needed. Where it does not say (not Linux), nothing is given
back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .placeholders import set_values, values_of

PAGE = mmap.PAGESIZE
MAPPINGS = Path("/proc/self/maps")
PAGES = Path("/proc/self/pagemap")
IS_PRESENT, IS_SWAPPED, IS_OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
"""Bits of the kernel's 8-byte entry for each page. A page in memory that is not a file's was written to."""


@dataclass(frozen=True)
class Place:
    """Where the values of a mapped tensor are: bytes [offset, offset + size) of a file."""

    file: Path
    offset: int
    size: int
    is_private: bool
    """Whether the file stays as it is when this process writes to the tensor."""


@dataclass(frozen=True)
class _Mapping:
    """Addresses [start, stop) of this process, which hold a file from `offset` on."""

    start: int
    stop: int
    offset: int
    file: Path
    is_private: bool


class FileMappings:
    """The writable mappings of files that this process has at the moment."""

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


def release(tensor: torch.Tensor) -> None:
    """Give the pages of a mapped tensor back to the kernel; they are read from the file again when they are needed.

    Pages at its ends, which it shares with its neighbours, stay. Does nothing if this process has written to a page of
    the tensor, or if the kernel does not tell.

    Args:
        tensor: a tensor that `FileMappings` has found; it must still be mapped.
    """
    begin = -(-tensor.data_ptr() // PAGE) * PAGE
    size = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE - begin
    if size > 0 and not _has_own_pages(begin, size):
        assert _LIBC is not None
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def is_written(tensor: torch.Tensor) -> bool:
    """Whether this process has written to a privately mapped tensor. Neighbours on its pages count as well.

    False if the kernel does not tell.
    """
    begin = tensor.data_ptr() // PAGE * PAGE
    return _has_own_pages(begin, tensor.data_ptr() + tensor.nbytes - begin, unknown=False)


def into_memory(parameters: Iterable[torch.Tensor]) -> None:
    """Copy those of the parameters that are mapped into memory of this process, one after the other.

    They remain the same objects. Afterwards the file may be changed or removed.
    """
    mappings = FileMappings()
    for parameter in parameters:
        values = values_of(parameter)
        if any(mappings.place_of(value) is not None for value in values):
            set_values(parameter, [value.clone() for value in values])
            for value in values:
                if mappings.place_of(value) is not None:
                    release(value)


@contextmanager
def releasing(model: nn.Module) -> Iterator[None]:
    """Inside, each module of a model gives its mapped weights back when its forward is over; at the end all are.

    So the model can run although there is no memory for it. Values that autograd keeps for a backward pass stay valid.
    """
    mappings = FileMappings()

    def give_back(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if mappings.place_of(parameter) is not None:  # not so a placeholder that has taken its place
                release(parameter)

    hooks = [
        module.register_forward_hook(give_back, always_call=True)
        for module in model.modules()
        if any(mappings.place_of(parameter) is not None for parameter in module.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in model.modules():
            give_back(module)


# ---------------------------------------------------------------------------------------------------------
# The kernel
# ---------------------------------------------------------------------------------------------------------

_LIBC = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _has_own_pages(begin: int, size: int, unknown: bool = True) -> bool:
    """Whether pages of [begin, begin + size) are this process's own, because it has written to them.

    Args:
        begin: an address at the beginning of a page.
        size: in bytes.
        unknown: the answer if the kernel does not tell.
    """
    count = -(-size // PAGE)
    try:
        with PAGES.open("rb", buffering=0) as file:
            file.seek(begin // PAGE * 8)
            content = file.read(count * 8)
    except OSError:
        return unknown
    if len(content) != count * 8:
        return unknown
    entries = np.frombuffer(content, dtype=np.uint64)
    own = ((entries & IS_PRESENT) != 0) & ((entries & IS_OF_FILE) == 0) | ((entries & IS_SWAPPED) != 0)
    return bool(own.any())
