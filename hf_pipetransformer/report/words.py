"""The sentences of a report: the verdict at the top, the reasons for each change of layout, and the glossary.

All numbers come from the records. Sentences without records are omitted.
"""

from __future__ import annotations

from itertools import pairwise

from ..parts.records.files import sentence_on_frozen
from ..parts.records.history import LayoutPeriod, Training
from ..planning.tables import MIB

FEW_STEPS = 10
"""Number of steps below which a layout's speed is uncertain: the first steps of a process take longer."""
SLOW_START = 1.5
"""Factor by which a layout's first steps may be slower than the others before its speed counts as uncertain."""
QUALITY_NAMES = ("accuracy", "_f1", "combined_score")
"""Endings of the names of evaluation metrics that summarize a training better than the loss."""

GLOSSARY = (
    ("stage", "a range of consecutive layers that one process holds and runs"),
    ("K", "number of stages of a pipeline (pipeline_parallel_size)"),
    ("R", "number of replicas: pipelines that train on different samples; K × R is the number of processes"),
    ("M", "number of micro-batches into which a pipeline's batch is split, so that its stages work at the same time"),
    ("frozen module", "you have set requires_grad=False for all of its parameters; no freeze policy had a part in it"),
    ("frozen layer", "it no longer trains: a forward, but no backward, gradients or optimizer state"),
    ("cached layer", "a frozen layer that is not computed: its output is read from the local disk"),
    ("waiting", "time in which a stage has nothing to do, because a pipeline fills and drains (the bubble)"),
    ("layout", "K, R and the cuts between stages; it does not change if layers freeze or are cached in their place"),
    ("dashed line", "a change of the layout, or of the frozen or cached layers; the table of layouts says which"),
    (
        "predicted",
        "simulated before the layout was used, from times of the parts' forwards that were measured alone; a backward"
        " counts as two of them, and the update of the weights is not in it",
    ),
    ("measured", "by the clock of the main process, with everything that happened on the machine meanwhile"),
)
"""Term -> meaning."""


def verdict(training: Training, is_compared: bool = False) -> list[str]:
    """Return the result of a training in a few sentences.

    Args:
        training: the training.
        is_compared: whether the report has a second training. The speed-up over the own first layout is then omitted.
    """
    sentences = []
    if training.is_complete is False:
        sentences.append(f"The training has not ended; this is its state after step {training.last_step:,}.")
    timed = [layout for layout in training.layouts if layout.samples_per_second is not None]
    first_speed = timed[0].samples_per_second if timed else None
    of_modules = _frozen_modules(training)
    sentences += [*of_modules, *_called_by_loss(training)]
    if first_speed is not None:
        if not any(layout.num_frozen for layout in timed):
            speed = f"{timed[0].shape} (stages × replicas) trained {_speed_of(timed):,.0f} samples/s."
            sentences.append(speed if of_modules else f"Nothing was frozen; {speed}")
        elif timed[0].num_frozen == 0 and not is_compared:
            sentences += _gain(training, timed, first_speed)
    quality = final_quality(training)
    if quality is not None:
        sentences.append(f"{quality[0].capitalize()} at the end: {quality[1]:.4g}.")
    return sentences


def _speed_of(timed: list[LayoutPeriod]) -> float:
    """Samples per second over several layouts."""
    return sum(layout.rows for layout in timed) / sum(layout.seconds + layout.waiting for layout in timed)


def _frozen_modules(training: Training) -> list[str]:
    """Return sentences on the user's frozen modules and the share of their outputs read from the cache."""
    frozen = [layout for layout in training.layouts if layout.frozen_modules is not None]
    if not frozen:
        return []
    last = frozen[-1]
    assert last.frozen_modules is not None
    until = "" if last is training.layouts[-1] else f" until step {last.last_step:,}"
    sentences = [f"{sentence_on_frozen(last.frozen_modules)}{until}."]
    read, skipped = (training.share_read(name) for name in ("cache_hit_rate", "cache_layers_skipped"))
    is_whole = not any(layout.num_frozen for layout in training.layouts)  # the cache is for the frozen modules
    if is_whole and read:
        sentences.append(
            f"Outputs of frozen modules were read for {read:.0%} of the samples, which skipped {skipped:.0%} of the"
            " forward passes."
        )
    reasons = why_not_read(training)
    sentences += [f"The output of {module} was not read from the cache: {reason}." for module, reason in reasons]
    if is_whole and not read and not reasons and training.is_complete:
        sentences.append("No output of a frozen module was read from the cache.")
    return sentences


def _called_by_loss(training: Training) -> list[str]:
    """Return for which part of each epoch outputs of frozen modules were read that the loss calls."""
    shares = training.curve("frozen_calls_read")[1]
    if not any(shares):
        return []
    by_epoch = ", ".join(f"{share:.0%}" for share in shares)
    return [f"The outputs of frozen modules that the loss calls were read for {by_epoch} of an epoch's samples."]


def why_not_read(training: Training) -> list[tuple[str, str]]:
    """Return the user's frozen modules that were computed in every epoch, each with the reason."""
    lines = [line for line in training.lines if line["kind"] == "cache_off" and "module" in line]
    return list({line["module"]: line["reason"] for line in lines}.items())


def _gain(training: Training, timed: list[LayoutPeriod], first_speed: float) -> list[str]:
    """Return sentences on the training's speed-up over its own first layout."""
    taken = sum(layout.seconds + layout.waiting for layout in timed) + training.seconds.get("adapting", 0.0)
    unfrozen = sum(layout.rows for layout in timed) / first_speed
    ratio = unfrozen / taken
    sentences = [
        f"{ratio:.2f} times as fast as its own first layout ({timed[0].shape}, nothing frozen, measured in"
        f" {timed[0].steps:,} steps), preparation left out; not compared with plain DDP;"
        f" {sum(training.seconds.values()):,.0f} s in all.",
        *_doubts(timed[0]),
        f"Steps and changes of layout took {taken:,.1f} s; at the first layout's measured speed the same steps would"
        f" have taken {unfrozen:,.1f} s.",
    ]
    if ratio > 1:
        sentences.append(
            f"The first layout would have done {1 / ratio:.0%} of the steps in this time. If that is enough for your"
            " accuracy, train without freezing."
        )
    return sentences


def _doubts(first: LayoutPeriod) -> list[str]:
    """Return a sentence if the speed of the first layout is too uncertain for a comparison."""
    why = []
    if first.steps < FEW_STEPS:
        why.append(f"the first layout had only {first.steps} step{'s' if first.steps != 1 else ''}")
    begin, *others = first.paces or [(0, 0.0)]
    rest = sum(steps for steps, _ in others)
    if begin[0] and rest:
        slower = begin[1] / begin[0] / max(sum(seconds for _, seconds in others) / rest, 1e-9)
        if slower > SLOW_START:
            steps = f"step{'s' if begin[0] != 1 else ''}"
            why.append(f"its first {begin[0]} {steps} took {slower:.1f} times as long as the others (warm-up)")
    if not why:
        return []
    return [
        f"This factor is uncertain: {' and '.join(why)}. Train once with freeze_policy='none' and use"
        " `hf-pipetransformer compare`."
    ]


def final_quality(training: Training) -> tuple[str, float] | None:
    """Return name and last value of the metric that summarizes the evaluations; None without evaluations."""
    name = quality_metric(training)
    values = training.curve(name)[1]
    return (name.removeprefix("eval_").replace("_", " "), values[-1]) if values else None


def quality_metric(training: Training) -> str:
    """Return the logged name of the metric that summarizes the evaluations."""
    names = [name for name in training.names if name.startswith("eval_") and name.endswith(QUALITY_NAMES)]
    return names[0] if names else "eval_loss"


def changes(training: Training) -> list[tuple[str, str]]:
    """Return each layout's beginning and its reason."""
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


def _when(layout: LayoutPeriod) -> str:
    step = layout.first_step
    return f"after step {step:,} (epoch {layout.event['epoch']:.3g})" if step else "at the start"


def _reason(before: LayoutPeriod, after: LayoutPeriod, first: LayoutPeriod, arguments: dict[str, object]) -> str:
    """Return the reason for a change of layout: frozen layers, cached layers, and the resulting stages."""
    parts = []
    if after.event["event"] == "resume":
        parts.append("resumed from a checkpoint")
    if after.event.get("frozen_modules") != before.event.get("frozen_modules") and "frozen_modules" in after.event:
        frozen = after.frozen_modules
        now = "no module is frozen by you" if frozen is None else sentence_on_frozen(frozen)
        parts.append(f"now {now}")
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
