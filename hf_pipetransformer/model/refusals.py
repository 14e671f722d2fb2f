"""Refuses models that cannot be split, by their configuration, their parameters and their forwards.

Raises `UnsupportedModelError` with the reason and the remedy.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from ..errors import UnsupportedModelError, is_out_of_memory, is_users
from .placeholders import has_state, is_wrapper, nodes_behind
from .units import Unit

LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Fields of configurations with the rate at which layers are skipped in training."""

USE_ONE_STAGE = "Set pipeline_parallel_size=1."


def refuse_by_configuration(model: nn.Module) -> None:
    """Refuse models if their configuration alone shows that they have no exact pipeline.

    Raises:
        UnsupportedModelError: for outputs of all layers, or layers that are skipped at random.
    """
    for part in configs_of(model):
        for field in ("output_hidden_states", "output_attentions"):
            if getattr(part, field, False):
                raise UnsupportedModelError(
                    model,
                    f"{field}=True returns values of all layers, but no stage holds them all.",
                    f"Set config.{field}=False.",
                )
        for field in LAYERDROP:
            if getattr(part, field, 0.0):
                raise UnsupportedModelError(
                    model,
                    f"{field}={getattr(part, field)} skips layers at random, and the stages would disagree on which.",
                    f"Set config.{field}=0.0.",
                )


def has_router_loss(model: nn.Module) -> bool:
    """Whether the model adds a loss over the routers of all layers. Such a loss needs the whole batch."""
    return any(getattr(part, "output_router_logits", False) for part in configs_of(model))


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations of the model and its parts."""
    config = getattr(model, "config", None)
    return [c for c in (config, *(getattr(config, n, None) for n in getattr(config, "sub_configs", {}))) if c]


def refuse_weights_with_state(model: nn.Module) -> None:
    """Refuse quantised weights of a class of their own that keep more than their values, such as bitsandbytes'.

    Raises:
        UnsupportedModelError: if the model has such a parameter; the message names it.
    """
    for name, parameter in model.named_parameters():
        if has_state(parameter):
            raise UnsupportedModelError(
                model,
                f"{name!r} is a {type(parameter).__name__}: its weights are quantized, and the scales that"
                " belong to them cannot be moved between stages.",
                "Quantize it with torchao, load it without quantization, or set pipeline_parallel_size=1.",
            )


def refuse_overlapping_weights(model: nn.Module) -> None:
    """Refuse different parameters that share elements in memory (`a.data = fused.data[:n]`): moves would split them.

    Raises:
        UnsupportedModelError: if the model has such parameters; the message names two.
    """
    dense = [(name, p) for name, p in model.named_parameters() if not (is_wrapper(p) or p.is_meta)]
    places = [(p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in dense if p.numel() and p.is_contiguous()]
    for (_, end, name), (begin, _, other) in pairwise(sorted(places)):
        if begin < end:
            raise UnsupportedModelError(
                model,
                f"{name!r} and {other!r} are different parameters, but share elements in memory, and would be moved"
                " apart.",
                "Make them one parameter (tied weights), or set pipeline_parallel_size=1.",
            )


def _forwards_of_autograd_functions() -> dict[CodeType, str]:
    """The code of the forward of each autograd function that is defined in Python, with the function's name.

    A frame is recognized by its code: reading its variables would keep them alive as long as the frame.
    """
    return {forward.__code__: name for name, forward in _forwards().items()}


def _forwards() -> dict[str, FunctionType]:
    classes: list[type] = [torch.autograd.Function]
    for cls in classes:
        classes.extend(cls.__subclasses__())
    forwards = {cls.__name__: getattr(cls, "forward", None) for cls in classes}
    return {name: forward for name, forward in forwards.items() if isinstance(forward, FunctionType)}


def users_functions(tensors: Collection[torch.Tensor]) -> list[str]:
    """Names of autograd functions of the user's in the graph behind these tensors."""
    of_nodes = {f"{name}Backward": name for name, forward in _forwards().items() if is_users(forward)}
    if not of_nodes:
        return []
    return [of_nodes[name] for node in nodes_behind(tensors) if (name := type(node).__name__) in of_nodes]


def refuse_split_checkpoint(model: nn.Module, unit: Unit) -> None:
    """Refuse a unit that is on another stage and is called inside torch's gradient checkpointing."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != checkpoint.__module__:
        frame = frame.f_back
    if frame is not None:
        raise UnsupportedModelError(
            model,
            "it checkpoints several layers at once (torch.utils.checkpoint), and computing them again takes"
            f" {unit.name!r}, which is on another stage.",
            "Checkpoint each layer alone, or set pipeline_parallel_size=1.",
        )


def refuse_own_backward(model: nn.Module, unit: Unit, _: Any) -> None:
    """Refuse a unit that is called inside the forward of an autograd function, as Reformer's layers are.

    The function's backward calls the layers again and sets gradients by itself, which autograd does not show.
    """
    frame, functions = inspect.currentframe(), _forwards_of_autograd_functions()
    while frame is not None:
        if frame.f_code in functions:
            raise UnsupportedModelError(
                model,
                f"it calls its layer {unit.name!r} inside an autograd function of its own"
                f" ({functions[frame.f_code]}), whose backward needs all layers.",
                f"Pass use_reentrant=False to torch.utils.checkpoint. Otherwise: {USE_ONE_STAGE}"
                if functions[frame.f_code] == CheckpointFunction.__name__
                else USE_ONE_STAGE,
            )
        frame = frame.f_back


def refuse_changed_weights(model: nn.Module, versions: Mapping[str, int]) -> None:
    """Refuse a model if its forward changes weights in place, because other stages hold some of them.

    Args:
        model: the model, after a forward.
        versions: autograd's counters of in-place changes before the forward.
    """
    changed = [name for name, parameter in model.named_parameters() if parameter._version != versions.get(name)]
    if changed:
        raise UnsupportedModelError(
            model,
            f"its forward changes {len(changed)} of its own weights ({changed[0]!r}), but no stage holds all weights.",
            USE_ONE_STAGE,
        )


@contextmanager
def refusing_what_fails(model: nn.Module) -> Iterator[None]:
    """Convert a model error into an `UnsupportedModelError`, because the whole model has run on the same batch.

    For example, Gemma 3n's upper layers take keys and values from a dictionary that lower layers have filled.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UnsupportedModelError) or is_out_of_memory(error):
            raise
        raise UnsupportedModelError(
            model,
            f"it fails when its layers are run one at a time ({type(error).__name__}: {error}), although the whole"
            " model runs (its layers may read attributes that earlier layers set).",
            USE_ONE_STAGE,
        ) from error
