"""Detects dropout, and disables it in training mode to make a model's training computation reproducible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


def may_drop(model: nn.Module) -> bool:
    """Whether a forward may draw random numbers for dropout, that is, whether any module has a dropout rate."""
    return any(
        module.training
        and any(isinstance(value, float) and value > 0 and "drop" in name for name, value in _rates_of(module))
        for module in model.modules()
    )


def _rates_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        yield "drop", float(module.p)
    yield from vars(module).items()
    if "config" in vars(module) and hasattr(module.config, "to_dict"):
        yield from vars(module.config).items()


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
"""Dropout functions of torch. Without dropout they return their first argument."""

DROPOUT_ARGUMENT: Mapping[str, tuple[str, int]] = {
    "scaled_dot_product_attention": ("dropout_p", 4),
    "multi_head_attention_forward": ("dropout_p", 10),
}
"""Functions with a dropout argument -> the argument's name and position."""


class WithoutDropout(TorchFunctionMode):
    """Inside, torch's dropout functions are disabled in all modules, in training and in eval mode.

    Eval mode would also disable code that a model runs only in training (a loss term, class weights, a mixup), and a
    probe must include it. Dropout is often not a module: transformers passes a probability to its attention functions.
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
