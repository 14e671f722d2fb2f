"""Notices changes to frozen modules besides their weights: attributes, code, and values that the code reads.

attributes        of each part and of its class, including private ones; containers, configurations and users' objects
                  by their values
code              `forward` of each part, the functions of its class, of its objects' classes, and hooks; functions
                  of `torch.nn.functional`, and the attention function
values read       global variables and closures of functions outside the known libraries; what these functions read of
                  modules and classes that they name
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, groupby, zip_longest
from operator import itemgetter, methodcaller
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn import functional
from transformers import Trainer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .known_code import LIBRARIES, OF_ALL, is_known
from .told import told
from .values import (
    DEEPEST,
    PLAIN,
    Contents,
    are_identical,
    bases,
    containers_in,
    content,
    entries_of,
    function_in,
    is_users,
    key_of,
    own_forward,
)

OF_CALLS = frozenset({"_disable_adapters", "_active_adapter"})
"""Attributes of PEFT that a loss may change from call to call. Only calls in the same state are stored."""
NEVER_READ = frozenset({"generation_config", "warnings_issued"})
"""Attributes of transformers' models that no forward reads."""
OF_MODULES = frozenset(vars(nn.Module())) | {"forward"} | OF_CALLS | NEVER_READ
"""Names of attributes that are no settings: parts, hooks and mode of every module are compared separately."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
hooks_in, held_in = itemgetter(*HOOKS), itemgetter("_modules", "_parameters")
values_in = methodcaller("values")
CALLS = ("__call__", "_wrapped_call_impl", "_call_impl")
"""Methods by which torch calls modules."""
ADDED = ("forward", "__getattr__", "__getattribute__", *CALLS)
"""Methods of modules that a class may get later, in place of an inherited one."""
PATCHED = (functional, torch.Tensor)
"""Where a function that replaces one of torch's changes what modules compute."""
BY_TEXT = frozenset({"__dict__", "getattr", "globals", "vars"})
"""Names in functions that read values by their names in texts."""
NOT_IMPLICIT = frozenset({"__eq__", "__hash__", "__init__", "__new__", "__repr__", "__str__"})
"""Names of special methods that modules do not compute with."""
OF_TRAINING = (Trainer, Accelerator, PartialState, AcceleratorState)
"""Classes of objects of the training, into which `ReadOutside` does not look."""
CALLABLE = (FunctionType, BuiltinFunctionType)
MOST_FUNCTIONS = 200
"""Maximum number of functions to compare global variables of."""

Slot = tuple[Mapping[str, Any], str]
"""Location of a value: a namespace, and a name in it."""


class Settings:
    """A snapshot of the attributes and code of modules.

    Args:
        modules: the modules. Their submodules are not included.
        with_hooks: whether what hooks on the modules read counts. It does not if the hooks run in any case.
    """

    def __init__(self, modules: Sequence[nn.Module], with_hooks: bool = False) -> None:
        self._modules = list(modules)
        self._owners = [vars(module) for module in modules]
        self._types = [type(module) for module in modules]
        self._slots: list[Slot] = [(of, name) for of in self._owners for name in of if name not in OF_MODULES]
        self._num_attributes = len(self._slots)
        self._codes: list[CodeType] = []  # of the functions of which values are noted
        tables = chain.from_iterable(map(hooks_in, self._owners)) if with_hooks else ()
        hooks = [hook for table in tables for hook in table.values()]
        attributes = [*(of[name] for of, name in self._slots), *hooks]
        inside = [*attributes, *chain.from_iterable(map(entries_of, containers_in(attributes)))]
        functions = [*self._note_code([*self._types, *_users_classes(inside)]), *self._note_tables()]
        patched = (value for of in PATCHED for value in vars(of).values())
        functions += filter(_is_users_function, map(function_in, (*inside, *patched)))
        self._cells: list[CellType] = []
        self._unread = set[str]()  # names of attributes that are not compared
        self._slots += _read_by(functions, self._cells, self._codes)
        spaces = (list(slots) for _, slots in groupby(self._slots, lambda slot: id(slot[0])))
        self._reads = [(slots[0][0], [name for _, name in slots]) for slots in spaces]
        self._functional = [name for name in vars(functional) if not name.startswith("__")]  # warnings are noted
        self._noted = self._now()
        containers = containers_in([*self._noted[1], *hooks])
        self._contents = Contents(containers)
        values = [*self._noted[1], *chain.from_iterable(map(entries_of, containers))]
        self.tensors = [v for v in values if getattr(type(v), "plain_class", type(v)) in (torch.Tensor, nn.Parameter)]
        """Tensors among the settings: they are neither weights nor buffers of the modules."""

    def _note_code(self, classes: Sequence[type]) -> Iterator[FunctionType]:
        """Note the locations of the functions of classes, and of users' classes' other attributes.

        Yield functions outside the known libraries.
        """
        functions = (f for cls in _bases_of(classes) for f in map(function_in, vars(cls).values()))
        self._slots += _functions_named_by(functions, self._codes)
        for base in _bases_of(classes):
            space = vars(base)
            if issubclass(base, nn.Module):
                self._slots += [(space, name) for name in ADDED if name not in space]
            for name, value in space.items():
                function = function_in(value)
                if isinstance(function, FunctionType) or (is_users(base) and not name.startswith("__")):
                    self._slots.append((space, name))
                if isinstance(function, FunctionType) and not is_known(function):
                    yield function
        for cls in filter(is_users, dict.fromkeys(classes)):
            self._slots += _inherited_in(list(bases(cls)))
        yield from filter(_is_users_function, map(function_in, map(own_forward, self._owners)))

    def _note_tables(self) -> Iterator[FunctionType]:
        """Note how torch calls modules, and the attention and mask functions in use. Yield the user's among these."""
        space = vars(nn.Module)
        self._slots += [(space, name) for name in CALLS]
        used = {getattr(getattr(module, "config", None), "_attn_implementation", None) for module in self._modules}
        for name in sorted(filter(None, used)):
            for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
                self._slots.append((table, name))
                self._slots += _functions_named_by([table.get(name)], self._codes)
                yield from filter(_is_users_function, [table.get(name)])

    @property
    def modules_read(self) -> list[nn.Module]:
        """Frozen modules that users' code in the modules has in containers, closures or global variables.

        Modules that contain one of the modules are left out.
        """
        of_users = {id(vars(module)) for module in self._modules if is_users(type(module))}
        values = [of.get(name) for of, name in self._slots[: self._num_attributes] if id(of) in of_users]
        values += [of.get(name) for of, name in self._slots[self._num_attributes :]]
        values += map(content, self._cells)
        inside = chain.from_iterable(map(entries_of, containers_in(values)))
        known = set(self._modules)
        outside = [v for v in (*values, *inside) if isinstance(v, nn.Module) and known.isdisjoint(v.modules())]
        frozen = [m for m in outside if not any(parameter.requires_grad for parameter in m.parameters())]
        return list(dict.fromkeys(part for module in frozen for part in module.modules()))

    def are_same(self) -> bool:
        """Whether all settings are unchanged. Compares objects first, then the contents of identical objects."""
        (sizes, values, code), (noted_sizes, noted, noted_code) = self._now(), self._noted
        if sizes != noted_sizes or not are_identical(code, noted_code):
            return False
        are_equal = are_identical(values, noted) or all(
            one is other or key_of(one) == key_of(other) for one, other in zip(values, noted, strict=True)
        )
        return are_equal and self._contents.are_same()

    def are_same_without_unread(self) -> bool:
        """Whether all settings are unchanged that code reads, and all others but numbers, words and tensors.

        What is no longer the same and never read (a callback's counter, outputs that a forward keeps) is not compared
        again, in all modules that have an attribute of its name.
        """
        sizes, values, code = self._noted
        slots = [(of, name) for of, names in self._reads for name in names]
        noted = {(id(of), name): value for (of, name), value in zip(slots, values, strict=False)}
        kinds = (*PLAIN, float, torch.Tensor)
        attributes = [(of, name) for of in self._owners for name in of if isinstance(of[name], kinds)]
        changed = {n for of, n in attributes if key_of(of[n]) != key_of(noted.get((id(of), n), Ellipsis))}
        read = set(chain.from_iterable(map(_attributes_read_in, self._codes)))
        unread = changed - OF_MODULES - read - _attributes_read_by(_bases_of(self._types))
        owners = set(map(id, self._owners))
        stay = [id(of) not in owners or name not in unread for of, name in slots]
        values = [value for value, stays in zip_longest(values, stay, fillvalue=True) if stays]
        sizes = [n - sum((id(of), c) in noted for c in unread) for n, of in zip(sizes, self._owners, strict=True)]
        self._noted = sizes, values, code
        self._unread |= unread
        self._reads = [
            (of, names if id(of) not in owners else [name for name in names if name not in unread])
            for of, names in self._reads
        ]
        return self.are_same()

    def described(self) -> str:
        """Return the settings in words that are the same in every process."""
        attributes = [(name, told(of.get(name))) for of, name in self._slots[: self._num_attributes]]
        read = {(name, told(of.get(name))) for of, name in self._slots[self._num_attributes :]}
        cells = sorted(told(content(cell)) for cell in self._cells)
        own = [told(own_forward(of)) for of in self._owners]
        hooks = [[told(hook) for table in HOOKS for hook in of[table].values()] for of in self._owners]
        patched = [(n, told(value)) for of in PATCHED for n, value in vars(of).items() if _is_users_function(value)]
        return repr(([told(cls) for cls in self._types], attributes, sorted(read), cells, own, hooks, patched))

    def _now(self) -> tuple[list[int], list[Any], list[Any]]:
        """Return the numbers of attributes, the values, and the parts, hooks and replaced methods."""
        # in each step: functions of C walk through them
        sizes = [len(of) - ("forward" in of) for of in self._owners]
        if self._unread:
            pairs = zip(sizes, self._owners, strict=True)
            sizes = [size - sum(map(of.__contains__, self._unread)) for size, of in pairs]
        held = [*filter(None, chain.from_iterable(map(held_in, self._owners)))]
        code = [*chain.from_iterable(held), *chain.from_iterable(map(values_in, held))]
        hooks = chain.from_iterable(map(values_in, filter(None, chain.from_iterable(map(hooks_in, self._owners)))))
        code += [hook for hook in hooks if not _is_libraries_function(hook)]
        code += [hook for table in OF_ALL for hook in table.values() if not is_known(hook)]
        code += map(type, self._modules)
        code += map(vars(functional).get, self._functional)
        code += [value for name, value in vars(torch.Tensor).items() if name != "__slotnames__"]  # which pickle sets
        code += [own for of in self._owners if "forward" in of and (own := own_forward(of)) is not None]
        values = chain.from_iterable(map(of.get, names) for of, names in self._reads)
        return sizes, [*values, *map(content, self._cells)], code


class ReadOutside:
    """A snapshot of what modules read outside of them: globals, closures and attributes of classes that users' code in
    them names, and the functions of `torch.nn.functional`.

    The insides of objects that are also attributes of the modules do not count. Nor does a Trainer, whose changes are
    sent to all stages, nor what Accelerate tells about the processes, which is exchanged while a loss runs.

    Args:
        modules: the modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        slots, functions = list[Slot](), list[FunctionType]()
        for base in filter(is_users, _bases_of(map(type, modules))):
            for name, value in vars(base).items():
                function = function_in(value)
                if isinstance(function, FunctionType):
                    functions.append(function)
                elif not name.startswith("__"):
                    slots.append((vars(base), name))
        self._cells: list[CellType] = []
        slots += _read_by(functions, self._cells, [])
        slots += [(vars(functional), name) for name, value in vars(functional).items() if isinstance(value, CALLABLE)]
        self._slots = slots
        self._noted = self._now()
        attributes = chain.from_iterable(vars(module).values() for module in modules)
        of_modules = set(map(id, containers_in(attributes)))
        containers = [one for one in containers_in(self._noted, OF_TRAINING) if id(one) not in of_modules]
        self._contents = Contents(containers)

    def changed(self) -> str:
        """The name of a value that has changed; empty if all are the same."""
        names = [*(name for _, name in self._slots), *("a closure" for _ in self._cells)]
        for name, value, noted in zip(names, self._now(), self._noted, strict=True):
            if value is not noted and key_of(value) != key_of(noted):
                return name
        return "" if self._contents.are_same() else "a container or object"

    def _now(self) -> list[Any]:
        return [*(of.get(name) for of, name in self._slots), *map(content, self._cells)]


def names_read_by(modules: Iterable[nn.Module]) -> frozenset[str]:
    """Return the attributes that the functions of users' classes among these modules' classes read.

    `training` is left out, and what only `__init__` reads. Texts count: `getattr(self, "share", None)`.
    """
    return _attributes_read_by(filter(is_users, _bases_of(map(type, modules)))) - {"training"}


def _attributes_read_by(classes: Iterable[type]) -> frozenset[str]:
    functions = [function_in(v) for cls in classes for name, v in vars(cls).items() if name != "__init__"]
    codes = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    return frozenset(chain.from_iterable(map(_attributes_read_in, codes)))


def _attributes_read_in(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        if isinstance(value, CodeType):
            yield from _attributes_read_in(value)
        elif isinstance(value, str) and instruction.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST")):
            yield value


def _is_libraries_function(hook: Any) -> bool:
    """Whether a hook is a function of a known library: turning on gradient checkpointing adds one each time."""
    return isinstance(hook, FunctionType) and is_known(hook)


def _bases_of(classes: Iterable[type]) -> Iterable[type]:
    """The base classes of all these classes, each once."""
    return dict.fromkeys(base for cls in dict.fromkeys(classes) for base in bases(cls))


def _read_by(functions: Sequence[FunctionType], cells: list[CellType], codes: list[CodeType]) -> Iterator[Slot]:
    """Yield the locations of global variables that functions read, directly or through other users' functions.

    Args:
        functions: the functions.
        cells: receives the functions' closures.
        codes: receives the code of the functions, without constructors.
    """
    waiting, done = list(functions), set[int]()
    while waiting and len(done) < MOST_FUNCTIONS:
        function = waiting.pop(0)  # the modules' own functions first
        if id(function) in done:
            continue
        done.add(id(function))
        names, own = _names_in(function.__code__), function.__closure__ or ()
        codes += [function.__code__] if function.__name__ != "__init__" else []
        cells += own
        around = accumulate(str(function.__globals__.get("__package__")).split("."), "{}.{}".format)
        imported = names.union(f"{package}.{name}" for package in around for name in names) & sys.modules.keys()
        values = [*map(content, own), *(sys.modules[name] for name in sorted(imported))]
        values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        slots: list[Slot] = [(function.__globals__, name) for name in sorted(names & function.__globals__.keys())]
        seen = set[int]()  # modules, and objects of users' classes
        for _ in range(DEEPEST):  # `config.model.scale` is read of a variable, of a module or class in it, and so on
            yield from slots
            values += [function_in(of.get(name)) for of, name in slots]
            values += chain.from_iterable(map(_held_in, tuple(values)))
            waiting += filter(_is_users_function, map(function_in, values))
            inside = {id(value): _slots_in(value, names) for value in values if id(value) not in seen}
            seen.update(inside)
            values, slots = [], list(chain.from_iterable(inside.values()))


def _held_in(value: Any) -> Iterable[Any]:
    """The contents of a small container, such as a table of activations, and of a `functools.partial`."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (dict, list, tuple)) and len(value) <= MOST_FUNCTIONS:
        return list(value.values() if isinstance(value, dict) else value)
    return []


def _slots_in(value: Any, names: Collection[str]) -> list[Slot]:
    """The locations of what may be read of a value by one of the names: in a module, and in a user's class.

    In the class also of methods that are called without a name, and where a value may be added that overrides.
    """
    if isinstance(value, ModuleType):
        return [(vars(value), name) for name in sorted(vars(value).keys() & names)]
    cls = value if isinstance(value, type) else type(value)
    spaces = [vars(base) for base in bases(cls)] if is_users(cls) else []
    read = {name for of in spaces for name, one in of.items() if name in names or _is_implicit(name, one)}
    return [(of, name) for of in spaces for name in sorted(read)]


def _is_implicit(name: str, value: Any) -> bool:
    """Whether a method is called by operators and the like."""
    return name.startswith("__") and name not in NOT_IMPLICIT and isinstance(value, FunctionType)


def _inherited_in(classes: Sequence[type]) -> Iterator[Slot]:
    """The locations in users' classes where a value may be added that overrides an inherited one.

    Args:
        classes: a class and its base classes.
    """
    names = {name for cls in classes for name in vars(cls) if not name.startswith("__")}
    for space in map(vars, filter(is_users, classes)):
        yield from ((space, name) for name in sorted(names - space.keys()))


def _users_classes(values: Iterable[Any]) -> list[type]:
    """Users' classes among values, and of values, each once; without those of modules."""
    classes = dict.fromkeys(value if isinstance(value, type) else type(value) for value in values)
    return [cls for cls in classes if is_users(cls) and not issubclass(cls, nn.Module)]


def _is_users_function(value: Any) -> bool:
    return isinstance(value, FunctionType) and not is_known(value)


def _functions_named_by(functions: Iterable[Any], codes: list[CodeType]) -> Iterator[Slot]:
    """Yield the locations of the functions that libraries' functions use: in their modules, and in others named there.

    Args:
        functions: the functions, and other values, which are left out.
        codes: as for `_read_by`.
    """
    waiting = [inspect.unwrap(function) for function in functions if isinstance(function, FunctionType)]
    done, seen = set[int](), set[tuple[int, str]]()
    while waiting:
        function = waiting.pop()
        if id(function) in done or not is_known(function):
            continue
        done.add(id(function))
        names, space = _names_in(function.__code__), function.__globals__
        codes += [function.__code__] if function.__name__ != "__init__" else []
        named = [of for of in map(space.get, names) if isinstance(of, ModuleType)]
        spaces = [space, *(vars(of) for of in named if of.__name__.partition(".")[0] in LIBRARIES)]
        slots = [(of, name) for of in spaces for name in names & of.keys() if isinstance(of[name], (*CALLABLE, type))]
        waiting += [f for of, n in slots if isinstance(f := of[n], FunctionType) and f.__globals__ is space]
        yield from (slot for slot in slots if (id(slot[0]), slot[1]) not in seen)
        seen.update((id(of), name) for of, name in slots)


def _names_in(code: CodeType) -> set[str]:
    """The names in a function, and in functions inside of it; also in texts, if it reads values by them."""
    names = set(code.co_names)
    texts = {constant for constant in code.co_consts if isinstance(constant, str)} if names & BY_TEXT else set[str]()
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return names.union(texts, *inner)
