"""Gives trained weights of zeros other values for a probe: a new head of zeros does not show what it will read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .placeholders import can_have_gradient

STANDARD_DEVIATION = 0.1
"""Of the values that replace zeros."""


@contextmanager
def zeros_filled(model: nn.Module) -> Iterator[None]:
    """Inside, trained parameters with no value but zero have random values; afterwards they are zero again.

    With a head, a gate or an adapter of zeros, outputs and losses are the same whatever these read. After the first
    updates they are not. Values are written as through `.data`: the numbers of writes into parameters stay the same.

    Args:
        model: the model.
    """
    filled = [parameter.data for parameter in model.parameters() if parameter.requires_grad and _is_zero(parameter)]
    for number, values in enumerate(filled):
        values.normal_(std=STANDARD_DEVIATION, generator=torch.Generator(values.device).manual_seed(number))
    try:
        yield
    finally:
        for values in filled:
            values.zero_()


def _is_zero(parameter: nn.Parameter) -> bool:
    """Whether all values are zero, and may be replaced. A placeholder repeats one value in memory."""
    if not can_have_gradient(parameter) or parameter.is_meta or not parameter.numel() or 0 in parameter.stride():
        return False
    values = parameter.detach()
    return not bool(values[(0,) * values.dim()]) and not bool(values.any())  # one value first: most are not zero
