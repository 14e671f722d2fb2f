"""Tells whether a model's forward may be repeated for a trial: afterwards, all that it changes can be restored."""

from __future__ import annotations

import dis
import functools
import logging
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ...model.left_as_found import parts_of, vars_of
from ..prefix_cache.cache.known_code import LIBRARIES, foreign_code

PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, np.dtype, logging.Logger)
KNOWN = LIBRARIES | {"hf_pipetransformer", "numpy", *sys.stdlib_module_names}
CHANGES = {"STORE_GLOBAL", "DELETE_GLOBAL"}


def is_of_libraries(model: nn.Module) -> bool:
    """Whether a model's forward is code of known libraries alone."""
    return not foreign_code(model, hooks_count=False)  # hooks are at rest in a trial


def is_restorable(model: nn.Module) -> bool:
    """Whether a model's forward changes nothing but what the model holds, which `left_as_found` restores.

    Users' code may change values of global variables: a counter, a schedule. Without such variables it may not.
    """
    if is_of_libraries(model):
        return True
    seen: dict[int, Any] = {}
    return all(_is_fixed(value, seen) for part in parts_of([model]) for value in _code_of(part))


def _code_of(part: Any) -> list[Any]:
    """The class of an object, and the functions among its attributes."""
    if isinstance(part, type):
        return [part]
    functions = (FunctionType, MethodType, functools.partial)
    return [type(part), *(value for value in vars_of(part).values() if isinstance(value, functions))]


def _is_fixed(value: Any, seen: dict[int, Any]) -> bool:
    """Whether a value that code can reach keeps nothing between calls, nor does the code that it calls."""
    if id(value) in seen or isinstance(value, PLAIN):
        return True
    seen[id(value)] = value
    if isinstance(value, (tuple, frozenset)):
        return all(_is_fixed(entry, seen) for entry in value)
    if isinstance(value, functools.partial):
        return all(_is_fixed(one, seen) for one in (value.func, *value.args, *value.keywords.values()))
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return _is_fixed(value.__func__, seen)
    if isinstance(value, property):
        return all(_is_fixed(function, seen) for function in (value.fget, value.fset, value.fdel))
    if isinstance(value, ModuleType):
        return _is_of_library(value.__name__)
    if isinstance(value, FunctionType):
        if _is_of_library(str(value.__globals__.get("__name__"))):
            return True
        return all(_is_fixed(one, seen) for one in _reached_by(value))
    if isinstance(value, type):
        if _is_of_library(value.__module__):
            return True
        code = (FunctionType, staticmethod, classmethod, property)
        own = [of for of in vars(value).values() if isinstance(of, code)]
        return all(_is_fixed(one, seen) for one in (*value.__bases__, *own))
    return callable(value) and _is_of_library(type(value).__module__)


def _reached_by(function: FunctionType) -> Iterator[Any]:
    """The values of the variables outside of a function that its code names; a list for one that it sets."""
    names = set(function.__code__.co_freevars)
    for code in _codes(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname in CHANGES or (step.opname == "STORE_DEREF" and step.argval in names):
                yield []
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield function.__globals__.get(step.argval)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # has no value yet
            continue
    yield from (function.__defaults__ or ())
    yield getattr(function, "__wrapped__", None)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_of_library(module: str) -> bool:
    return module != "__main__" and module.partition(".")[0] in KNOWN
