"""Training mode without dropout, to make what a model computes in training reproducible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

DROPOUTS = frozenset(
    name + suffix
    for name in (
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
    )
    for suffix in ("", "_")
)
"""Functions of torch that return their first argument if nothing is dropped."""

DROPOUT_ARGUMENT: Mapping[str, tuple[str, int]] = {
    "scaled_dot_product_attention": ("dropout_p", 4),
    "multi_head_attention_forward": ("dropout_p", 10),
}
"""Functions with a dropout argument -> the argument's name and position."""


class WithoutDropout(TorchFunctionMode):
    """Inside, torch's dropout functions drop nothing, whatever mode the modules are in.

    Setting the modules to eval mode would also disable what a model does in training only (a loss term, class weights,
    a mixup), which a probe must include. Dropout is often not a module: transformers passes a probability to its
    attention functions.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name in DROPOUT_ARGUMENT:
            argument, position = DROPOUT_ARGUMENT[name]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs[argument] = 0.0
        return func(*args, **kwargs)
