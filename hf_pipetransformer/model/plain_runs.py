"""Tells whether a call is run as it is written: its output is then the values that its tensors have, and nothing more.

torch.func.jvp, vjp, vmap, grad     tensors are wrapped, and have no memory of their own
torch.autograd.forward_ad           tensors have tangents beside their values
torch.compile, torch.jit.trace      the operations are recorded, to be run later on other values
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def runs_plainly() -> bool:
    """Whether nothing transforms, differentiates forwards, or records the operations of a call that runs now.

    Stored outputs may only stand in for the outputs of such a call.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # first, as a compiler must not see the rest
        return False
    return forward_ad._current_level < 0 and torch._C._functorch.peek_interpreter_stack() is None
