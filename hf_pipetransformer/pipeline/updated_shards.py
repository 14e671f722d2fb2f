"""Each replica of a stage gets the values that the other replicas have updated in an optimizer step (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from ..model.placeholders import ParameterTable
from .chunks import BUCKET_BYTES, as_bytes
from .shards import Span

DIRECT_BYTES = 2**18
"""Values of at least this number of bytes are messages of their own and need no buffer; smaller ones share them."""

Row = Sequence[tuple[str, Span]]
"""The parameters that one replica updates, by name, with their elements."""


class UpdatedShards:
    """The parameters that each replica of a stage updates, and how the others get them.

    Each replica broadcasts its values, all replicas in turns. Large values are read and written where they are.

        replica 0     |---embedding---|-ln, b, ln-|------w------|
        replica 1     |------w------|------w------|-b, ln, b, b-|     messages

    Args:
        table: the model's parameters.
        rows: what each replica updates, in the order of the group's ranks.
        group: the replicas of the stage.
    """

    def __init__(self, table: ParameterTable, rows: Sequence[Row], group: dist.ProcessGroup) -> None:
        assert group.size() == len(rows)
        self._table, self._rows, self._group = table, rows, group

    @torch.no_grad()
    def gather(self) -> None:
        """Copy into the parameters here what the other replicas have updated. Collective over the stage's replicas."""
        dense = {name: self._table[name].detach().contiguous() for row in self._rows for name, _ in row}
        values = [[dense[name].view(-1)[start:stop] for name, (start, stop) in row] for row in self._rows]
        under_way = [
            self._broadcast([values[replica][index] for index in indices], replica)
            for messages in zip_longest(*(in_messages([value.nbytes for value in row]) for row in values))
            for replica, indices in enumerate(messages)
            if indices is not None
        ]
        for work, message, buffer in under_way:
            work.wait()
            if buffer is not None:
                parts = buffer.split([value.nbytes for value in message])
                for value, part in zip(message, parts, strict=True):
                    as_bytes(value).copy_(part)
        for name, value in dense.items():
            if not self._table[name].is_contiguous():
                self._table[name].copy_(value)

    def _broadcast(
        self, message: list[torch.Tensor], replica: int
    ) -> tuple[dist.Work, list[torch.Tensor], torch.Tensor | None]:
        """Begin to broadcast some values of a replica. Returns the buffer, if one is to be read here afterwards."""
        is_mine = replica == self._group.rank()
        if len(message) == 1:
            sent, buffer = as_bytes(message[0]), None
        elif is_mine:
            sent, buffer = torch.cat([as_bytes(value) for value in message]), None
        else:
            size = sum(value.nbytes for value in message)
            sent = buffer = torch.empty(size, dtype=torch.uint8, device=message[0].device)
        work = dist.broadcast(sent, group=self._group, group_src=replica, async_op=True)
        assert work is not None
        return work, message, buffer


def in_messages(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Put values together into messages: large ones alone, so that they need no buffer.

    Args:
        sizes: bytes of each value.

    Yields:
        The indices of the values of a message.
    """
    small: list[int] = []
    size = 0
    for index, num_bytes in enumerate(sizes):
        if num_bytes >= DIRECT_BYTES:
            yield [index]
        elif num_bytes:
            small.append(index)
            size += num_bytes
            if size >= BUCKET_BYTES:
                yield small
                small, size = [], 0
    if small:
        yield small
