"""Try slices on a few rows before a model is cut.

What a layer keeps of earlier tokens beside keys and values cannot be read off a model. So the gradients of one step in
slices are compared with those of one step without, where every process still holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import UnsupportedModelError
from .ghosts import evaluation_mode
from .kv_slices import Windows, attention_windows
from .layer_stack import LayerStack
from .micro_batch import Batch
from .token_slices import SlicedSequence, check_updates, running_slices, sequence_length

REMEDY = "Set token_slices='off'."


def study_slicing(
    stack: LayerStack, sample: Batch, loss_of: Callable[[Batch], torch.Tensor], tolerance: float
) -> Windows:
    """Check that a model's sequences can be run slice by slice, and return the windows of its layers.

    Costs two training steps of the sample. Weights, gradients and modes are as before when it returns.

    Args:
        stack: the units of the whole model.
        sample: a few rows.
        loss_of: a batch's, or a slice's, part of the loss of the whole sample.
        tolerance: of the gradients, relative: the 2-norm of a parameter's difference over that of the parameter.

    Raises:
        UnsupportedModelError: the model cannot be cut along its tokens, or the slices give another loss or gradient.
    """
    model = stack.model
    windows = attention_windows(model)
    if len(windows) != stack.num_units:
        raise UnsupportedModelError(
            model, f"it has {stack.num_units} layers, and its configuration says {len(windows)}.", REMEDY
        )
    length = sequence_length(sample)
    if length < 2:
        raise ValueError(
            f"token_slices: the first rows have {length} token: a sequence needs 2 to be cut. Set token_slices='off'."
        )
    before = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        with evaluation_mode(model), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            whole = loss_of(sample)
            whole.backward()
            expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            for parameter in model.parameters():
                parameter.grad = None
            sliced = _step_in_slices(stack, sample, loss_of, windows)
        _compare(model, float(whole.detach()), sliced, expected, tolerance)
    finally:
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            parameter.grad = gradient
    return windows


def _step_in_slices(
    stack: LayerStack,
    sample: Batch,
    loss_of: Callable[[Batch], torch.Tensor],
    windows: Windows,
) -> float:
    length = sequence_length(sample)
    odd = [length // 2, length // 3, length - length // 2 - length // 3]  # unequal, so that no offset is hidden
    lengths = [one for one in odd if one]
    model = stack.model
    losses = []
    try:
        with running_slices(model, sample):
            sequence = SlicedSequence(model, sample, lengths, windows)
            for number in range(len(lengths)):
                part = sequence.slice(number)
                losses.append(loss_of(part))
                check_updates(model, part["past_key_values"], stack.num_units)
            for loss in reversed(losses):
                if loss.requires_grad:
                    loss.backward()
    except (UnsupportedModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(
            model,
            f"in slices of {lengths} tokens it fails ({type(error).__name__}: {error}), where the whole sequence does"
            " not.",
            REMEDY,
        ) from error
    return sum(float(loss.detach()) for loss in losses)


def _compare(
    model: nn.Module, whole: float, sliced: float, expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    if abs(whole - sliced) > tolerance * max(abs(whole), 1e-3):
        raise UnsupportedModelError(
            model,
            f"in slices of tokens its loss is {sliced:.6g}, and {whole:.6g} without: something but keys and values of"
            " earlier tokens matters to later ones, or the loss shifts labels itself.",
            REMEDY,
        )
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    # a key's bias has a gradient of rounding alone; it must not count as wrong
    floor = 1e-2 * max((float(gradient.norm()) for gradient in expected.values()), default=0.0)
    for name, gradient in expected.items():
        other = found.get(name, torch.zeros_like(gradient))
        error = float((gradient - other).norm()) / max(float(gradient.norm()), floor, 1e-30)
        if not error <= tolerance:
            raise UnsupportedModelError(
                model,
                f"in slices of tokens the gradient of {name!r} differs by {error:.1e} of its norm (allowed"
                f" {tolerance:.0e}).",
                REMEDY,
            )
