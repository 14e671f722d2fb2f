"""Checks the results of a pipeline's last stage in training mode, before the model is split.

`LayerStack.discover` has compared stages with the whole model in eval mode. In training a model may also draw random
numbers, read other layers, or count its calls. One forward of a few samples and two of the last unit show it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError, in_one_line
from ..randomness import global_state_kept, seed_all
from .batch_statistics import normalised_by_batch
from .dropout import WithoutDropout
from .layer_range import Carry, Unit
from .layer_stack import REGISTERS_HOOKS, LayerStack, NotingHooks, output_tensors
from .mapped_weights import FileMappings, is_written
from .micro_batch import batch_rows, numbers_of_rows, slice_rows
from .nested import are_close, tensors_of
from .placeholders import evaluation_mode, values_of
from .refusals import USE_ONE_STAGE, refuse_own_backward
from .zero_weights import zeros_filled

LIBRARIES = ("transformers.", "torch.", "peft.", "accelerate.")


def is_users(module: nn.Module) -> bool:
    """Whether a module is the user's own, or from an unknown library."""
    return not type(module).__module__.startswith(LIBRARIES)


@torch.no_grad()
def check_training(stack: LayerStack, batch: dict[str, Any]) -> str:
    """Check the last unit alone against the whole model in training mode, without dropout.

    The caller undoes the forwards' changes in the model.

    Args:
        stack: the units of the complete model.
        batch: the model's inputs, for a few samples.

    Returns:
        Why each call must run whole batches in one forward; empty if it need not. The forward
        registers hooks on tensors, a call changes state, or the code after the layers reads more than the last layers'
        outputs (two towers that call the same layers).

    Raises:
        UnsupportedModelError: in training the model draws random numbers before the layers and reads them behind the
            layers, reads state that earlier layers leave behind, or changes weights in the forward.
    """
    model, runner, last = stack.model, stack.runner, stack.num_units - 1
    carry: Carry = {}  # before the last unit
    final: Carry = {}  # behind it
    position = itertools.count()

    def note(unit: Unit, output: object) -> None:
        refuse_own_backward(model, unit, output)  # gradient checkpointing of the user's, in training mode only
        final[unit.stack] = tensors_of(output)
        if next(position) < last:
            carry[unit.stack] = tensors_of(output)

    runner.install()
    try:
        # each unit, and the code after the last one, draw the same numbers in each pass
        with (
            global_state_kept(),
            zeros_filled(model),
            evaluation_mode(model),
            WithoutDropout(),
            NotingHooks() as hooks,
            runner.telling_entries(lambda: seed_all(0)),
        ):
            model.train()
            before = _state_of(model)
            batch = stack.runner.arguments(batch)
            seed_all(0)
            with runner.to_the_end(0, None, note), torch.enable_grad(), _saving_nothing():
                whole = _called(stack, batch)  # with gradients: a forward may register hooks only then
            changed = _changed(before, _state_of(model))
            cut = []
            for seed in (0, 1):
                seed_all(seed)
                copies = {of: tuple(value.clone() for value in values) for of, values in carry.items()}
                with stack.without_others(last), runner.to_the_end(last, copies):
                    cut.append(_called(stack, batch))
            head = _behind_all(stack, batch, final)
    finally:
        runner.remove()
    if changed is not None and changed.startswith("the parameter"):
        raise UnsupportedModelError(
            model,
            f"each forward pass in training mode changes {changed}, but no stage holds all weights.",
            USE_ONE_STAGE,
        )
    if changed is None and not _are_close(*cut):
        raise UnsupportedModelError(
            model,
            "in training mode it draws random numbers before its layers (for example for mixup or noise) that the last"
            " layers or the loss use, and each stage would draw different ones.",
            "Draw them in the data collator or in _prepare_inputs, or set pipeline_parallel_size=1.",
        )
    if changed is None and not _are_close(whole, cut[0]):
        raise UnsupportedModelError(
            model,
            "in training mode it gives another result when only its last layer runs: it reads what other layers return"
            " or leave behind.",
            USE_ONE_STAGE,
        )
    if hooks.found:
        return REGISTERS_HOOKS
    if changed is not None:
        return f"each forward pass in training mode changes {changed}"
    if head is None or not _are_close(whole, head):
        return "what lies behind its layers reads more than the outputs of the last ones"
    return ""


def _saving_nothing() -> torch.autograd.graph.saved_tensors_hooks:
    """Inside, no tensor is kept for a backward, which is not run."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)


@torch.no_grad()
def why_mixed(stack: LayerStack, batch: dict[str, Any]) -> str:
    """Why the layers must run on whole batches: their outputs for a sample depend on the others; empty if they do not.

    It runs the layers in evaluation mode, where nothing is random, on all samples and on the first one. The caller
    undoes the forwards' changes in the model.

    Args:
        stack: the units of the complete model.
        batch: the model's inputs, for a few samples.
    """
    rows = batch_rows(batch)
    if rows < 2 or len(numbers_of_rows(batch)) > 1 or normalised_by_batch(stack.model):
        return ""
    runner = stack.runner
    runner.install()
    try:
        with global_state_kept(), evaluation_mode(stack.model):
            whole = runner.run(0, stack.num_units, None, batch)
            whole = {of: tuple(value.clone() for value in values) for of, values in whole.items()}
            alone = runner.run(0, stack.num_units, None, slice_rows(batch, 0, 1))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:  # of the user's layers: pairs, `squeeze()`
        return f"its layers fail on one sample of a batch ({in_one_line(error)})"
    finally:
        runner.remove()
    if all(
        len(values) == len(alone[of])
        and all(_begins_with(*pair, rows) for pair in zip(values, alone[of], strict=True))
        for of, values in whole.items()
    ):
        return ""
    return "its layers' outputs for a sample depend on the other samples of the batch"


def _begins_with(whole: torch.Tensor, part: torch.Tensor, rows: int) -> bool:
    """Whether a value for all samples begins with that for the first one, up to the rounding of other kernels.

    Values that have no entry for each sample are not judged.
    """
    sizes = zip(whole.shape, part.shape, strict=False)
    different = [dim for dim, (one, other) in enumerate(sizes) if one != other]
    if (
        whole.dim() != part.dim()
        or len(different) != 1
        or whole.shape[different[0]] != rows * part.shape[different[0]]
    ):
        return True
    return are_close(whole.narrow(different[0], 0, part.shape[different[0]]), part, 1e-3, 5e-2)


def _behind_all(stack: LayerStack, batch: dict[str, Any], final: Carry) -> dict[str, torch.Tensor] | None:
    """The outputs without running a layer, from the last layers' outputs; None if that fails."""
    seed_all(0)
    copies = {of: tuple(value.clone() for value in values) for of, values in final.items()}
    try:
        with stack.runner.to_the_end(stack.num_units, copies):
            return _called(stack, batch)
    except (RuntimeError, IndexError):  # two calls of a layer may return other shapes
        return None


def _called(stack: LayerStack, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in output_tensors(stack.model(**arguments)).items()}


def _are_close(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(are_close(value, other[key]) for key, value in one.items())


def _state_of(model: nn.Module) -> dict[str, Any]:
    """Buffers, numbers in attributes of user modules, and the norms of untrained parameters, by name.

    For transformers' own modules it includes only saved buffers, because their other buffers are tables computed from
    the inputs. Running statistics of batch normalisation are left out: each stage keeps its layers' statistics, and
    `normalised_by_batch` limits the rest.
    """
    state = _norms_of_untrained(model)
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        prefix, is_own = f"{path}." if path else "", is_users(module)
        hidden = set() if is_own else module._non_persistent_buffers_set
        for name, buffer in module.named_buffers(recurse=False):
            if name not in hidden:
                state[f"the buffer {prefix}{name}"] = buffer.detach().clone()
        for name, value in vars(module).items() if is_own else ():
            if isinstance(value, (int, float, torch.Tensor)) and name != "training":
                state[prefix + name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return state


def _norms_of_untrained(model: nn.Module) -> dict[str, Any]:
    """The norms of untrained parameters, such as the parameters of a teacher that follows the model.

    None for a parameter that still has its file's values, which need not be read.
    """
    mappings, norms = FileMappings(), dict[str, Any]()
    for name, parameter in model.named_parameters():
        for part, value in enumerate(values_of(parameter) if not parameter.requires_grad else ()):
            is_mapped = mappings.place_of(value) is not None and not is_written(value)
            if value.numel():
                key = f"the parameter {name}{f' (part {part})' if part else ''}"
                norms[key] = None if is_mapped else torch.linalg.vector_norm(value.float())
    return norms


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    for name in before.keys() & after.keys():
        one, other = before[name], after[name]
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if one.shape != other.shape or not torch.equal(one, other):
                return name
        elif isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) or one != other:
            return name
    return None
