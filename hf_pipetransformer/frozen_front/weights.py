"""Notices when the modules of a frozen front no longer compute what was stored of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn

from ..model.placeholders import values_of

PLAIN = (bool, int, float, str)
"""Types of attributes that are compared."""


class _Noted(NamedTuple):
    """What is compared."""

    parameters: list[tuple[int, int, bool]]
    buffers: list[tuple[int, int]]
    modes: list[bool]
    attributes: list[Any]
    parts: list[int]


class FrontWeights:
    """Weights, buffers and modes of the front's modules, as they are now.

    Args:
        modules: the modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [module for root in modules for module in root.modules()]
        self._parameters = list(dict.fromkeys(p for root in modules for p in root.parameters()))
        self._buffers = list(dict.fromkeys(b for root in modules for b in root.buffers()))
        self._owners = [vars(module) for module in self._modules]
        self._plain = [(of, name) for of in self._owners for name, value in of.items() if type(value) in PLAIN]
        self._middles = self._views_of_middles()
        self._noted = self._now()
        self._numbers = self._one_number_each()

    def digest(self) -> str:
        """Of all values, and of the modes."""
        content = xxhash.xxh3_128(repr([module.training for module in self._modules]).encode())
        for tensor in (*self._parameters, *self._buffers):
            content.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            for value in values_of(tensor):
                content.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return content.hexdigest()

    def what_changed(self) -> str | None:
        """What is another than when this was made, in words; None if nothing is.

        It compares one number of each tensor as well, as PyTorch does not count what is written through `.data`.
        """
        now = self._now()
        if now == self._noted and self._one_number_each() == self._numbers:
            return None
        if now.attributes != self._noted.attributes:
            return "an attribute of its modules has been changed"
        if now.parts != self._noted.parts:
            return "a module, a hook or a parameter has been added to it, or has been replaced"
        if now.modes != self._noted.modes:
            return "its modules have been set to another mode (train() or eval())"
        if any(flag for _, _, flag in now.parameters):
            return "a parameter of it is trained again"
        return "its weights or buffers have been changed"

    def have_values_changed(self) -> bool:
        """Whether weights or buffers have, whatever else."""
        now = self._now()
        is_same = (now.parameters, now.buffers) == (self._noted.parameters, self._noted.buffers)
        return not is_same or self._one_number_each() != self._numbers

    def _now(self) -> _Noted:
        modules = self._modules
        return _Noted(
            [(p.data_ptr(), -1 if p.is_inference() else p._version, p.requires_grad) for p in self._parameters],
            [(b.data_ptr(), -1 if b.is_inference() else b._version) for b in self._buffers],
            [module.training for module in modules],
            [
                *(of.get(name) for of, name in self._plain),
                *(len(of) - ("forward" in of) for of in self._owners),  # which the front itself replaces
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
        )

    def _views_of_middles(self) -> list[list[torch.Tensor]]:
        """A view of one number of each tensor, by type."""
        by_type: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in (*self._parameters, *self._buffers):
            for value in values_of(tensor)[:1]:
                if value.numel() and not value.is_complex():
                    middle = value.detach()[tuple(size // 2 for size in value.shape)]
                    by_type.setdefault((value.dtype, value.device), []).append(middle.view(1))
        return list(by_type.values())

    def _one_number_each(self) -> list[list[float]]:
        numbers = [torch.cat(views) for views in self._middles]
        return [(n.nan_to_num() if n.is_floating_point() else n).tolist() for n in numbers]  # NaN equals nothing
