"""What training a model on rows of a given length costs, from its configuration alone.

FLOPs and bytes of a row are polynomials of degree 2 in its tokens T: products with weights are linear, attention
quadratic. So a model of ghosts is run on three short rows, and long ones follow:

    T          16   32   64              2,048
    measured   ●    ●    ●      ->       the parabola through them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from transformers import PreTrainedModel

from ..model.dummy_inputs import dummy_batch
from ..model.frozen_prefix import FreezableLayers
from ..model.layer_stack import LayerStack
from ..planning.costs import UnitCost, measure_costs
from .inspection import GhostProducts

MEASURED_TOKENS = (16, 32, 64)


@dataclass(frozen=True)
class Workload:
    """A model, for rows of the training's length.

    Attributes:
        unit_costs: of its units.
        max_frozen: the most layers whose freezing leaves something to train.
        cacheable: numbers of layers behind which one tensor alone is read; whether it can be kept depends on more.
        tokens_matter: whether the costs depend on the number of tokens; images have one size.
    """

    unit_costs: tuple[UnitCost, ...]
    max_frozen: int
    cacheable: frozenset[int]
    tokens_matter: bool = True

    def cache_row_bytes(self, boundary: int) -> int:
        """What is kept of a row behind so many layers."""
        index = min(boundary, max(len(self.unit_costs) - 1, 1))  # behind the last unit: as large as before it
        return self.unit_costs[index - 1].boundary_bytes

    @property
    def weight_bytes(self) -> int:
        """Of all parameters, each once."""
        return sum({name: size for unit in self.unit_costs for name, size in unit.parameters.items()}.values())


def measure_workload(model: PreTrainedModel, tokens: int) -> Workload:
    """Find a model's units and what a row of so many tokens costs.

    Args:
        model: of ghosts, or with weights.
        tokens: of a text row; audio and images have the size that the configuration asks for.

    Raises:
        UnsupportedModelError: it cannot be cut.
        ValueError: the rows are longer than the model's positions.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    samples = [dummy_batch(model, 1, tokens=t) for t in MEASURED_TOKENS]
    tokens_matter = any(samples[0][name].shape != samples[1][name].shape for name in samples[0])
    if tokens_matter and isinstance(positions, int) and tokens > positions > 0:
        raise ValueError(
            f"seq is {tokens}, but {type(model).__name__} has {positions} positions (max_position_embeddings): take at"
            f" most {positions}."
        )
    if tokens_matter and tokens <= MEASURED_TOKENS[-1]:
        samples = [dummy_batch(model, 1, tokens=tokens)]
    elif not tokens_matter:
        samples = samples[:1]
    with GhostProducts():
        stack = LayerStack.discover(model, samples[0])
        costs = [measure_costs(stack, sample) for sample in samples]
        max_frozen = FreezableLayers.of(stack, samples[0]).max_frozen
    units = costs[0] if len(costs) == 1 else tuple(_at(tokens, three) for three in zip(*costs, strict=True))
    inner = {k for k in range(1, stack.num_units) if sum(slot.is_used for slot in stack.boundaries[k]) == 1}
    # what leaves the last unit is what leaves the one before it, for all families that are known
    whole = {stack.num_units} if stack.num_units - 1 in inner or stack.num_units == 1 else set()
    return Workload(units, max_frozen, frozenset(inner | whole), tokens_matter)


def _at(tokens: int, measured: Sequence[UnitCost]) -> UnitCost:
    """A unit's cost, by the parabola through what was measured."""

    def value(points: Sequence[float]) -> int:
        terms = (
            point * prod((tokens - other) / (here - other) for other in MEASURED_TOKENS if other != here)
            for here, point in zip(MEASURED_TOKENS, points, strict=True)
        )
        return max(round(sum(terms)), 0)

    return replace(
        measured[0],
        forward_flops=float(value([unit.forward_flops for unit in measured])),
        activation_bytes=value([unit.activation_bytes for unit in measured]),
        boundary_bytes=value([unit.boundary_bytes for unit in measured]),
    )
