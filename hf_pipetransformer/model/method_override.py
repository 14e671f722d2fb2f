"""Replaces methods of single modules, which the model's own code then calls, and attributes for a limited time."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn


@contextmanager
def having(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, these attributes (or methods) of an object have other values."""
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():  # of the class
            own.pop(name, None)
        own.update(before)


_OF_MODULES = vars(sys.modules[nn.Module.__module__])
"""The global variables of the code that calls modules."""


class HookOfOriginal:
    """A forward pre-hook of a module. A copy or pickle of it returns the inputs, and does not need this package."""

    def __init__(self, function: Callable[[Any, Any], None]) -> None:
        self._function = function

    def __call__(self, module: Any, inputs: Any) -> None:
        self._function(module, inputs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ({}, "get")  # of (module, inputs): the inputs


def original_method(module: nn.Module, name: str = "forward") -> Callable[..., Any]:
    """The method that a module has now, for a function that replaces it.

    If the module uses its class's method, this is looked up in each call: the user's code may change the class or
    its method later.
    """
    own: Callable[..., Any] | None = module.__dict__.get(name)
    if own is not None:
        return own
    cls = type(module)
    bound, of_class = getattr(module, name), getattr(cls, name)

    def original(*args: Any, **kwargs: Any) -> Any:
        if type(module) is cls and getattr(cls, name) is of_class:
            return bound(*args, **kwargs)
        return _of_class(module, name)(*args, **kwargs)

    return original


def _of_class(module: nn.Module, name: str) -> Any:
    """The method of a module's class, bound to the module, also if the module has an own one."""
    found = next(vars(base)[name] for base in type(module).__mro__ if name in vars(base))
    return found.__get__(module, type(module)) if hasattr(found, "__get__") else found


class MethodOverride:
    """Replaces a method of one module until `remove`. A copy of the module gets the earlier method, bound to the copy.

    Args:
        module: the module.
        name: name of the replaced method, which the module's class has.
        function: the function that is called instead. It may call the `original_method`.
    """

    def __init__(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self._module, self._name, self._function = module, name, function
        self.earlier = module.__dict__.get(name)
        """The module's own attribute of this name before; None if it used its class's method."""
        self._original = original_method(module, name)
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._function(*args, **kwargs)
        this: Any = inspect.currentframe
        caller = this().f_back  # this call's own frame is not kept: it would refer to itself, and keep the arguments
        if caller.f_globals is _OF_MODULES:  # torch calls a module: which one?
            module = caller.f_locals.get("self", self._module)
            if module is not self._module and vars(module)["_parameters"] is vars(self._module)["_parameters"]:
                return self._method_of(module)(*args, **kwargs)  # for a copy (`copy.copy`)
        return self._function(*args, **kwargs)

    def _method_of(self, module: nn.Module) -> Any:
        """The method that a module would have without any override that it shares with this one's module."""
        earlier = self.earlier
        while isinstance(earlier, MethodOverride):
            earlier = earlier.earlier
        return _of_class(module, self._name) if earlier is None else earlier

    @property
    def replaced(self) -> Any:
        """The method that would be called without the override."""
        return _of_class(self._module, self._name) if self.earlier is None else self.earlier

    @property
    def __signature__(self) -> inspect.Signature:
        """Signature of the replaced method, because libraries read the names of a model's inputs from it."""
        return inspect.signature(self.replaced)

    def remove(self) -> None:
        """Restore the earlier method. A later replacement of this one stays, and calls the earlier method."""
        if self._module.__dict__.get(self._name) is not self:
            self._function = self._original
        elif self.earlier is None:
            del self._module.__dict__[self._name]
        else:
            setattr(self._module, self._name, self.earlier)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle of the module has the earlier method, and does not need this package."""
        if self.earlier is None:
            return getattr, (self._module, self._name)  # read before the module's pickle has any attributes
        return partial, (self.earlier,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.earlier is not None:
            return copy.deepcopy(self.earlier, memo)
        method = getattr(type(self._module), self._name)
        return MethodType(method, memo.get(id(self._module), self._module))
