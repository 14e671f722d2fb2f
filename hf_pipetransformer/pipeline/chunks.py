"""Tensors as bytes, which are sent in messages of a bounded size, whatever their dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK_BYTES = 2**26
"""Upper bound, in bytes, for what a process sends and receives of weights or optimizer state at a time."""

BUCKET_BYTES = 25 * 2**20
"""Size, in bytes, of one message that is put together from small tensors in a step; the same as DDP's."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a contiguous tensor's bytes, because gloo does not support every dtype."""
    return tensor.view(-1).view(torch.uint8)


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
