"""Layouts and slices in words, for the lines that a training logs (`run_log.py`)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ...planning.layout import Layout

if TYPE_CHECKING:  # types only: the package is optional
    from ...token_slices.slice_timeline import SlicePlan


def describe_layout(plan: Layout) -> str:
    """Return K x R in words: "2 stages (2+4 layers) x 1 replica". A model that is not split is a single unit."""
    k, r = plan.pipeline_parallel_size, plan.data_parallel_size
    sizes = "+".join(str(len(plan.units_of(stage))) for stage in range(k))
    layers = f" ({sizes} layers)" if plan.num_units > 1 else ""
    return f"{many(k, 'stage')}{layers} x {many(r, 'replica')}"


def describe_frozen(plan: Layout) -> str:
    """Return the numbers of frozen and of cached layers in words."""
    cached = f", {plan.num_cached_layers} of them cached" if plan.num_cached_layers else ""
    return f"{plan.num_frozen_layers} of {plan.num_units} layers frozen{cached}"


def describe_slices(plan: SlicePlan) -> str:
    """Return how a batch is split in words: its parts, and the predicted seconds of forward and backward, if known."""
    kinds = Counter((part.rows, part.lengths) for part in plan.parts)
    cut = ", ".join(
        f"{f'{count} x ' if count > 1 else ''}{many(rows, 'row')} in "
        + ("one slice" if len(lengths) == 1 else f"slices of {'+'.join(map(str, lengths))} tokens")
        for (rows, lengths), count in kinds.items()
    )
    rows, tokens = sum(part.rows for part in plan.parts), sum(plan.parts[0].lengths)
    predicted = "" if plan.seconds is None else f"; forward and backward predicted {plan.seconds:.3g} s"
    return f"Batches of {rows} rows x {tokens} tokens: {cut}{predicted}"


def many(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"
