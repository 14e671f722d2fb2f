"""Notices changes to frozen modules besides their weights: attributes, code, and values that the code reads.

attributes        of each part and of its class, including private ones; containers, configurations and users' objects
                  by their values
code              `forward` of each part, the functions of its class, of its objects' classes, and hooks; functions
                  of `torch.nn.functional`, and the attention function
values read       global variables and closures of functions outside the known libraries; what these functions read of
                  modules and classes that they name
"""

from __future__ import annotations

import enum
import functools
import logging
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import chain
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedConfig, Trainer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ....model.method_override import MethodOverride
from .known_code import OF_ALL, is_known

PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
"""Types of values that are compared directly."""
PYTHONS = sys.stdlib_module_names | {"numpy"}
"""Packages whose objects are values, and not users' objects."""
CONTAINERS = (Mapping, list, tuple, set, frozenset, deque, np.ndarray)
OF_CALLS = frozenset({"_disable_adapters", "_active_adapter"})
"""Attributes of PEFT that a loss may change from call to call. Only calls in the same state are stored."""
OF_MODULES = frozenset(vars(nn.Module())) | {"forward"} | OF_CALLS
"""Names of the attributes of every module: parts, hooks and mode. They are compared separately."""
OF_FILES = frozenset({"_name_or_path", "_original_object_hash", "architectures", "dtype", "transformers_version"})
"""Names of a configuration's fields that loading and saving write, but modules do not read."""
TABLES = ("_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks")
MOST_ENTRIES = 1024
"""Maximum number of entries of a container or object whose entries are looked into."""
LARGEST, LARGEST_ARRAY = 2**16, 2**22
"""Maximum number of entries of a container, and of bytes of an array. Larger ones are data: their size counts."""
OF_TRAINING = (Trainer, Accelerator, PartialState, AcceleratorState)
"""Classes of objects of the training, into which `ReadOutside` does not look."""
DEEPEST = 4
"""Maximum nesting depth of containers and objects."""
MOST_FUNCTIONS = 200
"""Maximum number of functions to compare global variables of."""

Slot = tuple[Mapping[str, Any], str]
"""Location of a value: a namespace, and a name in it."""


class Settings:
    """A snapshot of the attributes and code of modules.

    Args:
        modules: the modules. Their submodules are not included.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._owners = [vars(module) for module in modules]
        self._types = [type(module) for module in modules]
        self._slots: list[Slot] = [(of, name) for of in self._owners for name in of if name not in OF_MODULES]
        self._num_attributes = len(self._slots)
        objects = [type(one) for one in _containers_in(of[name] for of, name in self._slots) if _is_users(type(one))]
        functions = list(self._note_code([*self._types, *objects]))
        self._cells: list[CellType] = []
        self._slots += _read_by(functions, self._cells)
        used = {getattr(getattr(m, "config", None), "_attn_implementation", None) for m in modules}
        self._slots += [(ALL_ATTENTION_FUNCTIONS, name) for name in sorted(filter(None, used))]
        self._noted = self._now()
        containers = _containers_in(self._noted[1])
        self._containers = [(one, list(_entries(one))) for one in containers]
        values = [*self._noted[1], *chain.from_iterable(map(_entries, containers))]
        self.tensors = [v for v in values if getattr(v, "plain_class", type(v)) in (torch.Tensor, nn.Parameter)]
        """Tensors among the settings: they are neither weights nor buffers of the modules."""

    def _note_code(self, classes: Sequence[type]) -> Iterator[FunctionType]:
        """Note the locations of the functions of classes, and of users' classes' other attributes.

        Yield functions outside the known libraries.
        """
        for base in _bases_of(classes):
            if "forward" not in vars(base) and issubclass(base, nn.Module):
                self._slots.append((vars(base), "forward"))  # `forward` may be added later
            for name, value in vars(base).items():
                function = _function_in(value)
                if isinstance(function, FunctionType) or (_is_users(base) and not name.startswith("__")):
                    self._slots.append((vars(base), name))
                if isinstance(function, FunctionType) and not is_known(function):
                    yield function
        yield from (f for of in self._owners if isinstance(f := _own_forward(of), FunctionType) and not is_known(f))

    def are_same(self) -> bool:
        """Whether all settings are unchanged. Compares objects first, then the contents of identical objects."""
        (sizes, values, code), (noted_sizes, noted, noted_code) = self._now(), self._noted
        if sizes != noted_sizes or not are_identical(code, noted_code):
            return False
        are_equal = are_identical(values, noted) or all(
            one is other or _value(one) == _value(other) for one, other in zip(values, noted, strict=True)
        )
        return are_equal and all(map(_is_same_inside, self._containers))

    def described(self) -> str:
        """Return the settings in words that are the same in every process."""
        attributes = [(name, _told(of.get(name))) for of, name in self._slots[: self._num_attributes]]
        read = {(name, _told(of.get(name))) for of, name in self._slots[self._num_attributes :]}
        cells = sorted(_told(_content(cell)) for cell in self._cells)
        own = [_told(_own_forward(of)) for of in self._owners]
        hooks = [[_told(hook) for table in TABLES[2:] for hook in of[table].values()] for of in self._owners]
        return repr(([_told(cls) for cls in self._types], attributes, sorted(read), cells, own, hooks))

    def _now(self) -> tuple[list[int], list[Any], list[Any]]:
        """Return the numbers of attributes, the values, and the parts, hooks and replaced methods."""
        sizes = [len(of) - ("forward" in of) for of in self._owners]
        tables = [of[table] for of in self._owners for table in TABLES[:2] if of[table]]
        code = [*chain.from_iterable(tables), *chain.from_iterable([table.values() for table in tables])]
        hooks = [of[table] for of in self._owners for table in TABLES[2:] if of[table]]
        code += [hook for table in hooks for hook in table.values() if not _is_libraries_function(hook)]
        code += [hook for table in OF_ALL for hook in table.values() if not is_known(hook)]
        code += map(type, self._modules)
        code += [value for name, value in vars(functional).items() if not name.startswith("__")]  # warnings are noted
        code += [own for of in self._owners if "forward" in of and (own := _own_forward(of)) is not None]
        values = [of.get(name) for of, name in self._slots]
        return sizes, [*values, *map(_content, self._cells)], code


class ReadOutside:
    """A snapshot of what users' code in modules reads outside of them: globals, closures, attributes of classes.

    The insides of objects that are also attributes of the modules do not count. Nor does a Trainer, whose changes are
    sent to all stages, nor what Accelerate tells about the processes, which is exchanged while a loss runs.

    Args:
        modules: the modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        slots, functions = list[Slot](), list[FunctionType]()
        for base in filter(_is_users, _bases_of(map(type, modules))):
            for name, value in vars(base).items():
                function = _function_in(value)
                if isinstance(function, FunctionType):
                    functions.append(function)
                elif not name.startswith("__"):
                    slots.append((vars(base), name))
        self._cells: list[CellType] = []
        slots += _read_by(functions, self._cells)
        self._slots = slots
        self._noted = self._now()
        attributes = chain.from_iterable(vars(module).values() for module in modules)
        of_modules = set(map(id, _containers_in(attributes)))
        containers = [one for one in _containers_in(self._noted, OF_TRAINING) if id(one) not in of_modules]
        self._containers = [(one, list(_entries(one))) for one in containers]

    def changed(self) -> str:
        """The name of a value that has changed; empty if all are the same."""
        names = [*(name for _, name in self._slots), *("a closure" for _ in self._cells)]
        for name, value, noted in zip(names, self._now(), self._noted, strict=True):
            if value is not noted and _value(value) != _value(noted):
                return name
        return "" if all(map(_is_same_inside, self._containers)) else "a container or object"

    def _now(self) -> list[Any]:
        return [*(of.get(name) for of, name in self._slots), *map(_content, self._cells)]


def are_identical(now: Sequence[Any], noted: Sequence[Any]) -> bool:
    """Whether two sequences contain the very same objects."""
    return len(now) == len(noted) and all(map(is_, now, noted))


def _is_libraries_function(hook: Any) -> bool:
    """Whether a hook is a function of a known library: turning on gradient checkpointing adds one each time."""
    return isinstance(hook, FunctionType) and is_known(hook)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _bases(cls: type) -> Iterable[type]:
    """The base classes of a module's class, without torch's own; of another class, the user's base classes."""
    if issubclass(cls, nn.Module):
        return cls.__mro__[: cls.__mro__.index(nn.Module)]
    return filter(_is_users, cls.__mro__)


def _bases_of(classes: Iterable[type]) -> Iterable[type]:
    """The base classes of all these classes, each once."""
    return dict.fromkeys(base for cls in dict.fromkeys(classes) for base in _bases(cls))


def _is_users(cls: type) -> bool:
    """Whether a class is neither of Python's nor of a known library's."""
    return not is_known(cls) and cls.__module__.partition(".")[0] not in PYTHONS


def _function_in(value: Any) -> Any:
    """The function of a property, a static method or a class method; other values as they are."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _own_forward(of: Mapping[str, Any]) -> Any:
    """Return the function that replaces a module's `forward`, apart from our own overrides."""
    function = of.get("forward")
    while isinstance(function, MethodOverride):
        function = function.earlier
    return function


def _read_by(functions: Sequence[FunctionType], cells: list[CellType]) -> Iterator[Slot]:
    """Yield the locations of global variables that functions read, directly or through other users' functions.

    Args:
        functions: the functions.
        cells: receives the functions' closures.
    """
    waiting, done = list(functions), set[int]()
    while waiting and len(done) < MOST_FUNCTIONS:
        function = waiting.pop(0)  # the modules' own functions first
        if id(function) in done:
            continue
        done.add(id(function))
        names, own = set(_names_in(function.__code__)), function.__closure__ or ()
        cells += own
        values, spaces = list(map(_content, own)), list[Mapping[str, Any]]([function.__globals__])
        seen = set[int]()  # modules, and objects of users' classes
        for _ in range(DEEPEST):  # `config.model.scale` is read of a variable, of a module or class in it, and so on
            slots = [(of, name) for of in spaces for name in sorted(names & of.keys())]
            yield from slots
            values += [_function_in(of[name]) for of, name in slots]
            waiting += [value for value in values if isinstance(value, FunctionType) and not is_known(value)]
            inside = {id(value): _namespaces(value) for value in values if id(value) not in seen}
            seen.update(inside)
            values, spaces = [], list(chain.from_iterable(inside.values()))


def _namespaces(value: Any) -> list[Mapping[str, Any]]:
    """The namespaces of a module, of a user's class, and of the class of a user's object."""
    if isinstance(value, ModuleType):
        return [vars(value)]
    cls = value if isinstance(value, type) else type(value)
    return [vars(base) for base in _bases(cls)] if _is_users(cls) else []


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # an inner function
            yield from _names_in(constant)


def _told(value: Any, depth: int = DEEPEST) -> str:
    """Return a value in words: functions by their code, containers and objects by their contents."""
    value = _function_in(value)
    if isinstance(value, (*PLAIN, float)):
        return repr(value)
    if isinstance(value, MethodOverride):
        return _told(value.earlier, depth)
    if isinstance(value, functools.partial):
        return repr([_told(part, depth - 1) for part in (value.func, value.args, value.keywords)]) if depth else ""
    if isinstance(value, FunctionType) and not is_known(value):
        code, *given = _entries(value)
        return _code_told(code) + (repr([_told(one, min(depth - 1, 1)) for one in given]) if depth else "")
    if not _has_inside(value) and (isinstance(value, (type, ModuleType)) or callable(value)):
        of = value if hasattr(value, "__name__") else type(value)
        return f"{getattr(of, '__module__', '')} {getattr(of, '__qualname__', of.__name__)}"
    if not _has_inside(value) or not depth:
        return type(value).__qualname__
    inside = [_told(entry, depth - 1) for entry in _entries(value)]
    return f"{type(value).__qualname__} {sorted(inside) if isinstance(value, (set, frozenset)) else inside}"


def _code_told(code: CodeType) -> str:
    constants = [
        _code_told(c) if isinstance(c, CodeType) else repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    return repr((code.co_code.hex(), code.co_names, constants))


def _has_inside(value: Any) -> bool:
    """Whether a value may change its contents while it stays the same object."""
    if isinstance(value, (*PLAIN, float, torch.Tensor, nn.Module, type, ModuleType, logging.Logger)):
        return False  # a logger changes whenever it is used, and no module computes with it
    if isinstance(value, (*CONTAINERS, ContextVar)):
        return True
    if isinstance(value, FunctionType):
        return not is_known(value)
    return _is_users(type(value)) or (not callable(value) and hasattr(value, "__dict__"))


def _containers_in(values: Iterable[Any], opaque: tuple[type, ...] = ()) -> list[Any]:
    """Return the containers and objects among values, and inside of them, each once; not those of `opaque` classes."""
    found: dict[int, Any] = {}
    level = list(values)
    for _ in range(DEEPEST):
        level = [v for v in level if id(v) not in found and not isinstance(v, opaque) and _has_inside(v)]
        level = list({id(value): value for value in level}.values())
        found |= {id(value): value for value in level}
        inside = map(_entries, level)
        level = [entry for entries in inside if len(entries) <= MOST_ENTRIES for entry in entries]
    return list(found.values())


def _entries(container: Any) -> list[Any]:
    """Return the contents of a container, object or function; its size instead, if it is data."""
    if isinstance(container, np.ndarray):
        is_data = container.nbytes > LARGEST_ARRAY
        values = container.nbytes if is_data else xxhash.xxh3_128_hexdigest(container.tobytes())
        return [values, repr(container.dtype), container.shape]
    if isinstance(container, ContextVar):
        return [container.get(None)]
    if isinstance(container, FunctionType):
        given = (*(container.__defaults__ or ()), *(container.__kwdefaults__ or {}).values())
        return [container.__code__, *given, *vars(container).values()]
    if isinstance(container, (PreTrainedConfig, GenerationConfig)):
        container = {name: value for name, value in vars(container).items() if name not in OF_FILES}
    elif not isinstance(container, CONTAINERS):
        container = _attributes_of(container)
    if len(container) > LARGEST:
        return [len(container)]
    if isinstance(container, Mapping):
        return [*container, *container.values()]
    return container if type(container) in (tuple, list) else list(container)


def _attributes_of(value: Any) -> Mapping[str, Any]:
    """Return an object's attributes; of users' classes also those in slots."""
    attributes = getattr(value, "__dict__", {})
    if not hasattr(type(value), "__slots__"):
        return attributes
    slots = chain.from_iterable(vars(base).get("__slots__", ()) for base in _bases(type(value)))
    own = [name for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name)]
    return {**attributes, **{name: getattr(value, name) for name in own}}


def _is_same_inside(container: tuple[Any, list[Any]]) -> bool:
    """Whether a container still has its noted entries."""
    value, noted = container
    now = _entries(value)
    return are_identical(now, noted) or list(map(_value, now)) == list(map(_value, noted))


def _value(value: Any) -> Any:
    """Return a key for comparing settings: equal keys mean equal settings."""
    if isinstance(value, float):
        return repr(value)  # NaN is not equal to itself
    if isinstance(value, PLAIN):
        return value
    if type(value) in (list, tuple):
        return list(map(_value, value))
    if type(value) is functools.partial:  # as each turning on of gradient checkpointing makes anew
        return [id(value.func), _value(value.args), _value(value.keywords)]
    if isinstance(value, dict):
        return [(_value(key), _value(entry)) for key, entry in value.items()]
    return id(value)
