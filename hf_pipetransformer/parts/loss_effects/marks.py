"""Notes the tensors of optimizers and modules, to find out whether a loss has changed them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_tables: Any = WeakIdKeyDictionary()
"""Module -> the tables of its parameters and buffers, because looking for them takes longer than reading them."""


class Marks:
    """The values in some tables, and the versions of the tensors among them. Marks are equal if nothing has changed.

    Args:
        tables: the tables, such as those of an optimizer's state.
    """

    def __init__(self, tables: Iterable[dict[Any, Any]]) -> None:
        self._values = list(chain.from_iterable(map(dict.values, tables)))
        try:
            self._versions = [value._version for value in self._values if isinstance(value, torch.Tensor)]
        except RuntimeError:  # those of inference mode cannot be changed outside of it
            tensors = (value for value in self._values if isinstance(value, torch.Tensor))
            self._versions = [tensor._version for tensor in tensors if not tensor.is_inference()]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Marks) or len(self._values) != len(other._values):
            return False
        return all(map(operator.is_, self._values, other._values)) and self._versions == other._versions

    __hash__ = None  # type: ignore[assignment]


def of_optimizer(optimizer: Any) -> Marks:
    """The state of an optimizer at this moment."""
    state = getattr(optimizer, "state", None)
    return Marks([one for one in dict.values(state) if isinstance(one, dict)] if isinstance(state, dict) else [])


def of_module(module: nn.Module, model: nn.Module) -> Marks:
    """The parameters and buffers of a module that do not belong to the trained model."""
    if module not in _tables:
        of_model = set(map(id, _of(model.modules())))
        _tables[module] = [table for table in _of(module.modules()) if table and id(table) not in of_model]
    return Marks(_tables[module])


def _of(modules: Iterable[nn.Module]) -> Collection[dict[str, Any]]:
    return [table for module in modules for table in (module._parameters, module._buffers)]
