"""The lines that a training logs: one at its start, one at each change of the layout, one at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..pipeline.moves import Transformation
from ..planning.layout import Layout
from ..planning.tables import MIB
from ..token_slices.slice_timeline import SlicePlan
from .recorder import Tally


@dataclass
class NotComputed:
    """What freezing and the cache have spared, counted in passes of single layers over single samples.

    Attributes:
        passes: forward passes that a training with nothing frozen would have run; as many backward passes.
        backward: backward passes of frozen layers, which were not run.
        forward: forward passes of cached layers, which were not run.
    """

    passes: int = 0
    backward: int = 0
    forward: int = 0

    def __str__(self) -> str:
        backward, forward = (count / max(self.passes, 1) for count in (self.backward, self.forward))
        return f"{backward:.1%} of the layers' backward passes and {forward:.1%} of their forward passes"


def describe_layout(plan: Layout) -> str:
    """K x R in words: "2 stages (2+4 layers) x 1 replica"."""
    k, r = plan.pipeline_parallel_size, plan.data_parallel_size
    sizes = "+".join(str(len(plan.units_of(stage))) for stage in range(k))
    return f"{_many(k, 'stage')} ({sizes} {'layer' if sizes == '1' else 'layers'}) x {_many(r, 'replica')}"


def describe_start(model: str, plan: Layout, freezing: str | None, cache: str | None, by_times: str) -> str:
    """Describe the training that begins.

    Args:
        model: name of the model's class.
        plan: the first plan.
        freezing: what will freeze and when; None if nothing can.
        cache: whether frozen layers are cached, and why; None if nothing can freeze.
        by_times: which choices go by measured times; empty if none does.
    """
    rows = plan.rows_per_pipeline
    parts = [f"{model} in {describe_layout(plan)}"]
    if plan.pipeline_parallel_size > 1:
        m = plan.num_microbatches
        parts.append(f"{_many(m, 'micro-batch', 'es')} of {_many(rows // m, 'sample')}, schedule {plan.schedule}")
    parts += ["replicas divide the optimizer state"] if plan.shards_optimizer else []
    parts += [freezing] if freezing is not None else []
    parts += [f"cache: {cache}"] if cache is not None else []
    parts += [f"{by_times} by measured times, so another run may differ by rounding"] if by_times else []
    return "; ".join(parts) + "."


def describe_chosen_length(plan: Layout, stage_bytes: Sequence[int], budget_bytes: int | None) -> str:
    """Describe which number of stages was chosen, and why.

    Args:
        plan: the first plan.
        stage_bytes: what each of its stages needs, as predicted.
        budget_bytes: memory of a device; None if it is not known.
    """
    k, needed = plan.pipeline_parallel_size, f"{max(stage_bytes) / MIB:,.0f} MiB"
    why = (
        "the memory of a device is not known, so the model counts as fitting one"
        if budget_bytes is None
        else f"its largest stage needs about {needed} of the {budget_bytes / MIB:,.0f} MiB of a device"
    )
    return f"pipeline_parallel_size='auto' is {k}: {why}."


def describe_change(change: Transformation, step: int, seconds: float, bytes_moved: int, freeze: str = "") -> str:
    """Describe a transformation.

    Args:
        change: the transformation.
        step: number of steps done.
        seconds: its duration.
        bytes_moved: number of bytes that all processes have received.
        freeze: what freezes with it (`FreezableLayers.describe_freeze`); empty if nothing does.
    """
    before, after = (describe_layout(plan) for plan in (change.before, change.after))
    parts = [*([freeze] if freeze else []), describe_frozen(change.after), f"{before} -> {after}"]
    return f"Step {step}: {'; '.join(parts)}, {bytes_moved / 2**20:.1f} MiB moved in {seconds:.3f} s."


def describe_frozen(plan: Layout) -> str:
    """How many layers are frozen, and cached, in words."""
    cached = f", {plan.num_cached_layers} of them cached" if plan.num_cached_layers else ""
    return f"{plan.num_frozen_layers} of {plan.num_units} layers frozen{cached}"


def describe_end(done: Tally, spared: NotComputed | None, changes: int, folder: str) -> str:
    """Describe a training that has ended.

    Args:
        done: by this `train()`, with the time of the main process.
        spared: what was not computed; None if nothing was frozen.
        changes: number of changes of the layout.
        folder: of the records.
    """
    longest = sorted(done.seconds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in longest if seconds >= 0.05)
    saved = f" Skipped {spared}; the layout changed {_many(changes, 'time')}." if spared else ""
    return (
        f"Trained {_many(done.steps, 'step')} in {sum(done.seconds.values()):.1f} s ({parts}).{saved} Report:"
        f" hf-pipetransformer report {folder}"
    )


def describe_cached_epoch(epoch: float, metrics: Mapping[str, float]) -> str:
    """Describe the use of the cache in an epoch that has ended, from its metrics."""
    found = metrics["cache_hit_rate"] + metrics["cache_older_hit_rate"]
    parts = []
    if found:
        skipped = metrics["cache_layers_skipped"]
        parts.append(f"{found:.0%} of the samples found ({skipped:.0%} of the layers' forward passes skipped)")
    if metrics["cache_rows_stored"]:
        parts.append(f"{metrics['cache_rows_stored']:,.0f} samples stored")
    size = f"{metrics['cache_bytes'] / MIB:,.1f} MiB"
    return f"Epoch {epoch:.4g}, cache: {', '.join(parts) or 'no samples found or stored'}; {size}."


def describe_slices(plan: SlicePlan) -> str:
    """Describe how a batch is split: its parts, and the predicted seconds of forward and backward, if known."""
    kinds = Counter((part.rows, part.lengths) for part in plan.parts)
    cut = ", ".join(
        f"{f'{count} x ' if count > 1 else ''}{_many(rows, 'row')} in "
        + ("one slice" if len(lengths) == 1 else f"slices of {'+'.join(map(str, lengths))} tokens")
        for (rows, lengths), count in kinds.items()
    )
    rows, tokens = sum(part.rows for part in plan.parts), sum(plan.parts[0].lengths)
    predicted = "" if plan.seconds is None else f"; forward and backward predicted {plan.seconds:.3g} s"
    return f"Batches of {rows} rows x {tokens} tokens: {cut}{predicted}"


def _many(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"
