"""Cost of training a model on samples of a given length, from its configuration alone.

FLOPs and bytes of a sample are polynomials of degree 2 in its number of tokens T: products with weights are linear in
T, attention is quadratic. Therefore a model of placeholders is run on three short samples, and longer ones are
extrapolated:

    T          16   32   64              2,048
    measured   ●    ●    ●      ->       the parabola through them

The same split into tokens and pairs of tokens gives the cost of a slice of a sample: its own tokens, and their pairs
with all preceding tokens (`stage_latencies`).
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
from ..planning.costs import UnitCost, measure_costs
from ..planning.plan import PipelinePlan
from ..planning.unit_times import Seconds
from ..token_slices.slice_planning import SliceLatency
from ..token_slices.slice_timeline import StageLatency
from .inspection import GhostProducts

MEASURED_TOKENS = (16, 32, 64)


@dataclass(frozen=True)
class Workload:
    """The costs of a model, for samples of the training's length.

    Attributes:
        unit_costs: costs of its units.
        max_frozen: the largest number of layers that can be frozen while something is left to train.
        cacheable: numbers of layers above which only one tensor is read. Whether it can be cached depends on more.
        tokens_matter: whether the costs depend on the number of tokens; images have a fixed size.
        tokens: number of tokens in a sample; 1 if they do not matter.
        pair_shares: for each unit the fraction of a sample's FLOPs that grows with pairs of tokens, as in attention.
            Set only if sequences are to be split along their tokens.
    """

    unit_costs: tuple[UnitCost, ...]
    max_frozen: int
    cacheable: frozenset[int]
    tokens_matter: bool = True
    tokens: int = 1
    pair_shares: tuple[float, ...] = ()

    def cache_row_bytes(self, boundary: int) -> int:
        """Size of what is cached for a sample at this boundary, that is, above this many layers."""
        index = min(boundary, max(len(self.unit_costs) - 1, 1))  # above the last unit: the same size as below it
        return self.unit_costs[index - 1].boundary_bytes

    @property
    def weight_bytes(self) -> int:
        """Size of all parameters, each counted once."""
        return sum({name: size for unit in self.unit_costs for name, size in unit.parameters.items()}.values())


def measure_workload(model: PreTrainedModel, tokens: int | None) -> Workload:
    """Find a model's units and measure the cost of a sample with this many tokens.

    Args:
        model: a model of placeholders, or with weights.
        tokens: number of tokens of a text sample; not needed for audio and images, which have the size that the
            configuration specifies.

    Raises:
        UnsupportedModelError: the model cannot be split into stages.
        ValueError: the samples are longer than the model's positions, or their length is needed but not given.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    samples = [dummy_batch(model, 1, tokens=t) for t in MEASURED_TOKENS]
    tokens_matter = any(samples[0][name].shape != samples[1][name].shape for name in samples[0])
    if not tokens_matter:
        tokens, samples = 1, samples[:1]
    elif tokens is None:
        raise ValueError(
            f"seq is not given, but the costs of {type(model).__name__} depend on the number of tokens of a sample."
            " Pass seq, such as --seq 128."
        )
    elif isinstance(positions, int) and tokens > positions > 0:
        raise ValueError(
            f"seq is {tokens}, but {type(model).__name__} has {positions} positions (max_position_embeddings). Set seq"
            f" to at most {positions}."
        )
    elif tokens <= MEASURED_TOKENS[-1]:
        samples = [dummy_batch(model, 1, tokens=tokens)]
    with GhostProducts():
        stack = LayerStack.discover(model, samples[0])
        freezable = FreezableLayers.of(stack, samples[0])
        costs = [measure_costs(stack, sample, freezable.never_frozen) for sample in samples]
    units = costs[0] if len(costs) == 1 else tuple(_at(tokens, three) for three in zip(*costs, strict=True))
    inner = {k for k in range(1, stack.num_units) if sum(slot.is_used for slot in stack.boundaries[k]) == 1}
    # in all known families, the last unit returns the same tensors as the one before it
    whole = {stack.num_units} if stack.num_units - 1 in inner or stack.num_units == 1 else set()
    return Workload(units, freezable.max_frozen, frozenset(inner | whole), tokens_matter, tokens)


def measure_sample(model: PreTrainedModel, tokens: int) -> tuple[dict[str, Any], tuple[UnitCost, ...]]:
    """Find the units and measure their costs on one sample of so many tokens; `inspection.measure` for longer ones.

    Raises:
        UnsupportedModelError: the model cannot be split into stages.
        ValueError: the sample is longer than the model's positions.
    """
    return dummy_batch(model, 1, tokens=tokens), measure_workload(model, tokens).unit_costs


def measure_pair_shares(model: PreTrainedModel, tokens: int) -> tuple[float, ...]:
    """The fraction of a sample's FLOPs that grows with pairs of its tokens, in each unit of a causal language model.

    Here FLOPs are a T + b T^2, without a constant, so two short samples determine a and b.

    Args:
        model: a model of placeholders, or with weights.
        tokens: number of tokens in a sample, T.
    """
    many = max(min(tokens, MEASURED_TOKENS[-1]), 2)
    few = many // 2
    samples = [dummy_batch(model, 1, tokens=t) for t in (few, many)]
    with GhostProducts():
        stack = LayerStack.discover(model, samples[0])
        short, long = (measure_costs(stack, sample) for sample in samples)

    def share(one: float, other: float) -> float:
        slope = (other / many - one / few) / (many - few)  # FLOPs per token are a + b T
        base = one / few - slope * few
        return min(max(slope * tokens / (base + slope * tokens), 0.0), 1.0) if slope > 0 else 0.0

    return tuple(share(one.forward_flops, other.forward_flops) for one, other in zip(short, long, strict=True))


def stage_latencies(plan: PipelinePlan, workload: Workload, flat_tokens: int) -> list[StageLatency]:
    """Times of slices on each stage: `plan.predict`'s time of a whole sample, divided into its terms by FLOPs.

    The fixed cost of a slice is that of a micro-batch. The part before the units grows with the tokens only; the head
    is divided like the last unit, with which its FLOPs are counted.

    Args:
        plan: a plan with times.
        workload: a workload with `pair_shares`.
        flat_tokens: number of tokens below which a slice takes no less time, at most those of a sample.
    """
    times, shares = plan.times, workload.pair_shares
    assert times is not None and len(shares) == plan.num_units, shares
    last = plan.pipeline_parallel_size - 1
    latencies = []
    for stage in range(plan.pipeline_parallel_size):
        units = plan.units_of(stage)
        forward = [(times.units[u].forward, shares[u]) for u in units if u >= plan.num_cached_layers]
        backward = [(times.units[u].backward, shares[u]) for u in units if u >= plan.num_frozen_layers]
        forward.append((times.prologue.forward, 0.0))
        if stage == 0 and not plan.num_frozen_layers:
            backward.append((times.prologue.backward, 0.0))
        if stage == last:
            forward.append((times.head.forward, shares[-1]))
            backward.append((times.head.backward, shares[-1]))
        terms = (_latency(lines, workload.tokens, flat_tokens) for lines in (forward, backward))
        latencies.append(StageLatency(*terms))
    return latencies


def frozen_latency(plan: PipelinePlan, workload: Workload, flat_tokens: int) -> SliceLatency:
    """Times of slices on the frozen units of all stages together. The arguments are those of `stage_latencies`."""
    assert plan.times is not None
    units = range(plan.num_cached_layers, plan.num_frozen_layers)
    lines = [(plan.times.units[unit].forward, workload.pair_shares[unit]) for unit in units]
    return _latency(lines, workload.tokens, flat_tokens)


def _latency(lines: Sequence[tuple[Seconds, float]], tokens: int, flat_tokens: int) -> SliceLatency:
    """Add up times per sample, of each of which a fraction grows with pairs of tokens."""
    of_pairs = sum(seconds.per_row * share for seconds, share in lines)
    of_tokens = sum(seconds.per_row * (1 - share) for seconds, share in lines)
    return SliceLatency(
        fixed=sum(seconds.fixed for seconds, _ in lines),
        per_token=of_tokens / tokens,
        per_pair=of_pairs / (tokens**2 / 2),  # each token forms pairs with the tokens up to itself
        per_context=0.0,
        flat_tokens=min(flat_tokens, tokens),
    )


def _at(tokens: int, measured: Sequence[UnitCost]) -> UnitCost:
    """Extrapolate a unit's cost with the parabola through the measured values."""

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
        head=replace(
            measured[0].head,
            forward_flops=float(value([unit.head.forward_flops for unit in measured])),
            activation_bytes=value([unit.head.activation_bytes for unit in measured]),
        ),
    )
