"""Moves weights and their optimizer state to the ranks that hold them under another plan, in bounded memory.

    rank 0   holds a a' b b'      b  ->  1        every flow (here 0 -> 1 and 1 -> 0) is equally far at any time, and
    rank 1   holds c c'           c' ->  0        what is left behind is freed as soon as it is sent

A process needs at no time more memory for weights and optimizer state than

    max(before, after)            what it holds under the one plan or the other
    + 2 x CHUNK_BYTES             the buffers of one round, and the parameters of this round
    + for each flow from or to it, its largest parameter with its optimizer state

A flow is all parameters that go from the same ranks to the same ranks; a process has a few, one for each stage of
the other plan that overlaps its own. Where replicas divide the optimizer state (`shards`), weights and states have
flows of their own, and a parameter that is cut counts as one that stays and one that arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..model.placeholders import ParameterTable, values_of
from ..resilience.watchdog import PROGRESS
from . import chunks
from .mesh import ProcessMesh
from .optimizer_state import OptimizerState, put_part
from .shards import Shards, Span, segments_of
from .state import Holders, WeightState

K = TypeVar("K", bound=Hashable)
"""What names a thing that travels."""


class Item(NamedTuple):
    """What travels as one: the values of a parameter, or the optimizer state of some of its elements."""

    name: str
    span: Span | None = None
    """The elements; None for the values."""


class Route(NamedTuple):
    """Who sends a parameter, and to whom."""

    source: int
    destinations: tuple[int, ...]


class Piece(NamedTuple):
    """The bytes [start, stop) of what travels under a name."""

    name: Any
    start: int
    stop: int


def routes_between(
    before: Mapping[K, tuple[int, ...]], after: Mapping[K, tuple[int, ...]]
) -> dict[K, tuple[Route, ...]]:
    """How the parameters travel that some rank of `after` lacks. Pure function with the same result on every process.

    The ranks that hold a parameter take turns in sending it.
    """
    routes: dict[K, tuple[Route, ...]] = {}
    for name, ranks in after.items():
        destinations: dict[int, list[int]] = {}
        for turn, rank in enumerate(rank for rank in ranks if rank not in before[name]):
            destinations.setdefault(before[name][turn % len(before[name])], []).append(rank)
        if destinations:
            routes[name] = tuple(Route(source, tuple(theirs)) for source, theirs in sorted(destinations.items()))
    return routes


def in_proportion(
    before: Mapping[K, tuple[int, ...]], after: Mapping[K, tuple[int, ...]], sizes: Mapping[K, int]
) -> list[K]:
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
    order: Sequence[K], routes: Mapping[K, Sequence[Route]], sizes: Mapping[K, int]
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
    shards: tuple[Shards, Shards] | None = None,
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
        optimizer: the optimizer's state; None if there is none. It updates what this process has afterwards.
        mesh: all processes of the run.
        device: the device of this process.
        shards: who has which part of the optimizer state now, and who will have it; None if the holders of a parameter
            have the state of all its elements.

    Returns:
        Number of bytes that this process received.
    """
    rank = mesh.rank
    holders: dict[Item, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    states = None
    if optimizer is not None:
        if shards is None:
            shards = undivided(before, table), undivided(after, table)
        states = _StatesOnTheMove(optimizer, table, weights, *shards, rank, device)
    everyone = tuple(range(mesh.world_size))
    for name in after:
        holders[Item(name)] = everyone if weights.is_whole else before[name], after[name]
        if states is not None:
            holders.update(states.items_of(name))
    now, then = ({item: both[i] for item, both in holders.items()} for i in (0, 1))
    routes = routes_between(now, then)

    def what_moves(item: Item) -> _Values:
        if item.span is None:
            return dict(enumerate(values_of(table[item.name])))
        assert states is not None
        return {key: _Small.of(value) for key, value in states.part(item.name, item.span).items()}

    def leave(item: Item) -> None:
        if item.span is not None:
            assert states is not None
            states.leave(item.name, item.span)
        elif rank in now[item] and rank not in then[item]:
            weights.drop(item.name, device)

    def store(item: Item, values: _Values) -> None:
        if item.span is None:
            weights.put(item.name, list(values.values()))
        else:
            assert states is not None
            states.store(item.name, item.span, values)

    outgoing = {item for item, theirs in routes.items() if any(rank == route.source for route in theirs)}
    incoming = {item for item, theirs in routes.items() if any(rank in route.destinations for route in theirs)}
    for item in holders.keys() - outgoing:  # 1
        leave(item)
    announced = mesh.gather_objects({item: _as_meta(what_moves(item)) for item in outgoing})  # 2
    described = {item: values for theirs in announced for item, values in theirs.items()}
    sizes = {item: chunks.total_bytes(_tensors_in(described[item])) for item in routes}
    under_way: dict[Item, _Values] = {}
    received = 0
    for pieces in rounds_of(in_proportion(now, then, sizes), routes, sizes):  # 3
        for item, start, _ in pieces:
            if start == 0 and item in outgoing:
                under_way[item] = what_moves(item)
            elif start == 0 and item in incoming:
                under_way[item] = _empty(described[item], device)
        received += _run_round(pieces, routes, {n: _tensors_in(v) for n, v in under_way.items()}, rank, device)
        for item in (piece.name for piece in pieces if piece.stop == sizes[piece.name]):
            if item in incoming:
                store(item, under_way.pop(item))
            elif item in outgoing:
                del under_way[item]
                leave(item)
        PROGRESS.tick()
    if states is not None:
        states.arrive()
    return received


def undivided(holders: Holders, table: ParameterTable) -> Shards:
    """Who has which part of the optimizer state if all holders of a parameter have that of all its elements."""
    return {name: dict.fromkeys(ranks, (0, table[name].numel())) for name, ranks in holders.items()}


class _StatesOnTheMove:
    """Optimizer states on the way from one division among the processes to another.

    A process keeps the state of the elements that it has now until it has sent those that others need, and puts
    together the state of those that it will have from what it has and what arrives.
    """

    def __init__(
        self,
        optimizer: OptimizerState,
        table: ParameterTable,
        weights: WeightState,
        before: Shards,
        after: Shards,
        rank: int,
        device: torch.device,
    ) -> None:
        self._optimizer, self._table, self._weights = optimizer, table, weights
        self._before, self._after = before, after
        self._rank, self._device = rank, device
        self._to_leave: dict[str, set[Span]] = {}  # the elements whose state is here and not free yet
        self._arrived: dict[str, dict[str, Any]] = {}

    def items_of(self, name: str) -> dict[Item, tuple[tuple[int, ...], tuple[int, ...]]]:
        """What travels separately of a parameter's state, and who has it now and then."""
        if name not in self._before or name not in self._after or self._weights.is_frozen(name):
            return {}
        items = {}
        own, new = self._before[name].get(self._rank), self._after[name].get(self._rank)
        for span, (now, then) in segments_of(self._before[name], self._after[name]):
            items[Item(name, span)] = now, then
            if own != new and self._rank in now:
                self._to_leave.setdefault(name, set()).add(span)
                if self._rank in then:
                    self.store(name, span, self.part(name, span))
        return items

    def part(self, name: str, span: Span) -> dict[str, Any]:
        """The state of some of the elements that are here."""
        return self._optimizer.part_of_state(name, span)

    def leave(self, name: str, span: Span) -> None:
        """Note that nobody needs the state of these elements from here any more."""
        left = self._to_leave.get(name, set())
        if span in left:
            left.remove(span)
            if not left:
                self._optimizer.drop(name)

    def store(self, name: str, span: Span, values: Mapping[str, Any]) -> None:
        """Keep the state of some elements for `arrive`."""
        shape, whole = self._table[name].shape, (0, self._table[name].numel())
        new = self._after[name][self._rank]
        shape = shape if new == whole else torch.Size([new[1] - new[0]])
        plain = {key: v.value if isinstance(v, _Small) else v for key, v in values.items()}
        put_part(self._arrived.setdefault(name, {}), plain, shape, new, span)

    def arrive(self) -> None:
        """Let the optimizer update what this process has now."""
        self._optimizer.assign(self._after, self._arrived)


def _run_round(
    pieces: Sequence[Piece],
    routes: Mapping[Item, Sequence[Route]],
    tensors: Mapping[Item, Sequence[torch.Tensor]],
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


@dataclass(frozen=True)
class _Small:
    """A value on the CPU that is sent with the announcement and not in a buffer, such as AdamW's step."""

    value: Any

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return a tensor that has dimensions or is on a device unchanged, and anything else wrapped."""
        in_buffer = isinstance(value, torch.Tensor) and (value.dim() > 0 or value.device.type != "cpu")
        return value if in_buffer else cls(value)


_Values = dict[Any, Any]
"""Key -> tensor or `_Small`: a parameter's values, or optimizer state."""


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
