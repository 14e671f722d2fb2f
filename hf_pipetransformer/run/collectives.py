"""The accelerator's collectives in code that only the last stages of the pipelines run: `compute_loss`.

`gather`, `gather_for_metrics`, `reduce` and `pad_across_processes` mean the last stages of all pipelines there; with
one pipeline that is this process alone, as in a training on one process. `torch.distributed` is left alone: a
collective of all processes would wait for the other stages, which never enter it, until the watchdog ends the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import concatenate, recursively_apply

from ..model.nested import tensors_of

METHODS = ("gather", "gather_for_metrics", "pad_across_processes", "reduce")
"""Methods of an `Accelerator` that return their first argument when there is one process."""


@contextmanager
def among_last_stages(accelerator: Accelerator, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside the context, the accelerator's collectives are those of a group.

    Args:
        accelerator: the trainer's accelerator.
        group: the last stages of all pipelines; None if they mean this process alone.
    """
    before = {name: vars(accelerator).get(name) for name in METHODS}
    of_group: dict[str, Callable[..., Any]] = {
        "gather": partial(_gather, group),
        "gather_for_metrics": partial(_gather, group),
        "pad_across_processes": partial(_pad, group),
        "reduce": partial(_reduce, group),
    }
    vars(accelerator).update(of_group)
    try:
        yield
    finally:
        for name, method in before.items():
            del vars(accelerator)[name]
            if method is not None:  # the user had replaced it, or the code around this context
                vars(accelerator)[name] = method


def _everyones(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return each process's value, its tensors on this process's devices."""
    devices = iter([tensor.device for tensor in tensors_of(value)])
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, recursively_apply(lambda tensor: tensor.detach().cpu(), value), group=group)
    device = next(devices, torch.device("cpu"))
    return [recursively_apply(lambda tensor: tensor.to(device), theirs) for theirs in everyone]


def _gather(group: dist.ProcessGroup | None, tensor: Any = None, *_: Any, input_data: Any = None, **__: Any) -> Any:
    value = input_data if tensor is None else tensor
    if group is None:
        return value
    if not tensors_of(value):
        return [entry for theirs in _everyones(group, value) for entry in theirs]
    rows = recursively_apply(lambda one: one[None] if one.dim() == 0 else one, value)
    return concatenate(_everyones(group, rows))


def _reduce(group: dist.ProcessGroup | None, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
    if group is None:
        return tensor
    everyone = _everyones(group, tensor)
    by_tensor = iter(zip(*map(tensors_of, everyone), strict=True))
    number = len(everyone) if reduction == "mean" else 1
    return recursively_apply(lambda _: torch.stack(next(by_tensor)).sum(0) * scale / number, tensor)


def _pad(
    group: dist.ProcessGroup | None, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
) -> Any:
    if group is None:
        return tensor

    def pad(one: torch.Tensor) -> torch.Tensor:
        most = max(_everyones(group, one.shape[dim] if one.dim() > dim else 0))
        if one.dim() <= dim or one.shape[dim] == most:
            return one
        shape = [most - size if d == dim % one.dim() else size for d, size in enumerate(one.shape)]
        padding = one.new_full(shape, pad_index)
        return torch.cat([padding, one] if pad_first else [one, padding], dim)

    return recursively_apply(pad, tensor)
