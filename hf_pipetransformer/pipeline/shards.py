"""Which replica of a stage has the optimizer state of which elements (ZeRO-1). Pure functions, alike on every process.

a stage's parameters, in a row      |---embedding---|-w-|-b-|---w---|--w--|
replica                             |-----0-----|-----1-----|-----2-----|

Parts are equal to within `CUT_ELEMENTS` elements, however large one parameter is. An optimizer that updates a matrix
as a whole (Adafactor) cannot be given a part of one: then each parameter goes to one replica, the largest first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..model.layer_stack import LayerStack
from ..planning.layout import Layout
from .virtual_stages import names_of_stage

CUT_ELEMENTS = 64
"""Parameters are cut at multiples of this number of elements, so that parts are aligned for vector instructions."""

Span = tuple[int, int]
"""The elements [start, stop) of a flattened parameter."""
Shards = Mapping[str, Mapping[int, Span]]
"""Parameter name -> rank -> the elements whose optimizer state the rank has. The same on every process."""


class Size(NamedTuple):
    """Size of a parameter."""

    elements: int
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.elements * self.element_bytes


def shards_under(plan: Layout, stack: LayerStack, names: Collection[str], is_elementwise: bool) -> Shards:
    """The elements whose optimizer state each rank has under a plan.

    A parameter of several stages is divided among the replicas of each of them.

    Args:
        plan: the plan.
        stack: the units of the model.
        names: the parameters that the optimizer updates.
        is_elementwise: whether the optimizer may be given a part of a parameter.
    """
    shards: dict[str, dict[int, Span]] = {name: {} for name in stack.table.names if name in names}
    divide = divided_evenly if is_elementwise else divided_whole
    for stage in range(plan.pipeline_parallel_size):
        ranks = plan.ranks_of_stage(stage)
        owned = names_of_stage(plan, stack, stage)
        parameters = {name: stack.table[name] for name in shards if name in owned}
        sizes = {name: Size(parameter.numel(), parameter.itemsize) for name, parameter in parameters.items()}
        if plan.shards_optimizer:
            parts: Sequence[Mapping[str, Span]] = divide(sizes, len(ranks))
        else:
            parts = [{name: (0, size.elements) for name, size in sizes.items()}] * len(ranks)
        for rank, part in zip(ranks, parts, strict=True):
            for name, span in part.items():
                shards[name][rank] = span
    return shards


def divided_evenly(sizes: Mapping[str, Size], parts: int) -> list[dict[str, Span]]:
    """Divide parameters, put in a row, into parts of the same number of bytes. Each element is in one part."""
    total = sum(size.num_bytes for size in sizes.values())
    divided: list[dict[str, Span]] = [{} for _ in range(parts)]
    position = 0  # of the parameter in the row, in bytes
    for name, size in sizes.items():
        cuts = [_cut_before(total * part / parts - position, size) for part in range(parts)]
        for part, span in zip(divided, zip(cuts, [*cuts[1:], size.elements], strict=True), strict=True):
            if span[1] > span[0]:
                part[name] = span
        if not size.elements:
            divided[0][name] = (0, 0)
        position += size.num_bytes
    return divided


def _cut_before(position: float, size: Size) -> int:
    """The element before which a parameter is cut, if the cut should be at a position in bytes."""
    element = int(max(position, 0) / size.element_bytes)
    return size.elements if element >= size.elements else element // CUT_ELEMENTS * CUT_ELEMENTS


def divided_whole(sizes: Mapping[str, Size], parts: int) -> list[dict[str, Span]]:
    """Give each parameter to one part: the largest first, to the part that has the fewest bytes."""
    divided: list[dict[str, Span]] = [{} for _ in range(parts)]
    loads = [0] * parts
    for name, size in sorted(sizes.items(), key=lambda item: -item[1].num_bytes):
        part = loads.index(min(loads))
        loads[part] += size.num_bytes
        divided[part][name] = (0, size.elements)
    return divided


def joined(shards: Shards, sizes: Mapping[str, int]) -> Shards:
    """The same with each parameter that is cut given to the first rank that has a part of it.

    Args:
        shards: who has which part.
        sizes: the number of elements of each parameter.
    """
    return {
        name: spans if all(span == (0, sizes[name]) for span in spans.values()) else {min(spans): (0, sizes[name])}
        for name, spans in shards.items()
    }


class Segment(NamedTuple):
    """Elements of one parameter that no rank divides.

    Attributes:
        span: the elements.
        holders: for each of the ways to divide the parameter, the ranks that have these elements, ascending.
    """

    span: Span
    holders: tuple[tuple[int, ...], ...]


def segments_of(*ways: Mapping[int, Span]) -> Iterator[Segment]:
    """Cut a parameter wherever some rank does, by one of several ways to divide it (rank -> elements)."""
    spans = {span for way in ways for span in way.values()}
    cuts = sorted({cut for span in spans for cut in span})
    for span in pairwise(cuts) if len(cuts) > 1 else [(0, 0)] * len(cuts):
        yield Segment(span, tuple(_having(span, way) for way in ways))


def _having(span: Span, way: Mapping[int, Span]) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, own in way.items() if own[0] <= span[0] and span[1] <= own[1]))
