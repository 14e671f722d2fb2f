"""Probes slices on a few samples before a model is split.

A model's code does not tell whether a layer has other state than keys and values, nor how a loss uses its labels. So
the probe compares a step in slices with a step without, while every process still holds the whole model:

1. It compares the loss and gradients of the samples. Gradient checkpointing recomputes layers, as in training.
2. It compares the loss if only the first tokens of later slices have labels: the tokens before them must predict
   them. A loss that shifts labels itself loses these labels, and step 1 would not notice so few.

In addition, the probe replaces words in one part of the samples and checks whether the loss of another part changes:
the loss of earlier tokens may depend on later ones, as in an encoder; or the loss of a document on another document in
the same sample (such samples are refused when they occur).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UnsupportedModelError, is_out_of_memory
from ..model.layer_stack import LayerStack
from ..model.loss_scaling import IGNORED
from ..model.micro_batch import Batch, batch_rows
from ..model.placeholders import evaluation_mode
from ..model.refusals import has_router_loss
from ..model.zero_weights import zeros_filled
from ..randomness import global_state_kept
from .kv_slices import Windows, attention_windows, slice_cache_in
from .slices import REMEDY, SlicedSequence, check_updates, padding_word, running_slices, sequence_length

LossOf = Callable[[Batch], torch.Tensor]

SAME_LOSS = 1e-6
"""Relative difference below which two losses count as equal."""
FAR_FROM_ROUNDING = 100
"""Multiple of a loss's rounding error above which a difference is no rounding error."""


def informative_samples(batches: Sequence[Batch]) -> tuple[int, ...]:
    """Return the indices of two informative samples: the longest, for windows, and the shortest, for padding.

    Args:
        batches: separately collated samples. Indices count through all batches.
    """
    masks = [batch.get("attention_mask") for batch in batches]
    labels = [batch.get("labels") for batch in batches]
    counted = [one.ne(IGNORED) if isinstance(one, torch.Tensor) else None for one in labels]
    for tokens in (masks, counted):
        lengths = [
            n for one in tokens if isinstance(one, torch.Tensor) and one.dim() == 2 for n in one.sum(1).tolist()
        ]
        if lengths and min(lengths) < max(lengths):
            return lengths.index(max(lengths)), lengths.index(min(lengths))
    return tuple(range(min(sum(map(batch_rows, batches)), 2)))


def probe_slicing(
    stack: LayerStack, sample: Batch, loss_of: LossOf, *, loss_tolerance: float, gradient_tolerance: float
) -> Windows:
    """Check that a model's sequences can be run slice by slice, and return the windows of its layers.

    It costs two training steps on the sample batch, with gradients of the whole model, and some forwards. Weights,
    gradients and modes are restored.

    Args:
        stack: the units of the whole model.
        sample: a batch of a few samples.
        loss_of: computes the contribution of a batch or a slice to the loss of the whole sample batch.
        loss_tolerance: relative tolerance of losses.
        gradient_tolerance: relative tolerance: 2-norm of the difference of a parameter's gradients over the
            2-norm of its gradient.

    Raises:
        UnsupportedModelError: if the model cannot be split along its tokens, or slices change the loss or gradients.
        ValueError: if the batch is not informative: samples of one token, no gradient, or a loss that is not finite.
    """
    model = stack.model
    if has_router_loss(model):
        raise UnsupportedModelError(
            model, "output_router_logits=True adds a loss that compares all tokens of a batch.", REMEDY
        )
    windows = attention_windows(model)
    num_layers = len(windows.layers)
    if num_layers != stack.num_units:
        raise UnsupportedModelError(
            model, f"it has {stack.num_units} layers, but its configuration specifies {num_layers}.", REMEDY
        )
    _refuse_lost_checkpointing(model)
    length = sequence_length(sample)
    if length < 2:
        raise ValueError(
            f"token_slices: the first samples have {length} token, but a sequence needs at least 2 to be split. Set"
            " token_slices='off'."
        )
    lengths = [one for one in (length // 2, length // 3, length - length // 2 - length // 3) if one]  # unequal
    before = [parameter.grad for parameter in model.parameters()]
    try:
        with zeros_filled(model), evaluation_mode(model), global_state_kept():
            if _looks_ahead(sample, loss_of):
                raise UnsupportedModelError(model, "its attention is not causal: tokens see later tokens.", REMEDY)
            windows = replace(windows, separates_documents=_separates_documents(sample, loss_of))
            windows = replace(
                windows,
                allows_left_padding=_allows_left_padding(stack, sample, loss_of, lengths, windows, loss_tolerance),
            )
            with _checkpointing(model):
                _compare_gradients(stack, sample, loss_of, lengths, windows, loss_tolerance, gradient_tolerance)
            edges = _with_labels_at(sample, list(accumulate(lengths))[:-1])
            if edges is not None:
                with torch.no_grad():
                    whole = float(loss_of(edges))
                    parts = _losses_in_slices(stack, edges, loss_of, lengths, windows)
                _check_loss(model, whole, sum(map(float, parts)), loss_tolerance)
    finally:
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            parameter.grad = gradient
    return windows


@contextmanager
def _checkpointing(model: nn.Module) -> Iterator[None]:
    """Inside the context, a model in eval mode uses gradient checkpointing as in training.

    transformers checkpoints a layer if its `training` flag is True. Here the flag is True outside of the layer's own
    forward, and False inside it and during recomputation, which keeps dropout off.
    """
    layers: list[Any] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    before = [(layer, layer._gradient_checkpointing_func) for layer in layers if layer.gradient_checkpointing]
    for layer, checkpoint in before:
        layer._gradient_checkpointing_func = _in_evaluation_mode(layer, checkpoint)
        layer.training = True
    try:
        yield
    finally:
        for layer, checkpoint in before:
            layer._gradient_checkpointing_func = checkpoint
            layer.training = False


def _in_evaluation_mode(layer: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checkpoints a layer's forward and runs it in eval mode."""

    def call(forward: Callable[..., Any], *inputs: Any) -> Any:
        def quiet(*again: Any) -> Any:
            layer.training = False
            try:
                return forward(*again)
            finally:
                layer.training = True

        return checkpoint(quiet, *inputs)

    return call


def _refuse_lost_checkpointing(model: nn.Module) -> None:
    flagged = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    layers = [module for module in flagged if isinstance(module, GradientCheckpointingLayer)]
    if flagged and not (layers and hasattr(GradientCheckpointingLayer, "_can_checkpoint_with_cache")):
        raise UnsupportedModelError(
            model, "its gradient checkpointing does not support keys and values of earlier tokens.", REMEDY
        )


def _compare_gradients(
    stack: LayerStack,
    sample: Batch,
    loss_of: LossOf,
    lengths: list[int],
    windows: Windows,
    loss_tolerance: float,
    gradient_tolerance: float,
) -> None:
    model = stack.model
    for parameter in model.parameters():
        parameter.grad = None
    with torch.enable_grad():
        whole = loss_of(sample)
        if not math.isfinite(float(whole.detach())):
            raise ValueError(
                f"token_slices: the loss of the first samples is {float(whole.detach())}, so slices cannot be checked"
                " for correctness. Find the cause of this loss, or set token_slices='off'."
            )
        whole.backward()
        norms = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
        largest = max(norms.values(), default=0.0)
        if not largest > 0:
            raise ValueError(
                "token_slices: the first samples have no label that counts in the loss, so slices cannot be checked"
                " for correctness. Reorder or filter the data, or set token_slices='off'."
            )
        # losses of slices get the opposite sign: the gradients then add up to the difference, without extra memory
        losses = _losses_in_slices(stack, sample, lambda part: -loss_of(part), lengths, windows)
        _check_loss(model, float(whole.detach()), -sum(float(loss.detach()) for loss in losses), loss_tolerance)
        for loss in reversed(losses):
            if loss.requires_grad:
                loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        # the gradient of a key's bias is pure rounding error, which must not count as wrong
        error = float(parameter.grad.norm()) / max(norms.get(name, 0.0), 1e-2 * largest)
        if not error <= gradient_tolerance:
            raise UnsupportedModelError(
                model,
                f"with token slices the gradient of {name!r} differs by {error:.1e} of its norm (at most"
                f" {gradient_tolerance:.0e} is allowed).",
                REMEDY,
            )


def _losses_in_slices(
    stack: LayerStack, sample: Batch, loss_of: LossOf, lengths: list[int], windows: Windows
) -> list[torch.Tensor]:
    """Return the loss of each slice, with its graph."""
    model, losses = stack.model, []
    try:
        with running_slices(model, sample):
            sequence = SlicedSequence(model, sample, lengths, windows)
            for number in range(len(lengths)):
                part = sequence.slice(number)
                losses.append(loss_of(part))
                cache = slice_cache_in(part)
                assert cache is not None, lengths
                check_updates(model, cache, stack.num_units)
    except Exception as error:
        if isinstance(error, UnsupportedModelError) or is_out_of_memory(error):
            raise
        raise UnsupportedModelError(
            model,
            f"in slices of {lengths} tokens it fails ({type(error).__name__}: {error}), although the whole sequence"
            " does not.",
            REMEDY,
        ) from error
    return losses


def _looks_ahead(sample: Batch, loss_of: LossOf) -> bool:
    """Whether tokens attend to later ones, as in an encoder. Gradients of new weights would not show this."""
    length = sequence_length(sample)
    middle = length // 2
    return bool(_depends(sample, loss_of, on=range(middle, length), at=range(1, middle)))


def _separates_documents(sample: Batch, loss_of: LossOf) -> bool:
    """Whether the second document in a sample does not attend to the first one."""
    length = sequence_length(sample)
    middle = length // 2
    positions = torch.cat([torch.arange(middle), torch.arange(length - middle)])
    row = {name: value for name, value in sample.items() if name != "attention_mask"}  # a mask overrides positions
    device = next((value.device for value in sample.values() if isinstance(value, torch.Tensor)), None)
    row["position_ids"] = positions.to(device).expand(batch_rows(sample), -1)
    return _depends(row, loss_of, on=range(middle), at=range(middle + 1, length)) is False


@torch.no_grad()
def _allows_left_padding(
    stack: LayerStack, sample: Batch, loss_of: LossOf, lengths: list[int], windows: Windows, tolerance: float
) -> bool:
    """Whether slices give the same loss if the first token is padding. True if this cannot be tested."""
    words, padding, labels = sample.get("input_ids"), padding_word(stack.model), sample.get("labels")
    if padding is None or "position_ids" in sample:
        return True
    if not isinstance(words, torch.Tensor) or not isinstance(labels, torch.Tensor) or labels.shape != words.shape:
        return True
    mask = sample.get("attention_mask")
    mask = mask.clone() if isinstance(mask, torch.Tensor) else torch.ones_like(words)
    if mask.shape != words.shape:
        return True
    words, labels = words.clone(), labels.clone()
    words[:, 0], mask[:, 0], labels[:, :2] = padding, 0, IGNORED
    padded = {**sample, "input_ids": words, "attention_mask": mask, "labels": labels}
    try:
        whole = float(loss_of(padded))
        parts = sum(map(float, _losses_in_slices(stack, padded, loss_of, lengths, windows)))
    except Exception as error:  # the model may raise any error for such samples; a comparison without padding follows
        if is_out_of_memory(error):
            raise
        return True
    return not math.isfinite(whole) or abs(whole - parts) <= tolerance * max(abs(whole), 1e-3)


@torch.no_grad()
def _depends(sample: Batch, loss_of: LossOf, on: range, at: range) -> bool | None:
    """Whether other words at some tokens change the first sample's loss at others; None if this cannot be tested.

    Other words in other samples measure the rounding error: they change the numbers of tokens per expert.
    """
    row, words = _with_labels_at(sample, at), sample.get("input_ids")
    if row is None or not isinstance(words, torch.Tensor):
        return None
    others = words.min() + words.max() - words  # other words from the vocabulary
    labels = row["labels"].clone()
    labels[1:] = IGNORED
    if labels.eq(IGNORED).all() or torch.equal(words[0, on], others[0, on]):
        return None

    def loss_with_others(rows: slice) -> float:
        ids = words.clone()
        ids[rows, on] = others[rows, on]
        return float(loss_of({**row, "labels": labels, "input_ids": ids}))

    try:
        same, own, foreign = (loss_with_others(rows) for rows in (slice(0), slice(1), slice(1, None)))
    except Exception as error:  # the model may raise any error for positions, or for these words
        if is_out_of_memory(error):
            raise
        return None
    if not all(map(math.isfinite, (same, own, foreign))):
        return None
    return abs(own - same) > max(SAME_LOSS * abs(same), FAR_FROM_ROUNDING * abs(foreign - same))


def _with_labels_at(sample: Batch, positions: Sequence[int]) -> Batch | None:
    """Return the samples with labels at these tokens only; None without a label per token, or if none is left.

    Padding gets no label, and neither does a token predicted from padding: left padding has no token to attend to, and
    with eager attention it then attends to all tokens.
    """
    labels: Any = sample.get("labels")
    is_for_tokens = isinstance(labels, torch.Tensor) and labels.dim() == 2 and not labels.is_floating_point()
    if not is_for_tokens or labels.shape[1] != sequence_length(sample) or "shift_labels" in sample:
        return None
    counted = torch.zeros_like(labels, dtype=torch.bool)
    counted[:, list(positions)] = True
    mask = sample.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == labels.shape:
        counted[:, 1:] &= mask[:, 1:].bool() & mask[:, :-1].bool()
    if not counted.any():
        return None
    only = labels.clamp(min=0).masked_fill(~counted, IGNORED)  # ignored labels count here
    return {**sample, "labels": only}


def _check_loss(model: nn.Module, whole: float, sliced: float, tolerance: float) -> None:
    if not abs(whole - sliced) <= tolerance * max(abs(whole), 1e-3):  # also raises for NaN
        raise UnsupportedModelError(
            model,
            f"with token slices its loss is {sliced:.6g}, but {whole:.6g} without: later tokens depend on more than"
            " the keys and values of earlier ones, or the loss shifts labels itself.",
            REMEDY,
        )
