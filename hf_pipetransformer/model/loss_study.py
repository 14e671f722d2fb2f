"""Try a loss on a few rows before a model is cut.

Users write losses as they like. What a pipeline asks of one cannot be read off it, so it is tried, where every process
still holds the whole model and all can refuse it at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import nn

from ..errors import UnsupportedModelError
from .ghosts import evaluation_mode, reachable_leaves
from .layer_stack import LayerStack
from .loss_scaling import LossReduction, find_loss_reduction, unexamined
from .micro_batch import Batch


def study_loss(
    stack: LayerStack,
    sample: Batch,
    loss_of: Callable[[Batch, int], torch.Tensor],
    *,
    shifts_labels: bool,
    adds_up: bool,
    is_cut: bool,
    tolerance: float,
) -> tuple[LossReduction, frozenset[str]]:
    """How a loss adds up, and which parameters it does not reach.

    1. What gets no gradient from it.
    2. How the losses of parts add up.
    3. With several stages: whether it comes out the same when only the last layer runs under it.

    Args:
        stack: the units of the whole model.
        sample: a few rows, `with_distinct_labels`.
        loss_of: the loss of a batch for a number of items; 0-dimensional, drawing the same numbers at each call.
        shifts_labels: whether the model predicts label i + 1 at position i.
        adds_up: whether the losses of several parts will be added up.
        is_cut: whether the model will run in several stages.
        tolerance: relative, for the comparisons.

    Returns:
        The reduction, and the names of the parameters without gradient.

    Raises:
        UnsupportedModelError: the loss needs more of the model than its last stage.
    """

    def value_of(batch: Batch, num_items: int) -> float:
        with torch.no_grad():
            return float(loss_of(batch, num_items))

    table = stack.table
    with evaluation_mode(stack.model), torch.random.fork_rng(devices=[]):
        with torch.enable_grad(), table.all_trainable():  # 1
            reached = {id(leaf) for leaf in reachable_leaves([loss_of(sample, 1)])}
            without_gradient = frozenset(name for name in table.names if id(table[name]) not in reached)
        reduction = (  # 2
            find_loss_reduction(value_of, sample, shifts_labels, tolerance) if adds_up else unexamined(shifts_labels)
        )
        if is_cut:  # 3
            whole, cut = value_of(sample, 1), _under_the_last_unit(stack, sample, value_of)
            if math.isfinite(whole) and not math.isclose(whole, cut, rel_tol=tolerance, abs_tol=1e-6):
                raise UnsupportedModelError(
                    stack.model,
                    f"compute_loss gives {cut:.6g} where only the last layer runs, and {whole:.6g} where all do: it"
                    " changes the inputs before it calls the model, or reads hidden states of earlier layers.",
                    "Do the former in the data collator and compute the loss from the model's final outputs, or set"
                    " pipeline_parallel_size=1.",
                )
    return reduction, without_gradient


def _under_the_last_unit(stack: LayerStack, sample: Batch, value_of: Callable[[Batch, int], float]) -> float:
    """The loss as the last stage would compute it, were its stage one unit."""
    last = stack.num_units - 1
    stack.runner.install()
    try:
        with torch.no_grad(), stack.runner.poisoning_skipped():
            carry = stack.runner.run(0, last, None, sample) if last else {}
            with stack.runner.to_the_end(last, carry):
                return value_of(sample, 1)
    finally:
        stack.runner.remove()


def raise_for_exchanged_inputs(model: nn.Module) -> NoReturn:
    """What `study_loss` could not see: in a step of the training the last stage's inputs were others.

    Raises:
        UnsupportedModelError: always.
    """
    raise UnsupportedModelError(
        model,
        "compute_loss has called the model on other inputs than it was given, and the layers of the other stages have"
        " run on those that it was given.",
        "Change them in the data collator or in _prepare_inputs, or set pipeline_parallel_size=1.",
    )
