"""Moves weights and their optimizer state to the ranks that hold them under another plan, in bounded memory.

    rank 0   holds a a' b b'      b  ->  1        every flow (here 0 -> 1 and 1 -> 0) is equally far at any time, and
    rank 1   holds c c'           c' ->  0        what is left behind is freed as soon as it is sent

A process needs at no time more memory for weights and optimizer state than

    max(before, after)            what it holds under the one plan or the other
    + 2 x CHUNK_BYTES             the buffers of one round, and the parameters of this round
    + for each flow from or to it, its largest parameter with its optimizer state

A flow is all parameters that go from the same ranks to the same ranks; a process has a few, one for each stage of
the other plan that overlaps its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..model.placeholders import ParameterTable, values_of
from ..resilience.watchdog import PROGRESS
from . import chunks
from .mesh import ProcessMesh
from .state import Holders, OptimizerState, WeightState


class Route(NamedTuple):
    """Who sends a parameter, and to whom."""

    source: int
    destinations: tuple[int, ...]


class Piece(NamedTuple):
    """The bytes [start, stop) of a parameter with its optimizer state."""

    name: str
    start: int
    stop: int


def routes_between(before: Holders, after: Holders) -> dict[str, tuple[Route, ...]]:
    """How the parameters travel that some rank of `after` lacks. Pure function with the same result on every process.

    The ranks that hold a parameter take turns in sending it.
    """
    routes: dict[str, tuple[Route, ...]] = {}
    for name, ranks in after.items():
        destinations: dict[int, list[int]] = {}
        for turn, rank in enumerate(rank for rank in ranks if rank not in before[name]):
            destinations.setdefault(before[name][turn % len(before[name])], []).append(rank)
        if destinations:
            routes[name] = tuple(Route(source, tuple(theirs)) for source, theirs in sorted(destinations.items()))
    return routes


def in_proportion(before: Holders, after: Holders, sizes: Mapping[str, int]) -> list[str]:
    """The names in `sizes` in an order in which at any time the same fraction of each flow's bytes has been sent.

    Within a flow they keep their order. So no process receives all that it will hold before it has sent, and freed,
    what it leaves behind. Pure function with the same result on every process.
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
    order: Sequence[str], routes: Mapping[str, Sequence[Route]], sizes: Mapping[str, int]
) -> Iterator[list[Piece]]:
    """Divide the parameters into rounds in which no process sends and receives more than `CHUNK_BYTES` together."""
    pieces: list[Piece] = []
    load: Counter[int] = Counter()
    for name in order:
        ranks = [rank for route in routes[name] for rank in (route.source, *route.destinations)]
        start = 0
        while True:
            stop = min(start + chunks.CHUNK_BYTES - max(load[rank] for rank in ranks), sizes[name])
            if stop > start or sizes[name] == 0:
                pieces.append(Piece(name, start, stop))
                load.update(dict.fromkeys(ranks, stop - start))
            if stop == sizes[name]:
                break
            yield pieces
            pieces, load, start = [], Counter(), stop
    if pieces:
        yield pieces


def exchange(
    before: Holders,
    after: Holders,
    table: ParameterTable,
    weights: WeightState,
    optimizer: OptimizerState | None,
    mesh: ProcessMesh,
    device: torch.device,
) -> int:
    """Move parameters with their optimizer state, in bounded memory: see above. Collective over all processes.

    1. Each process frees what it leaves behind and nobody needs from it.
    2. The senders announce what they will send, as a state's tensors and plain values differ by optimizer.
    3. In rounds, each process exchanges flat buffers with the others, all at once; receivers store what is complete,
       and senders free what they leave behind.

    Args:
        before: who holds what now.
        after: who will hold it.
        table: the model's parameters.
        weights: the weights; those of a whole model, which every process has, stay where they are.
        optimizer: the optimizer's state; None if there is none.
        mesh: all processes of the run.
        device: the device of this process.

    Returns:
        Number of bytes that this process received.
    """
    rank = mesh.rank
    routes = routes_between(before, after)
    sends_weights = not weights.is_whole

    def what_moves(name: str) -> _Values:
        state = optimizer.state_of(name) if optimizer is not None and not weights.is_frozen(name) else {}
        own: _Values = {f"{WEIGHT}{i}": v for i, v in enumerate(values_of(table[name]))} if sends_weights else {}
        return own | {key: _Small.of(value) for key, value in state.items()}

    def leave(name: str) -> None:
        if rank in before[name] and rank not in after[name]:
            weights.drop(name, device)
            if optimizer is not None:
                optimizer.drop(name)

    def store(name: str, values: _Values) -> None:
        if sends_weights:
            weights.put(name, [values.pop(key) for key in list(values) if key.startswith(WEIGHT)])
        if optimizer is not None:
            optimizer.put(name, {k: v.value if isinstance(v, _Small) else v for k, v in values.items()})

    outgoing = {name for name, theirs in routes.items() if any(rank == route.source for route in theirs)}
    incoming = {name for name, theirs in routes.items() if any(rank in route.destinations for route in theirs)}
    for name in after.keys() - outgoing:  # 1
        leave(name)
    announced = mesh.gather_objects({name: _as_meta(what_moves(name)) for name in outgoing})  # 2
    described = {name: values for theirs in announced for name, values in theirs.items()}
    sizes = {name: chunks.total_bytes(_tensors_in(described[name])) for name in routes}
    under_way: dict[str, _Values] = {}
    received = 0
    for pieces in rounds_of(in_proportion(before, after, sizes), routes, sizes):  # 3
        for name, start, _ in pieces:
            if start == 0 and name in outgoing:
                under_way[name] = what_moves(name)
            elif start == 0 and name in incoming:
                under_way[name] = _empty(described[name], device)
        received += _run_round(pieces, routes, {n: _tensors_in(v) for n, v in under_way.items()}, rank, device)
        for name in (piece.name for piece in pieces if piece.stop == sizes[piece.name]):
            if name in incoming:
                store(name, under_way.pop(name))
            elif name in outgoing:
                del under_way[name]
                leave(name)
        PROGRESS.tick()
    return received


def _run_round(
    pieces: Sequence[Piece],
    routes: Mapping[str, Sequence[Route]],
    tensors: Mapping[str, Sequence[torch.Tensor]],
    rank: int,
    device: torch.device,
) -> int:
    """Send and receive the pieces of one round, in one buffer for each route. Returns the number of bytes received."""
    by_route: dict[Route, list[Piece]] = {}
    for piece in pieces:
        for route in routes[piece.name]:
            if piece.stop > piece.start and (rank == route.source or rank in route.destinations):
                by_route.setdefault(route, []).append(piece)
    buffers: dict[Route, torch.Tensor] = {}
    operations = []
    for route, parts in sorted(by_route.items()):  # both ends have the same order
        if rank == route.source:
            contents = [chunks.cut(tensors[part.name], part.start, part.stop) for part in parts]
            buffers[route] = torch.cat([content.to(device) for of_part in contents for content in of_part])
            operations += [dist.P2POp(dist.isend, buffers[route], to) for to in route.destinations]
        else:
            size = sum(part.stop - part.start for part in parts)
            buffers[route] = torch.empty(size, dtype=torch.uint8, device=device)
            operations.append(dist.P2POp(dist.irecv, buffers[route], route.source))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    incoming = {route: buffer for route, buffer in buffers.items() if rank != route.source}
    for route, buffer in incoming.items():
        parts = by_route[route]
        for part, content in zip(parts, buffer.split([p.stop - p.start for p in parts]), strict=True):
            chunks.fill(tensors[part.name], part.start, part.stop, content)
    return sum(buffer.nbytes for buffer in incoming.values())


WEIGHT = "weight "
"""How the keys of a parameter's values begin, beside the keys of its optimizer state."""


@dataclass(frozen=True)
class _Small:
    """A value on the CPU that is sent with the announcement and not in a buffer, such as AdamW's step."""

    value: Any

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return a tensor that has dimensions or is on a device unchanged, and anything else wrapped."""
        in_buffer = isinstance(value, torch.Tensor) and (value.dim() > 0 or value.device.type != "cpu")
        return value if in_buffer else cls(value)


_Values = dict[str, Any]
"""Key -> tensor or `_Small`: a parameter's weight and optimizer state."""


def _tensors_in(values: _Values) -> list[torch.Tensor]:
    return [value for value in values.values() if isinstance(value, torch.Tensor)]


def _as_meta(values: _Values) -> _Values:
    """The same values with meta tensors, which carry shapes and dtypes, in place of tensors."""
    return {key: v.to("meta") if isinstance(v, torch.Tensor) else v for key, v in values.items()}


def _empty(values: _Values, device: torch.device) -> _Values:
    """The same values with empty tensors on a device in place of meta tensors."""
    return {
        key: torch.empty(v.shape, dtype=v.dtype, device=device) if isinstance(v, torch.Tensor) else v
        for key, v in values.items()
    }
