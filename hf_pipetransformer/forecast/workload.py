"""Cost of training a model on samples of a given length, from its configuration alone.

FLOPs and bytes of a sample are polynomials of degree 2 in its number of tokens T: products with weights are linear in
T, attention is quadratic. Therefore a model of placeholders is run on three short samples, and longer ones are
extrapolated:

    T          16   32   64              2,048
    measured   ●    ●    ●      ->       the parabola through them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from transformers import PreTrainedModel

from ..model.dummy_inputs import dummy_batch
from ..model.frozen_prefix import FreezableLayers
from ..model.layer_stack import LayerStack
from ..planning.costs import FORWARDS_OF_A_BACKWARD, Cost, UnitCost, measure_costs
from .placeholder_model import GhostProducts

MEASURED_TOKENS = (16, 32, 64)


@dataclass(frozen=True)
class Workload:
    """The costs of a model for samples of the training's length.

    Attributes:
        unit_costs: costs of the model's units.
        max_frozen: the largest number of layers that can be frozen while some parameters stay trainable.
        cacheable: boundaries (numbers of layers below) that a single tensor crosses: a necessary condition for
            caching.
        tokens: number of tokens in a sample; None if the costs do not depend on it, as images have a fixed size.
        backward_forwards: cost of a backward in forwards.
        autocasts: whether autocast computes in 16 bits, and keeps copies of weights.
    """

    unit_costs: tuple[UnitCost, ...]
    max_frozen: int
    cacheable: frozenset[int]
    tokens: int | None = None
    backward_forwards: float = FORWARDS_OF_A_BACKWARD
    autocasts: bool = False

    def cache_row_bytes(self, boundary: int) -> int:
        """Return the bytes cached for a sample at this boundary, above `boundary` layers."""
        index = min(boundary, max(len(self.unit_costs) - 1, 1))  # above the last unit: the same size as below it
        return self.unit_costs[index - 1].boundary_bytes


def measure_workload(model: PreTrainedModel, tokens: int | None) -> Workload:
    """Find a model's units and measure the cost of a sample with this many tokens.

    Args:
        model: a model of placeholders, or with weights.
        tokens: number of tokens of a text sample; not needed for audio and images: the configuration specifies their
            size.

    Raises:
        UnsupportedModelError: the model cannot be split into stages.
        ValueError: the samples are longer than the model's positions, or `tokens` is needed but None.
    """
    tokens, samples = samples_to_measure(model, tokens)
    with GhostProducts():
        stack = LayerStack.discover(model, samples[0])
        freezable = FreezableLayers.of(stack, samples[0])
        costs = [measure_costs(stack, sample, freezable.never_frozen) for sample in samples]
    units = costs[0]
    if tokens is not None and len(costs) > 1:
        units = tuple(_at(tokens, measured) for measured in zip(*costs, strict=True))
    inner = {k for k in range(1, stack.num_units) if sum(slot.is_used for slot in stack.boundaries[k]) == 1}
    # in all known families, the last unit returns the same tensors as the previous unit
    whole = {stack.num_units} if stack.num_units - 1 in inner or stack.num_units == 1 else set()
    return Workload(units, freezable.max_frozen, frozenset(inner | whole), tokens)


def samples_to_measure(model: PreTrainedModel, tokens: int | None) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the number of tokens, None if costs do not depend on it, and the batches of one sample to measure.

    With several batches, the costs for the number of tokens are extrapolated from them (`at_length`).

    Raises:
        ValueError: as for `measure_workload`.
    """
    samples = [dummy_batch(model, 1, tokens=t) for t in MEASURED_TOKENS]
    if all(samples[0][name].shape == samples[1][name].shape for name in samples[0]):
        return None, samples[:1]
    if (length := _checked(tokens, model)) <= MEASURED_TOKENS[-1]:
        return length, [dummy_batch(model, 1, tokens=length)]
    return length, samples


def at_length(tokens: int | None, measured: Sequence[float]) -> float:
    """Return the value at this number of tokens, of the parabola through the values of `samples_to_measure`."""
    if tokens is None or len(measured) == 1:
        return measured[0]
    at = MEASURED_TOKENS
    weights = [prod((tokens - other) / (here - other) for other in at if other != here) for here in at]
    return sum(value * weight for value, weight in zip(measured, weights, strict=True))


def _checked(tokens: int | None, model: PreTrainedModel) -> int:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if tokens is None:
        raise ValueError(
            f"seq is not given, but the costs of {type(model).__name__} depend on the number of tokens of a sample."
            " Pass seq, such as --seq 128."
        )
    if isinstance(positions, int) and tokens > positions > 0:
        raise ValueError(
            f"seq is {tokens}, but {type(model).__name__} has {positions} positions (max_position_embeddings). Set seq"
            f" to at most {positions}."
        )
    return tokens


def _at(tokens: int, measured: Sequence[UnitCost]) -> UnitCost:
    """Extrapolate a unit's cost with the parabola through the measured values."""

    def extrapolated(costs: Sequence[Cost], *names: str) -> dict[str, Any]:
        points = {name: [getattr(cost, name) for cost in costs] for name in names}
        return {name: type(at[0])(max(round(at_length(tokens, at)), 0)) for name, at in points.items()}

    first, heads, of_both = measured[0], [unit.head for unit in measured], ("forward_flops", "activation_bytes")
    head = replace(first.head, **extrapolated(heads, *of_both))
    return replace(first, head=head, **extrapolated(measured, "boundary_bytes", *of_both))
