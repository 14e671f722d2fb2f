"""Values of many parameters that several processes sum up or give one another in a step, in few messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn

from ..model.nested import as_bytes

BUCKET_BYTES = 25 * 2**20
"""Size, in bytes, of one message that is put together from small tensors in a step; the same as DDP's."""

DIRECT_BYTES = 2**18
"""Updated values of at least this number of bytes are messages of their own and need no buffer."""


def reduce_gradients(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    factor: float = 1.0,
    may_lack: Collection[nn.Parameter] = (),
) -> None:
    """Set gradients to their sum over a group, times a factor. Collective over the group.

    A parameter without a gradient counts as zero. One that no process has a gradient of is left without: the optimizer
    skips it.

    Args:
        parameters: the parameters.
        group: the processes that have them.
        factor: multiplies the sums.
        may_lack: further parameters that get a gradient only if the samples of some process reach them (an expert's).
            They are only sent if some process has a gradient of them.
    """
    reached: list[nn.Parameter] = []
    if may_lack:
        device = next(iter(may_lack)).device
        counts = torch.tensor([p.grad is not None for p in may_lack], dtype=torch.float32, device=device)
        dist.all_reduce(counts, group=group)
        reached = [p for p, count in zip(may_lack, counts.tolist(), strict=True) if count]
    for bucket in _buckets([*parameters, *reached]):
        here = [parameter.grad is not None for parameter in bucket]
        gradients = [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in bucket]
        has = gradients[0].new_ones(len(bucket)) if all(here) else gradients[0].new_tensor(here)
        flat = torch.cat([*gradients, has])
        dist.all_reduce(flat, group=group)
        if factor != 1.0:
            flat *= factor
        *totals, counts = flat.split([*(p.numel() for p in bucket), len(bucket)])
        exists = here if all(here) else counts.tolist()  # only if one is missing here, the device is waited for
        for parameter, total, is_there in zip(bucket, totals, exists, strict=True):
            if is_there:
                parameter.grad = total.view_as(parameter)


@torch.no_grad()
def exchange_updates(rows: Sequence[Sequence[nn.Parameter]], group: dist.ProcessGroup) -> None:
    """Broadcast each replica's updated parameters to the others (ZeRO-1), in turns. Collective over the replicas.

        replica 0     |---embedding---|-ln, b, ln-|------w------|
        replica 1     |------w------|------w------|-b, ln, b, b-|     messages

    Args:
        rows: the parameters that each replica updates, in the order of the group's ranks; all of them are here.
        group: the replicas of a stage.
    """
    under_way = []
    for messages in zip_longest(*(_buckets(row, DIRECT_BYTES) for row in rows)):
        for replica, message in enumerate(messages):
            values = [parameter.detach() for parameter in message or () if parameter.nbytes]
            if not values:
                continue
            is_direct = len(values) == 1 and values[0].is_contiguous()
            parts = [as_bytes(value.contiguous()) for value in values]
            buffer = parts[0] if is_direct else torch.cat(parts)
            work = dist.broadcast(buffer, group=group, group_src=replica, async_op=True)
            under_way.append((work, [] if is_direct or replica == group.rank() else values, buffer))
    for work, stale, buffer in under_way:
        assert work is not None
        work.wait()
        for value, part in zip(stale, buffer.split([value.nbytes for value in stale]) if stale else (), strict=True):
            value.copy_(part.view(value.dtype).view(value.shape))


def _buckets(parameters: Sequence[nn.Parameter], alone: int | None = None) -> Iterator[list[nn.Parameter]]:
    """Split parameters into lists of one dtype with about `BUCKET_BYTES` each; from `alone` bytes on by itself."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if alone is not None and parameter.nbytes >= alone:
            yield [parameter]
            continue
        if bucket and (size > BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket
