"""Tensors with values on another process: they have a shape and dtype, and cannot be read.

A hidden tensor stays the same object; only its class changes. All metadata (`shape`, `nbytes`, `requires_grad`,
hooks) stay PyTorch's own. An operation that reads its values fails at the user's line, with a message that names them.
No list of allowed operations is needed: an operation is allowed if it dispatches no kernel on a hidden tensor.

Inside a model's own forward, a stage runs without the outputs of other stages' layers. There, operations compute with
the NaN that a hidden tensor contains.
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_state = threading.local()

NAN: float = struct.unpack("d", struct.pack("Q", 0x7FF8_E15E_4000_0000))[0]
"""The value in hidden tensors. Its bits differ from a computed NaN's, and processors propagate them."""
_BITS = struct.unpack("I", struct.pack("f", NAN))[0] & 0x7FFFFFFF
OURS = "hf_pipetransformer"
COMPUTES = (OURS, "torch")
"""Packages that see a hidden parameter's `requires_grad` on this process, which is False. They compute by it (DDP)."""
UPDATES = ("accelerate", OURS, "torch.optim", "torch.amp", "torch.nn.modules.module")
"""Packages that see no gradient on a hidden parameter, because they update each parameter on its own."""
CLIPS = "torch.nn.utils"
"""The package that gets a `HiddenGradient` from a hidden parameter."""
GRADIENT_REMEDY = (
    "So are norms of gradients: this process would clip or measure those of its own stage only. Set max_grad_norm, or"
    " call trainer.accelerator.clip_grad_norm_(parameters, max_norm) on all processes: it clips by the norm over all"
    " stages, and returns it, with float('inf') as well; or set pipeline_parallel_size=1."
)

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_READ_ONLY = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "is_leaf", "is_sparse", "layout", "ndim", "shape", "_version", *_HOOKS)
) | {torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim, torch.Tensor.is_floating_point}
"""Frequent accesses that read no values; they run without the dispatch mode."""
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
"""Accesses to values that do not dispatch."""
_FLAG = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_SETS_FLAG = frozenset({torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__})  # type: ignore[attr-defined]
_REGISTERS_HOOK = frozenset({torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook})
_GRADIENT = torch.Tensor.__dict__.get("grad", torch._C.TensorBase.grad).__get__
_SETS_GRADIENT = torch.Tensor.__dict__.get("grad", torch._C.TensorBase.grad).__set__


def placeholder(parameter: torch.Tensor, fill: float = 0.0, device: torch.device | None = None) -> torch.Tensor:
    """A tensor with the shape and dtype of `parameter` in a single element of memory."""
    return torch.full((), fill, dtype=parameter.dtype, device=device or parameter.device).expand(parameter.shape)


def _blank(like: torch.Tensor) -> torch.Tensor:
    """A tensor that contains NaN, or 0 where there is none."""
    return placeholder(like, NAN if like.is_floating_point() else 0).detach()


@contextmanager
def on_this_thread(state: threading.local, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute of a thread's state has this value. Afterwards its earlier value (or None) is restored."""
    before = getattr(state, name, None)
    setattr(state, name, value)
    try:
        yield
    finally:
        setattr(state, name, before)


def computing_with_nan() -> AbstractContextManager[None]:
    """Inside, on this thread, hidden tensors can be read as NaN, because a model's forward passes them on."""
    return on_this_thread(_state, "is_inside", True)


def keeping_gradients(has_some: Callable[[], bool]) -> AbstractContextManager[None]:
    """Inside, on this thread, gradients of hidden parameters cannot be cleared, because their owners keep them.

    Args:
        has_some: whether there are gradients; without any, clearing has no effect and is allowed.
    """
    return on_this_thread(_state, "has_gradients", has_some)


def _refuse_clearing(parameter: Hidden, clears: bool) -> None:
    has_some = getattr(_state, "has_gradients", None)
    if clears and has_some is not None and has_some():
        raise ValueError(
            f"zero_grad: gradients are cleared in the loss, which runs on the last pipeline stage only, and"
            f" {parameter.about}. Clear them in training_step or a callback, which run on all stages, or compute those"
            " that you do not want by torch.autograd.grad, which stores none; or set pipeline_parallel_size=1."
        )


@contextmanager
def _trained(parameter: Hidden) -> Iterator[None]:
    """Inside, hooks can be registered on a parameter that is trained elsewhere; they run once its layer moves here."""
    before = parameter.requires_grad
    parameter.requires_grad_(before or parameter.is_trained)
    try:
        yield
    finally:
        parameter.requires_grad_(before)


class UnreadableError(ValueError):
    """Something reads a hidden tensor."""


class Hidden(torch.Tensor):
    """A tensor that cannot be read here. Made by `hide`, and made readable again by `show`."""

    about: str
    remedy: str
    is_trained: bool

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function in _READ_ONLY:
                return function(*args, **kwargs)
            if function == _FLAG:
                return function(*args, **kwargs) if _is_in(_caller(), *COMPUTES) else args[0].is_trained
            if function in _SETS_FLAG and not _is_in(_caller(), OURS):
                args[0].is_trained = bool([*args[1:], *kwargs.values(), True][0])
            if getattr(_state, "is_inside", False):
                return function(*args, **kwargs)
            if function in _REGISTERS_HOOK:
                with _trained(args[0]):
                    return function(*args, **kwargs)
            if function in _WITHOUT_DISPATCH:
                _refuse(function, args, kwargs)
            if function == _GRADIENT:
                _refuse_clearing(args[0], _calling_frame(sys._getframe(1)).f_code.co_name == "zero_grad")
                return _gradient_of(args[0], _caller())
            if function == _SETS_GRADIENT:
                _refuse_clearing(args[0], not _is_in(_caller(), OURS))
            with _Watching():
                return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}: {self.about})"

    def __deepcopy__(self, _: Any) -> NoReturn:
        _refuse("deepcopy", (self,), {})

    def __reduce_ex__(self, _: Any) -> NoReturn:
        _refuse("pickle", (self,), {})

    # torch does not call `__torch_function__` for these
    def set_(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("set_", (self,), {})

    def as_subclass(self, cls: Any) -> Any:
        if getattr(_state, "is_inside", False):
            return super().as_subclass(cls)
        _refuse("as_subclass", (self,), {})


class Postponed(Hidden):
    """A tensor whose values are computed when they are read. Made by `hidden_like`.

    `computed` returns them; None if they cannot be computed, so that reading fails.
    """

    computed: Callable[[], torch.Tensor | None]
    read: tuple[torch.Tensor, int] | None = None
    """The values after the first reading, and their number of writes then."""

    def values_read(self) -> torch.Tensor | None:
        """The values; None if they cannot be computed."""
        values = self.computed()
        if values is not None and self.read is None and not values.is_inference():
            self.read = values, values._version
        return values

    @property
    def is_written_to(self) -> bool:
        """Whether the values have been written to since they were first read."""
        return self.read is not None and self.read[0]._version != self.read[1]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(function, types, args, kwargs)
        except UnreadableError:
            found = [value for value in pytree.tree_leaves((args, kwargs or {})) if isinstance(value, Postponed)]
            values = {id(value): value.values_read() for value in found}
            if not values or any(value is None for value in values.values()):
                raise
        args, kwargs = pytree.tree_map_only(Postponed, lambda value: values[id(value)], (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Read by functions that ignore a tensor's class, such as those of `torch.func`."""

        def values_of(value: Postponed) -> torch.Tensor:
            found = _blank(value) if getattr(_state, "is_inside", False) else value.values_read()
            return _refuse(function.overloadpacket, (value,), {}) if found is None else found

        args, kwargs = pytree.tree_map_only(Postponed, values_of, (args, kwargs or {}))
        return function(*args, **kwargs)


class HiddenParameter(Hidden, nn.Parameter):
    """A parameter that another process holds."""

    is_elsewhere = True


class HiddenGradient(Hidden):
    """The gradient of a parameter that another process holds, or a value computed from it.

    Values computed from it are hidden as well, and writes into it are dropped, because its owner does the same on its
    process. So `torch.nn.utils` may clip the gradients of one stage, and clip gradients entry by entry. It may not
    change a gradient of this process by a hidden value.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function in _READ_ONLY:
                return function(*args, **kwargs)
            if function in _WITHOUT_DISPATCH:
                _refuse(function, args, kwargs)
            with _Following():
                return function(*args, **kwargs)


class _Following(TorchDispatchMode):
    """Inside, operations on hidden gradients follow the rules of `HiddenGradient`."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hidden = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Hidden)]
        if not hidden:
            return function(*args, **kwargs)
        name = function.overloadpacket.__name__
        is_read = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags)
        if is_read or "out" in kwargs or not all(isinstance(value, HiddenGradient) for value in hidden):
            _refuse(function.overloadpacket, args, kwargs)
        if not name.endswith("_"):
            return pytree.tree_map_only(torch.Tensor, lambda value: _like(value, hidden[0]), function(*args, **kwargs))
        if not name.startswith("_foreach_"):
            if not isinstance(args[0], HiddenGradient):
                _refuse(function.overloadpacket, args, kwargs)
            return args[0]
        here = [index for index, target in enumerate(args[0]) if not isinstance(target, Hidden)]
        args = [[value[index] for index in here] if isinstance(value, (list, tuple)) else value for value in args]
        if here and any(isinstance(value, Hidden) for value in pytree.tree_leaves((args, kwargs))):
            _refuse(function.overloadpacket, args, kwargs)
        return function(*args, **kwargs) if here else None


def _like(result: torch.Tensor, source: Hidden) -> HiddenGradient:
    """Hide a tensor that was computed from a hidden gradient."""
    hidden: Any = result if type(result) is torch.Tensor else result.as_subclass(torch.Tensor)
    hidden.__class__ = HiddenGradient
    hidden.about, hidden.remedy, hidden.is_trained = source.about, source.remedy, False
    assert isinstance(hidden, HiddenGradient)
    return hidden


def _gradient_of(parameter: Hidden, caller: str) -> HiddenGradient | None:
    """The `grad` of a hidden parameter, for the module that reads it."""
    if not isinstance(parameter, HiddenParameter):
        _refuse("grad", (parameter,), {})
    if not parameter.is_trained or _is_in(caller, *UPDATES):
        return None
    about = f"the gradient of {parameter.about}"
    if not _is_in(caller, CLIPS):
        raise ValueError(f"grad: {about}. {GRADIENT_REMEDY}")
    gradient: Any = placeholder(parameter, float("nan")).detach()
    gradient.__class__ = HiddenGradient
    gradient.about, gradient.remedy, gradient.is_trained = about, GRADIENT_REMEDY, False
    assert isinstance(gradient, HiddenGradient)
    return gradient


_READS_SHAPE = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "empty_like",
        "full_like",
        "ones_like",
        "zeros_like",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
    )
)
"""Operations that read no values. Adagrad makes its state by them when it is created."""


class _Watching(TorchDispatchMode):
    """Inside, an operation on a hidden tensor fails, unless it reads the shape alone."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "overloadpacket", None) in _READS_SHAPE:
            return function(*args, **(kwargs or {}))
        if any(isinstance(value, Hidden) for value in pytree.tree_leaves((args, kwargs))):
            _refuse(getattr(function, "overloadpacket", function), args, kwargs or {})
        return function(*args, **(kwargs or {}))


def hide(tensor: torch.Tensor, about: str, remedy: str, is_trained: bool | None = None) -> None:
    """Make a tensor or a parameter unreadable. It must contain NaN already, in a single element of memory.

    Tensors of other classes (quantised weights) stay as they are.

    Args:
        tensor: the tensor.
        about: where its values are, as a clause: "weight is held by rank 1".
        remedy: the remedy for the user, as a sentence.
        is_trained: the value of `requires_grad` for users' code, which may select parameters by it; None: unchanged.
    """
    kind = getattr(tensor, "plain_class", type(tensor))  # a guarded weight stands for a plain one
    if kind in (torch.Tensor, nn.Parameter):
        tensor.__class__ = HiddenParameter if kind is nn.Parameter else Hidden
    if isinstance(tensor, Hidden):
        with torch._C.DisableTorchFunctionSubclass():
            tensor.is_trained = tensor.requires_grad if is_trained is None else is_trained
        tensor.about, tensor.remedy = about, remedy


def hidden_like(
    tensor: torch.Tensor, about: str, remedy: str, computed: Callable[[], torch.Tensor | None] | None = None
) -> torch.Tensor:
    """Return a tensor of the same shape that cannot be read.

    Args:
        tensor: the tensor.
        about: as for `hide`.
        remedy: as for `hide`.
        computed: computes the values if they are read nevertheless, as for `Postponed`.
    """
    hidden: Any = _blank(tensor)
    if computed is not None:  # torch calls `__torch_dispatch__` only of a tensor that was made with its class
        hidden = torch.Tensor._make_subclass(Postponed, hidden)
        hidden.computed = computed
    hide(hidden, about, remedy)
    return hidden


def is_computed_of_hidden(value: torch.Tensor) -> bool:
    """Whether a number of 32 bits on the CPU is NaN because a hidden tensor has been read unnoticed.

    Functions of torch that ignore both a tensor's class and modes read it as NaN: `torch.Tensor(p)`, `torch.func`, and
    code that runs with `DisableTorchFunction`.
    """
    if value.device.type != "cpu" or value.dtype != torch.float32 or value.numel() != 1:
        return False
    return int(value.detach().reshape(1).view(torch.int32)) & 0x7FFFFFFF == _BITS


def show(tensor: torch.Tensor) -> None:
    """Make a hidden parameter readable again, once it has its values."""
    if isinstance(tensor, Hidden):
        del tensor.about, tensor.remedy, tensor.is_trained
        plain: Any = nn.Parameter if isinstance(tensor, HiddenParameter) else torch.Tensor
        tensor.__class__ = plain


class Unreadable:
    """A value that is no tensor and cannot be read on this process. Any use of it fails at the user's line."""

    def __init__(self, about: str, remedy: str) -> None:
        self.__dict__.update(about=about, remedy=remedy)

    def __repr__(self) -> str:
        return f"Unreadable({self.__dict__['about']})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_all(next(value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Unreadable)))


def _refuse_all(value: Unreadable, *_: Any, **__: Any) -> NoReturn:
    raise ValueError("{about}. {remedy}".format(**vars(value)))


_BINARY = "add sub mul truediv floordiv divmod mod pow matmul and or xor lshift rshift"
_OTHERS = (
    "neg pos abs invert bool int float complex index round len iter reversed next contains getitem setitem delitem"
    " call getattr setattr delattr eq ne lt le gt ge hash format str bytes enter exit reduce_ex deepcopy array"
)
for _name in (*_OTHERS.split(), *_BINARY.split(), *(f"r{name}" for name in _BINARY.split())):
    setattr(Unreadable, f"__{_name}__", _refuse_all)


def _refuse(function: Any, args: Any, kwargs: Any) -> NoReturn:
    name = function if isinstance(function, str) else getattr(function, "__name__", str(function))
    owner = getattr(getattr(function, "__self__", None), "__name__", None)  # of an attribute
    first = next(value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Hidden))
    raise UnreadableError(f"{owner if name in ('__get__', '__set__') else name}: {first.about}. {first.remedy}")


def _caller() -> str:
    """Return the module of the code that accesses an attribute of a hidden tensor."""
    return str(_calling_frame(sys._getframe(2)).f_globals.get("__name__", ""))


def _calling_frame(frame: FrameType) -> FrameType:
    """Return the frame, or the frame that has called it through a mode for torch functions."""
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_in(module: str, *packages: str) -> bool:
    """Whether a module is one of the packages, or inside one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)
