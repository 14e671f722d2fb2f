"""Comparing computed values, and noise that reveals reads of the padding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

SAME = 1e-6
"""Tolerance relative to the largest value, for the same kernels on the same shapes: results must be identical."""

TOLERANCES: Mapping[torch.dtype, float] = {torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Tolerances relative to the largest value, for other batches: other shapes run other kernels, which sum in another
order."""

FLOAT32_TOLERANCE = 1e-5


def with_noise(state: torch.Tensor, mask: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Put noise as large as the state in half of the padding, and zeros in the other half."""
    real = aligned(mask, state)
    noise = torch.empty_like(state).normal_(generator=generator) * state[mask].abs().max()
    half = torch.empty_like(real, dtype=state.dtype).bernoulli_(0.5, generator=generator)
    return torch.where(real, state, noise * half)


def aligned(mask: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """View [B, T] or [B, C, T] as [B, T, 1, ...], with as many dimensions as the tensor."""
    return mask.view(*mask.shape, *[1] * (tensor.dim() - mask.dim()))


def relative_difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest expected value; infinite if shapes differ or for NaN."""
    if any(a.shape != b.shape for a, b in zip(actual, expected, strict=True)):
        return math.inf
    differences = [
        (a.detach().float() - b.detach().float()).abs().max() for a, b in zip(actual, expected, strict=True)
    ]
    largest = torch.stack([b.detach().float().abs().max() for b in expected]).max().clamp(min=1e-30)
    error = float(torch.stack(differences).max() / largest)
    return math.inf if math.isnan(error) else error


def rounding_of(state: torch.Tensor) -> float:
    """Return the tolerance for rounding if other kernels run, for the dtype of the state or of its computation."""
    device = state.device.type
    dtypes = [state.dtype]
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    if device == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtypes.append(torch.float16)  # fp16 has as many mantissa bits as TF32
    return max(TOLERANCES.get(dtype, FLOAT32_TOLERANCE) for dtype in dtypes)
