"""Whose code computes what a module returns: a known library's, or somebody else's.

The code of known libraries computes a function of a module's inputs, weights and settings. Of other code that is not
known, so its outputs are stored only if the user has declared the module (`cached_modules`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ....model.frozen_prefix import frozen_modules
from ....model.method_override import MethodOverride

LIBRARIES = frozenset(
    {
        *("accelerate", "bitsandbytes", "diffusers", "liger_kernel", "peft", "sentence_transformers", "timm"),
        *("torch", "torchao", "torchvision", "transformers"),
    }
)
"""Top-level packages whose code is known."""
FOREIGN = (
    "{}. If its output for a sample depends on nothing but the sample, its weights, its buffers and its attributes,"
    " declare it with cached_modules=['{}']"
)
"""Why a module is not stored whose code is not known: what is not known of it, and its name."""
HELPERS = frozenset({"contextlib", "functools", "hf_pipetransformer"})
"""Top-level packages of functions that may wrap others."""


def is_declared(name: str, declared: Collection[str]) -> bool:
    """Whether a module, or one that contains it, is among the modules that the user has declared, all by name."""
    return any(name == other or name.startswith(f"{other}.") for other in declared)


def candidates(model: nn.Module, opened: Collection[str], declared: Collection[str]) -> dict[str, str]:
    """The largest frozen modules that may be looked at, by name, with why each may not be stored; empty if it may.

    A module with code of somebody else's is replaced by its parts if a larger module of a known library is in it.

    Args:
        model: the model.
        opened: as for `frozen_modules`.
        declared: names of the modules that the user has declared.
    """
    known = functools.cache(_why_not_known)
    opened = set(opened)
    while True:
        found = frozen_modules(model, opened)
        why_not = {n: "" if is_declared(n, declared) else foreign_code(module, known) for n, module in found.items()}
        mixed = {name for name, why in why_not.items() if why and _has_known_inside(found[name], known)}
        if not mixed:
            return why_not
        opened |= mixed


def _has_known_inside(module: nn.Module, known: Callable[[type], str]) -> bool:
    """Whether a module contains another one that has parts itself, and is of a known library with all of them."""
    return any(
        next(part.children(), None) is not None and not foreign_code(part, known)
        for part in module.modules()
        if part is not module
    )


def foreign_code(module: nn.Module, known: Callable[[type], str] | None = None) -> str:
    """Describe the first code in a module that is not of a known library; empty if there is none.

    Looked at are the classes of all parts, functions that replace methods, attributes that can be called, hooks on
    the parts (those on the module itself run when its output is read as well), and attention functions.

    Args:
        module: the module.
        known: `_why_not_known`, with a memory.
    """
    known = known or functools.cache(_why_not_known)
    for part in module.modules():
        attributes = [value for value in vars(part).values() if callable(value) and not isinstance(value, nn.Module)]
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()] if part is not module else []
        attention = ALL_ATTENTION_FUNCTIONS.get(getattr(getattr(part, "config", None), "_attn_implementation", None))
        for value in (*attributes, *hooks, attention):
            if not is_known(value):
                return f"the function {_name(value)} in it is not of a known library"
        if why := known(type(part)):
            return why
    return ""


def _why_not_known(cls: type) -> str:
    """Describe the first code of a module's class that is not of a known library; empty if there is none."""
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
    """Whether a function, with the functions that it wraps, or the class of an object, is of a known library."""
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
            # the module in which it was written, while `__module__` is copied from what it wraps
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
