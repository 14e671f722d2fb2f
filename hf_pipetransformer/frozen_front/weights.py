"""Notices when the modules of a frozen front no longer compute what was stored of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import nn

from ..model.placeholders import values_of

PLAIN = (bool, int, float, str)
"""Types of attributes that are compared."""


class FrontWeights:
    """Weights, buffers and modes of the front's modules, as they are now.

    Args:
        modules: the modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [module for root in modules for module in root.modules()]
        self._parameters = list(dict.fromkeys(p for root in modules for p in root.parameters()))
        self._buffers = list(dict.fromkeys(b for root in modules for b in root.buffers()))
        self._noted = self._now()
        self._numbers = self._one_number_each()

    def digest(self) -> str:
        """Of all values."""
        content = xxhash.xxh3_128()
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
        if now == self._noted and not self.have_values_changed():
            return None
        if now[3] != self._noted[3]:
            return "an attribute of its modules has been changed"
        if now[2] != self._noted[2]:
            return "its modules have been set to another mode (train() or eval())"
        if any(flag for _, _, flag in now[0]):
            return "a parameter of it is trained again"
        return "its weights or buffers have been changed"

    def have_values_changed(self) -> bool:
        """Whether weights or buffers have, whatever else."""
        return self._now()[:2] != self._noted[:2] or self._one_number_each() != self._numbers

    def _now(self) -> tuple[list[tuple[int, int, bool]], list[tuple[int, int]], list[bool], list[Any]]:
        return (
            [(p.data_ptr(), -1 if p.is_inference() else p._version, p.requires_grad) for p in self._parameters],
            [(b.data_ptr(), -1 if b.is_inference() else b._version) for b in self._buffers],
            [module.training for module in self._modules],
            [value for module in self._modules for value in vars(module).values() if type(value) in PLAIN],
        )

    def _one_number_each(self) -> list[float]:
        tensors = [value for tensor in (*self._parameters, *self._buffers) for value in values_of(tensor)[:1]]
        values = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel() and not tensor.is_complex()]
        return torch.stack([value[len(value) // 2].double() for value in values]).tolist() if values else []
