"""Runs the modules of a front without the forward of the model around them, which may be users' code.

argument of a module                           comes from
an input of the batch, as it is                the batch
the output of an earlier module                this module
another tensor                                 `OTHERS`: what the forward around has computed in the first call
anything else                                  the first call
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ...model.called_inputs import version_of
from ...model.micro_batch import Batch
from ..prefix_cache.cache.origins import Origins
from .divided import Rows

OTHERS = "<others>"
"""Name of the entry of a batch with the tensors that the forward around the modules has computed."""


class OfBatch(NamedTuple):
    """An input: the keys that lead to it."""

    path: tuple[Any, ...]


class OfModule(NamedTuple):
    """A leaf of the output of an earlier module."""

    name: str
    position: int


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module: what is needed to make the same call on other samples.

    Attributes:
        leaves: the leaves of its arguments, or where they come from.
        structure: their containers.
        autocast: whether autocast is on, and its dtype.
        modes: the modes of its parts.
    """

    leaves: tuple[Any, ...]
    structure: TreeSpec
    autocast: tuple[bool, torch.dtype]
    modes: tuple[bool, ...]


class BatchInputs:
    """The tensors of a batch as they are before the model is called: their places, and numbers of writes.

    Args:
        inputs: the model's arguments, by name.
        device: device of the model.
    """

    def __init__(self, inputs: Mapping[str, Any], device: torch.device) -> None:
        found = [(path, tensor) for path, tensor in _tensors(inputs, ()) if isinstance(tensor, torch.Tensor)]
        self._places = {id(tensor): (path, version_of(tensor), tensor) for path, tensor in found}
        self._device = device.type

    def call_of(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModuleCall:
        """Describe the call of a module that begins."""
        leaves, structure = tree_flatten((args, dict(kwargs)))
        state = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)
        modes = tuple(part.training for part in module.modules())
        return ModuleCall(tuple(map(self._place, leaves)), structure, state, modes)

    def _place(self, leaf: Any) -> Any:
        path, version, _ = self._places.get(id(leaf), ((), -1, None))
        return OfBatch(path) if version == version_of(leaf) and path else leaf


class FrontAlone:
    """The modules of a front as one function of the batch.

    Args:
        calls: the calls of its modules, in order.
        outputs: the leaves of their outputs.
        origins: what each tensor depends on.
        rows: the rows of the calls.
        device: device of the model.
    """

    def __init__(
        self,
        calls: Mapping[str, ModuleCall],
        outputs: Mapping[str, Sequence[Any]],
        origins: Origins,
        rows: Rows,
        device: torch.device,
    ) -> None:
        self.others: list[torch.Tensor] = []
        """The tensors for `OTHERS`; to be discarded after use."""
        self.is_closed = True
        """Whether the batch alone suffices: the forward around computes no argument."""
        self._calls, self._device = dict[str, ModuleCall](), device.type
        made: dict[int, OfModule] = {}
        for name, call in calls.items():
            leaves = [made.get(id(leaf), leaf) for leaf in call.leaves]
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    self.is_closed = False
                    if origins.of(leaf) or _is_per_row(leaf, rows):
                        leaves[position] = OfBatch((OTHERS, len(self.others)))
                        self.others.append(leaf)
            self._calls[name] = ModuleCall(tuple(leaves), call.structure, call.autocast, call.modes)
            tensors = ((k, leaf) for k, leaf in enumerate(outputs[name]) if isinstance(leaf, torch.Tensor))
            made |= {id(leaf): OfModule(name, k) for k, leaf in tensors}

    def run(self, model: nn.Module, batch: Batch) -> None:
        """Call the modules. Their modes are to be restored afterwards.

        Args:
            model: the model.
            batch: the model's arguments, with an entry `OTHERS` unless the batch alone suffices.
        """
        made: dict[str, list[Any]] = {}

        def value_of(leaf: Any) -> Any:
            if isinstance(leaf, OfModule):
                return made[leaf.name][leaf.position]
            if not isinstance(leaf, OfBatch):
                return leaf
            value: Any = batch
            for key in leaf.path:
                value = value[key]
            return value

        for name, call in self._calls.items():
            module = model.get_submodule(name)
            for part, mode in zip(module.modules(), call.modes, strict=True):
                part.training = mode
            args, kwargs = tree_unflatten(map(value_of, call.leaves), call.structure)
            enabled, dtype = call.autocast
            with torch.autocast(self._device, dtype=dtype, enabled=enabled):
                made[name] = tree_flatten(module(*args, **kwargs))[0]


def _tensors(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values in mappings and lists, with the keys that lead to them."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _tensors(entry, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, entry in enumerate(value):
            yield from _tensors(entry, (*path, number))
    else:
        yield path, value


def _is_per_row(constant: torch.Tensor, rows: Rows) -> bool:
    """Whether a tensor that depends on no input has entries for each row; a square is a mask of tokens."""
    return constant.dim() > 1 and len(constant) == rows.count and constant.shape[0] != constant.shape[1]
