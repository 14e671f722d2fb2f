"""Process groups for the fake device: gloo carries what NCCL would, and a log says who was asked for what.

Tensors of the device are handed to gloo as tensors of the CPU with the same memory. What would fail on NCCL is noted
in `wrong`: a tensor of the CPU on a group that would be NCCL's, or one of the device on a group made for gloo.
The reductions of DDP are made in C++, which gloo refuses for this device; `Replicated` makes them in Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fake_device
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_pipetransformer.run.setup import cutting

log: list[tuple[str, int]] = []
"""Each call on a group that would be NCCL's: its name, and the group's id; all processes together are 0."""
wrong: Counter[str] = Counter()

_gloo: dict[int, Any] = {}  # groups made for gloo, by id; kept, as Python uses the id of a deleted one again
_is_inside = False  # of another call of these


def register() -> None:
    """Replace the functions of `torch.distributed` in this process, for the rest of its life."""
    names = ("send", "recv", "isend", "irecv", "all_reduce", "broadcast", "reduce", "all_gather_into_tensor")
    replacements = {name: _passing(name) for name in names}
    replacements |= {"all_gather": _all_gather(), "new_group": _new_group()}
    replacements |= {"batch_isend_irecv": _batch(replacements), "barrier": _passing("barrier")}
    for name, function in replacements.items():
        setattr(c10d, name, function)
        setattr(dist, name, function)
    cutting.DistributedDataParallel = Replicated  # type: ignore[misc]
    PartialState._prepare_backend = lambda self, *_, **__: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[assignment]


def _note(name: str, group: Any, tensor: Any) -> None:
    if _is_inside:
        return
    is_of_device = isinstance(tensor, torch.Tensor) and tensor.device.type == "fake"
    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else tuple(range(dist.get_world_size()))
    if id(group) in _gloo:
        if is_of_device:
            wrong[f"{name} of a tensor of the device on gloo's group {ranks}: {fake_device.site()}"] += 1
        return
    if isinstance(tensor, torch.Tensor) and not is_of_device:
        wrong[f"{name} of a tensor of the CPU on NCCL's group {ranks}: {fake_device.site()}"] += 1
    log.append((name, id(group) if group not in (None, dist.group.WORLD) else 0))


def _calling(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _is_inside
    before, _is_inside = _is_inside, True
    try:
        return real(*map(fake_device.as_cpu, args), **{k: fake_device.as_cpu(v) for k, v in kwargs.items()})
    finally:
        _is_inside = before


def _passing(name: str) -> Callable[..., Any]:
    real = getattr(c10d, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        _note(name, kwargs.get("group"), next(iter(args), None))
        return _calling(real, *args, **kwargs)

    function.__name__ = name
    return function


def _all_gather() -> Callable[..., Any]:
    real = c10d.all_gather

    def all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, **kwargs: Any) -> Any:
        _note("all_gather", kwargs.get("group"), tensor)
        return _calling(real, [fake_device.as_cpu(one) for one in tensors], tensor, **kwargs)

    return all_gather


def _new_group() -> Callable[..., Any]:
    real = c10d.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = real(*args, **kwargs)
        if kwargs.get("backend") == "gloo":
            _gloo[id(group)] = group
        return group

    return new_group


def _batch(replacements: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        _note("batch_isend_irecv", operations[0].group, operations[0].tensor)
        works = []
        for one in operations:
            peer = {"group_dst" if one.op is replacements["isend"] else "group_src": one.group_peer}
            works.append(_calling(one.op, one.tensor, group=one.group, tag=one.tag, **peer))
        return [work for work in works if work is not None]

    return batch_isend_irecv


class Replicated(DistributedDataParallel):
    """DDP as far as a stage and a pipeline's schedule use it: gradients are averaged where a backward pass ends."""

    def __init__(self, module: nn.Module, process_group: Any, **_: Any) -> None:
        nn.Module.__init__(self)
        self.module, self.process_group = module, process_group
        self.require_backward_grad_sync = True
        self.reducer, self.logger = _Reducer(module, process_group), None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.reducer.prepare_for_backward([])
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


class _Reducer:
    """Averages all gradients over the replicas once, at the end of the backward pass that it is prepared for."""

    def __init__(self, module: nn.Module, group: Any) -> None:
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._group = group
        self._is_prepared = False
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        self._is_prepared = True

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._is_prepared:
            self._is_prepared = False
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        for parameter in self._parameters:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            dist.all_reduce(gradient, group=self._group)
            parameter.grad = gradient.div_(dist.get_world_size(self._group))
