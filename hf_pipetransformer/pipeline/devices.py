"""Which device this process has, and how much memory it may use."""

from __future__ import annotations

import os
import platform

import psutil
import torch

USABLE_MEMORY = 0.9
"""Share of a device's memory that a stage may be planned to fill."""


def name_of_device(device: torch.device) -> str:
    """What kind it is, for people and for comparison."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"


def memory_budget(device: torch.device, processes: int) -> int | None:
    """Bytes that a stage may take on a device; None where it is not known.

    Args:
        device: of this process.
        processes: that share the host, where the launcher does not say.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * USABLE_MEMORY)
    if device.type == "cpu":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        return int(psutil.virtual_memory().available / here * USABLE_MEMORY)
    return None


def fits(size: int, device: torch.device) -> bool:
    """Whether so many bytes are free on a device; on the CPU, where the model has been made, they are."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return size < free * USABLE_MEMORY
