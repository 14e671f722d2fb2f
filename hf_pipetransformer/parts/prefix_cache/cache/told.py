"""Values in words that are the same in every process, for the fingerprint of a module's settings.

Equal words mean equal values: a value that cannot be described has other words each time, so that no other training
takes its outputs for its own.
"""

from __future__ import annotations

import pickle
import secrets
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.hooks import RemovableHandle

from ....model.method_override import MethodOverride
from .known_code import is_known
from .values import LOCKS, PLAIN, SIMPLE, entries_of, function_in, has_inside, is_data

DEEPEST = 12
"""Maximum nesting depth of a value that is described."""
LARGEST_PICKLE = 2**30
"""Maximum number of bytes of data that a digest is taken of."""


def told(value: Any, around: tuple[int, ...] = ()) -> str:
    """Return a value in words: functions by their code, containers and objects by their contents.

    Args:
        value: the value.
        around: identities of the values that it is inside of, from the outermost one.
    """
    if type(value) in SIMPLE:
        return repr(value)
    if isinstance(value, (staticmethod, classmethod, property)) or not has_inside(value):
        value = function_in(value)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, MethodOverride):
        return told(value.earlier, around)
    if isinstance(value, np.generic):
        return f"{value.dtype} {value.tobytes().hex()}"
    if isinstance(value, (*PLAIN, float, complex, range)):
        return f"{name} {value!r}" if isinstance(value, (complex, range)) else repr(value)
    if isinstance(value, (torch.Tensor, nn.Module, *LOCKS, RemovableHandle)):
        return name  # their values are compared elsewhere, or are none
    if id(value) in around:
        return f"around it, at level {around.index(id(value))}"
    if len(around) > DEEPEST:
        return secrets.token_hex(16)
    if isinstance(value, FunctionType) and not is_known(value):
        code, *given = entries_of(value)
        return _code_told(code) + repr([told(one, (*around, id(value))) for one in given])
    if is_data(value):  # in a training only its size is compared, but another training may have other data
        return f"{name} {_pickled(value)}"
    if has_inside(value):
        inside = [told(entry, (*around, id(value))) for entry in entries_of(value)]
        return f"{name} {sorted(inside) if isinstance(value, (set, frozenset)) else inside}"
    if isinstance(value, (type, ModuleType, FunctionType, BuiltinFunctionType)):
        return f"{value.__name__} {getattr(value, '__module__', '')} {getattr(value, '__qualname__', '')}"
    if (wrapped := getattr(value, "__wrapped__", None)) is not None:  # by functools.lru_cache, say
        return f"{name} {told(wrapped, (*around, id(value)))}"
    return f"{name} {_pickled(value)}"


class _Digest:
    """A file that takes a digest of what is written, in place of keeping it."""

    def __init__(self) -> None:
        self.hash, self._size = xxhash.xxh3_128(), 0

    def write(self, content: Any) -> int:
        self._size += len(content)
        if self._size > LARGEST_PICKLE:
            raise ValueError
        self.hash.update(content)
        return len(content)


def _pickled(value: Any) -> str:
    """A digest of the value's pickle; a random one if there is none, or if it has other bytes each time."""
    one, other = _Digest(), _Digest()
    try:
        for digest in (one, other):
            pickle.Pickler(digest).dump(value)
    except Exception:  # anything may happen in it
        return secrets.token_hex(16)
    return one.hash.hexdigest() if one.hash.digest() == other.hash.digest() else secrets.token_hex(16)


def _code_told(code: CodeType) -> str:
    constants = [
        _code_told(c) if isinstance(c, CodeType) else repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    return repr((code.co_code.hex(), code.co_names, constants))
