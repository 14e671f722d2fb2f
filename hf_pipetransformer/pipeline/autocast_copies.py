"""Autocast's 16-bit copies of weights that are gathered layer by layer.

Autocast copies a weight when an operation first needs it in 16 bits, and keeps the copy until the forward ends;
autograd keeps it until the backward. Together the copies are half as large as the layers' weights in 32 bits. So the
copies go with the weights:

    forward of a layer     autocast copies; autograd saves views of the copies
    after it               in their place autograd keeps names (`View`), and autocast forgets its copies
    backward of a layer    a weight that has been gathered is copied once more, which gives the same bits

A weight that is not trained is copied by each use, and autocast does not remember for which: these copies stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch


class View(NamedTuple):
    """A view of a gathered weight, or of autocast's copy of one, by which it can be made again."""

    name: str
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> View:
        return cls(name, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


@dataclass(eq=False)
class Saved:
    """What autograd keeps from the forward of a layer: a tensor, or a view that it turned out to be."""

    content: torch.Tensor | View


class AutocastCopies:
    """The copies of one stage's layers.

    Args:
        device_type: type of the device that computes.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._dtype: torch.dtype | None = None  # of copies in the layer that runs; None if none are made
        self._saved: list[Saved] = []  # by the layer that runs, in that type
        self._again: dict[str, torch.Tensor] = {}  # made in the backward

    def enter_layer(self) -> None:
        """A layer begins its forward."""
        makes_copies = torch.is_autocast_enabled(self._device_type) and torch.is_autocast_cache_enabled()
        self._dtype, self._saved = torch.get_autocast_dtype(self._device_type) if makes_copies else None, []

    def save(self, tensor: torch.Tensor) -> torch.Tensor | Saved:
        """Return what autograd is to keep in place of a tensor that is not a view of a gathered weight."""
        if tensor.dtype != self._dtype:
            return tensor
        saved = Saved(tensor)
        self._saved.append(saved)
        return saved

    def leave_layer(self, weights: Mapping[str, torch.Tensor]) -> None:
        """The layer has ended its forward: let go of the copies of its weights, which must still be here."""
        if self._dtype is None:
            return
        for name, weight in weights.items():
            alike = [saved for saved in self._saved if _has_size_of(weight, saved.content)]
            copy = self._copy_of(weight) if alike else None
            for saved in alike if copy is not None else ():
                assert copy is not None and isinstance(saved.content, torch.Tensor)
                if saved.content.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr():
                    saved.content = View.of(name, saved.content)
        torch.clear_autocast_cache()
        self.end_forward()

    def end_forward(self) -> None:
        """What is saved from now on is not saved by a layer."""
        self._dtype, self._saved = None, []

    def _copy_of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Autocast's copy of a weight, which only an operation gets to see; None if it makes none."""
        seen: list[torch.Tensor] = []

        def look(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tensor)
            return tensor

        nothing = weight.new_empty(weight.shape[-1], 0, requires_grad=True)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
            torch.matmul(weight, nothing)
        return next((tensor for tensor in seen if tensor.dtype == self._dtype and tensor.numel()), None)

    def again(self, view: View, weight: torch.Tensor) -> torch.Tensor:
        """Return a view that autograd has kept by name, of a weight that is here again, or of a copy of it."""
        values = weight.detach()
        if view.dtype != values.dtype:
            if view.name not in self._again:
                self._again[view.name] = values.to(view.dtype)
            values = self._again[view.name]
        return values.as_strided(view.size, view.stride, view.offset)

    def forget(self, names: Collection[str]) -> None:
        """Let go of the copies that the backward has made of these weights."""
        for name in names:
            self._again.pop(name, None)


def _has_size_of(weight: torch.Tensor, saved: torch.Tensor | View) -> bool:
    """Whether a saved tensor may be a copy of a weight; autograd saves those of matrices."""
    return (
        isinstance(saved, torch.Tensor)
        and weight.dim() > 1
        and weight.requires_grad
        and saved.untyped_storage().nbytes() == weight.numel() * saved.itemsize
    )
