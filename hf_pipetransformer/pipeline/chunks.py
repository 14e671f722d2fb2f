"""Many tensors as one row of bytes, which is sent in chunks of a bounded size.

tensors      |-------a-------|b|-------c-------|d|
chunks       |-----0-----|-----1-----|-----2-----|     a chunk may hold several tensors, or a part of one
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ..cache.side_stream import is_apart
from .devices import synchronise

CHUNK_BYTES = 2**26
"""Upper bound, in bytes, for one message of weights or optimizer state, and so for the buffer that it needs."""

BUCKET_BYTES = 25 * 2**20
"""Size, in bytes, of one message that is put together from small tensors in a step; the same as DDP's."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a contiguous tensor's bytes, because gloo does not support every dtype."""
    return tensor.view(-1).view(torch.uint8)


def total_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Number of bytes of all tensors together, which may be meta tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def cut(tensors: Sequence[torch.Tensor], start: int, stop: int) -> list[torch.Tensor]:
    """Flat views of the bytes [start, stop) of tensors in a row; a tensor that is not contiguous is copied first."""
    parts = []
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        if max(begin, start) < min(end, stop):
            dense = tensor.detach().contiguous()
            parts.append(as_bytes(dense)[max(start - begin, 0) : stop - begin])
        begin = end
    return parts


def fill(tensors: Sequence[torch.Tensor], start: int, stop: int, buffer: torch.Tensor) -> None:
    """Copy a buffer into the bytes [start, stop) of contiguous tensors in a row."""
    views = cut(tensors, start, stop)
    for view, part in zip(views, buffer.split([view.numel() for view in views]), strict=True):
        view.copy_(part)


def chunk_ranges(size: int) -> Iterator[tuple[int, int]]:
    """Split `size` bytes into ranges of at most `CHUNK_BYTES`."""
    for start in range(0, size, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, size)


def packed(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the bytes of tensors, on any device, in chunks on the CPU.

    Two buffers take turns, so that a chunk can be sent while the next one is copied. They are pinned if the device has
    memory of its own.
    """
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    size = min(total_bytes(tensors), CHUNK_BYTES)
    buffers: list[torch.Tensor] = []
    for number, (start, stop) in enumerate(chunk_ranges(total_bytes(tensors))):
        if number < 2:
            buffers.append(torch.empty(size, dtype=torch.uint8, pin_memory=is_apart(device)))
        buffer = buffers[number % 2][: stop - start]
        parts = cut(tensors, start, stop)
        for place, part in zip(buffer.split([part.numel() for part in parts]), parts, strict=True):
            place.copy_(part, non_blocking=True)
        synchronise(device)
        yield buffer


def unpacked(
    like: Sequence[torch.Tensor],
    receive: Callable[[torch.Tensor], object],
    into: Iterable[torch.Tensor] | None = None,
) -> Iterator[torch.Tensor]:
    """Yield CPU tensors in the shapes and dtypes of `like`, each as soon as all its bytes have arrived.

    Args:
        like: tensors on any device; meta tensors suffice.
        receive: fills a buffer with the next chunk that `packed` has given elsewhere.
        into: contiguous tensors to fill; None makes new ones.
    """
    # new ones are not in memory until written to
    tensors = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in like] if into is None else list(into)
    buffer = torch.empty(min(total_bytes(like), CHUNK_BYTES), dtype=torch.uint8)
    begin = 0  # of the first of these tensors
    for start, stop in chunk_ranges(total_bytes(like)):
        receive(buffer[: stop - start])
        fill(tensors, start - begin, stop - begin, buffer[: stop - start])
        while tensors and begin + tensors[0].nbytes <= stop:
            begin += tensors[0].nbytes
            yield tensors.pop(0)
    yield from tensors  # empty ones, if nothing else was sent


def on_cpu(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the CPU; copies of those that are on another device, made in chunks."""
    elsewhere = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    chunks = packed(elsewhere)
    copies = unpacked(elsewhere, lambda buffer: buffer.copy_(next(chunks)))
    return [tensor.detach() if tensor.device.type == "cpu" else next(copies) for tensor in tensors]
