"""The move to another layout: parameters, and their optimizer state."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..model.layer_stack import LayerStack
from ..planning.layout import Layout
from ..progress import phase
from .holders import Holders, holders_under, updaters_under
from .optimizer_state import OptimizerState
from .transfer import Values, transfer
from .weights import Weights


@dataclass(frozen=True)
class Distribution:
    """The ranks of parameters and optimizer states. The same on every process.

    Attributes:
        weights: the ranks that hold each parameter.
        states: the ranks that have its optimizer state, for the parameters that are updated.
    """

    weights: Holders
    states: Holders

    @classmethod
    def under(cls, layout: Layout, stack: LayerStack, optimizer: OptimizerState | None) -> Distribution:
        """The ranks under a layout."""
        updated = () if optimizer is None else optimizer.names
        return cls(holders_under(layout, stack), updaters_under(layout, stack, updated))


@dataclass(frozen=True)
class Transformation:
    """The cost of the change to another layout, on one process.

    Attributes:
        before: the layout that was in force before the transformation.
        after: the layout that is in force now.
        seconds: duration of each phase in seconds: freeze, move, drop, build.
        bytes_moved: number of bytes that this process received.
        stopped: names of the parameters that were trained before and are not any more, the same on every process.
    """

    before: Layout
    after: Layout
    seconds: Mapping[str, float]
    bytes_moved: int
    stopped: frozenset[str] = frozenset()


@contextmanager
def timed_phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Time one phase of a transformation and store its seconds under `name`."""
    began = time.perf_counter()
    with phase(name):
        yield
    seconds[name] = time.perf_counter() - began


class _Item(NamedTuple):
    name: str
    is_state: bool


def move(after: Distribution, weights: Weights, optimizer: OptimizerState | None) -> int:
    """Bring parameters and optimizer states to the ranks that lack them, and free them where they are not kept.

    Collective over all processes. The memory for the move has a bound: see `transfer`.

    Args:
        after: the ranks after the move.
        weights: the weights.
        optimizer: the optimizer's state; None if there is none. It updates this process's parameters afterwards.

    Returns:
        Number of bytes that this process received.
    """
    before = Distribution(weights.assign(after.weights), {} if optimizer is None else optimizer.holders())

    def items(now: Distribution, there: Distribution) -> dict[_Item, tuple[int, ...]]:
        found: dict[_Item, tuple[int, ...]] = {}
        for name in weights.table.names:  # a parameter's state beside its values
            found[_Item(name, False)] = now.weights[name]
            if name in now.states and name in there.states:
                found[_Item(name, True)] = now.states[name]
        return found

    def state() -> OptimizerState:
        assert optimizer is not None
        return optimizer

    def read(item: _Item) -> Values:
        return state().state_of(item.name) if item.is_state else weights.values_of(item.name)

    def store(item: _Item, values: dict[Any, Any]) -> None:
        (state().put_state if item.is_state else weights.put)(item.name, values)

    def leave(item: _Item) -> None:
        (state().drop if item.is_state else weights.drop)(item.name)

    received = transfer(items(before, after), items(after, before), weights.mesh, weights.device, read, store, leave)
    if optimizer is not None:
        optimizer.assign(after.states)
    return received
