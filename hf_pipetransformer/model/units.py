"""Immutable descriptions of a model's layers: its units, their outputs, and the way the model is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn

from .nested import is_continuous, tensors_of

Carry = dict[int, tuple[torch.Tensor, ...]]
"""Stack index -> the tensors in the output of the last unit that ran in this stack."""


@dataclass(frozen=True)
class Unit:
    """One call of a layer module, in execution order (ALBERT calls one module many times)."""

    name: str
    module: nn.Module = field(compare=False, repr=False)
    stack: int


@dataclass(frozen=True)
class CalledWith:
    """How the user's code calls the model on a batch.

    Attributes:
        kept_back: inputs that it does not pass to the model (sample weights, labels that it takes out).
        takes_batch: whether it calls the model on inputs of the batch. If not, it calls it on inputs of its own (pairs
            of sentences), perhaps several times, and each batch of the runner holds the inputs of one call.
        nested_in: the model's only argument, if it is called on one dict of inputs, as in sentence-transformers.
    """

    kept_back: frozenset[str] = frozenset()
    takes_batch: bool = True
    nested_in: str | None = None


Observer = Callable[[Unit, Any], None]
"""Called with each unit that has been computed, and with its output."""


class _Gap:
    """The place of a tensor."""


def plain_values(output: Any) -> tuple[Any, ...]:
    """The numbers and strings in a unit's output, in a fixed order."""
    if isinstance(output, (bool, int, float, str)):
        return (output,)
    if not isinstance(output, (Mapping, list, tuple)):
        return ()
    entries = output.values() if isinstance(output, Mapping) else output
    return tuple(value for entry in entries for value in plain_values(entry))


@dataclass(frozen=True)
class OutputStructure:
    """A unit's output (tensor, tuple or ModelOutput) with gaps for its tensors, to rebuild it later."""

    template: Any  # the output with a `_Gap` in place of each tensor
    is_floating: tuple[bool, ...]  # for each tensor, whether it can have a gradient
    plain: tuple[Any, ...] = ()  # the numbers and strings beside the tensors

    @classmethod
    def of(cls, output: Any) -> OutputStructure:
        is_floating = tuple(map(is_continuous, tensors_of(output)))
        return cls(recursively_apply(lambda _: _Gap(), output), is_floating, plain_values(output))

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        supply = iter(tensors)
        is_gap = lambda leaf: isinstance(leaf, _Gap)  # noqa: E731
        return recursively_apply(lambda _: next(supply), self.template, test_type=is_gap)


@dataclass(frozen=True)
class ModelLayers:
    """Which layers of a model are run, and how; it can be sent to another process.

    Attributes:
        stacks: for each stack of layers, the names of its modules in the model.
        copies_carry: whether layers that do not run return copies of the carry, which the model may change in place.
        taps: for each layer, the names of inner modules with hooks that pass their outputs to the model (the routers
            of experts). These outputs are part of the layer's carry; if the layer does not run, the hooks get them.
    """

    stacks: tuple[tuple[str, ...], ...]
    copies_carry: bool = False
    taps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class TracedLayers:
    """The result of `LayerRangeRunner.trace` without the model; it can be sent to another process.

    Attributes:
        layers: the model's layers.
        called: how the model is called.
        calls: name and stack of each unit.
        structures: structure of each unit's output.
    """

    layers: ModelLayers
    called: CalledWith
    calls: tuple[tuple[str, int], ...]
    structures: tuple[OutputStructure, ...]


def with_unreached(
    reached: Sequence[set[str]], units: Sequence[Unit], unreached: frozenset[str], everywhere: bool
) -> tuple[frozenset[str], ...]:
    """Give each unit the parameters of its own module that the probed batch did not reach (experts without a token).

    Parameters outside of all units go to the first unit that reaches another parameter of the same module (such as a
    user's own embedding); otherwise (an unused pooler) to the last unit, or to all units with `everywhere`.
    """
    completed = [set(names) for names in reached]
    elsewhere = list(range(len(units))) if everywhere else [len(units) - 1]
    modules = [{name.rpartition(".")[0] for name in names} for names in reached]
    for name in unreached:
        inside = [k for k, unit in enumerate(units) if name.startswith(unit.name + ".")]
        beside = [k for k, names in enumerate(modules) if name.rpartition(".")[0] in names]
        for k in inside or (elsewhere if everywhere else beside[:1] or elsewhere):
            completed[k].add(name)
    return tuple(map(frozenset, completed))
