"""Tensors whose values are on another process: they have shape and dtype, and no storage.

All metadata (`shape`, `nbytes`, `requires_grad`) is PyTorch's own. Whatever touches values reaches
`__torch_dispatch__`, and fails at the user's line with a sentence that says where they are. Inside of a model's own
forward, where layers that do not run pass such values on, operations compute with NaN instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

_state = threading.local()


@contextmanager
def computing_with_nan() -> Iterator[None]:
    """Inside, on this thread, operations on such tensors compute with NaN: a model's forward passes values on."""
    before = getattr(_state, "is_inside", False)
    _state.is_inside = True
    try:
        yield
    finally:
        _state.is_inside = before


class Elsewhere(torch.Tensor):
    """A tensor that cannot be read here.

    Args:
        like: shape, dtype and device.
        what: the values, and why they are not here, as a sentence: "hidden states of layer 3 are ...".
        remedy: what to do, as a sentence.
    """

    what: str
    remedy: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, what: str, remedy: str) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.what, made.remedy = what, remedy
        return made

    def __init__(self, like: torch.Tensor, what: str, remedy: str) -> None:
        pass

    def _refuse(self, operation: str) -> NoReturn:
        raise ValueError(f"{operation}: {self.what} {self.remedy}")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        if getattr(_state, "is_inside", False):
            positional, named = pytree.tree_map_only(Elsewhere, _as_nan, given)
            return function(*positional, **named)
        first = next(value for value in pytree.tree_leaves(given) if isinstance(value, Elsewhere))
        name = getattr(function, "overloadpacket", function)
        first._refuse(getattr(name, "__name__", str(name)))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Elsewhere({tuple(self.shape)}, {self.dtype}: {self.what})"

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("numpy")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("numpy")

    def __reduce_ex__(self, _: Any) -> NoReturn:
        self._refuse("pickle")

    def __deepcopy__(self, _: Any) -> NoReturn:
        self._refuse("deepcopy")


def _as_nan(tensor: Elsewhere) -> torch.Tensor:
    fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), fill, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
