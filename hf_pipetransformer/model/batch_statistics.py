"""Batch normalisation: finds layers that normalise by a batch's statistics, and protects these from probes.

In training mode such a layer normalises each sample by the mean and variance of the whole batch, so micro-batches
would change its result. With one micro-batch in one pipeline, its result is the same as in one process. Its running
statistics are buffers, kept by the stage that holds its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def normalised_by_batch(model: nn.Module) -> str | None:
    """Return why the samples of a batch depend on one another; None if no layer normalises by the batch.

    Args:
        model: the model in its training mode. A batch normalisation that stays in eval mode (because its `train` is
            overridden, for example) normalises by its running statistics.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            return (
                f"{name!r} is a {type(module).__name__}, which normalises by the statistics of the whole batch in"
                " training mode (one that stays in eval mode does not)"
            )
    return None


@contextmanager
def running_statistics_kept(model: nn.Module) -> Iterator[None]:
    """Inside, normalisation layers are in eval mode, so a pass does not change their running statistics."""
    switched = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.training]
    for module in switched:
        module.training = False
    try:
        yield
    finally:
        for module in switched:
            module.training = True


def normalisations(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


@contextmanager
def statistics_set_aside(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, a pass updates copies of these layers' running statistics, which are then discarded.

    They are exchanged and not restored in place, because the backward of an earlier pass may refer to them.
    """
    kept = [(module, name, getattr(module, name)) for module in modules for name in STATISTICS]
    for module, name, statistic in kept:
        setattr(module, name, statistic.clone() if isinstance(statistic, torch.Tensor) else statistic)
    try:
        yield
    finally:
        for module, name, statistic in kept:
            setattr(module, name, statistic)
