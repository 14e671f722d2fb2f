"""Random number generators: the global ones, and those that users' objects own.

`seeded` and `global_state_kept` handle the default generators of Python, NumPy and torch, on the CPU and on the
accelerator. A collator, a dataset or a trainer may own generators that no seed reaches. `generators_kept` finds them
and restores their states, so that collating a few samples before the first step does not change the random numbers of
the training.
"""

from __future__ import annotations

import base64
import gc
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import get_worker_info

DEEPEST = 16
"""Maximum distance from an object to a generator, in references: two for an attribute, three into a closure."""
MOST_OBJECTS = 10_000
"""Maximum number of objects that are searched, the nearest first."""
MOST_ELEMENTS = 256
"""Containers with more elements than this are not searched, because their elements are samples, not parts."""

_PLAIN = (str, bytes, bytearray, int, float, complex, type(None), type, CodeType, ModuleType, np.ndarray, torch.Tensor)
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_INSTALLED = tuple(
    {path for name in ("stdlib", "purelib", "platlib") if (path := sysconfig.get_paths().get(name))}
    | {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
)


# ------------------------------------------------------------------------------------ the global generators
def seed_all(seed: int) -> None:
    """Seed the default generators of Python, NumPy and torch, and the accelerator's if it is in use."""
    torch.default_generator.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    device = _device_module()
    if device is not None:
        device.manual_seed(seed % 2**63)


@contextmanager
def global_state_kept() -> Iterator[None]:
    """Context manager that restores the states of the global generators on exit."""
    of_torch, python, numpy = torch_states(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        set_torch_states(of_torch)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context manager: the global generators are seeded with `seed` inside it, and their states are restored on exit.

    Random augmentation and collators (masking) thus draw the same numbers on every rank of a pipeline.
    """
    with global_state_kept():
        seed_all(seed)
        yield


def torch_states() -> list[torch.Tensor]:
    """States of the generators from which torch's functions draw."""
    device = _device_module()
    return [torch.default_generator.get_state(), *([device.get_rng_state()] if device is not None else [])]


def set_torch_states(states: Sequence[torch.Tensor]) -> None:
    """Set the states that `torch_states` has returned in this process."""
    torch.default_generator.set_state(states[0])
    device = _device_module()
    if device is not None and len(states) > 1:
        device.set_rng_state(states[1])


def global_states() -> dict[str, list[Any]]:
    """States of the generators on the CPU, by library, in values for JSON."""
    version, python, gauss = random.getstate()
    kind, numpy, *rest = np.random.get_state(legacy=True)
    torch_state = base64.b64encode(torch.default_generator.get_state().numpy().tobytes()).decode()
    return {
        "torch": [torch_state],
        "python": [version, list(python), gauss],
        "numpy": [str(kind), np.asarray(numpy).tolist(), *rest],
    }


def set_global_states(states: Mapping[str, list[Any]]) -> None:
    """Restore the states of these libraries' generators that `global_states` has returned."""
    if "torch" in states:
        state = np.frombuffer(base64.b64decode(states["torch"][0]), dtype=np.uint8)
        torch.default_generator.set_state(torch.from_numpy(state.copy()))
    if "python" in states:
        version, python, gauss = states["python"]
        random.setstate((version, tuple(python), gauss))
    if "numpy" in states:
        kind, numpy, *rest = states["numpy"]
        np.random.set_state((kind, np.array(numpy, dtype=np.uint32), *rest))


def _device_module() -> Any:
    """The accelerator's module, if this process uses it already; None in a loader's worker, which must not use it."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or get_worker_info() is not None:
        return None
    module = torch.get_device_module(kind)
    return module if getattr(module, "is_initialized", module.is_available)() else None


# ------------------------------------------------------------------------------------ generators of users' objects
@contextmanager
def generators_kept(*owners: Any) -> Iterator[None]:
    """Context manager that restores the states of the generators that these objects own on exit.

    Generators are searched for in attributes, containers, partial functions, closures and the module globals that the
    user's own functions read. A generator that an object creates inside, when it first needs it, is removed again.

    Args:
        owners: a collator, a dataset, a trainer, a model; None is ignored.
    """
    generators, namespaces = _search(owners)
    restore = [_restorer_of(generator) for generator in generators]
    try:
        yield
    finally:
        for one in restore:
            one()
        known = set(map(id, generators))
        for values, before in namespaces:
            for name in [n for n, value in values.items() if _is_generator(value) and id(value) not in known]:
                if name in before:
                    values[name] = before[name]
                else:
                    del values[name]


def _search(owners: Iterable[Any]) -> tuple[list[Any], list[tuple[dict[Any, Any], dict[Any, Any]]]]:
    """Find the generators among some objects and their parts, and the dicts and attributes with their values now."""
    generators, namespaces = [], []
    seen: dict[int, Any] = {}  # holds the objects, since an id may be reused once its object is freed
    following = deque((owner, 0) for owner in owners)
    while following and len(seen) < MOST_OBJECTS:
        one, depth = following.popleft()
        is_large = isinstance(one, _CONTAINERS) and len(one) > MOST_ELEMENTS
        if isinstance(one, _PLAIN) or id(one) in seen or is_large:
            continue
        seen[id(one)] = one
        if _is_generator(one):
            generators.append(one)
            continue
        if isinstance(one, dict):
            namespaces.append((one, dict(one)))
        if depth < DEEPEST:
            following.extend((part, depth + 1) for part in _parts_of(one))
    return generators, namespaces


def _parts_of(one: Any) -> list[Any]:
    """What an object refers to, and what its class and, if it is a user's function, its code do."""
    if isinstance(one, nn.Module):
        return [v for module in one.modules() for name, v in vars(module).items() if not name.startswith("_")]
    parts = gc.get_referents(one)
    if isinstance(one, FunctionType):
        parts = [
            part for part in parts if part is not one.__globals__ and part is not one.__globals__.get("__builtins__")
        ]
        return parts + [one.__globals__.get(name) for name in one.__code__.co_names if _is_of_user(one)]
    of_class = [value for cls in type(one).__mro__ for value in vars(cls).values()]
    attributes = getattr(one, "__dict__", None)
    return [*parts, attributes, *(value for value in of_class if _is_generator(value) or _is_of_user(value))]


def _is_generator(value: Any) -> bool:
    is_one = isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))
    return is_one and not isinstance(value, random.SystemRandom)


def _is_of_user(value: Any) -> bool:
    """Whether it is a function that does not come from an installed package."""
    return isinstance(value, FunctionType) and not value.__code__.co_filename.startswith((*_INSTALLED, "<frozen"))


def _restorer_of(generator: Any) -> Callable[[], Any]:
    """A function that restores the generator's present state."""
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    return partial(generator.set_state, generator.get_state())
