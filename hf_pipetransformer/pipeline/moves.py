"""What moves when the plan changes: parameters, and their optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .mesh import ProcessMesh
from .optimizer_state import OptimizerState
from .state import Holders, WeightState
from .transfer import transfer


@dataclass(frozen=True)
class Distribution:
    """Who has what. The same on every process.

    Attributes:
        weights: the ranks that hold each parameter.
        states: the ranks that have its optimizer state, for the parameters that are updated.
    """

    weights: Holders
    states: Holders


class _Item(NamedTuple):
    name: str
    is_state: bool


def move(
    before: Distribution,
    after: Distribution,
    weights: WeightState,
    optimizer: OptimizerState | None,
    mesh: ProcessMesh,
    device: torch.device,
) -> int:
    """Bring parameters and optimizer states to the ranks that lack them, and free what each process leaves behind.

    Collective over all processes. The memory that it takes has a bound: see `transfer`.

    Args:
        before: who has what now.
        after: who will have it.
        weights: the weights.
        optimizer: the optimizer's state; None if there is none. It updates what this process has afterwards.
        mesh: all processes of the run.
        device: the device of this process.

    Returns:
        Number of bytes that this process received.
    """

    def items(now: Distribution, there: Distribution) -> dict[_Item, tuple[int, ...]]:
        found: dict[_Item, tuple[int, ...]] = {}
        for name in weights.table.names:  # a parameter's state beside its values
            if name in now.weights and name in there.weights:
                found[_Item(name, False)] = now.weights[name]
            if optimizer is not None and name in now.states and name in there.states:
                found[_Item(name, True)] = now.states[name]
        return found

    def read(item: _Item) -> dict[Any, Any]:
        return state(item).state_of(item.name) if item.is_state else weights.values_of(item.name)

    def store(item: _Item, values: dict[Any, Any]) -> None:
        if item.is_state:
            state(item).put_state(item.name, values)
        else:
            weights.put(item.name, list(values.values()))

    def leave(item: _Item) -> None:
        if item.is_state:
            state(item).drop(item.name)
        else:
            weights.drop(item.name, device)

    def state(item: _Item) -> OptimizerState:
        assert optimizer is not None, item
        return optimizer

    received = transfer(items(before, after), items(after, before), mesh, device, read, store, leave)
    if optimizer is not None:
        optimizer.assign(after.states)
    return received
