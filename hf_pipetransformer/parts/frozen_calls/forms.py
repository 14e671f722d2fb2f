"""The form of a call: the module's mode, and the arguments without the values of tensors; modules without a form."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ...model.called_inputs import named_inputs
from ...model.plain_runs import state_of_torch
from ..front.described import ITEMS
from ..front.finding import PLAIN, is_compiled
from ..prefix_cache.cache.origins import tensors_in

KNOWN = ("torch.nn.", "hf_pipetransformer.", "bitsandbytes.", "torchao.", "transformers.")
"""Where the classes of parameters are from that lie whole on this process."""


def why_not_storable(module: nn.Module) -> str:
    """Why the output of a module outside of the training is not stored that is called now; empty if it may be."""
    if isinstance(module, torch.jit.ScriptModule) or is_compiled(module):
        return "it is compiled, so that its code cannot be looked at"
    parameters = list(module.parameters())
    if not all(type(parameter).__module__.startswith(KNOWN) for parameter in parameters):
        return "its weights are distributed"
    if any(parameter.is_meta for parameter in parameters):
        return "its weights are offloaded, and loaded in each call"
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
        return "its weights require gradients; if nothing trains them, set requires_grad_(False)"
    return ""


def arguments_by_name(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The arguments of a module's call, by name; None if its forward does not name them."""
    kinds = [p.kind for p in inspect.signature(type(module).forward).parameters.values()][1:]
    if any(kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds[: len(args)]):
        return None
    return named_inputs(module, args, kwargs)


def form_of(module: nn.Module, inputs: Mapping[str, Any] | None) -> str | None:
    """The form of a call that takes place now, in words; None if the arguments cannot be looked at.

    Args:
        module: the module.
        inputs: the arguments of the call, by name.
    """
    if inputs is None:
        return None
    if not all(isinstance(leaf, (*PLAIN, torch.Tensor, Mapping)) for leaf in tree_flatten(dict(inputs))[0]):
        return None
    device = next(module.parameters()).device.type
    if device == "meta":  # its weights are elsewhere, and are loaded in each call
        return None
    plain = sorted((n, repr(value)) for n, value in inputs.items() if n != ITEMS and not tensors_in(value))
    tensors = [(name, [(t.dtype, t.dim()) for t in tensors_in(inputs[name])]) for name in sorted(inputs)]
    adapters = next((part for part in module.modules() if hasattr(part, "_disable_adapters")), None)
    state = None if adapters is None else (adapters._disable_adapters, adapters._active_adapter)
    return repr((module.training, plain, tensors, state, state_of_torch(device)))
