"""The meaning of "all processes" in code that only the last stages of the pipelines run: `compute_loss`.

It means the last stages of all pipelines; with one pipeline this process alone, as in a training on one process. This
holds for each of these:

collectives of the accelerator     methods of its instance
counts and indices                 the shared states of Accelerate, which `TrainingArguments` read as well
`torch.distributed` without group  the default process group, which all processes would never enter together
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, concatenate, recursively_apply
from transformers.loss.loss_utils import LOSS_MAPPING

from ..model.nested import tensors_of
from ..pipeline.mesh import ProcessMesh

METHODS = ("gather", "gather_for_metrics", "pad_across_processes", "reduce")
"""Methods of an `Accelerator` that return their first argument when there is one process."""
ALONE: Mapping[str, Any] = {"num_processes": 1, "process_index": 0, "distributed_type": DistributedType.NO}
"""The counts of Accelerate in a training on one process."""


@contextmanager
def among_last_stages(accelerator: Accelerator, mesh: ProcessMesh, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside the context, a group stands for all processes: for collectives, counts and `torch.distributed`.

    Operations of the trainer that take all processes are refused (`ProcessMesh.refuse_with_last_stages`).

    The local index stays, because it is the number of a device.

    Args:
        accelerator: the trainer's accelerator.
        mesh: all processes of the run.
        group: the last stages of all pipelines; None if they are this process alone.
    """
    if mesh.world_size == 1:
        yield
        return
    counts = ALONE
    if group is not None:
        counts = {"num_processes": dist.get_world_size(group), "process_index": dist.get_rank(group)}
    everyone, alone = dist.group.WORLD, mesh.alone  # made while the default group has all processes
    with mesh.with_last_stages(), with_collectives_of(accelerator, group), counting(accelerator, counts):
        dist.distributed_c10d._update_default_pg(group or alone)
        try:
            yield
        finally:
            dist.distributed_c10d._update_default_pg(everyone)


def counts_processes(model: Any) -> bool:
    """Whether a model of transformers has a loss that counts processes: for detection and segmentation.

    These average their number of objects over all processes by a function of Accelerate, and then divide it by the
    number of processes once more. They find both in the state of Accelerate, which their modules import.
    """
    inside: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    return _have_counts(type(inside).__module__, getattr(inside, "loss_type", None))


@cache
def _have_counts(module: str, loss_type: str | None) -> bool:
    loss = LOSS_MAPPING.get(str(loss_type))
    used = [loss, *vars(sys.modules[loss.__module__]).values()] if loss is not None else []
    modules = {module, *(str(getattr(value, "__module__", None)) for value in used)}
    of_transformers = [
        sys.modules[name] for name in modules if name.startswith("transformers.") and name in sys.modules
    ]
    return any("PartialState" in vars(one) for one in of_transformers)


@contextmanager
def counting(accelerator: Accelerator, counts: Mapping[str, Any] = ALONE) -> Iterator[None]:
    """Inside the context, Accelerate has these counts; by default those of one process, without collectives."""
    # both have their attributes in dictionaries of their classes, which all instances share
    states = vars(PartialState()), vars(accelerator.state)
    before = [{name: state[name] for name in counts} for state in states]
    for state in states:
        state.update(counts)
    try:
        yield
    finally:
        for state, values in zip(states, before, strict=True):
            state.update(values)


@contextmanager
def with_collectives_of(accelerator: Accelerator, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside the context, the accelerator's collectives run in a group; None stands for this process alone."""
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
