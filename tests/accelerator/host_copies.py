"""Several processes on one accelerator: gloo, with the device's tensors copied to the host and back.

NCCL refuses two processes on one device, and gloo sends and receives the CPU's tensors only. So for a trial of a
pipeline on one device two things are needed:

1. `ddp_backend="gloo"` in the training arguments; Accelerate then gives all processes the same device.
2. `use_host_copies()` in each process, before the trainer is made: the functions of `torch.distributed` below take
   tensors of the device, too.

Each copy waits for the device, so measured times are useless. DDP's reductions are made in C++ and are not copied:
each stage must have a single process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d


class HostCopies(dist.Work):
    """An operation under way on copies in the host's memory.

    Args:
        work: the operation; None if this process has no part in it.
        received: pairs of a tensor of the device and its copy, which is written back when the operation is done.
    """

    def __init__(self, work: dist.Work | None, received: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._work, self._received = work, received

    def wait(self, *timeout: Any) -> bool:
        is_done = self._work is None or self._work.wait(*timeout)
        for tensor, copy in self._received:
            _write(tensor, copy)
        self._received = []
        return is_done

    def is_completed(self) -> bool:
        return not self._received and (self._work is None or self._work.is_completed())


def use_host_copies() -> None:
    """Let this process's `torch.distributed` take tensors of an accelerator over gloo, for the rest of its life."""
    functions: dict[str, Callable[..., Any]] = {
        "isend": _sending(c10d.isend),
        "send": _sending(c10d.send),
        "irecv": _receiving(c10d.irecv),
        "recv": _receiving(c10d.recv),
        "broadcast": _collective(c10d.broadcast),
        "all_reduce": _collective(c10d.all_reduce),
        "all_gather": _all_gather(c10d.all_gather),
    }
    functions |= {"batch_isend_irecv": _one_by_one, "barrier": _barrier(c10d.barrier)}
    for name, function in functions.items():
        function.__name__ = name
        setattr(c10d, name, function)  # P2POp compares with the functions of this module
        setattr(dist, name, function)


def _is_on_device(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu"


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _write(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    tensor.detach().copy_(copy)  # torch's schedules receive into leaves that require a gradient


def _sending(function: Callable[..., Any]) -> Callable[..., Any]:
    def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(_to_host(tensor) if _is_on_device(tensor) else tensor, *args, **kwargs)

    return send


def _receiving(function: Callable[..., Any]) -> Callable[..., Any]:
    def receive(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_on_device(tensor):
            return function(tensor, *args, **kwargs)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        result = function(copy, *args, **kwargs)
        if isinstance(result, dist.Work):  # irecv; recv returns the sender's rank when all is there
            return HostCopies(result, [(tensor, copy)])
        _write(tensor, copy)
        return result

    return receive


def _collective(function: Callable[..., Any]) -> Callable[..., Any]:
    def collective(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_on_device(tensor):
            return function(tensor, *args, **kwargs)
        copy = _to_host(tensor)
        return _finish(function(copy, *args, **kwargs), [(tensor, copy)])

    return collective


def _all_gather(function: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_on_device(tensor):
            return function(tensors, tensor, *args, **kwargs)
        copies = [_to_host(one) for one in tensors]
        return _finish(function(copies, _to_host(tensor), *args, **kwargs), list(zip(tensors, copies, strict=True)))

    return all_gather


def _barrier(function: Callable[..., Any]) -> Callable[..., Any]:
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, **kwargs: Any) -> Any:
        # Accelerate names the device of the process's number, but there is one device for all of them
        return function(group, async_op, **kwargs)

    return barrier


def _finish(work: dist.Work | None, received: list[tuple[torch.Tensor, torch.Tensor]]) -> HostCopies | None:
    """The operation's handle; None, as of torch's own, if it was not asked for and all is done."""
    pending = HostCopies(work, received)
    if work is not None:
        return pending
    pending.wait()
    return None


def _one_by_one(operations: list[Any]) -> list[Any]:
    works = []
    for one in operations:
        peer = {"group_dst" if one.op is c10d.isend else "group_src": one.group_peer}
        works.append(one.op(one.tensor, group=one.group, tag=one.tag, **peer))
    return [work for work in works if work is not None]
