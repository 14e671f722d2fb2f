"""Any value as a few flat buffers, which can be sent: the pickled value, and the bytes of its tensors beside it."""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import torch

from ..model.nested import as_bytes

ALIGNMENT = 64
"""Alignment of each tensor in a buffer, in bytes."""

WITH_CONTENT = "cpu"
"""The type of device whose tensors travel with the content, as messages of their own would only take longer."""


class Packed(NamedTuple):
    """A value in buffers of bytes.

    Attributes:
        pickled: size in bytes of the pickled part of `content`.
        content: on the CPU: the pickled value without its tensors, then the tensors that are not on the accelerator.
        on_device: the tensors on the accelerator.
    """

    pickled: int
    content: torch.Tensor
    on_device: torch.Tensor


class _Writer(pickle.Pickler):
    """Pickles a value without its tensors, which are kept apart."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._device = device
        self.places: dict[int, tuple[Any, ...]] = {}  # by tensor: its number, buffer, offset, size, dtype and shape
        self.tensors: tuple[list[tuple[int, torch.Tensor]], ...] = ([], [])  # of the content, on the device
        self.lengths = [0, 0]

    def persistent_id(self, value: Any) -> Any:
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
        if not is_plain or value.is_quantized or value.is_meta:
            return None
        if id(value) not in self.places:
            where = int(value.device.type == self._device.type and self._device.type != WITH_CONTENT)
            dense = value.detach().resolve_conj().resolve_neg().contiguous()
            start = self.lengths[where]
            self.tensors[where].append((start, dense))
            self.lengths[where] = _aligned(start + dense.nbytes)
            self.places[id(value)] = (len(self.places), where, start, dense.nbytes, dense.dtype, tuple(dense.shape))
        return self.places[id(value)]


class _Reader(pickle.Unpickler):
    def __init__(self, packed: Packed, copies: bool) -> None:
        self._copies = copies
        super().__init__(io.BytesIO(packed.content[: packed.pickled].numpy().tobytes()))
        self._buffers = (packed.content[_aligned(packed.pickled) :], packed.on_device)
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        if pid not in self._made:
            _, where, start, size, dtype, shape = pid
            # `.data`: an in-place change of one tensor leaves the version counters of the others unchanged
            made = self._buffers[where][start : start + size].view(dtype).view(shape).data
            self._made[pid] = made.clone() if self._copies else made
        return self._made[pid]


def packed(value: Any, device: torch.device) -> Packed:
    """Copy a value into buffers.

    Args:
        value: mappings, sequences and any values that can be pickled, with tensors anywhere.
        device: the device whose tensors stay in a buffer of their own, unless it is the CPU.
    """
    file = io.BytesIO()
    writer = _Writer(file, device)
    writer.dump(value)
    pickled, first = file.tell(), _aligned(file.tell())
    content = torch.empty(first + writer.lengths[0], dtype=torch.uint8)
    content[:pickled] = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    on_device = torch.empty(writer.lengths[1], dtype=torch.uint8, device=device)
    for buffer, tensors in zip((content[first:], on_device), writer.tensors, strict=True):
        for start, tensor in tensors:
            buffer[start : start + tensor.nbytes] = as_bytes(tensor)
    return Packed(pickled, content, on_device)


def unpacked(given: Packed, copies: bool = False) -> Any:
    """The value.

    Args:
        given: what `packed` has returned.
        copies: whether each tensor gets memory of its own, because a part of the value may be kept for long;
            otherwise tensors are views of the buffers.
    """
    return _Reader(given, copies).load()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
