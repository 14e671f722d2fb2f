"""The insides of a frozen module's attributes, and which of them can be compared with what they were.

plain, fixed        compared directly, or never changed
containers, memory  lists, dictionaries, objects, arrays of bytes, of numbers or of C: by their contents
of libraries        objects of known libraries: by their attributes
others              objects of C code, such as generators and files: a module of the user's with one is not cached
"""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import operator
import re
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import SemLock
from operator import is_
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID
from weakref import ReferenceType

import numpy as np
import torch
import xxhash
from huggingface_hub import CardData
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, PreTrainedConfig

from ....model.method_override import MethodOverride
from .known_code import is_known

PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
"""Types of values that are compared directly."""
SIMPLE = frozenset({bool, int, str, bytes, float, type(None)})
"""Types of most attributes: a test of the type itself takes a tenth of the time of one for `PLAIN`."""
PYTHONS = sys.stdlib_module_names | {"numpy"}
"""Packages whose objects are values, and not users' objects."""
FIXED = (
    *(complex, range, re.Pattern, Decimal, Fraction, PurePath, UUID, date, time, timedelta, tzinfo),
    *(np.generic, np.dtype, np.ufunc, operator.itemgetter, operator.attrgetter, operator.methodcaller),
    *(torch.layout, torch.memory_format, torch.finfo, torch.iinfo, type(Ellipsis), type(NotImplemented), TypeVar),
)
"""Types of values that never change."""
CALLS = (functools.partial, MethodType, BuiltinFunctionType)
LOCKS = (type(threading.Lock()), type(threading.RLock()), SemLock, logging.Logger)
"""Types of objects that no module computes with."""
REMEMBERING: Any = type(functools.lru_cache(len))
"""Type of functions with `lru_cache`."""
WRAPPERS: Any = (
    *(staticmethod, classmethod, property),
    *(functools.cached_property, functools.partialmethod, REMEMBERING),
)
"""Types of what decorators of Python make of a function."""
UNREAD = (logging.Logger, RemovableHandle, CardData)
"""Types of objects that change whenever they are used, and that no module computes with."""
OF_PYTHON = (threading.local, ContextVar, SimpleNamespace, ReferenceType, RemovableHandle)
"""Further types of objects that are compared, or that no module computes with."""
CONTAINERS = (Mapping, list, tuple, set, frozenset, deque, np.ndarray)

OF_FILES = frozenset({"_name_or_path", "_original_object_hash", "architectures", "dtype", "transformers_version"})
"""Names of a configuration's fields that loading and saving write, but modules do not read."""

LARGEST, LARGEST_ARRAY = 2**16, 2**22
"""Maximum number of entries of a container, and of bytes of an array. Larger ones are data: their size counts."""

DEEPEST = 4
"""Maximum nesting depth of containers and objects."""


def content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def bases(cls: type) -> Iterable[type]:
    """The base classes of a module's class, without torch's own; of another class, the user's base classes."""
    if issubclass(cls, nn.Module):
        return cls.__mro__[: cls.__mro__.index(nn.Module)]
    return filter(is_users, cls.__mro__)


def is_users(cls: type) -> bool:
    """Whether a class is neither of Python's nor of a known library's."""
    return not is_known(cls) and cls.__module__.partition(".")[0] not in PYTHONS


def function_in(value: Any) -> Any:
    """The function inside of properties, static and class methods, `lru_cache` and the like; others as they are."""
    while isinstance(value, (*WRAPPERS, MethodType)):
        if isinstance(value, (staticmethod, classmethod, MethodType)):
            value = value.__func__
        elif isinstance(value, (functools.cached_property, functools.partialmethod)):
            value = value.func
        elif isinstance(value, property):
            value = value.fget
        else:
            remembering: Any = value
            value = remembering.__wrapped__
    return value


def own_forward(of: Mapping[str, Any]) -> Any:
    """Return the function that replaces a module's `forward`, apart from our own overrides."""
    function = of.get("forward")
    while isinstance(function, MethodOverride):
        function = function.earlier
    return function


def has_inside(value: Any) -> bool:
    """Whether a value may change its contents while it stays the same object."""
    if type(value) in SIMPLE or isinstance(
        value, (*PLAIN, float, *FIXED, torch.Tensor, nn.Module, type, ModuleType, *UNREAD)
    ):
        return False
    if isinstance(value, (*CONTAINERS, ContextVar, slice, functools.partial, SynchronizedBase, ReferenceType)):
        return True
    if isinstance(value, FunctionType):
        return not is_known(value)
    if isinstance(value, MethodType):
        return isinstance(value.__self__, nn.Module) or is_users(type(value.__self__))
    if isinstance(value, BuiltinFunctionType):  # a method of a list, say; functions have their module
        return not isinstance(value.__self__, (ModuleType, type, type(None))) and not isinstance(
            value.__self__, nn.Module
        )
    if is_users(type(value)) or (not callable(value) and hasattr(value, "__dict__")):
        return True
    return _memory_of(value) is not None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory whose changes can be noticed; sparse ones have other tensors inside."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def held_by(module: nn.Module) -> str | None:
    """Describe the first value in parts with code of the user's whose changes cannot be noticed; None without one.

    Sparse and quantised tensors count in all parts.
    """
    parts = list(module.modules())  # compared as modules
    tensors = [
        v for part in parts for v in (*vars(part).values(), *part.buffers(False)) if isinstance(v, torch.Tensor)
    ]
    if (odd := next((tensor for tensor in tensors if not is_plain(tensor)), None)) is not None:
        return f"it has a {'quantised' if odd.is_quantized else 'sparse'} tensor, whose changes cannot be noticed"
    for part in parts:
        own = own_forward(vars(part))
        if not is_users(type(part)) and (own is None or is_known(own)):
            continue
        attributes = {
            name: value for base in bases(type(part)) for name, value in vars(base).items() if is_users(base)
        }
        for name, value in {**attributes, **vars(part)}.items():
            if name.startswith("__") or isinstance(function_in(value), FunctionType):
                continue
            if (unknown := _unknown_in([value], parts)) is not None:
                return f"it has {unknown} in its attribute {name}, whose changes cannot be noticed"
    return None


def _unknown_in(values: list[Any], known: Iterable[Any]) -> str | None:
    """Describe the first value that is neither plain, known nor comparable."""
    seen = set(map(id, known))
    for _ in range(DEEPEST):
        values = [value for value in values if not isinstance(value, (*PLAIN, float)) and id(value) not in seen]
        seen.update(map(id, values))
        unknown = next((value for value in values if not _is_comparable(value)), None)
        if unknown is not None:
            return f"a value of type {type(unknown).__module__}.{type(unknown).__qualname__}"
        inside = [value for value in values if has_inside(value) and not _is_libraries(value)]
        values = [entry for value in inside for entry in entries_of(value)]
    return f"values at more than {DEEPEST} levels of containers" if any(map(has_inside, values)) else None


def _is_comparable(value: Any) -> bool:
    """Whether changes of a value are noticed, or there are none that a module could compute with."""
    if isinstance(value, (*FIXED, *LOCKS, *OF_PYTHON, type, ModuleType, FunctionType)) or type(value) is object:
        return True
    if isinstance(value, (*CONTAINERS, *CALLS)) or _is_libraries(value) or _memory_of(value) is not None:
        return True
    return has_inside(value) and not any(map(_is_of_c, type(value).__mro__[:-1]))


def _is_libraries(value: Any) -> bool:
    return (
        not isinstance(value, (*CONTAINERS, *CALLS)) and type(value).__module__ != "builtins" and is_known(type(value))
    )


def _is_of_c(cls: type) -> bool:
    """Whether a class was not made in Python: attributes do not show what its objects hold."""
    is_made_at_runtime, cannot_be_called = cls.__flags__ >> 9 & 1, cls.__flags__ >> 7 & 1
    has_constructor = isinstance(vars(cls).get("__new__"), BuiltinFunctionType)
    return not is_made_at_runtime or bool(cannot_be_called) or has_constructor


def _memory_of(value: Any) -> list[Any] | None:
    """A digest of the memory of an array of bytes, numbers or C; its size instead, if it is data. None for others."""
    if isinstance(value, (FunctionType, *CALLS)):
        return None
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    with view:  # as long as there is one, the array cannot be resized
        is_data = view.nbytes > LARGEST_ARRAY
        return [view.nbytes if is_data else xxhash.xxh3_128_hexdigest(view.tobytes()), view.format, view.shape]


def is_data(value: Any) -> bool:
    """Whether a container is so large that only its size is compared in a training."""
    if isinstance(value, np.ndarray):
        return value.nbytes > LARGEST_ARRAY
    return isinstance(value, CONTAINERS) and len(value) > LARGEST


def containers_in(values: Iterable[Any], opaque: tuple[type, ...] = ()) -> list[Any]:
    """Return the containers and objects among values, and inside of them, each once; not those of `opaque` classes."""
    found: dict[int, Any] = {}
    level = list(values)
    for _ in range(DEEPEST):
        level = [function_in(value) if isinstance(value, WRAPPERS) else value for value in level]
        level = [v for v in level if id(v) not in found and not isinstance(v, opaque) and has_inside(v)]
        level = list({id(value): value for value in level}.values())
        found |= {id(value): value for value in level}
        level = [entry for value in level for entry in entries_of(value)]
    return list(found.values())


def entries_of(container: Any) -> list[Any]:
    """Return the contents of a container, object or function; its size instead, if it is data."""
    kind = type(container)
    if kind is list or kind is tuple or kind is dict:  # first, as most are
        if len(container) > LARGEST:
            return [len(container)]
        return [*container, *container.values()] if kind is dict else container
    if isinstance(container, np.ndarray):
        values = container.nbytes if is_data(container) else xxhash.xxh3_128_hexdigest(container.tobytes())
        return [values, repr(container.dtype), container.shape]
    if isinstance(container, SynchronizedBase):
        container = container.get_obj()
    if isinstance(container, ContextVar):
        return [container.get(None)]
    if isinstance(container, ReferenceType):
        value = container()  # only a user's object: an output must not be kept alive
        return [value] if is_users(type(value)) and not isinstance(value, (torch.Tensor, nn.Module)) else []
    if isinstance(container, slice):
        return [container.start, container.stop, container.step]
    if isinstance(container, (MethodType, BuiltinFunctionType)):
        return [getattr(container, "__func__", container.__name__), container.__self__]
    if isinstance(container, functools.partial):
        return [container.func, *container.args, *container.keywords, *container.keywords.values()]
    if isinstance(container, FunctionType):
        given = (*(container.__defaults__ or ()), *(container.__kwdefaults__ or {}).values())
        return [container.__code__, *given, *vars(container).values()]
    own: Mapping[str, Any] = {}
    if isinstance(container, (PreTrainedConfig, GenerationConfig)):
        container = {name: value for name, value in vars(container).items() if name not in OF_FILES}
    elif isinstance(container, CONTAINERS):
        own = _attributes_of(container)
    else:
        if (memory := _memory_of(container)) is not None:
            return memory
        container = _attributes_of(container)
    if len(container) > LARGEST:
        return [len(container), *own.values()]
    if isinstance(container, Mapping):
        return [*container, *container.values(), *own.values()]
    return [*container, *own.values()]


def _attributes_of(value: Any) -> Mapping[str, Any]:
    """Return an object's attributes; of users' classes also those in slots."""
    attributes = getattr(value, "__dict__", {})
    if not hasattr(type(value), "__slots__"):
        return attributes
    members = chain.from_iterable(vars(base).items() for base in bases(type(value)))
    slots = [name for name, member in members if inspect.ismemberdescriptor(member) and hasattr(value, name)]
    return {**attributes, **{name: getattr(value, name) for name in slots}}


def are_identical(now: Sequence[Any], noted: Sequence[Any]) -> bool:
    """Whether two sequences contain the very same objects."""
    return len(now) == len(noted) and all(map(is_, now, noted))


class Contents:
    """A snapshot of what is inside of containers and objects.

    Lists, dictionaries and attributes are compared in each step: together first, object by object, and only if one of
    them is another one, by their values.

    Args:
        containers: the containers and objects.
    """

    def __init__(self, containers: Sequence[Any]) -> None:
        self._entries = [(one, list(entries_of(one))) for one in containers]
        self._lists = [one for one in containers if type(one) is list and len(one) <= LARGEST]
        self._dicts = [one for one in containers if type(one) is dict and len(one) <= LARGEST]
        self._objects = [one for one in containers if _has_attributes_only(one) and len(vars(one)) <= LARGEST]
        compared = {id(one) for one in (*self._lists, *self._dicts, *self._objects)}
        others = [of for of in self._entries if id(of[0]) not in compared]
        self._others = [of for of in others if type(of[0]) not in (tuple, frozenset)]  # these stay as they are
        self._containers, self._types = list(containers), list(map(type, containers))
        self._noted = self._now()

    def are_same(self) -> bool:
        """Whether all of them have the same contents, and are of the same classes."""
        if not are_identical(list(map(type, self._containers)), self._types):
            return False
        (sizes, objects), (noted_sizes, noted) = self._now(), self._noted
        if sizes == noted_sizes and are_identical(objects, noted):
            return all(map(_is_same_inside, self._others))
        return all(map(_is_same_inside, self._entries))

    def _now(self) -> tuple[list[int], list[Any]]:
        spaces = [*self._dicts, *map(vars, self._objects)]
        sizes = [*map(len, self._lists), *map(len, spaces)]
        values = chain.from_iterable(space.values() for space in spaces)
        return sizes, [*chain.from_iterable(self._lists), *chain.from_iterable(spaces), *values]


def _has_attributes_only(value: Any) -> bool:
    """Whether `entries_of` lists the attributes of an object, and nothing else."""
    if not isinstance(value, (PreTrainedConfig, GenerationConfig)):
        others = (*CONTAINERS, *CALLS, SynchronizedBase, ContextVar, ReferenceType, slice, FunctionType)
        if isinstance(value, others) or hasattr(type(value), "__slots__") or _memory_of(value) is not None:
            return False
    return type(getattr(value, "__dict__", None)) is dict


def _is_same_inside(container: tuple[Any, list[Any]]) -> bool:
    """Whether a container still has its noted entries."""
    value, noted = container
    now = entries_of(value)
    return are_identical(now, noted) or list(map(key_of, now)) == list(map(key_of, noted))


def key_of(value: Any) -> Any:
    """Return a key for comparing settings: equal keys mean equal settings."""
    if isinstance(value, float):
        return repr(value)  # NaN is not equal to itself
    if isinstance(value, PLAIN):
        return value
    if type(value) in (list, tuple):
        return list(map(key_of, value))
    if isinstance(value, RemovableHandle):  # of a hook, which is compared itself
        return RemovableHandle
    if type(value) is functools.partial:  # as each turning on of gradient checkpointing makes anew
        return [id(value.func), key_of(value.args), key_of(value.keywords)]
    if isinstance(value, dict):
        return [(key_of(key), key_of(entry)) for key, entry in value.items()]
    return id(value)
