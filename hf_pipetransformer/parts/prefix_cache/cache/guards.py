"""Notices accesses to a tensor's memory, which allow writes that PyTorch does not count.

PyTorch counts writes into a tensor and its views, but not writes through `.data`, a NumPy array or a pointer. A
guarded tensor stays the same object; only its class changes. Operations on it are PyTorch's own, at PyTorch's speed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ....model.elsewhere import on_this_thread

_state = threading.local()

GIVES_OUT = (
    *("detach", "numpy", "storage", "untyped_storage", "data_ptr", "set_", "share_memory_"),
    *("__array__", "__dlpack__", "__getitem__", "view", "view_as", "reshape", "flatten", "as_strided"),
    *("ravel", "diagonal", "unfold", "movedim", "swapaxes", "swapdims", "unsqueeze_", "unflatten", "tensor_split"),
    *("narrow", "select", "unbind", "split", "chunk", "t", "transpose", "permute", "squeeze", "unsqueeze", "expand"),
    *("adjoint", "as_subclass", "broadcast_to", "expand_as", "moveaxis", "split_with_sizes", "unsafe_chunk"),
    *("unsafe_split", "unsafe_split_with_sizes", "hsplit", "vsplit", "dsplit", "reshape_as", "resize", "resize_as"),
    *("slice_inverse", "rename", "refine_names"),
)
"""Methods that return memory, or views that give access to memory. The last two are gone from newer versions."""


def unnoticed() -> AbstractContextManager[None]:
    """Inside the context, accesses on this thread are not noted: by a running module itself, and by this package."""
    return on_this_thread(_state, "is_inside", True)


def _noting(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _note(self, name)
        return method(self, *args, **kwargs)

    return noted


def _noting_property(name: str) -> Any:
    read = getattr(torch.Tensor, name).__get__

    def noted(self: Any) -> Any:
        _note(self, name)
        return read(self)

    return property(noted)


def _note(tensor: Any, access: str) -> None:
    if not getattr(_state, "is_inside", False):
        tensor.num_given_out += 1
        tensor.access = access


class _Guard:
    """Common base of guarded parameters and buffers."""

    # values of a tensor that torch has made of this class: `q.as_subclass(type(p))`
    plain_class: type
    """Class of the tensor without a guard."""
    num_guards: int = 0
    """Number of guards on the tensor."""
    num_given_out: int = 0
    """Number of accesses to its memory, which may have written to it."""
    access: str = ""
    """Name of the latest access."""
    num_views: int = 0
    """Number of views of its memory that this package holds."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A tensor that is made by the class of a guarded one, `type(p)(values)`, is a plain tensor."""
        return cls.plain_class(*args, **kwargs)

    @property
    def data(self) -> Any:
        _note(self, "data")
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        _note(self, "data")
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]


class GuardedParameter(_Guard, nn.Parameter):
    """A guarded parameter. Copies and pickles are plain parameters."""

    plain_class = nn.Parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with unnoticed():
            memo[id(self)] = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with unnoticed():
            return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


class GuardedBuffer(_Guard, torch.Tensor):
    """A guarded tensor that is not a parameter. Copies and pickles are plain tensors."""

    plain_class = torch.Tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with unnoticed():
            memo[id(self)] = self.data.clone(memory_format=torch.preserve_format)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with unnoticed():
            return self.data.__reduce_ex__(protocol)


PLAIN: dict[type, type] = {guarded.plain_class: guarded for guarded in (GuardedParameter, GuardedBuffer)}
_OVERRIDES: dict[str, Any] = {name: _noting(name) for name in GIVES_OUT if hasattr(torch.Tensor, name)}
# as for parameters: otherwise each operation would call Python
_OVERRIDES["__torch_function__"] = nn.Parameter.__torch_function__
for _name in ("T", "mT", "H", "mH"):
    _OVERRIDES[_name] = _noting_property(_name)
for _guarded in PLAIN.values():
    for _name, _override in _OVERRIDES.items():
        setattr(_guarded, _name, _override)


def guard(tensors: Sequence[torch.Tensor]) -> None:
    """Guard tensors. Tensors of other classes (quantised weights) stay unguarded."""
    for tensor in tensors:
        if type(tensor) in PLAIN:
            tensor.__class__ = PLAIN[type(tensor)]
            vars(tensor).update(num_guards=0, num_given_out=0, num_views=0, access="")
        if isinstance(tensor, _Guard):
            tensor.num_guards += 1


def unguard(tensors: Sequence[torch.Tensor]) -> None:
    """Remove a guard from tensors. They become plain tensors when no guard is left."""
    for tensor in tensors:
        if isinstance(tensor, _Guard):
            tensor.num_guards -= 1
            if tensor.num_guards == 0:
                for name in ("num_guards", "num_given_out", "num_views", "access"):
                    vars(tensor).pop(name, None)
                tensor.__class__ = tensor.plain_class


def accesses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the number of accesses to each tensor's memory; -1 for unguarded tensors, also if they were guarded."""
    return [getattr(tensor, "num_given_out", -1) for tensor in tensors]


def are_lent(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether something else holds its memory: a view, a result of `.data`, an array.

    Through it the memory may be written to at any time. Tensors in the sequence that share memory do not count, and
    neither do `num_views` of each. False for unguarded tensors.
    """
    storages = [torch.Tensor.untyped_storage(tensor) if isinstance(tensor, _Guard) else None for tensor in tensors]
    own = Counter[int]()
    for tensor, storage in zip(tensors, storages, strict=True):
        if storage is not None:
            own[storage._cdata] += 1 + tensor.num_views  # type: ignore[attr-defined]
    # `storages` holds each of them once more
    return [s is not None and torch._C._storage_Use_Count(s._cdata) > own[s._cdata] + 1 for s in storages]
