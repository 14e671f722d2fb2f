"""Notices when frozen modules no longer compute what was stored of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
import xxhash
from torch import nn

from .placeholders import is_wrapper, values_of

PLAIN = (bool, int, float, str, type(None), torch.dtype)
"""Types of attributes that are compared."""
PARTS = ("_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks")
MOST_ENTRIES = 64
"""Maximum number of entries in a container that is a setting; larger ones are data."""


class WatchedWeights:
    """Weights, buffers, modes and settings of frozen modules, as they are now.

    PyTorch does not count what is written through `.data`, so one number of each tensor is compared as well.

    Args:
        modules: the modules, each without those inside of it.
        parameters: those that are watched.
    """

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[torch.Tensor]) -> None:
        self._modules = list(dict.fromkeys(modules))
        self._parameters = list(dict.fromkeys(parameters))
        self._owners = [vars(module) for module in self._modules]
        self._plain = [
            (of, name)
            for of in self._owners
            for name, value in of.items()
            if not name.startswith("_") and name not in ("training", "forward") and _setting(value) is not None
        ]
        self.buffers = list(dict.fromkeys(b for b in self._held_buffers() if b is not None and b.numel()))
        """The buffers of the modules."""
        self._counting = [p for p in self._parameters if not p.is_inference()]  # those whose writes are counted
        held = (*self._parameters, *self.buffers)
        self._held, self._wrappers = ([t for t in held if is_wrapper(t) is kind] for kind in (False, True))
        self._where: list[int] = []  # of the parameters that the views belong to
        self._middles: list[list[torch.Tensor]] = []
        self._checksums: dict[int, tuple[int, float]] = {}  # of buffers: with the number of writes
        self._noted_parts, self._noted_modes, self._noted_settings = self._parts(), self._modes(), self._settings()
        self._noted_buffers, self._noted_values = self._held_buffers(), self._values()

    @classmethod
    def of(cls, roots: Sequence[nn.Module]) -> WatchedWeights:
        """Watch whole modules."""
        return cls([m for root in roots for m in root.modules()], [p for root in roots for p in root.parameters()])

    def digest(self) -> str:
        """Of all values, and of the modes."""
        content = xxhash.xxh3_128(repr(self._modes()).encode())
        for tensor in (*self._parameters, *self.buffers):
            content.update(digest_of(tensor).encode())
        return content.hexdigest()

    def what_changed(self, settings: bool = True, values: bool = True, modes: bool = True) -> str | None:
        """What is another than when this was made, in words; None if nothing is.

        Args:
            settings: whether attributes, hooks and modes count.
            values: whether the values of weights and buffers count.
            modes: whether modes count, if settings do.
        """
        if settings and not (_are_identical(self._parts(), self._noted_parts) and self._are_settings_same()):
            return "an attribute, a hook or a part of its modules has been changed, added or removed"
        if settings and modes and self._modes() != self._noted_modes:
            return "its modules have been set to another mode (train() or eval())"
        if not values:
            return None
        if self._values() != self._noted_values or not _are_identical(self._held_buffers(), self._noted_buffers):
            return "its weights or buffers have been changed, or are trained again"
        return None

    def take_rewritten(self, digest: str) -> bool:
        """Take values that were written anew for the noted ones, if all are equal. Returns whether they are.

        Args:
            digest: `digest()` of the noted values.
        """
        are_held = _are_identical(self._held_buffers(), self._noted_buffers)
        if not are_held or self.what_changed(values=False) is not None or self.digest() != digest:
            return False
        noted, self._noted_values = self._noted_values, self._values()
        return bool(self._noted_values[0] == noted[0])  # what is trained again is another model

    def _are_settings_same(self) -> bool:
        """Objects are compared first: only what is in containers may change while they are the same."""
        sizes, values, inside = self._settings()
        noted_sizes, noted, noted_inside = self._noted_settings
        are_same = _are_identical(values, noted) or list(map(_setting, values)) == list(map(_setting, noted))
        return are_same and sizes == noted_sizes and inside == noted_inside

    def _settings(self) -> tuple[list[int], list[Any], list[Any]]:
        """Numbers of attributes (without `forward`, which each call replaces), the plain ones, and what is in them."""
        values = [of.get(name) for of, name in self._plain]
        inside = [_setting(value) for value in values if type(value) in (dict, list, tuple)]
        return [len(of) - ("forward" in of) for of in self._owners], values, inside

    def _parts(self) -> list[Any]:
        tables = [of[part] for of in self._owners for part in PARTS if of[part]]
        return [*chain.from_iterable(tables), *chain.from_iterable(table.values() for table in tables)]

    def _modes(self) -> list[bool]:
        return [of["training"] for of in self._owners]

    def _held_buffers(self) -> list[Any]:
        return [buffer for of in self._owners for buffer in of["_buffers"].values()]

    def _values(self) -> tuple[list[Any], ...]:
        """Flags of weights, how often they were written to, what is in buffers, and one number of each tensor."""
        where = [tensor.data_ptr() for tensor in self._held]
        where += [values_of(tensor)[0].data_ptr() for tensor in self._wrappers]
        if where != self._where:  # weights may be moved to other memory
            self._where, self._middles = where, self._views_of_middles()
        numbers = [torch.cat(views) for views in self._middles]
        return (
            [p.requires_grad for p in self._parameters],
            [p._version for p in self._counting],
            [self._checksum(buffer) for buffer in self.buffers],
            [(n.nan_to_num() if n.is_floating_point() else n).tolist() for n in numbers],  # NaN equals nothing
        )

    def _checksum(self, buffer: torch.Tensor) -> float:
        """A number that changes if values change or swap places, as they may in a mask.

        It is computed anew only if the buffer was written to: DDP writes the same values in each step.
        """
        version, checksum = self._checksums.get(id(buffer), (-2, 0.0))
        if version != _version(buffer):
            values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
            values = values.detach().reshape(-1).double().nan_to_num()
            weights = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=values.device).sqrt()
            version, checksum = _version(buffer), float(values @ weights)
            self._checksums[id(buffer)] = version, checksum
        return checksum

    def _views_of_middles(self) -> list[list[torch.Tensor]]:
        by_type: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in (*self._parameters, *self.buffers):
            for value in values_of(tensor)[:1]:
                if value.numel() and not value.is_complex():
                    middle = value.detach()[tuple(size // 2 for size in value.shape)]
                    by_type.setdefault((value.dtype, value.device), []).append(middle.view(1))
        return list(by_type.values())


def digest_of(tensor: torch.Tensor) -> str:
    """A digest of a tensor's dtype, shape and all bits."""
    content = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    for value in values_of(tensor):
        content.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def _are_identical(now: Sequence[Any], noted: Sequence[Any]) -> bool:
    return len(now) == len(noted) and all(map(is_, now, noted))


def _setting(value: Any, is_inside: bool = False) -> Any:
    """A value that can be compared with a later one; None for tensors and other objects, which are no settings."""
    if type(value) in PLAIN:
        return "None" if value is None else value
    if callable(value) and not isinstance(value, nn.Module):
        return id(value)
    if is_inside or not isinstance(value, (dict, list, tuple)) or len(value) > MOST_ENTRIES:
        return None
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    return [(str(key), _setting(entry, True)) for key, entry in entries]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
