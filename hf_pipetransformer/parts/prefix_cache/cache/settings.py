"""Notices changes to frozen modules besides their weights: attributes, code, and values that the code reads.

attributes        of each part, including private ones; containers and configurations by their values
code              `forward` of each part, the functions of its class, and hooks
values read       global variables and closures of functions outside the known libraries
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from ....model.method_override import MethodOverride
from .known_code import is_known

PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
"""Types of values that are compared directly."""
OF_CALLS = frozenset({"_disable_adapters", "_active_adapter"})
"""Attributes of PEFT that a loss may change from call to call. Only calls in the same state are stored."""
OF_MODULES = frozenset(vars(nn.Module())) | {"forward"} | OF_CALLS
"""Names of the attributes of every module: parts, hooks and mode. They are compared separately."""
OF_FILES = frozenset({"_name_or_path", "_original_object_hash", "architectures", "dtype", "transformers_version"})
"""Names of a configuration's fields that loading and saving write, but modules do not read."""
TABLES = ("_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks")
MOST_ENTRIES = 256
"""Maximum number of entries of a setting that is a container or object; larger ones are data."""
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
        functions = list(self._note_code())
        self._cells: list[CellType] = []
        self._slots += _read_by(functions, self._cells)
        attributes = (of.get(name) for of, name in self._slots[: self._num_attributes])
        self.tensors = [value for value in attributes if type(value) is torch.Tensor]
        """Tensors that are plain attributes, not buffers."""
        self._noted = self._now()
        self._containers = [(one, list(_entries(one))) for one in _containers_in(self._noted[1])]

    def _note_code(self) -> Iterator[FunctionType]:
        """Note the locations of the functions of the modules' classes. Yield functions outside the known libraries."""
        self._num_attributes = len(self._slots)
        for base in dict.fromkeys(base for cls in dict.fromkeys(self._types) for base in _bases(cls)):
            if "forward" not in vars(base):
                self._slots.append((vars(base), "forward"))  # `forward` may be added later
            for name, value in vars(base).items():
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if isinstance(function, FunctionType):
                    self._slots.append((vars(base), name))
                    if not is_known(function):
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
        code += [type(module) for module in self._modules]
        code += [own for of in self._owners if "forward" in of and (own := _own_forward(of)) is not None]
        values = [of.get(name) for of, name in self._slots]
        return sizes, [*values, *map(_content, self._cells)], code


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
    return cls.__mro__[: cls.__mro__.index(nn.Module)]


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
    waiting, seen = list(functions), set[int]()
    while waiting and len(seen) < MOST_FUNCTIONS:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        names = set(_names_in(function.__code__))
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            yield function.__globals__, name
            if isinstance(value, ModuleType):
                yield from ((vars(value), inside) for inside in names & vars(value).keys())
            elif isinstance(value, FunctionType) and not is_known(value):
                waiting.append(value)
        for cell in function.__closure__ or ():
            cells.append(cell)
            if isinstance(value := _content(cell), FunctionType) and not is_known(value):
                waiting.append(value)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # an inner function
            yield from _names_in(constant)


def _told(value: Any, depth: int = DEEPEST) -> str:
    """Return a value in words: functions by their code, containers and objects by their contents."""
    if isinstance(value, (*PLAIN, float)):
        return repr(value)
    if isinstance(value, MethodOverride):
        return _told(value.earlier, depth)
    if isinstance(value, functools.partial):
        return repr([_told(part, depth - 1) for part in (value.func, value.args, value.keywords)]) if depth else ""
    if isinstance(value, (FunctionType, MethodType)) and not is_known(value):
        code, defaults = getattr(value, "__code__", None), getattr(value, "__defaults__", None)
        return (_code_told(code) if code else "") + repr([_told(given, 1) for given in defaults or ()])
    if isinstance(value, (type, ModuleType)) or callable(value):
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
    if isinstance(value, (*PLAIN, float, torch.Tensor, nn.Module, type, ModuleType)) or callable(value):
        return False
    return isinstance(value, (Mapping, list, tuple, set, frozenset, np.ndarray)) or hasattr(value, "__dict__")


def _containers_in(values: Iterable[Any]) -> list[Any]:
    """Return the containers and objects among values, and inside of them, each once."""
    found: dict[int, Any] = {}
    level = list(values)
    for _ in range(DEEPEST):
        level = [value for value in level if id(value) not in found and _has_inside(value)]
        level = list({id(value): value for value in level}.values())
        found |= {id(value): value for value in level}
        level = [entry for value in level for entry in _entries(value)]
    return list(found.values())


def _entries(container: Any) -> list[Any]:
    """Return the contents of a container or object; its length or bytes instead, if it is data."""
    kind = type(container)
    if kind is dict and len(container) <= MOST_ENTRIES:
        return [*container, *container.values()]
    if kind in (tuple, list) and len(container) <= MOST_ENTRIES:
        return container
    if isinstance(container, np.ndarray):
        return [container.tobytes()] if container.size <= MOST_ENTRIES else []
    entries = container if isinstance(container, (Mapping, list, tuple, set, frozenset)) else vars(container)
    if isinstance(container, (PreTrainedConfig, GenerationConfig)):
        entries = {name: value for name, value in vars(container).items() if name not in OF_FILES}
    if len(entries) > MOST_ENTRIES:
        return [len(entries)]
    return [*entries, *entries.values()] if isinstance(entries, Mapping) else list(entries)


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
