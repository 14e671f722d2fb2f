"""Names of modules that a loss may call: attributes of the trainer, variables of the loss, parts of the model.

self.teacher = teacher                     trainer.teacher
a global variable or a closure             loss.teacher
a part of the trained model                its name in the model, such as vision_model
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import Trainer

OF_TRAINER, OF_LOSS = "trainer", "loss"
"""The first words in the names of modules outside of the model."""
OF_STOCK = frozenset({"model", "model_wrapped"})
"""Attributes of the trainer that are the trained model."""
LIBRARIES = ("hf_pipetransformer", "transformers")
"""Packages of trainers with methods that read no module by a variable."""


def named_roots(trainer: Trainer) -> dict[str, nn.Module]:
    """The modules outside of the trained model that a loss may call, by name; parts of them are not named here."""
    found: dict[str, nn.Module] = {}
    for name, value in vars(trainer).items():
        if name not in OF_STOCK:
            found |= dict(_modules_in(value, f"{OF_TRAINER}.{name}"))
    for function in _functions_of(trainer):
        for name, value in _variables_of(function):
            for path, module in _modules_in(value, f"{OF_LOSS}.{name}"):
                found.setdefault(path, module)
    model: Any = trainer.model
    return {name: module for name, module in found.items() if module is not model}


def reachable(trainer: Trainer) -> set[nn.Module]:
    """The trained model, the modules that a loss may call by a name, and all their parts."""
    model: Any = trainer.model
    return {part for root in (model, *named_roots(trainer).values()) for part in root.modules()}


def name_of(module: nn.Module, trainer: Trainer) -> str:
    """The name of a module that a loss has called."""
    model: Any = trainer.model
    if module is model:
        return f"{OF_TRAINER}.model"
    roots = named_roots(trainer)
    for first, root in [("", model), *roots.items()]:
        for inside, part in root.named_modules():
            if part is module:
                return f"{first}.{inside}".strip(".")
    return f"{OF_LOSS}.{type(module).__name__}"


def containers_of(module: nn.Module, trainer: Trainer) -> list[nn.Module]:
    """The modules with a forward that contain a module, in the trained model and in modules that a loss may call."""
    parts = reachable(trainer)
    found = [part for part in parts if part is not module and any(inside is module for inside in part.modules())]
    return [
        part
        for part in found
        if type(part).forward is not nn.Module.forward and not isinstance(part, torch.jit.ScriptModule)
    ]


def _modules_in(value: Any, name: str) -> Iterator[tuple[str, nn.Module]]:
    """A value if it is a module, or the modules in a list or dict of them."""
    if isinstance(value, nn.Module):
        yield name, value
    # not the methods of a class of its own, which may compute or import what the container holds
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        entries = dict.items(value)
    elif isinstance(value, (list, tuple)):
        entries = enumerate(list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value))
    yield from ((f"{name}.{key}", one) for key, one in entries if isinstance(one, nn.Module))


def _functions_of(trainer: Trainer) -> Iterator[Any]:
    """The functions of the user's, or of another library's, that may compute a loss."""
    yield trainer.compute_loss_func
    yield from (value for value in vars(trainer).values() if isinstance(value, (FunctionType, MethodType, partial)))
    for cls in type(trainer).__mro__:
        if cls.__module__.partition(".")[0] not in LIBRARIES:
            yield from (value for value in vars(cls).values() if isinstance(value, (FunctionType, staticmethod)))


def _variables_of(function: Any) -> Iterator[tuple[str, Any]]:
    """The closure of a function, the global variables that it names, and the object that it is bound to, by name."""
    if isinstance(function, partial):
        yield from function.keywords.items()
        yield from _variables_of(function.func)
        return
    function = getattr(function, "__func__", function)
    owner = getattr(function, "__self__", function)
    if not isinstance(function, FunctionType):
        yield from getattr(owner, "__dict__", {}).items()
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not yet bound
            continue
    names = function.__code__.co_names
    yield from ((name, function.__globals__[name]) for name in names if name in function.__globals__)
