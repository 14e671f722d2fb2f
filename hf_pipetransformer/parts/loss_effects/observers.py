"""Finds forward hooks of the user's that keep outputs of modules inside of layers, for the user's loss.

    hook on a layer          on the last stage it gets an output that cannot be read: the loss fails in its line
    hook inside of a layer   runs on the layer's stage, once for each micro-batch: the loss would miss its values,
                             or have those of the last micro-batch

A hook that returns a value changes the output, and counts as no observer: each stage runs its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import is_users
from ...model.layer_stack import LayerStack
from ...model.left_as_found import left_as_found
from ...model.micro_batch import Batch
from ...model.placeholders import evaluation_mode
from ...randomness import generators_kept, global_state_kept


def observing_hook(trainer: Any, stack: LayerStack, sample: Callable[[], Batch]) -> tuple[str, str] | None:
    """Return the names of a hook that observes and of its module inside of a layer; None without one.

    The model's forward runs once if there are hooks of the user's inside of layers. Not collective.

    Args:
        trainer: the trainer; the generators that it and its model own keep their states.
        stack: the units of the whole model.
        sample: returns a batch of a few samples.
    """
    hooked = {
        name: module
        for unit in stack.units
        for name, module in unit.module.named_modules(prefix=unit.name)
        if module is not unit.module and any(map(is_users, module._forward_hooks.values()))
    }
    if not hooked:
        return None
    with generators_kept(trainer, stack.model):
        batch = sample()
        stack.runner.install()
        try:
            with (
                evaluation_mode(stack.model),
                left_as_found(stack.model),
                global_state_kept(),
                torch.no_grad(),
                _noting(hooked) as observing,
                stack.runner.to_the_end(0, None),
            ):
                stack.model(**stack.runner.arguments(batch))
        finally:
            stack.runner.remove()
    return observing[0] if observing else None


@contextmanager
def _noting(hooked: dict[str, nn.Module]) -> Iterator[list[tuple[str, str]]]:
    """Inside, note the hooks of these modules that return nothing."""
    observing: list[tuple[str, str]] = []

    def noting(hook: Any, module_name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            returned = hook(*args, **kwargs)
            if returned is None and is_users(hook):
                observing.append((str(getattr(hook, "__qualname__", type(hook).__qualname__)), module_name))
            return returned

        return call

    before = {name: dict(module._forward_hooks) for name, module in hooked.items()}
    for name, module in hooked.items():
        module._forward_hooks.update({number: noting(hook, name) for number, hook in before[name].items()})
    try:
        yield observing
    finally:
        for name, module in hooked.items():
            kept = {number: before[name][number] for number in module._forward_hooks if number in before[name]}
            module._forward_hooks.update(kept)
