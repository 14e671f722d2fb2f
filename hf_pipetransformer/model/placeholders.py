"""A model's parameters by name, and placeholders for parameters on other processes.

A parameter object is never replaced: a parameter on another process occupies one element of memory in the shape of its
values. So tied weights, hooks on parameters, a user's lists and the optimizer's references remain valid.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from .elsewhere import placeholder, show


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a subclass around other tensors, such as torchao's quantised weights.

    Its dtype is the dtype of computations; values and scales are in the inner tensors.
    """
    return hasattr(type(tensor), "__tensor_flatten__")


def _places_of(tensor: torch.Tensor) -> list[tuple[torch.Tensor, str]]:
    """The objects and their attributes that hold a tensor's values."""
    if not is_wrapper(tensor):
        return [(tensor, "data")]
    places: list[tuple[torch.Tensor, str]] = []
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inside = getattr(tensor, name)
        places += _places_of(inside) if is_wrapper(inside) else [(tensor, name)]
    return places


def values_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors with a parameter's values: its `data`, or those inside a wrapper (int8 values, scales)."""
    with torch._C.DisableTorchFunctionSubclass():  # a hidden parameter would refuse
        return [getattr(owner, name) for owner, name in _places_of(parameter)]


def set_values(parameter: torch.Tensor, values: Iterable[torch.Tensor]) -> None:
    """Replace `values_of(parameter)` by other tensors. The parameter stays the same object, and becomes readable."""
    show(parameter)
    for (owner, name), value in zip(_places_of(parameter), values, strict=True):
        setattr(owner, name, value)


def num_bytes(parameter: torch.Tensor) -> int:
    """Size of a parameter's values in bytes; for a wrapper, the size of its inner tensors."""
    return sum(value.nbytes for value in values_of(parameter))


def has_state(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a quantised weight of a class with scales as attributes (bitsandbytes)."""
    plain = type(parameter) in (torch.Tensor, nn.Parameter) or is_wrapper(parameter)
    return not plain and not parameter.is_floating_point()


def can_have_gradient(parameter: torch.Tensor) -> bool:
    """Whether a parameter can be trained: quantised weights cannot."""
    return parameter.is_floating_point() and not is_wrapper(parameter)


def _substitutes(parameter: torch.Tensor, substitute: torch.Tensor) -> list[torch.Tensor]:
    if not is_wrapper(parameter):
        return [substitute]
    is_nan = substitute.numel() > 0 and math.isnan(substitute[(0,) * substitute.dim()])
    return [placeholder(v, math.nan if is_nan and v.is_floating_point() else 0.0) for v in values_of(parameter)]


class ParameterTable:
    """Every parameter of a model by its first name, with all its names in the model.

    Tied parameters (an embedding that is also the head) are one entry with several aliases.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.aliases: dict[str, tuple[str, ...]] = {}
        first_name: dict[int, str] = {}
        self._paths: dict[str, tuple[list[str], str]] = {}
        self._known = dict(model.named_parameters(remove_duplicate=False))
        self._modules = list(model.modules())
        self._seen = self._seen_now()
        for name, parameter in self._known.items():
            first = first_name.setdefault(id(parameter), name)
            self.aliases[first] = (*self.aliases.get(first, ()), name)
            *modules, attribute = name.split(".")
            self._paths[name] = (modules, attribute)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters in the order of `model.named_parameters()`, the same on every process."""
        return tuple(self.aliases)

    def __getitem__(self, name: str) -> nn.Parameter:
        # as `model.get_parameter` does, which takes forty times as long
        modules, attribute = self._paths[name]
        module: Any = self.model
        try:
            for child in modules:
                module = module._modules[child]
            parameter: nn.Parameter = module._parameters[attribute]
        except (KeyError, AttributeError):  # the user's code has removed it: pruned a weight, or cut layers off
            return self._known[name]
        return parameter

    def exchanged(self) -> list[str]:
        """Names of the parameters that the user's code has added to the model, replaced or removed."""
        seen = self._seen_now()  # in each step: many times as fast as a walk with names
        if len(seen) == len(self._seen) and all(map(is_, seen, self._seen)):
            return []
        now = dict(self.model.named_parameters(remove_duplicate=False))
        names = [name for name in {**self._known, **now} if now.get(name) is not self._known.get(name)]
        if not names:
            self._modules = list(self.model.modules())
            self._seen = self._seen_now()
        return names

    def _seen_now(self) -> list[str | nn.Parameter | nn.Module | None]:
        """Return the names, parameters and children of all modules."""
        held = chain.from_iterable(map(attrgetter("_parameters", "_modules"), self._modules))
        tables = [*filter(None, held)]
        return [*chain.from_iterable(tables), *chain.from_iterable(map(dict.values, tables))]

    def __setitem__(self, name: str, parameter: nn.Parameter) -> None:
        """Replace a parameter under all its names; only before other code refers to the model."""
        for alias in self.aliases[name]:
            self._known[alias] = parameter
            owner, _, attribute = alias.rpartition(".")
            setattr(self.model.get_submodule(owner), attribute, parameter)

    @contextmanager
    def replaced(self, substitutes: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside, these parameters have other values in all modules, and require no gradient.

        Args:
            substitutes: placeholders, by name. Each inner tensor of a wrapper gets a placeholder with the same fill. A
                weight with state keeps its values, because it cannot compute with others.
        """
        replaced = {name: self[name] for name in substitutes if not has_state(self[name])}
        originals = [(parameter, values_of(parameter), parameter.requires_grad) for parameter in replaced.values()]
        try:
            for name, parameter in replaced.items():
                parameter.requires_grad_(False)
                set_values(parameter, _substitutes(parameter, substitutes[name]))
            yield
        finally:
            for parameter, values, requires_grad in originals:
                set_values(parameter, values)
                parameter.requires_grad_(requires_grad)

    @contextmanager
    def all_trainable(self) -> Iterator[None]:
        """Inside, every parameter that can have a gradient requires one; afterwards the flags are restored."""
        before = {name: self[name].requires_grad for name in self.names if can_have_gradient(self[name])}
        for name in before:
            self[name].requires_grad_(True)
        try:
            yield
        finally:
            for name, trainable in before.items():
                self[name].requires_grad_(trainable)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; afterwards the mode of every submodule is restored."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def reachable_leaves(tensors: Collection[torch.Tensor]) -> dict[torch.Tensor, None]:
    """The leaves of the autograd graph (parameters, inputs that require a gradient) behind `tensors`.

    Returns:
        A set in order of distance, the nearest first.
    """
    leaves: dict[torch.Tensor, None] = {t: None for t in tensors if t.requires_grad and t.is_leaf}
    leaves.update(
        (leaf, None) for node in nodes_behind(tensors) if (leaf := getattr(node, "variable", None)) is not None
    )
    return leaves


def nodes_behind(tensors: Collection[torch.Tensor]) -> Iterator[Any]:
    """The nodes of the autograd graph behind `tensors`, the nearest first."""
    todo: deque[Any] = deque(t.grad_fn for t in tensors)
    seen: set[Any] = set()
    while todo:
        node = todo.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo.extend(following for following, _ in node.next_functions)
