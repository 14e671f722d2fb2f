"""Each replica of a stage gets the values that the other replicas have updated in an optimizer step (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from .chunks import BUCKET_BYTES, as_bytes

DIRECT_BYTES = 2**18
"""Values of at least this number of bytes are messages of their own and need no buffer; smaller ones share them."""


@torch.no_grad()
def exchange_updates(rows: Sequence[Sequence[torch.Tensor]], group: dist.ProcessGroup) -> None:
    """Broadcast what each replica has updated to the others, all replicas in turns. Collective over the replicas.

        replica 0     |---embedding---|-ln, b, ln-|------w------|
        replica 1     |------w------|------w------|-b, ln, b, b-|     messages

    Args:
        rows: the parameters that each replica updates, in the order of the group's ranks; all of them are here.
        group: the replicas of a stage.
    """
    under_way = []
    for messages in zip_longest(*map(_messages, rows)):
        for replica, message in enumerate(messages):
            if message is not None:
                buffer = _buffer_of(message)
                work = dist.broadcast(buffer, group=group, group_src=replica, async_op=True)
                under_way.append((work, message, buffer, replica == group.rank()))
    for work, message, buffer, is_mine in under_way:
        assert work is not None
        work.wait()
        if not is_mine and not _is_direct(message):
            parts = buffer.split([value.nbytes for value in message])
            for value, part in zip(message, parts, strict=True):
                value.copy_(part.view(value.dtype).view(value.shape))


def _messages(row: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Put values together into messages: large ones alone, so that they need no buffer."""
    small: list[torch.Tensor] = []
    for value in (parameter.detach() for parameter in row if parameter.nbytes):
        if value.nbytes >= DIRECT_BYTES:
            yield [value]
            continue
        if small and (small[0].dtype != value.dtype or sum(v.nbytes for v in small) >= BUCKET_BYTES):
            yield small
            small = []
        small.append(value)
    if small:
        yield small


def _is_direct(message: Sequence[torch.Tensor]) -> bool:
    return len(message) == 1 and message[0].is_contiguous()


def _buffer_of(message: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of a message: those of its only value, or copies of all of them."""
    if _is_direct(message):
        return as_bytes(message[0])
    return torch.cat([as_bytes(value.contiguous()) for value in message])
