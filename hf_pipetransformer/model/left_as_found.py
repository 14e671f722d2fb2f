"""Runs user code for a probe and undoes its side effects.

Probes before the first step call the user's model and loss. These may count their calls, append to lists or update
buffers; training must begin as if they had never been called.
"""

from __future__ import annotations

import collections.abc
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

CONTAINERS: tuple[type, ...] = (list, dict, set, collections.deque)
HOLDING = (*CONTAINERS, tuple, CellType)
UNREAD_SLOTS = ("__dict__", "__weakref__")
PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, ModuleType, torch.Tensor)
MOST_OBJECTS = 10_000
"""Limit for the search for what objects hold."""
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
    *("threading", "queue", "logging", "multiprocessing", "concurrent", "asyncio", "weakref", "_io", "io", "_thread"),
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
    kind = type(value)
    is_one = hasattr(kind, "__next__") and issubclass(kind, collections.abc.Iterator)
    return is_one and kind.__module__ in ("builtins", "itertools")


@contextmanager
def left_as_found(*objects: Any) -> Iterator[None]:
    """Inside, objects may change; afterwards their attributes, containers and buffers are restored.

    For parameters only `requires_grad` is restored, because a probe takes no optimizer step. Attributes that are
    iterators return again what has been taken from them.

    Args:
        objects: modules, with all their submodules, or any other objects. What they hold is restored as well: modules
            (a criterion) and users' objects in attributes, containers and closures, with the data of their classes.
    """
    noted: dict[int, _Noted] = {}  # an iterator may be an attribute of several objects
    undo = [restore for value in parts_of(objects) for restore in _restoring(value, noted)]
    try:
        yield
    finally:
        for restore in undo:
            restore()


def parts_of(objects: Sequence[Any]) -> list[Any]:
    """Return the objects and all that they hold: submodules, users' objects and classes, and the cells of closures.

    Args:
        objects: modules or any other objects.
    """
    found: dict[int, Any] = {}
    todo = collections.deque(objects)
    given = set(map(id, objects))
    seen = dict[int, Any]()  # keeps them alive: an id may be used again
    while todo and len(seen) < MOST_OBJECTS:
        value = todo.popleft()
        if id(value) in seen or isinstance(value, PLAIN):
            continue
        if isinstance(value, (*CONTAINERS, tuple)) and not value:  # as most of torch's tables of hooks
            continue
        seen[id(value)] = value
        if isinstance(value, (MethodType, functools.partial, FunctionType, *HOLDING)):
            todo.extend(_held_by(value))
            if isinstance(value, CellType) or id(value) in given:
                found[id(value)] = value
        elif id(value) in given or _is_of_user(value):
            modules = list(value.modules()) if isinstance(value, nn.Module) else [value]
            found.update((id(module), module) for module in modules)
            seen.update((id(module), module) for module in modules)
            classes = {cls: None for module in modules for cls in type(module).__mro__}
            found.update((id(cls), cls) for cls in classes if not _is_stock(cls.__module__))
            for module in modules:
                todo.extend(v for n, v in vars_of(module).items() if n not in ("_parameters", "_buffers", "_modules"))
    return list(found.values())


def _is_stock(module: str) -> bool:
    return module.partition(".")[0] in STOCK


def _is_of_user(value: Any) -> bool:
    """Whether an object may keep state between calls: one of the user's, or a module."""
    is_module = isinstance(value, nn.Module) and type(value).__module__.startswith("torch.")
    return not isinstance(value, type) and (is_module or not _is_stock(type(value).__module__))


def _held_by(value: Any) -> Iterable[Any]:
    """Return what a container, a bound method, a partial function or a function holds."""
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, FunctionType):
        return () if _is_stock(value.__module__ or "") else value.__closure__ or ()
    if isinstance(value, CellType):
        return (value.cell_contents,) if _is_bound(value) else ()
    if len(value) > MAX_ENTRIES:
        return ()
    return value.values() if isinstance(value, dict) else value


def _is_bound(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # its variable has no value yet
        return False


def vars_of(owner: Any) -> dict[str, Any]:
    """The attributes of an object, in its dictionary and in slots."""
    slots = [name for cls in type(owner).__mro__ for name in _as_tuple(vars(cls).get("__slots__", ()))]
    in_slots = {name: getattr(owner, name) for name in slots if name not in UNREAD_SLOTS and hasattr(owner, name)}
    return {**in_slots, **getattr(owner, "__dict__", {})}


def _as_tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _restoring(owner: Any, noted: dict[int, _Noted]) -> Iterator[Undo]:
    """Yield functions that restore a container, the variable in a cell, or the attributes of another object.

    Args:
        owner: the container, cell, class or object.
        noted: receives the iterators, by their identities.
    """
    if isinstance(owner, CONTAINERS):
        yield from _contents(owner, [MAX_ENTRIES], MAX_DEPTH)
        return
    if isinstance(owner, (CellType, type)):
        before = {"cell_contents": owner.cell_contents} if isinstance(owner, CellType) else _data_of(owner)
        yield partial(_set_attributes, owner, before)
    elif not hasattr(owner, "__dict__"):
        before = vars_of(owner)
        yield partial(_set_attributes, owner, before)
    else:
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


def _data_of(cls: type) -> dict[str, Any]:
    """The attributes of a class that are data: a counter of all its objects, for example."""
    data = {name: value for name, value in vars(cls).items() if not name.startswith("_") and not callable(value)}
    return {name: value for name, value in data.items() if not hasattr(type(value), "__get__")}


def _set_attributes(owner: Any, before: Mapping[str, Any]) -> None:
    now = _data_of(owner) if isinstance(owner, type) else vars_of(owner)
    for name, value in before.items():
        if isinstance(owner, CellType) or now.get(name) is not value:
            setattr(owner, name, value)
    for name in now.keys() - before.keys():
        delattr(owner, name)


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
