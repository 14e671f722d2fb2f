"""Notes the tensors of optimizers and modules, to find out whether a loss has changed them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_tables: Any = WeakIdKeyDictionary()
"""Module -> `_Tables`, because looking for them takes longer than reading them."""
_VERSION = operator.attrgetter("_version")


class Marks:
    """The values in some tables, and the versions of the tensors among them.

    Args:
        tables: the tables, such as those of an optimizer's state.
    """

    def __init__(self, tables: Iterable[dict[Any, Any]]) -> None:
        self._values = list(chain.from_iterable(map(dict.values, tables)))
        tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        try:
            self._tensors, self._versions = tensors, list(map(_VERSION, tensors))
        except RuntimeError:  # those of inference mode have no versions, and cannot be changed outside of it
            self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
            self._versions = list(map(_VERSION, self._tensors))

    def are_those_of(self, tables: Iterable[dict[Any, Any]]) -> bool:
        """Whether the tables have the same values now, and the tensors were not written to."""
        values = list(chain.from_iterable(map(dict.values, tables)))
        is_same = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        return is_same and list(map(_VERSION, self._tensors)) == self._versions


def tables_of_optimizer(optimizer: Any) -> list[dict[Any, Any]]:
    """The tables in the state of an optimizer."""
    state = getattr(optimizer, "state", None)
    return [one for one in dict.values(state) if isinstance(one, dict)] if isinstance(state, dict) else []


def tables_of_module(module: nn.Module, model: nn.Module) -> list[dict[Any, Any]]:
    """The tables of the parameters and buffers of a module that do not belong to the trained model."""
    known: _Tables | None = _tables.get(module)
    if known is None or not known.are_those_of(model):
        known = _tables[module] = _Tables(module, model)
    return known.found


class _Tables:
    """The tables of a module, as long as its parts are the same.

    Args:
        module: the module.
        model: the trained model, whose tables are left out.
    """

    def __init__(self, module: nn.Module, model: nn.Module) -> None:
        of_model = set(map(id, _of(model.modules())))
        self.found = [table for table in _of(module.modules()) if table and id(table) not in of_model]
        self._model = weakref.ref(model)
        self._parts = [part._modules for part in module.modules()]
        self._noted = self._now()

    def are_those_of(self, model: nn.Module) -> bool:
        """Whether no part has been added, removed or replaced, and the trained model is the same."""
        now = self._now()
        return self._model() is model and len(now) == len(self._noted) and all(map(operator.is_, now, self._noted))

    def _now(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._parts)))


def _of(modules: Iterable[nn.Module]) -> Collection[dict[str, Any]]:
    return [table for module in modules for table in (module._parameters, module._buffers)]
