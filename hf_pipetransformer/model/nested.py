"""Nested values, such as batches and outputs: tensors inside mappings, lists and tuples.

They are read by `tensors_of` and rebuilt by Accelerate's `recursively_apply`, which keeps the types of containers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import recursively_apply

MASKED = 1e30
"""Values of at least this size stand for "minus infinity", and do not widen the tolerance for others."""


def tensors_of(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors in a value, in a fixed order."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if not isinstance(value, (Mapping, list, tuple)):
        return ()
    entries = value.values() if isinstance(value, Mapping) else value
    return tuple(tensor for entry in entries for tensor in tensors_of(entry))


def is_continuous(tensor: torch.Tensor) -> bool:
    """Whether a tensor can have a gradient, and is equal to another one up to rounding only."""
    return tensor.is_floating_point() or tensor.is_complex()


def in_new_containers(value: Any) -> Any:
    """The same tensors in new containers, for a model that writes its results into its input dict."""
    return recursively_apply(lambda tensor: tensor, value)


def in_new_tensors(value: Any) -> Any:
    """A copy of a value, for a trial of users' code: it may write into its input, which a step reads afterwards."""
    return recursively_apply(torch.clone, value)


def on_device(value: Any, device: torch.device) -> Any:
    """The same value with its tensors on a device."""
    return recursively_apply(lambda tensor: tensor.to(device), value)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a contiguous tensor's bytes, because gloo does not support every dtype."""
    return tensor.view(-1).view(torch.uint8)


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor itself; of a sparse or quantised one, tensors with plain memory that determine it."""
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def are_close(one: torch.Tensor, other: torch.Tensor, float32: float = 1e-4, half: float = 3e-2) -> bool:
    """Whether two tensors are equal up to rounding. NaN equals NaN.

    Args:
        one: a tensor.
        other: another tensor.
        float32: the largest accepted difference, relative to the largest value; integers must be equal.
        half: the same in half precision.
    """
    if one.shape != other.shape:
        return False
    if not is_continuous(one):
        return torch.equal(one, other)
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    sizes = other.detach().float().abs()
    sizes = sizes[sizes < MASKED]
    scale = float(sizes.max()) if sizes.numel() else 0.0
    tolerance = half if one.dtype in (torch.float16, torch.bfloat16) else float32
    return torch.allclose(one.float(), other.float(), rtol=0, atol=tolerance * max(scale, 1e-6), equal_nan=True)
