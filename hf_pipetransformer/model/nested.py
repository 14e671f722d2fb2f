"""Nested values, such as batches and outputs: tensors inside mappings, lists and tuples.

They are read by `tensors_of` and rebuilt by Accelerate's `recursively_apply`, which keeps the types of containers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import recursively_apply


def tensors_of(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors in a value, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if not isinstance(value, (Mapping, list, tuple)):
        return ()
    entries = value.values() if isinstance(value, Mapping) else value
    return tuple(tensor for entry in entries for tensor in tensors_of(entry))


def in_new_containers(value: Any) -> Any:
    """The same tensors in new containers, for a model that writes its results into the dict that it is called on."""
    return recursively_apply(lambda tensor: tensor, value)


def on_device(value: Any, device: torch.device) -> Any:
    """The same value with its tensors on a device."""
    return recursively_apply(lambda tensor: tensor.to(device), value)
