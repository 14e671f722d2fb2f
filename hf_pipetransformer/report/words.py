"""What a report says in sentences: the verdict at the top, why each layout changed, and what its terms mean.

All numbers are those of the records. What was not recorded is not said.
"""

from __future__ import annotations

from itertools import pairwise

from ..planning.tables import MIB
from ..records.history import Layout, Training

QUALITY_NAMES = ("accuracy", "_f1", "combined_score")
"""How the names of evaluation metrics end that summarize a training, instead of the loss."""

GLOSSARY = (
    ("stage", "a range of consecutive layers that one process holds and runs"),
    ("K", "number of stages of a pipeline (pipeline_parallel_size)"),
    ("R", "number of replicas: pipelines that train on different samples; K × R is the number of processes"),
    ("M", "number of micro-batches into which a pipeline's batch is split, so that its stages work at the same time"),
    ("frozen layer", "it no longer trains: a forward, but no backward, gradients or optimizer state"),
    ("cached layer", "a frozen layer that is not computed: its output is read from the local disk"),
    ("waiting", "time in which a stage has nothing to do, because a pipeline fills and drains (the bubble)"),
    ("dashed line", "a change of the layout; the table of layouts says which, and why"),
    (
        "predicted",
        "simulated before the layout was used, from times of the parts' forwards that were measured alone; a backward"
        " counts as two of them, and the update of the weights is not in it",
    ),
    ("measured", "by the clock of the main process, with everything that happened on the machine meanwhile"),
)
"""Term -> meaning."""


def verdict(training: Training) -> list[str]:
    """Return what came out of a training, in at most five sentences."""
    sentences = []
    if training.is_complete is False:
        sentences.append(f"The training has not ended; this is its state after step {training.last_step:,}.")
    timed = [layout for layout in training.layouts if layout.samples_per_second is not None]
    first_speed = timed[0].samples_per_second if timed else None
    if first_speed is not None:
        if not any(layout.num_frozen for layout in timed):
            sentences.append(
                f"Nothing was frozen; {timed[0].shape} (stages × replicas) trained {first_speed:,.0f} samples/s."
            )
        elif timed[0].num_frozen == 0:
            sentences += _gain(training, timed, first_speed)
    quality = final_quality(training)
    if quality is not None:
        sentences.append(f"{quality[0].capitalize()} at the end: {quality[1]:.4g}.")
    return sentences


def _gain(training: Training, timed: list[Layout], first_speed: float) -> list[str]:
    """Return how much faster the training was than its first layout would have been to the end."""
    taken = sum(layout.seconds + layout.waiting for layout in timed) + training.seconds.get("adapting", 0.0)
    unfrozen = sum(layout.rows for layout in timed) / first_speed
    ratio = unfrozen / taken
    sentences = [
        f"{ratio:.2f} times as fast as its own first layout ({timed[0].shape}, nothing frozen), preparation left out;"
        f" not compared with plain DDP; {sum(training.seconds.values()):,.0f} s in all.",
        f"Steps and changes of layout took {taken:,.1f} s; at the first layout's measured speed the same steps would"
        f" have taken {unfrozen:,.1f} s.",
    ]
    if ratio > 1:
        sentences.append(
            f"The first layout would have done {1 / ratio:.0%} of the steps in this time. If that is enough for your"
            " accuracy, train without freezing."
        )
    return sentences


def final_quality(training: Training) -> tuple[str, float] | None:
    """Return name and last value of the metric that summarizes the evaluations; None without evaluations."""
    names = [name for name in training.names if name.startswith("eval_")]
    for name in [name for name in names if name.endswith(QUALITY_NAMES)][:1] or ["eval_loss"]:
        values = training.curve(name)[1]
        if values:
            return name.removeprefix("eval_").replace("_", " "), values[-1]
    return None


def changes(training: Training) -> list[tuple[str, str]]:
    """Return for each layout when it began, and why."""
    layouts = training.layouts
    if not layouts:
        return []
    arguments = training.facts.get("arguments", {})
    asked = arguments.get("pipeline_parallel_size")
    first = layouts[0]
    why = f"{first.shape} (stages × replicas)"
    if asked == "auto":
        why += ": pipeline_parallel_size='auto' chose the shortest pipeline that fits, or a faster one"
    elif asked is not None:
        why += f": pipeline_parallel_size={asked} was asked for"
    begins = [(_when(first), why + ".")]
    return begins + [(_when(after), _reason(before, after, first, arguments)) for before, after in pairwise(layouts)]


def _when(layout: Layout) -> str:
    step = layout.first_step
    return f"after step {step:,} (epoch {layout.event['epoch']:.3g})" if step else "at the start"


def _reason(before: Layout, after: Layout, first: Layout, arguments: dict[str, object]) -> str:
    """Return why one layout followed another: what froze, what was cached, and what that allowed."""
    parts = []
    if after.event["event"] == "resume":
        parts.append("resumed from a checkpoint")
    froze = after.num_frozen - before.num_frozen
    if froze > 0:
        policy = arguments.get("freeze_policy", "none")
        by = f" by freeze_policy={policy!r}" if policy != "none" else ""
        parts.append(f"{froze} more layer{'s' if froze > 1 else ''} froze{by}, {after.num_frozen} in all")
    if after.num_cached != before.num_cached:
        parts.append(
            f"the outputs of the lowest {after.num_cached} layers are read from the cache"
            if after.num_cached
            else "no layers are read from the cache any more"
        )
    if after.num_stages < before.num_stages:
        parts.append(
            f"the pipeline became shorter, {before.shape} → {after.shape}: its largest stage needs"
            f" {after.stage_bytes / MIB:,.1f} MiB, at the start it was {first.stage_bytes / MIB:,.1f} MiB"
        )
    elif after.shape != before.shape:
        parts.append(f"{before.shape} → {after.shape} (stages × replicas)")
    elif after.event["stage_bounds"] != before.event["stage_bounds"]:
        parts.append("layers were divided anew over the stages, as frozen and cached ones take less time")
    text = "; ".join(parts) or "the plan was made anew"
    return text[0].upper() + text[1:] + "."
