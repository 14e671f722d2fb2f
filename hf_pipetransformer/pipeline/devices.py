"""Which device this process has, and how much memory it may use."""

from __future__ import annotations

import os
import platform

import psutil
import torch

USABLE_MEMORY = 0.9
"""Fraction of a device's memory that a stage may be planned to fill."""


def name_of_device(device: torch.device) -> str:
    """The kind of device, to show to people and to compare."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"


def synchronise(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_budget(device: torch.device, processes: int) -> int | None:
    """Number of bytes that a stage may use on a device; None if it is not known.

    Args:
        device: the device of this process.
        processes: number of processes that share the host, used if the launcher does not set LOCAL_WORLD_SIZE.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * USABLE_MEMORY)
    if device.type == "cpu":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        return int(psutil.virtual_memory().available / here * USABLE_MEMORY)
    return None


def fits(size: int, device: torch.device) -> bool:
    """Whether `size` bytes are free on a device; always True on the CPU, where the model was created."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return size < free * USABLE_MEMORY
