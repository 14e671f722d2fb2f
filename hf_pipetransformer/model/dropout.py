"""Whether a model drops, and training mode without dropout, to make what a model computes in training reproducible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


def may_drop(model: nn.Module) -> bool:
    """Whether a forward may draw random numbers for dropout: where it is on, some module has a rate for it."""
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
