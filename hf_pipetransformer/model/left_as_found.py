"""Runs user code for a probe and undoes its side effects.

Probes before the first step call the user's model and loss. These may count their calls, append to lists or update
buffers; training must begin as if they had never been called.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

CONTAINERS: tuple[type, ...] = (list, dict, set, collections.deque)
MAX_DEPTH = 3
"""Containers inside containers are restored down to this depth."""
MAX_ENTRIES = 2_000
"""Limit for one attribute, with all containers inside it. Larger ones hold data, not counters, and are left alone."""
MAX_ELEMENTS = 2**22
"""Larger tensors that are neither parameters nor buffers are left alone."""
REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Attributes in which an `nn.Module` keeps registered objects; their entries are restored with the module."""


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
"""Packages whose objects keep no state from call to call that matters here."""


def with_parts(*objects: Any) -> list[Any]:
    """Return the objects, with the modules (a criterion) and user objects that non-modules have as attributes."""
    found = {id(value): value for value in objects}
    for owner in objects:
        if isinstance(owner, nn.Module) or not hasattr(owner, "__dict__"):
            continue
        for value in vars(owner).values():
            part = getattr(value, "__self__", value)  # the object of a bound method
            package = type(part).__module__.partition(".")[0]
            is_stock = package in STOCK and not (isinstance(part, nn.Module) and package == "torch")
            if not is_stock and hasattr(part, "__dict__") and not isinstance(part, type):
                found.setdefault(id(part), part)
    return list(found.values())


@contextmanager
def left_as_found(*objects: Any) -> Iterator[None]:
    """Inside, objects may change; afterwards their attributes, containers and buffers are restored.

    Parameters need no restoring, because a probe takes no optimizer step.

    Args:
        objects: modules, with all their submodules, or any other objects with attributes (`with_parts`).
    """
    undo: list[Callable[[], None]] = []
    for value in with_parts(*objects):
        if isinstance(value, nn.Module):
            for module in value.modules():
                undo.append(_attributes_of(module, is_module=True))
            undo.append(_values_of(list(value.buffers()), largest=None))
        elif hasattr(value, "__dict__"):
            undo.append(_attributes_of(value, is_module=False))
        else:
            undo.append(_contents_of(value, [MAX_ENTRIES]) or _nothing)
    try:
        yield
    finally:
        for restore in undo:
            restore()


def _attributes_of(owner: Any, is_module: bool) -> Callable[[], None]:
    attributes = dict(vars(owner))
    names = REGISTRIES if is_module else ()
    registries = {name: dict(attributes[name]) for name in names}
    contents = [
        undo
        for name, value in attributes.items()
        if name not in names and (undo := _contents_of(value, [MAX_ENTRIES])) is not None
    ]
    tensors = _values_of([value for value in attributes.values() if isinstance(value, torch.Tensor)])

    def restore() -> None:
        if not _holds_the_same(vars(owner), attributes):
            vars(owner).clear()
            vars(owner).update(attributes)
        for name, entries in registries.items():
            if not _holds_the_same(vars(owner)[name], entries):
                vars(owner)[name].clear()
                vars(owner)[name].update(entries)
        for undo in contents:
            undo()
        tensors()

    return restore


def _contents_of(value: Any, budget: list[int], depth: int = 0) -> Callable[[], None] | None:
    """Return a function that restores a container; None for other values and for containers that are too large."""
    container: Any = value
    if not isinstance(value, CONTAINERS) or depth == MAX_DEPTH or len(container) > budget[0]:
        return None
    if len(container) == 0:  # most attributes of a module are empty dicts
        return partial(_empty, container)
    budget[0] -= len(container)
    before: Any = dict(container) if isinstance(container, dict) else container.copy()
    entries = before.values() if isinstance(before, dict) else before
    inside = [undo for entry in entries if (undo := _contents_of(entry, budget, depth + 1)) is not None]

    def restore() -> None:
        if not _holds_the_same(container, before):
            container.clear()
            (container.extend if isinstance(container, (list, collections.deque)) else container.update)(before)
        for undo in inside:
            undo()

    return restore


def _empty(container: Any) -> None:
    if len(container) > 0:
        container.clear()


def _holds_the_same(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)  # in order, which matters for registered modules
        return all(key is key2 and value is value2 for (key, value), (key2, value2) in pairs)
    return all(a is b for a, b in zip(one, other, strict=True))


def _values_of(tensors: list[torch.Tensor], largest: int | None = MAX_ELEMENTS) -> Callable[[], None]:
    """Return a function that restores the values of tensors that have been changed."""
    noted = [
        (tensor, tensor._version, tensor.detach().clone())
        for tensor in tensors
        if (largest is None or tensor.numel() <= largest)
        and not isinstance(tensor, nn.Parameter)
        and not tensor.is_inference()
    ]

    if not noted:
        return _nothing

    def restore() -> None:
        for tensor, version, value in noted:
            # the version counter does not count writes through `.data`
            if tensor._version == version and tensor.shape == value.shape and torch.equal(tensor, value):
                continue
            if tensor.shape == value.shape:
                tensor.data.copy_(value)
            else:
                tensor.data = value

    return restore


def _nothing() -> None:
    return None
