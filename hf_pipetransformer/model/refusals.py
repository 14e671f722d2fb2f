"""Refuses models that cannot be split, by their configuration, their parameters and their forwards.

Raises `UnsupportedModelError` with the reason and the remedy.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from ..errors import UnsupportedModelError, is_out_of_memory, is_users
from .elsewhere import is_computed_of_hidden
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


def refuse_recorded(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Refuse a call that asks for what is recorded inside of all layers, if the stages do not send it.

    Raises:
        ValueError: attentions are asked for; or routers, but not in the configuration by which the model was split.
    """
    if inputs.get("output_attentions") or any(getattr(part, "output_attentions", False) for part in configs_of(model)):
        raise ValueError(
            f"output_attentions=True was set for {type(model).__name__}, but this pipeline stage has the attentions of"
            " its own layers only. Unset it, or set pipeline_parallel_size=1."
        )
    if inputs.get("output_router_logits") and not has_router_loss(model):
        raise ValueError(
            f"output_router_logits=True was passed to {type(model).__name__}, but its configuration did not ask for"
            " the routers' outputs when the model was split, so this pipeline stage has those of its own layers only."
            " Set model.config.output_router_logits=True before train(), or set pipeline_parallel_size=1."
        )


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


# ------------------------------------------------------------------------------------ passes through some layers
def ended_early(model: nn.Module, calls: int, units: int) -> UnsupportedModelError:
    """The forward has called fewer layers than expected."""
    return UnsupportedModelError(
        model,
        f"its forward ended after {calls} of {units} layer calls: the number of layers that run depends on the input.",
        USE_ONE_STAGE,
    )


def other_number_of_calls(model: nn.Module, calls: int, units: int) -> UnsupportedModelError:
    """A step has called another number of layers than expected."""
    return UnsupportedModelError(
        model,
        f"a step made {calls} layer calls where {units} were expected: the number of layers that run depends on the"
        " input, or the loss function does not call the model exactly once.",
        USE_ONE_STAGE,
    )


def other_order(model: nn.Module, index: int, unit: Unit, expected: str) -> UnsupportedModelError:
    """A layer was called where another one was expected."""
    return UnsupportedModelError(
        model,
        f"it called layer {unit.name!r} at position {index}, where {expected!r} was expected: the order of its"
        " layers depends on the input, or the loss function calls the model more than once.",
        USE_ONE_STAGE,
    )


def other_plain_values(
    model: nn.Module, unit: Unit, returned: Sequence[Any], probed: Sequence[Any]
) -> UnsupportedModelError:
    """A layer returns other numbers beside its tensors than for the probed samples."""

    def in_words(values: Sequence[Any]) -> str:
        return ", ".join(map(repr, values))

    return UnsupportedModelError(
        model,
        f"its layer {unit.name!r} returns {in_words(returned)} (a height and width, or a length), and"
        f" {in_words(probed)} for the first samples, but other stages get tensors only.",
        "Give all samples one size, let the layers read it from the tensors' shapes, or set pipeline_parallel_size=1.",
    )


def generating_with_some_layers(model: nn.Module, here: Sequence[int], units: int) -> ValueError:
    """`generate` is called where only some layers are."""
    return ValueError(
        f"generate() was called while {type(model).__name__} is split over pipeline stages: this process holds layers"
        f" {_described(here)} of {units}, and generating takes all of them. Generate in the trainer's evaluations,"
        " with predict_with_generate=True and compute_metrics (see PipeTransformerSeq2SeqTrainer): during them every"
        " process has the whole model. Or call generate() before or after train(), or set pipeline_parallel_size=1."
    )


def missing_layers(model: nn.Module, here: Sequence[int], units: int, unit: Unit) -> ValueError:
    """The whole model is called where only some layers are."""
    return ValueError(
        f"{type(model).__name__} is split over the pipeline stages during training: this process holds layers"
        f" {_described(here)} of {units}, and {unit.name!r} is not among them. Call the whole model (in"
        " compute_loss or a callback), use the trainer's evaluate() or predict(), or wait until train() has returned."
    )


def _described(units: Sequence[int]) -> str:
    """Return the units of ascending, disjoint ranges in words: "0 to 2 and 6 to 8"."""
    starts = [unit for unit in units if unit - 1 not in units]
    stops = [unit for unit in units if unit + 1 not in units]
    return " and ".join(f"{start} to {stop}" for start, stop in zip(starts, stops, strict=True))


# ------------------------------------------------------------------------------------ losses
def refuse_computed_of_hidden(loss: torch.Tensor) -> None:
    """Raise a `ValueError` if a loss is NaN because it reads weights or outputs of other processes."""
    if is_computed_of_hidden(loss):
        raise ValueError(
            "The loss is computed from weights or outputs of layers of other pipeline stages, in a way that hides it"
            " (torch.Tensor(p), torch.func, torch.vmap or DisableTorchFunction). Leave out parameters p for which"
            " getattr(p, 'is_elsewhere', False), or set pipeline_parallel_size=1."
        )


def raise_for_exchanged_inputs(model: nn.Module, names: Iterable[str]) -> NoReturn:
    """Report that the last stage has called the model on other inputs than the earlier ones.

    Args:
        model: the model.
        names: of the inputs.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"The {type(model).__name__} was called on other inputs than the batch's ({', '.join(sorted(names))}), by"
        " compute_loss or because of a forward pre-hook that has been registered since training began, but the loss"
        " is computed on micro-batches: the layers of the other stages run on the batch's inputs that the model's"
        " forward takes. Add, change or remove them in the data collator or in _prepare_inputs, register the hook"
        " before train(), or leave loss_reduction out: the loss then runs on whole batches, and may call the model on"
        " anything."
    )
