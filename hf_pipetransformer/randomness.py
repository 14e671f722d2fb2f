"""Random number generators: the global generators, and generators of users' objects.

`seeded` and `global_state_kept` handle the default generators of Python, NumPy and torch, on the CPU and on the
accelerator. A collator, a dataset or a trainer may own generators that no seed reaches. `generators_kept` finds them
and restores their states. Collating a few samples before the first step then does not change the random numbers of the
training.
"""

from __future__ import annotations

import base64
import functools
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import get_worker_info

DEEPEST = 8
"""Maximum distance from an object to a generator, in steps such as attribute, element or closure."""
MOST_OBJECTS = 5_000
"""Maximum number of objects to search, the nearest first."""
MOST_ELEMENTS = 256
"""Containers with more elements are not searched: their elements are samples, not parts."""

_ABSENT = object()
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, ModuleType, np.ndarray, torch.Tensor)
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
    device = _device_module()
    on_device = device.get_rng_state() if device is not None else None
    on_cpu = torch.default_generator.get_state()
    python, numpy = random.getstate(), np.random.get_state(legacy=False)  # in half the time
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(on_cpu)
        if device is not None:
            device.set_rng_state(on_device)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside the context, the global generators are seeded with `seed`. Their states are restored on exit.

    Random augmentation and collators (masking) then draw the same numbers on every rank of a pipeline.
    """
    with global_state_kept():
        seed_all(seed)
        yield


def other_randomness() -> tuple[Any, ...]:
    """States of the generators of Python and NumPy."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), *map(repr, rest), repr(kind)


def torch_states() -> list[torch.Tensor]:
    """Return the states of the generators that torch's functions use."""
    device = _device_module()
    return [torch.default_generator.get_state(), *([device.get_rng_state()] if device is not None else [])]


def set_torch_states(states: Sequence[torch.Tensor]) -> None:
    """Set the states that `torch_states` has returned in this process."""
    torch.default_generator.set_state(states[0])
    device = _device_module()
    if device is not None and len(states) > 1:
        device.set_rng_state(states[1])


def global_states() -> dict[str, list[Any]]:
    """Return the states of the generators on the CPU, by library, in values for JSON."""
    version, python, gauss = random.getstate()
    kind, numpy, *rest = np.random.get_state(legacy=True)
    torch_state = base64.b64encode(torch.default_generator.get_state().numpy().tobytes()).decode()
    return {
        "torch": [torch_state],
        "python": [version, list(python), gauss],
        "numpy": [str(kind), np.asarray(numpy).tolist(), *rest],
    }


def set_global_states(states: Mapping[str, list[Any]]) -> None:
    """Restore states that `global_states` has returned."""
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
    """Return the accelerator's module, if this process already uses it; None in a loader's worker, which must not."""
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
    user's own functions read. A generator that an object creates inside the context, on first use, is removed again.

    Args:
        owners: a collator, a dataset, a trainer, a model; None is ignored.
    """
    found = _Search(owners)
    states = [(generator, _state_of(generator)) for generator in found.generators]
    try:
        yield
    finally:
        for generator, state in states:
            _restore(generator, state)
        found.forget_new_ones()


@dataclass(frozen=True)
class _Namespace:
    """Attributes of an object, or entries of a dict, with their earlier values."""

    values: MutableMapping[Any, Any]
    before: dict[Any, Any]


class _Search:
    """Breadth-first search through some objects and their parts."""

    def __init__(self, owners: tuple[Any, ...]) -> None:
        self.generators: list[Any] = []
        self._namespaces: list[_Namespace] = []
        self._classes: set[type] = set()  # classes with references that were looked at: all their objects share these
        self._seen: dict[int, Any] = {}  # keeps the objects alive: an id may be reused once its object is freed
        self._next: deque[tuple[Any, int]] = deque((owner, 0) for owner in owners)
        while self._next and len(self._seen) < MOST_OBJECTS:
            one, depth = self._next.popleft()
            if isinstance(one, _PLAIN) or id(one) in self._seen:
                continue
            self._seen[id(one)] = one
            if _is_generator(one):
                self.generators.append(one)
            elif depth < DEEPEST:
                self._next.extend((part, depth + 1) for part in self._parts_of(one))

    def forget_new_ones(self) -> None:
        """Remove the generators that were created since the search."""
        known = {id(generator) for generator in self.generators}
        for namespace in self._namespaces:
            for name, value in list(namespace.values.items()):
                if _is_generator(value) and id(value) not in known:
                    earlier = namespace.before.get(name, _ABSENT)
                    if earlier is _ABSENT:
                        del namespace.values[name]
                    else:
                        namespace.values[name] = earlier

    def _parts_of(self, one: Any) -> list[Any]:
        if isinstance(one, nn.Module):
            modules = list(one.modules())
            self._seen.update((id(module), module) for module in modules)
            return [v for module in modules for n, v in vars(module).items() if not n.startswith("_")]
        if isinstance(one, (MethodType, FunctionType, functools.partial)):
            return _parts_of_callable(one)
        parts = [part for cls in type(one).__mro__ for part in _in_slots(one, cls)]
        new = [cls for cls in type(one).__mro__ if cls not in self._classes]
        self._classes.update(new)
        parts += [value for cls in new for value in vars(cls).values() if _is_generator(value) or _is_of_user(value)]
        few = isinstance(one, (list, tuple, set, frozenset, deque)) and len(one) <= MOST_ELEMENTS
        for values in (one, getattr(one, "__dict__", None)):
            if isinstance(values, dict) and (values is not one or len(one) <= MOST_ELEMENTS):
                self._note(values)
                parts += values.values()
        return [*one, *parts] if few else parts

    def _note(self, values: MutableMapping[Any, Any]) -> None:
        self._namespaces.append(_Namespace(values, dict(values)))


def _in_slots(one: Any, cls: type) -> list[Any]:
    """Return the values in the slots of one of an object's classes."""
    slots = cls.__dict__.get("__slots__", ())
    return [getattr(one, name, None) for name in ((slots,) if isinstance(slots, str) else slots)]


def _is_generator(value: Any) -> bool:
    cls: Any = type(value)
    try:
        return _is_class_of_generators(cls)
    except TypeError:  # a class of the user's that cannot be hashed
        return False


@functools.lru_cache(4096)
def _is_class_of_generators(cls: type) -> bool:
    """Known by class: torch's own test of an instance takes ten times as long, and a search asks for each object."""
    is_one = issubclass(cls, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))
    return is_one and not issubclass(cls, random.SystemRandom)


def _is_of_user(value: Any) -> bool:
    """Whether a value is a function from outside the installed packages."""
    return isinstance(value, FunctionType) and not value.__code__.co_filename.startswith((*_INSTALLED, "<frozen"))


def _parts_of_callable(function: FunctionType | MethodType | functools.partial[Any]) -> list[Any]:
    """Return a function's references: defaults, closure and, for a user's function, the global names that it reads."""
    if isinstance(function, MethodType):
        return [function.__self__, function.__func__]
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    parts: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not yet bound
            continue
    if _is_of_user(function):
        parts += [function.__globals__.get(name) for name in function.__code__.co_names]
    return parts


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
