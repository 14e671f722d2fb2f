"""Runs user code for a probe and undoes its side effects.

Probes before the first step call the user's model and loss. These may count their calls, append to lists or update
buffers; training must begin as if they had never been called.
"""

from __future__ import annotations

import collections.abc
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

CONTAINERS: tuple[type, ...] = (list, dict, set, collections.deque)
MAX_DEPTH = 3
"""Containers inside containers are restored down to this depth."""
MAX_ENTRIES = 2_000
"""Limit for one attribute, with all containers inside it. Larger ones hold data, not counters, and are ignored."""
MAX_ELEMENTS = 2**22
"""Larger tensors that are neither parameters nor buffers are not restored."""
STOCK = (
    "builtins",
    "collections",
    "functools",
    "numpy",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "hf_pipetransformer",
)
"""Packages with objects that keep no relevant state between calls."""

Undo = Callable[[], None]


class _Noted:
    """An iterator that keeps what it has returned.

    Args:
        iterator: the iterator that is read.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator, self.taken = iterator, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.taken.append(next(self.iterator))
        return self.taken[-1]

    def __getattr__(self, name: str) -> Any:
        if name == "iterator" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.iterator, name)  # `send` of a generator

    @cached_property
    def again(self) -> Iterator[Any]:
        """Returns first what has been taken. One for all attributes that have been the iterator."""
        return itertools.chain(self.taken, self.iterator)


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator of Python's own (a counter, a generator): to read it is to change it."""
    return isinstance(value, collections.abc.Iterator) and type(value).__module__ in ("builtins", "itertools")


@contextmanager
def left_as_found(*objects: Any) -> Iterator[None]:
    """Inside, objects may change; afterwards their attributes, containers and buffers are restored.

    For parameters only `requires_grad` is restored, because a probe takes no optimizer step. Attributes that are
    iterators return again what has been taken from them.

    Args:
        objects: modules, with all their submodules, or any other objects. Modules (a criterion) and user objects among
            their attributes are restored as well.
    """
    noted: dict[int, _Noted] = {}  # an iterator may be an attribute of several objects
    undo = [restore for value in _with_parts(objects) for restore in _restoring(value, noted)]
    try:
        yield
    finally:
        for restore in undo:
            restore()


def _with_parts(objects: Sequence[Any]) -> list[Any]:
    """Return the objects, with their parts and submodules."""
    found = {id(value): value for value in objects}
    for owner in [value for value in objects if hasattr(value, "__dict__") and not isinstance(value, nn.Module)]:
        for value in vars(owner).values():
            part = getattr(value, "__self__", value)  # the object of a bound method
            package = type(part).__module__.partition(".")[0]
            is_stock = package in STOCK and not (isinstance(part, nn.Module) and package == "torch")
            if not is_stock and hasattr(part, "__dict__") and not isinstance(part, type):
                found.setdefault(id(part), part)
    modules = [value.modules() if isinstance(value, nn.Module) else [value] for value in found.values()]
    return list({id(value): value for value in itertools.chain.from_iterable(modules)}.values())


def _restoring(owner: Any, noted: dict[int, _Noted]) -> Iterator[Undo]:
    """Yield functions that restore a container, or the attributes of another object.

    Args:
        owner: the container or object.
        noted: receives the iterators, by their identities.
    """
    if not hasattr(owner, "__dict__"):
        yield from _contents(owner, [MAX_ENTRIES], MAX_DEPTH)
        return
    attributes = vars(owner)
    before = dict(attributes)
    iterators = {
        name: noted.setdefault(id(value), _Noted(value))
        for name, value in before.items()
        if is_iterator(value) or isinstance(value, _Noted)
    }
    attributes.update(iterators)
    yield partial(_refill, attributes, before)
    for name, iterator in iterators.items():
        yield partial(_put_back, attributes, name, iterator)
    for value in before.values():
        if not isinstance(value, torch.Tensor):
            yield from _contents(value, [MAX_ENTRIES], MAX_DEPTH)
        elif value.numel() <= MAX_ELEMENTS:
            yield from _values(value)
    if isinstance(owner, nn.Module):
        for buffer in owner._buffers.values():
            yield from _values(buffer)
        for parameter in owner._parameters.values():
            if parameter is not None:
                yield partial(_set_flag, parameter, parameter.requires_grad)


def _contents(container: Any, budget: list[int], depth: int) -> Iterator[Undo]:
    """Yield functions that restore a container; none for other values and for containers that are too large."""
    if not isinstance(container, CONTAINERS) or not depth or len(container) > budget[0]:  # type: ignore[arg-type]
        return
    budget[0] -= len(container)  # type: ignore[arg-type]
    before: Any = dict(container) if isinstance(container, dict) else container.copy()  # type: ignore[attr-defined]
    yield partial(_refill, container, before)
    for entry in before.values() if isinstance(before, dict) else before:
        yield from _contents(entry, budget, depth - 1)


def _refill(container: Any, before: Any) -> None:
    """Give a container its earlier entries, in their order, which matters for registered modules."""
    if _are_the_same(container, before):
        return
    container.clear()
    (container.extend if isinstance(container, (list, collections.deque)) else container.update)(before)


def _put_back(attributes: dict[str, Any], name: str, noted: _Noted) -> None:
    """Let an iterator return again what a probe has taken from it."""
    if noted.taken:
        attributes[name] = noted.again


def _are_the_same(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, dict):
        one, other = (itertools.chain.from_iterable(entries.items()) for entries in (one, other))
    return all(map(operator.is_, one, other))


def _values(tensor: Any) -> Iterator[Undo]:
    """Yield a function that restores a tensor's values, if it is not a parameter."""
    if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter) and not tensor.is_inference():
        yield partial(_set_values, tensor, tensor.detach().clone(), tensor._version)


def _set_flag(parameter: torch.Tensor, requires_grad: bool) -> None:
    if parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)


def _set_values(tensor: torch.Tensor, values: torch.Tensor, version: int) -> None:
    if tensor.shape != values.shape:
        tensor.data = values
    # the version counter does not count writes through `.data`
    elif tensor._version != version or not torch.equal(tensor, values):
        tensor.data.copy_(values)
