"""Tells known libraries' code from other code in a module's forward.

The code of known libraries computes a function of a module's inputs, weights and settings. Other code may not, so its
outputs are stored only if the user has declared the module (`cached_modules`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ....model.frozen_prefix import frozen_modules
from ....model.method_override import MethodOverride

LIBRARIES = frozenset(
    {
        *("accelerate", "bitsandbytes", "diffusers", "liger_kernel", "peft", "sentence_transformers", "timm"),
        *("torch", "torchao", "torchvision", "transformers"),
    }
)
"""Top-level packages of known libraries."""
FOREIGN = (
    "{}. If its output for a sample depends on nothing but the sample, its weights, its buffers and its attributes,"
    " declare it with cached_modules=['{}']"
)
"""Reason for not storing a module with unknown code, with the code and the module's name as fields."""
OF_ALL = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
"""Tables of the hooks of all modules, from `torch.nn.modules.module.register_module_forward_hook`."""
BY_LONGEST = frozenset({"dynamic", "longrope"})
"""Kinds of rotary embeddings whose frequencies follow the longest sample of a batch."""
HELPERS = frozenset({"contextlib", "functools", "hf_pipetransformer", "typing_extensions", "warnings"})
"""Top-level packages of functions that may wrap other functions."""


def is_declared(name: str, declared: Collection[str]) -> bool:
    """Whether the user has declared a module, or a module that contains it, by name."""
    return any(name == other or name.startswith(f"{other}.") for other in declared)


def candidates(model: nn.Module, opened: Collection[str], declared: Collection[str]) -> dict[str, str]:
    """Return name -> reason for the largest frozen modules. The reason is empty if the module may be stored.

    A list of modules, which is never called itself, is replaced by its parts, and so is a module with other code if it
    contains a larger module of a known library.

    Args:
        model: the model.
        opened: as for `frozen_modules`.
        declared: names of the modules that the user has declared.
    """
    known = functools.cache(_why_not_known)
    opened = set(opened)
    while True:
        found = frozen_modules(model, opened)
        lists = {name for name, module in found.items() if type(module).forward is nn.Module.forward}
        if lists:
            opened |= lists
            continue
        why_not = {n: "" if is_declared(n, declared) else foreign_code(module, known) for n, module in found.items()}
        mixed = {name for name, why in why_not.items() if why and _has_known_inside(found[name], known)}
        if not mixed:
            return why_not
        opened |= mixed


def _has_known_inside(module: nn.Module, known: Callable[[type], str]) -> bool:
    """Whether a module contains a module with parts that consists of a known library's code only."""
    return any(
        next(part.children(), None) is not None and not foreign_code(part, known)
        for part in module.modules()
        if part is not module
    )


def foreign_code(module: nn.Module, known: Callable[[type], str] | None = None, hooks_count: bool = True) -> str:
    """Describe the first code in a module from outside the known libraries; empty if there is none.

    Checks the classes of all parts, functions that replace methods, callable attributes, hooks on the parts, and
    attention and mask functions. Hooks on the module itself do not count: they also run when its output is read.

    Args:
        module: the module.
        known: a memoized `_why_not_known`.
        hooks_count: whether hooks on the parts count.
    """
    known = known or functools.cache(_why_not_known)
    for part in module.modules():
        attributes = [value for value in vars(part).values() if callable(value) and not isinstance(value, nn.Module)]
        hooks = hooks_of(part) if part is not module and hooks_count else []
        used = getattr(getattr(part, "config", None), "_attn_implementation", None)
        attention, mask = ALL_ATTENTION_FUNCTIONS.get(used), ALL_MASK_ATTENTION_FUNCTIONS.get(used)
        for value in (*attributes, *hooks, attention, mask):
            if not is_known(value):
                return f"the function {_name(value)} in it is not of a known library"
        if why := known(type(part)):
            return why
    return ""


def replaced_function_of_torch() -> str | None:
    """The name of a function in `torch.nn.functional` that is of no known library; None without one.

    While torch's functions are watched, one that calls the function that it replaces may run twice.
    """
    functions = [(n, of) for n, of in vars(functional).items() if isinstance(of, (FunctionType, functools.partial))]
    return next((name for name, of in functions if not is_known(of)), None)


@contextmanager
def modules_called() -> Iterator[dict[nn.Module, None]]:
    """Inside, collects the modules that are called."""
    called: dict[nn.Module, None] = {}

    def note(module: nn.Module, given: Any) -> None:
        called[module] = None

    hook = register_module_forward_pre_hook(note)
    try:
        yield called
    finally:
        hook.remove()


def why_not_by_sample(modules: Iterable[nn.Module]) -> str | None:
    """Why the output for a sample may depend on the other samples of a longer batch; None if nothing is known."""
    for module in modules:
        kinds = getattr(module, "rope_type", None)  # of a layer type each, or one for all
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if isinstance(kind, str) and kind in BY_LONGEST:
                return f"its rotary embeddings of type {kind!r} depend on the longest sample of a batch"
    return None


def hooks_of(part: nn.Module) -> list[Any]:
    """The forward hooks that run when a module is called, also those that torch has for all modules."""
    return [hook for table in (part._forward_hooks, part._forward_pre_hooks, *OF_ALL) for hook in table.values()]


def users_hook_inside(module: nn.Module, or_on_it: bool = False) -> str | None:
    """Name of a user's hook on a part of a module; None without one. It may do anything when the part runs.

    Args:
        module: the module.
        or_on_it: whether hooks on the module itself count.
    """
    for part in module.modules():
        for hook in hooks_of(part) if or_on_it or part is not module else ():
            if not is_known(hook):
                return str(getattr(hook, "__qualname__", type(hook).__qualname__))
    return None


class UsersHooks:
    """The user's forward hooks on the modules of a model. They may read all that these are given or return.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables = [table for part in model.modules() for table in (part._forward_hooks, part._forward_pre_hooks)]
        self._numbers: list[int] = []  # torch gives each hook another number
        self._are_any = False

    @property
    def are_any(self) -> bool:
        """Whether there is one now. Takes some microseconds, as it is asked in each call."""
        numbers = list(itertools.chain.from_iterable(self._tables))
        if numbers != self._numbers:
            self._numbers = numbers
            self._are_any = not all(is_known(hook) for table in self._tables for hook in table.values())
        return self._are_any


def kept_by(module: nn.Module) -> list[dict[str, int]]:
    """The identities of the attributes of a module's parts, without switches (such as "hooks are set")."""
    left_out = ("_modules", "_buffers", "forward")
    return [
        {name: id(value) for name, value in vars(part).items() if name not in left_out and type(value) is not bool}
        for part in module.modules()
    ]


def _why_not_known(cls: type) -> str:
    """Describe the first code of a module's class from outside the known libraries; empty if there is none."""
    for base in cls.__mro__:
        is_of_library = _package(base.__module__) in LIBRARIES
        for value in vars(base).values():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            function = function.func if isinstance(function, functools.cached_property) else function
            is_code = isinstance(function, FunctionType) or (callable(function) and not isinstance(function, type))
            if is_code and not (is_of_library and is_known(function)):
                what = f"its code is of {base.__module__}.{base.__qualname__}"
                return what if not is_of_library else f"{what}, where {_name(function)} replaces a method"
        if base is nn.Module:
            break
    return ""


def is_known(value: Any) -> bool:
    """Whether a function and the functions that it wraps, or an object's class, come from a known library."""
    while value is not None:
        if isinstance(value, MethodOverride):
            value = value.replaced
        elif isinstance(value, functools.partial):
            if not all(is_known(given) for given in (*value.args, *value.keywords.values()) if callable(given)):
                return False
            value = value.func
        elif isinstance(value, MethodType):
            value = value.__func__
        elif isinstance(value, FunctionType):
            # the module that defines it: `__module__` is copied from the wrapped function
            if _package(value.__globals__.get("__name__")) not in LIBRARIES | HELPERS:
                return False
            value = getattr(value, "__wrapped__", None)
        else:
            is_of_class = isinstance(value, type) or not hasattr(value, "__module__")
            module = getattr(value if is_of_class else type(value), "__module__", None)
            return module is None or _package(module) in LIBRARIES | HELPERS | {"builtins", "torch._C"}
    return True


def _package(module: Any) -> str:
    return str(module).partition(".")[0]


def _name(value: Any) -> str:
    value = value.func if isinstance(value, functools.partial) else value
    of = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(of, '__module__', '')}.{of.__qualname__}"
