"""Notices when the modules of a frozen front no longer compute what was stored of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import nn

from ..model.placeholders import values_of


class FrontWeights:
    """Weights, buffers and modes of the front's modules, as they are now.

    Args:
        modules: the modules.
        looks_closely: whether the user's callbacks run between the steps, and may write where PyTorch does not count.
    """

    def __init__(self, modules: Sequence[nn.Module], looks_closely: bool) -> None:
        self._modules = [module for root in modules for module in root.modules()]
        self._parameters = list(dict.fromkeys(p for root in modules for p in root.parameters()))
        self._buffers = list(dict.fromkeys(b for root in modules for b in root.buffers()))
        self._looks_closely = looks_closely
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
        """What is another than when this was made, in words; None if nothing is. It takes microseconds."""
        now = self._now()
        if now == self._noted and (not self._looks_closely or self._one_number_each() == self._numbers):
            return None
        if now[2] != self._noted[2]:
            return "its modules have been set to another mode (train() or eval())"
        if any(flag for _, _, flag in now[0]):
            return "a parameter of it is trained again"
        return "its weights or buffers have been changed"

    def _now(self) -> tuple[list[tuple[int, int, bool]], list[tuple[int, int]], list[bool]]:
        return (
            [(p.data_ptr(), -1 if p.is_inference() else p._version, p.requires_grad) for p in self._parameters],
            [(b.data_ptr(), -1 if b.is_inference() else b._version) for b in self._buffers],
            [module.training for module in self._modules],
        )

    def _one_number_each(self) -> list[float]:
        if not self._looks_closely:
            return []
        values = [value.detach().reshape(-1) for parameter in self._parameters for value in values_of(parameter)[:1]]
        return torch.stack([value[len(value) // 2].double() for value in values]).tolist() if values else []
