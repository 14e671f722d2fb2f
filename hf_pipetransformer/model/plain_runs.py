"""Tells whether a call is run as it is written: its output is then the values that its tensors have, and nothing more.

Also tells with which settings of torch it is run.

torch.func.jvp, vjp, vmap, grad     tensors are wrapped, and have no memory of their own
torch.autograd.forward_ad           tensors have tangents beside their values
torch.compile, torch.jit.trace      the operations are recorded, to be run later on other values
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad


def runs_plainly() -> bool:
    """Whether nothing transforms, differentiates forwards, or records the operations of a call that runs now.

    Stored outputs may only stand in for the outputs of such a call.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # first, as a compiler must not see the rest
        return False
    return forward_ad._current_level < 0 and torch._C._functorch.peek_interpreter_stack() is None


def state_of_torch(device: str) -> str:
    """The settings of torch that modules compute with, in words: autocast, default dtype, precision."""
    autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    of: Any = torch.backends
    products, convolutions = (of.cuda, of.cudnn) if device == "cuda" else (of.mkldnn, of.mkldnn)
    precision = products.matmul.fp32_precision, convolutions.conv.fp32_precision
    return f"{autocast} {torch.get_default_dtype()} {precision}"
