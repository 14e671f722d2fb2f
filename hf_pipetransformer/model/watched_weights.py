"""Notices when frozen modules no longer compute what was stored of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn

from .placeholders import values_of

PLAIN = (bool, int, float, str, type(None), torch.dtype)
"""Types of attributes that are compared."""
MOST_ENTRIES = 64
"""Maximum number of entries in a container that is a setting; larger ones are data."""


class _Noted(NamedTuple):
    """What is compared."""

    parameters: list[tuple[int, int, bool]]
    buffers: list[tuple[int, float]]
    modes: list[bool]
    attributes: list[Any]
    parts: list[int]
    numbers: list[list[float]]


class WatchedWeights:
    """Weights, buffers, modes and settings of frozen modules, as they are now.

    PyTorch does not count what is written through `.data`, so one number of each tensor is compared as well.

    Args:
        modules: the modules, each without those inside of it.
        parameters: those that are watched.
        may_move: whether weights may be moved to other memory and back, with the same values.
    """

    def __init__(
        self, modules: Sequence[nn.Module], parameters: Sequence[torch.Tensor], may_move: bool = False
    ) -> None:
        self._modules = list(dict.fromkeys(modules))
        self._parameters, self._may_move = list(dict.fromkeys(parameters)), may_move
        self._owners = [vars(module) for module in self._modules]
        self._plain = [
            (of, name)
            for of in self._owners
            for name, value in of.items()
            if not name.startswith("_") and name not in ("training", "forward") and _setting(value) is not None
        ]
        self._middles = None if may_move else self._views_of_middles()
        self._checksums: dict[int, tuple[int, float]] = {}  # of buffers: with the number of writes
        self._noted = self._now()

    @classmethod
    def of(cls, roots: Sequence[nn.Module]) -> WatchedWeights:
        """Watch whole modules."""
        return cls([m for root in roots for m in root.modules()], [p for root in roots for p in root.parameters()])

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers of the modules."""
        found = (b for module in self._modules for b in module._buffers.values() if b is not None and b.numel())
        return list(dict.fromkeys(found))

    def digest(self) -> str:
        """Of all values, and of the modes."""
        content = xxhash.xxh3_128(repr([module.training for module in self._modules]).encode())
        for tensor in (*self._parameters, *self.buffers):
            content.update(digest_of(tensor).encode())
        return content.hexdigest()

    def what_changed(self, settings: bool = True) -> str | None:
        """What is another than when this was made, in words; None if nothing is.

        Args:
            settings: whether attributes, hooks and modes count.
        """
        now, noted = self._now(), self._noted
        if now == noted:
            return None
        if settings and now.attributes != noted.attributes:
            return "an attribute of its modules has been changed"
        if settings and now.parts != noted.parts:
            return "a module, a hook or a parameter has been added to it, or has been replaced"
        if settings and now.modes != noted.modes:
            return "its modules have been set to another mode (train() or eval())"
        if any(flag for _, _, flag in now.parameters):
            return "a parameter of it is trained again"
        values = (now.parameters, now.buffers, now.numbers) != (noted.parameters, noted.buffers, noted.numbers)
        return "its weights or buffers have been changed" if values else None

    def _now(self) -> _Noted:
        modules = self._modules
        middles = self._middles if self._middles is not None else self._views_of_middles()
        numbers = [torch.cat(views) for views in middles]
        return _Noted(
            [(0 if self._may_move else p.data_ptr(), _version(p), p.requires_grad) for p in self._parameters],
            [(id(buffer), self._checksum(buffer)) for buffer in self.buffers],
            [module.training for module in modules],
            [
                *(_setting(of.get(name)) for of, name in self._plain),
                *(len(of) - ("forward" in of) for of in self._owners),  # which is replaced for each call
            ],
            [
                id(part)
                for module in modules
                for parts in (
                    module._parameters,
                    module._buffers,
                    module._modules,
                    module._forward_hooks,
                    module._forward_pre_hooks,
                )
                for part in parts.values()
            ],
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
        """A view of one number of each tensor, by type."""
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
