"""Which device this process has, and how much memory it may use. Any accelerator that torch knows, or the CPU."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable

import psutil
import torch
from torch import nn

USABLE_MEMORY = 0.9
"""Fraction of a device's memory that a stage may be planned to fill."""
WITHOUT_STREAMS = ("cpu", "mps")
"""Devices that compute in the host's memory."""


def name_of_device(device: torch.device) -> str:
    """The kind of device, to show to people and to compare."""
    named: Callable[[torch.device], str] | None = None
    if device.type != "cpu":
        named = getattr(torch.get_device_module(device), "get_device_name", None)
    return named(device) if named is not None else f"{device.type} ({platform.machine()})"


def synchronise(device: torch.device) -> None:
    """Wait until a device has completed its queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_budget(device: torch.device, processes: int) -> int | None:
    """Number of bytes that a stage may use on a device; None if it is not known.

    Args:
        device: the device of this process.
        processes: number of processes that share the host, used if the launcher does not set LOCAL_WORLD_SIZE.
    """
    if device.type == "cpu":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        return int(psutil.virtual_memory().available / here * USABLE_MEMORY)
    return device_budget(device)


def device_budget(device: torch.device) -> int | None:
    """Number of bytes of an accelerator's memory that may be used; None if it is not known, and on the CPU.

    The CPU's memory is no bound for a model, because the model was created there.
    """
    memory = free_and_total(device) if device.type != "cpu" else None
    return int(memory[1] * USABLE_MEMORY) if memory is not None else None


def fits(size: int, device: torch.device) -> bool:
    """Whether `size` bytes are free on a device; always True on the CPU, where the model was created.

    Also True if a device does not tell.
    """
    memory = free_and_total(device) if device.type != "cpu" else None
    return memory is None or size < memory[0] * USABLE_MEMORY


def has_room(size: int, device: torch.device, processes: int) -> bool:
    """Whether `size` bytes are free for this process on a device, on the CPU as well.

    Args:
        size: number of bytes.
        device: the device.
        processes: as in `memory_budget`.
    """
    budget = memory_budget(device, processes) if device.type == "cpu" else None
    return size <= budget if budget is not None else fits(size, device)


def is_on(module: nn.Module, device: torch.device) -> bool:
    """Whether all parameters and buffers of a module are on a device; without an index it is the first of its kind."""
    places = {(tensor.device.type, tensor.device.index or 0) for tensor in (*module.parameters(), *module.buffers())}
    return places <= {(device.type, device.index or 0)}


def has_own_memory(device: torch.device) -> bool:
    """Whether a device has memory of its own, which it copies from and to pinned memory by itself."""
    return device.type not in WITHOUT_STREAMS


def free_and_total(device: torch.device) -> tuple[int, int] | None:
    """Bytes of an accelerator's memory that are free, and that there are; None if its backend does not tell."""
    try:
        free, total = torch.accelerator.get_memory_info(device)
    except RuntimeError:  # no such device, or, as a NotImplementedError, no such function
        return None
    return free, total


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that tensors have taken on an accelerator so far; None on the CPU, or without statistics."""
    if device.type == "cpu":
        return None
    try:
        return int(torch.accelerator.max_memory_allocated(device))
    except RuntimeError:
        return None
