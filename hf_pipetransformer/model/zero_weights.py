"""Gives trained weights of zeros other values for a probe: a new head of zeros does not show what it will read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .placeholders import can_have_gradient

STANDARD_DEVIATION = 0.1
"""Of the values that replace zeros."""


@contextmanager
def zeros_filled(model: nn.Module) -> Iterator[None]:
    """Inside, trained parameters with no value but zero have random values; afterwards they are zero again.

    With a head, a gate or an adapter of zeros, outputs and losses are the same whatever these read. After the first
    updates they are not. The values are in other memory, as a parameter's own may be a file's. The numbers of writes
    into parameters stay the same.

    Args:
        model: the model.
    """
    zeros = [parameter for parameter in model.parameters() if parameter.requires_grad and _is_zero(parameter)]
    before = [parameter.data for parameter in zeros]
    filled = [_random_like(values, seed) for seed, values in enumerate(before)]
    try:
        for parameter, values in zip(zeros, filled, strict=True):
            parameter.data = values
        yield
    finally:
        for parameter, values in zip(zeros, before, strict=True):
            parameter.data = values


def _is_zero(parameter: nn.Parameter) -> bool:
    """Whether all values are zero, and may be replaced. A placeholder repeats one value in memory."""
    if is_lazy(parameter) or not can_have_gradient(parameter) or parameter.is_meta or not parameter.numel():
        return False
    if 0 in parameter.stride() or parameter.element_size() < 2:
        return False
    values = parameter.detach()
    return not bool(values[(0,) * values.dim()]) and not bool(values.any())  # one value first: most are not zero


def _random_like(values: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator(values.device).manual_seed(seed)
    return torch.empty_like(values).normal_(std=STANDARD_DEVIATION, generator=generator)
