"""Tensors go from the processes that hold them to those that lack them, in bounded memory.

All transfers outside of a step work in this way, for parameters, optimizer state and buffers alike: the moves to
another layout, the gathering of weights on rank 0 for saving, of the whole model for a generation and at the end, and
the synchronisation of values that differ at the beginning.

    rank 0   holds a a' b b'      b  ->  1        every flow (here 0 -> 1 and 1 -> 0) is equally far at any time, and
    rank 1   holds c c'           c' ->  0        a rank can free an item that it gives away as soon as it is sent

If ranks free these items, a process at no time needs more memory for the transfer than

    max(before, after)            its items before or after
    + 2 x CHUNK_BYTES             the buffers of one round, and the items of this round
    + for each flow from or to it, its largest item

An item is a parameter's values or its optimizer state. A flow is all items that go from the same ranks to the same
ranks; a process has a few, one for each stage of the other layout that overlaps its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..model.mapped_weights import TensorLike, tensors_in_file
from ..model.nested import as_bytes
from ..progress import PROGRESS
from .devices import has_own_memory, synchronise
from .mesh import ProcessMesh

K = TypeVar("K", bound=Hashable)
"""The name of an item."""

Ranks = tuple[int, ...]
"""Ascending."""
Values = Mapping[Any, Any]
"""The values of an item: tensors, and plain values such as AdamW's step."""

CPU = torch.device("cpu")
PEERS_AT_ONCE = 32
"""Number of processes that one sends to, and receives from, in one batch: NCCL hangs in batches of hundreds."""

CHUNK_BYTES = 2**26
"""Upper bound, in bytes, for the weights or optimizer state that a process sends and receives at a time."""


class Route(NamedTuple):
    """The rank that sends an item, and the ranks that receive it."""

    source: int
    destinations: Ranks


class Piece(NamedTuple):
    """The bytes [start, stop) of an item."""

    name: Any
    start: int
    stop: int


def transfer(
    before: Mapping[K, Ranks],
    after: Mapping[K, Ranks],
    mesh: ProcessMesh,
    device: torch.device,
    read: Callable[[K], Values],
    store: Callable[[K, dict[Any, Any]], None],
    leave: Callable[[K], None] | None = None,
    folder: Path | None = None,
) -> int:
    """Bring items to the ranks of `after` that lack them. Collective over all processes.

    1. Each process frees the items that it does not keep and need not send.
    2. The senders announce the contents of their items, as a state's tensors and plain values differ by optimizer.
    3. In rounds, each process exchanges flat buffers with the others, all at once; receivers store complete items,
       and senders free the items that they do not keep.

    Args:
        before: the ranks that hold each item, the same on every process.
        after: the ranks that will hold it, for some or all of them; the same on every process.
        mesh: all processes of the run.
        device: the device that the messages go through, and that the received tensors are on.
        read: returns the values of an item here.
        store: keeps an item that has arrived.
        leave: frees an item that this process does not hold afterwards; None leaves all where it is.
        folder: the folder of a temporary file that items arrive in, for a process without memory for them; the same
            on every process, and then `device` is the CPU.

    Returns:
        Number of bytes that this process received.

    Raises:
        OSError: the disk has no space for the temporary file. On the other ranks it is a `PeerFailedError`.
    """
    rank = mesh.rank
    routes = routes_between(before, after)
    outgoing = {item for item, theirs in routes.items() if any(rank == route.source for route in theirs)}
    incoming = {item for item, theirs in routes.items() if any(rank in route.destinations for route in theirs)}
    left = {item for item, ranks in after.items() if rank in before[item] and rank not in ranks}
    if leave is None:
        left, leave = set(), lambda _: None
    for item in left - outgoing:  # 1
        leave(item)
    if not routes:
        return 0
    told_here = {item for item, theirs in routes.items() if theirs[0].source == rank}
    announced = mesh.gather_objects({item: _described(read(item)) for item in told_here})  # 2
    described = {item: values for theirs in announced for item, values in theirs.items()}
    sizes = {item: sum(like.num_bytes for like in _in_buffers(described[item], TensorLike)) for item in routes}
    in_file: dict[Any, torch.Tensor] = {}
    if folder is not None:
        with mesh.failing_together():
            in_file = _space_for({item: described[item] for item in incoming}, folder) if incoming else {}
    under_way: dict[K, Values] = {}
    received = 0
    for pieces in rounds_of(in_proportion(before, after, sizes), routes, sizes):  # 3
        for item, start, _ in pieces:
            if start == 0 and item in outgoing:
                under_way[item] = _wrapped(read(item))
            elif start == 0 and item in incoming:
                under_way[item] = _filled_later(item, described[item], device, in_file)
        tensors = {item: _in_buffers(values, torch.Tensor) for item, values in under_way.items()}
        received += _run_round(pieces, routes, tensors, mesh, device)
        for item in (piece.name for piece in pieces if piece.stop == sizes[piece.name]):
            values = under_way.pop(item, {})
            if item in incoming:
                store(item, {key: v.value if isinstance(v, _Plain) else v for key, v in values.items()})
            elif item in left:
                leave(item)
        PROGRESS.tick()
    return received


def routes_between(before: Mapping[K, Ranks], after: Mapping[K, Ranks]) -> dict[K, tuple[Route, ...]]:
    """How the items travel that some rank of `after` lacks. Pure function with the same result on every process.

    The ranks that hold an item take turns in sending it.
    """
    routes: dict[K, tuple[Route, ...]] = {}
    for name, ranks in after.items():
        destinations: dict[int, list[int]] = {}
        for turn, rank in enumerate(rank for rank in ranks if rank not in before[name]):
            destinations.setdefault(before[name][turn % len(before[name])], []).append(rank)
        if destinations:
            routes[name] = tuple(Route(source, tuple(theirs)) for source, theirs in sorted(destinations.items()))
    return routes


def in_proportion(before: Mapping[K, Ranks], after: Mapping[K, Ranks], sizes: Mapping[K, int]) -> list[K]:
    """The names in `sizes`, in an order that sends the same fraction of each flow's bytes at any time.

    Within a flow they keep their order. So no process receives all of its new items before it has sent, and freed,
    the old ones. Pure function with the same result on every process.
    """
    flows = {name: (before[name], after[name]) for name in sizes}
    totals: Counter[Any] = Counter()
    for name, size in sizes.items():
        totals[flows[name]] += size
    passed: Counter[Any] = Counter()
    middles = {}
    for name, size in sizes.items():
        middles[name] = (passed[flows[name]] + size / 2) / max(totals[flows[name]], 1)
        passed[flows[name]] += size
    return sorted(sizes, key=middles.__getitem__)


def rounds_of(
    order: Sequence[K], routes: Mapping[K, Sequence[Route]], sizes: Mapping[K, int]
) -> Iterator[list[Piece]]:
    """Divide the items into rounds. In a round no process sends and receives more than `CHUNK_BYTES` together."""
    pieces: list[Piece] = []
    load: Counter[int] = Counter()
    for name in order:
        ranks = [rank for route in routes[name] for rank in (route.source, *route.destinations)]
        start = 0
        while True:
            stop = min(start + CHUNK_BYTES - max(load[rank] for rank in ranks), sizes[name])
            if stop > start or sizes[name] == 0:
                pieces.append(Piece(name, start, stop))
                load.update(dict.fromkeys(ranks, stop - start))
            if stop == sizes[name]:
                break
            yield pieces
            pieces, load, start = [], Counter(), stop
    if pieces:
        yield pieces


def _run_round(
    pieces: Sequence[Piece],
    routes: Mapping[Any, Sequence[Route]],
    tensors: Mapping[Any, Sequence[torch.Tensor]],
    mesh: ProcessMesh,
    device: torch.device,
) -> int:
    """Send and receive the pieces of one round, in one buffer for each route. Returns the number of bytes received."""
    rank, group = mesh.rank, mesh.control if device.type == "cpu" else None
    by_route: dict[Route, list[torch.Tensor]] = {}  # views of the bytes
    for name, start, stop in pieces:
        for route in routes[name]:
            if stop > start and (rank == route.source or rank in route.destinations):
                by_route.setdefault(route, []).extend(_cut(tensors[name], start, stop))
    buffers: dict[Route, torch.Tensor] = {}
    operations = []
    for route, views in sorted(by_route.items(), key=lambda item: item[0]):  # both ends have the same order
        if rank == route.source:
            buffers[route] = _joined(views, device)
            operations += [dist.P2POp(dist.isend, buffers[route], to, group) for to in route.destinations]
        else:
            size = sum(view.numel() for view in views)
            buffers[route] = torch.empty(size, dtype=torch.uint8, device=device)
            operations.append(dist.P2POp(dist.irecv, buffers[route], route.source, group))
    for batch in _batches(operations, rank, mesh.world_size):
        for work in dist.batch_isend_irecv(batch):
            work.wait()
    incoming = {route: buffer for route, buffer in buffers.items() if rank != route.source}
    for route, buffer in incoming.items():
        for view, content in zip(
            by_route[route], buffer.split([view.numel() for view in by_route[route]]), strict=True
        ):
            view.copy_(content)
    return sum(buffer.nbytes for buffer in incoming.values())


def _batches(operations: Sequence[dist.P2POp], rank: int, world_size: int) -> list[list[dist.P2POp]]:
    """Divide a round's messages by the distance that they go; both ends of a message find it in the same batch."""
    batches: dict[int, list[dist.P2POp]] = {}
    for operation in operations:
        distance = (operation.peer - rank if operation.op is dist.isend else rank - operation.peer) % world_size
        batches.setdefault(distance // PEERS_AT_ONCE, []).append(operation)
    return [batch for _, batch in sorted(batches.items())]


def _cut(tensors: Sequence[torch.Tensor], start: int, stop: int) -> list[torch.Tensor]:
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


def _joined(views: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The bytes in one buffer on a device. Another device that they are on is waited for once."""
    source = next((view.device for view in views if view.device != device), None)
    if source is None:
        return torch.cat(list(views))
    size = sum(view.numel() for view in views)
    buffer = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=has_own_memory(source))
    for place, view in zip(buffer.split([view.numel() for view in views]), views, strict=True):
        place.copy_(view, non_blocking=True)
    synchronise(source)
    return buffer


class _Plain(NamedTuple):
    """A value that is sent with the announcement and not in a buffer."""

    value: Any


def _wrapped(values: Values) -> Values:
    """The values, with `_Plain` around values that are not sent in a buffer: no tensors, or numbers on the CPU."""
    return {
        key: v if isinstance(v, torch.Tensor) and (v.dim() > 0 or v.device.type != "cpu") else _Plain(v)
        for key, v in values.items()
    }


def _described(values: Values) -> Values:
    """The values with the shapes and dtypes of tensors that are sent in buffers."""
    return {
        key: TensorLike(v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for key, v in _wrapped(values).items()
    }


def _in_buffers(values: Values, kind: type[Any]) -> list[Any]:
    """The tensors, or descriptions of tensors, that are sent in buffers."""
    return [value for value in values.values() if isinstance(value, kind)]


def _filled_later(item: Any, values: Values, device: torch.device, in_file: Mapping[Any, torch.Tensor]) -> Values:
    """The values with empty tensors in the place of their descriptions."""
    filled = dict(values)
    for key, like in values.items():
        if isinstance(like, TensorLike):
            known = in_file.get((item, key))
            filled[key] = torch.empty(like.shape, dtype=like.dtype, device=device) if known is None else known
    return filled


def _space_for(items: Mapping[Any, Values], folder: Path) -> dict[Any, torch.Tensor]:
    """Tensors in a temporary file, by item and key."""
    likes = {(i, key): v for i, values in items.items() for key, v in values.items() if isinstance(v, TensorLike)}
    return dict(zip(likes, tensors_in_file(folder, list(likes.values()), are_passed_on=True), strict=True))
