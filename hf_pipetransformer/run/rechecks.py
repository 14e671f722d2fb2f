"""Repeat the probe of the loss in some training steps, because user code may behave differently later.

A loss term that begins in the third epoch, or that a callback switches on, is not active when the loss is probed
before the first step. Therefore in the first eight steps, in steps 16, 32, 64, ... and in the first two steps of each
epoch, the last stage of a pipeline recomputes the loss of its batch, in parts and as a whole, without gradients and
dropout. It uses two steps per epoch because the results for one batch may agree by chance.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError, is_out_of_memory
from ..model.dropout import WithoutDropout
from ..model.left_as_found import left_as_found
from ..model.loss_scaling import LossOutcome, Tolerance, difference
from ..model.micro_batch import Batch
from ..model.placeholders import placeholder, values_of
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..pipeline.stage import LossFunction
from ..randomness import seeded

logger = logging.getLogger(__name__)

FIRST_STEPS = 8
STEPS_OF_AN_EPOCH = 2
LEAST_STEPS = 16
"""Minimum number of steps between two epochs that are checked; otherwise very short epochs would do little else."""
DEEPEST = 4
"""Maximum nesting depth of containers and objects that are searched for copies of parameters."""
MOST_ENTRIES = 2_000
"""Maximum number of entries of a container that is searched; a longer one holds samples."""
WITHOUT_COPIES = ("torch", "transformers", "accelerate", "datasets", "hf_pipetransformer", "builtins")
"""Packages whose objects keep no copies of parameters."""


class Rechecks:
    """Decides in which steps the probe is repeated."""

    def __init__(self) -> None:
        self._latest = -1
        self._epoch, self._since = -1, 0

    def is_due(self, step: int, epoch: float) -> bool:
        """Whether the probe is due in the step that begins. True at most once for each step.

        Args:
            step: number of steps done.
            epoch: number of epochs done, as a fraction within an epoch.
        """
        if step == self._latest:
            return False
        self._latest = step
        number = math.floor(epoch + 1e-6)
        if number != self._epoch and step - self._since >= LEAST_STEPS:
            self._since = step
        self._epoch = number
        is_power_of_two = (step + 1) & step == 0
        return step < FIRST_STEPS or is_power_of_two or step - self._since < STEPS_OF_AN_EPOCH


def loss_has_changed(
    pipeline: ElasticPipeline,
    batch: Batch,
    received: Sequence[Sequence[torch.Tensor]],
    part_of_loss: LossFunction,
    others: Sequence[Any],
    tolerance: Tolerance,
) -> str | None:
    """Return how the loss of a batch differs from the sum of its micro-batches' losses; None if it does not.

    Called on a last stage. Not collective.

    Args:
        pipeline: a pipeline of several stages, which has just run this batch.
        batch: the batch.
        received: the tensors that this stage received in the step, for each micro-batch (`ElasticPipeline.step`).
        part_of_loss: returns what a micro-batch, or the whole batch, contributes to the loss of the whole batch.
        others: objects whose attributes the loss may change; they are restored.
        tolerance: tolerance of the comparison.
    """

    def again(seed: int) -> list[LossOutcome]:
        with torch.no_grad(), WithoutDropout(), left_as_found(pipeline.model, *others), seeded(seed):
            losses = pipeline.losses_of_parts_and_whole(batch, received, part_of_loss)
            return [LossOutcome(float(loss)) for loss in losses]

    try:
        *parts, whole = again(0)
        if not all(outcome.is_finite for outcome in (*parts, whole)):
            return _reads_what_is_missing(pipeline, lambda: again(0))
        found = difference([(1.0, part) for part in parts], whole, tolerance)
        if found is not None and difference([(1.0, again(1)[-1])], whole, tolerance) is not None:
            return None  # the loss now draws random numbers
    except Exception as error:  # it must not be raised on this stage alone
        if not is_out_of_memory(error):
            return f"recomputing it fails ({type(error).__name__}: {error})"
        logger.warning("The loss is not rechecked: there is not enough memory to recompute it for a whole batch.")
        return None
    return found


def _reads_what_is_missing(pipeline: ElasticPipeline, again: Callable[[], list[LossOutcome]]) -> str | None:
    """Return a reason if a loss is not finite only because it reads parameters of other stages; otherwise None."""
    table = pipeline.stack.table
    zeros = {name: placeholder(table[name]) for name in pipeline.missing_parameters if table[name].is_floating_point()}
    with table.replaced(zeros):
        if all(outcome.is_finite for outcome in again()):
            return "it reads parameters that other stages hold"
    return None


def raise_for_changed_loss(model: nn.Module, step: int, found: str) -> None:
    """Raise the error for a loss that has changed during training.

    Raises:
        UnsupportedModelError: always.
    """
    raise UnsupportedModelError(
        model,
        f"in step {step} its loss is not the same function as before the first step: {found}. Probably a term was"
        " added during training that depends on all samples together, is normalized differently, or reads parameters"
        " of other stages.",
        "Include the term from the first step on (for example with a factor close to zero), so that it is probed, or"
        " set pipeline_parallel_size=1.",
    )


def keeper_of_placeholders(owners: Collection[Any], model: nn.Module, missing: Sequence[torch.Tensor]) -> str | None:
    """Find an object that keeps copies of placeholder parameters, as a running average would.

    Args:
        owners: the user's callbacks and the trainer.
        model: the model, whose own parameters are not copies.
        missing: the model's parameters that other stages hold; here they are all NaN.

    Returns:
        Class and attribute of the owner, as "Class.attribute"; None if there is none.
    """
    shapes = {tuple(value.shape) for tensor in missing for value in values_of(tensor)}
    memory = {value.untyped_storage().data_ptr() for tensor in model.parameters() for value in values_of(tensor)}
    for owner in owners:
        for name, value in getattr(owner, "__dict__", {}).items():
            for tensor in (inside for found in _tensors_of(value, 0) for inside in values_of(found)):
                is_copy = tuple(tensor.shape) in shapes and tensor.untyped_storage().data_ptr() not in memory
                if is_copy and tensor.numel() > 1 and tensor.is_floating_point() and bool(tensor.isnan().all()):
                    return f"{type(owner).__name__}.{name}"
    return None


def _tensors_of(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, nn.Module):
        if not isinstance(value, ElasticPipeline):
            yield from (parameter.detach() for parameter in value.parameters())
    elif depth < DEEPEST:
        inside: Iterable[Any] = ()
        if isinstance(value, (Mapping, list, tuple)):
            inside = () if len(value) > MOST_ENTRIES else value.values() if isinstance(value, Mapping) else value
        elif type(value).__module__.partition(".")[0] not in WITHOUT_COPIES:
            inside = list(getattr(value, "__dict__", {}).values())
        for inner in inside:
            yield from _tensors_of(inner, depth + 1)
