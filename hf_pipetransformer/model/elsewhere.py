"""Tensors whose values are on another process: they have shape and dtype, and cannot be read.

A hidden tensor stays the object that it is; only its class changes. All metadata (`shape`, `nbytes`, `requires_grad`,
hooks) stay PyTorch's own. Whatever touches its values fails at the user's line, with a sentence that names them: an
operation is let through as long as it dispatches nothing on a hidden tensor, so there is no list of what is allowed.

Inside of a model's own forward, where a stage runs on inputs of layers that it does not have, operations compute with
the NaN that a hidden tensor contains.
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_state = threading.local()

NAN: float = struct.unpack("d", struct.pack("Q", 0x7FF8_E15E_4000_0000))[0]
"""What hidden tensors contain. Its bits differ from those of a NaN that is computed, and processors hand them on."""
_BITS = struct.unpack("I", struct.pack("f", NAN))[0] & 0x7FFFFFFF
OURS = "hf_pipetransformer"
LIBRARIES = frozenset({"accelerate", OURS, "torch", "transformers"})
"""Packages that may ask a hidden parameter for its gradient, which is None: they go over all parameters."""

_READ_ONLY = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "is_leaf", "is_sparse", "layout", "ndim", "shape", "_version")
) | {torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim, torch.Tensor.is_floating_point}
"""Frequent accesses that read no values: for these, nothing is watched."""
_WITHOUT_DISPATCH = frozenset(
    {
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.data.__set__,  # type: ignore[attr-defined]
        torch.Tensor.__array__,
        torch.Tensor.__deepcopy__,
        torch.Tensor.__dlpack__,
        torch.Tensor.__reduce_ex__,
        torch.Tensor.numpy,
        torch.Tensor.set_,
        torch.Tensor.storage,
        torch.Tensor.tolist,
        torch.Tensor.untyped_storage,
        torch.autograd.backward,
        torch.autograd.grad,
    }
)
"""Accesses to values that dispatch nothing."""
_FLAG = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_SETS_FLAG = frozenset({torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__})  # type: ignore[attr-defined]
_GRADIENT = torch.Tensor.__dict__.get("grad", torch._C.TensorBase.grad).__get__


def placeholder(parameter: torch.Tensor, fill: float = 0.0, device: torch.device | None = None) -> torch.Tensor:
    """A tensor with shape and dtype of `parameter` in a single element of memory."""
    return torch.full((), fill, dtype=parameter.dtype, device=device or parameter.device).expand(parameter.shape)


@contextmanager
def computing_with_nan() -> Iterator[None]:
    """Inside, on this thread, hidden tensors are NaN: a model's forward passes on what other layers would return."""
    before = getattr(_state, "is_inside", False)
    _state.is_inside = True
    try:
        yield
    finally:
        _state.is_inside = before


class Hidden(torch.Tensor):
    """A tensor that cannot be read here. Made by `hide`, and made readable again by `show`."""

    about: str
    remedy: str
    is_trained: bool

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(_state, "is_inside", False) or function in _READ_ONLY:
                return function(*args, **kwargs)
            if function == _FLAG:
                return args[0].is_trained if _caller() not in LIBRARIES else function(*args, **kwargs)
            if function in _SETS_FLAG and _caller() != OURS:
                args[0].is_trained = bool([*args[1:], *kwargs.values(), True][0])
            if function in _WITHOUT_DISPATCH:
                _refuse(function, args, kwargs)
            if function == _GRADIENT and _caller() not in LIBRARIES:
                _refuse("grad", args, kwargs)
            with _Watching():
                return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}: {self.about})"

    def __deepcopy__(self, _: Any) -> NoReturn:
        _refuse("deepcopy", (self,), {})

    def __reduce_ex__(self, _: Any) -> NoReturn:
        _refuse("pickle", (self,), {})

    # of these torch does not ask `__torch_function__`
    def set_(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("set_", (self,), {})

    def as_subclass(self, cls: Any) -> Any:
        if getattr(_state, "is_inside", False):
            return super().as_subclass(cls)
        _refuse("as_subclass", (self,), {})


class HiddenParameter(Hidden, nn.Parameter):
    """A parameter that another process has."""

    is_elsewhere = True


class _Watching(TorchDispatchMode):
    """Inside, an operation on a hidden tensor fails."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(value, Hidden) for value in pytree.tree_leaves((args, kwargs))):
            _refuse(getattr(function, "overloadpacket", function), args, kwargs or {})
        return function(*args, **(kwargs or {}))


def hide(tensor: torch.Tensor, about: str, remedy: str, is_trained: bool | None = None) -> None:
    """Make a tensor or a parameter unreadable. It must contain NaN already, in a single element of memory.

    Tensors of other classes (quantised weights) stay as they are.

    Args:
        tensor: the tensor.
        about: where its values are, as a clause: "weight is held by rank 1".
        remedy: what the user can do, as a sentence.
        is_trained: what `requires_grad` shall say to the user, who may choose parameters by it; None: what it says.
    """
    if type(tensor) in (torch.Tensor, nn.Parameter):
        tensor.__class__ = HiddenParameter if type(tensor) is nn.Parameter else Hidden
    if isinstance(tensor, Hidden):
        with torch._C.DisableTorchFunctionSubclass():
            tensor.is_trained = tensor.requires_grad if is_trained is None else is_trained
        tensor.about, tensor.remedy = about, remedy


def hidden_like(tensor: torch.Tensor, about: str, remedy: str) -> torch.Tensor:
    """Return a tensor of the same shape that cannot be read."""
    hidden = placeholder(tensor, NAN if tensor.is_floating_point() else 0).detach()
    hide(hidden, about, remedy)
    return hidden


def is_computed_of_hidden(value: torch.Tensor) -> bool:
    """Whether a number of 32 bits on the CPU is NaN because a hidden tensor has been read unnoticed.

    Functions of torch that look neither at the class of a tensor nor at modes read it as NaN: `torch.Tensor(p)`,
    `torch.func`, whatever runs with `DisableTorchFunction`.
    """
    if value.device.type != "cpu" or value.dtype != torch.float32 or value.numel() != 1:
        return False
    return int(value.detach().reshape(1).view(torch.int32)) & 0x7FFFFFFF == _BITS


def show(tensor: torch.Tensor) -> None:
    """Make a hidden parameter readable again, which has got its values."""
    if isinstance(tensor, Hidden):
        del tensor.about, tensor.remedy, tensor.is_trained
        plain: Any = nn.Parameter if isinstance(tensor, HiddenParameter) else torch.Tensor
        tensor.__class__ = plain


class Unreadable:
    """A value that cannot be read here, and is no tensor. Whatever is done with it fails at the user's line."""

    def __init__(self, about: str, remedy: str) -> None:
        self.__dict__.update(about=about, remedy=remedy)

    def __repr__(self) -> str:
        return f"Unreadable({self.__dict__['about']})"


def _refuse_all(value: Unreadable, *_: Any, **__: Any) -> NoReturn:
    raise ValueError("{about}. {remedy}".format(**vars(value)))


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_OTHERS = (
    "neg pos abs invert bool int float complex index round len iter next contains getitem setitem delitem call"
    " getattr setattr delattr eq ne lt le gt ge hash format str bytes enter exit reduce_ex deepcopy array"
)
for _name in (*_OTHERS.split(), *_BINARY.split(), *(f"r{name}" for name in _BINARY.split())):
    setattr(Unreadable, f"__{_name}__", _refuse_all)


def _refuse(function: Any, args: Any, kwargs: Any) -> NoReturn:
    name = function if isinstance(function, str) else getattr(function, "__name__", str(function))
    owner = getattr(getattr(function, "__self__", None), "__name__", None)  # of an attribute
    first = next(value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Hidden))
    raise ValueError(f"{owner if name in ('__get__', '__set__') else name}: {first.about}. {first.remedy}")


def _caller() -> str:
    """The package of the code that has asked a hidden tensor for an attribute."""
    frame = sys._getframe(2)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
