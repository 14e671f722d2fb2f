"""The figures of a report. Each shows a training's records, or the reason for missing data.

All figures over steps have the same x axis, with a line at each change of the layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from ..parts.records.history import LayoutPeriod, Training
from ..planning.tables import MIB
from ..planning.timeline import Timeline, simulate
from ..token_slices.slice_planning import RowSlices, SliceLatency
from ..token_slices.slice_timeline import StageLatency, simulate_slices
from .words import why_not_read

BLUE, ORANGE, GREEN, TEAL, PURPLE, GREY = "#3b6fb6", "#ee8434", "#3f9b5b", "#2a9d9d", "#8661b0", "#8a929c"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, TEAL, "#c8485b", "#7a6a53", GREY)
MOST_LAYOUTS_DRAWN = 6
MOST_BINS = 400
"""Maximum number of points of the samples/s curve."""
MOST_POINTS = 1500
"""Maximum number of points of other curves."""
MOST_MARKERS = 30
"""Curves with fewer points get markers: a single point would be invisible without one."""
TECHNICAL = ("_runtime", "_per_second", "_samples", "_time", "_seconds", "_bytes", "_flos", "_delta", "_allocated")

ACTIVITIES = {
    "steps": "training steps",
    "batches": "waiting for the next batch",
    "adapting": "changing layouts, cache",
    "evaluating": "evaluation",
    "saving": "checkpoints",
    "preparing": "before the first step",
    "ending": "after the last step",
    "other": "logging and all else",
}
PASSES = {"forward": ("forward", BLUE), "backward": ("backward", ORANGE), "weights": ("backward of weights", PURPLE)}
"""Kind of a pass -> label and color."""
WAITING = "waiting (bubble)"

Curve = tuple[Sequence[Any], Sequence[Any]]
"""x and y."""
Curves = Mapping[str, Curve]
"""Label -> curve."""

TITLES = {
    "losses-over-time": "Losses over time",
    "loss": "Loss",
    "quality": "Evaluation",
    "layers": "Layers: trained, frozen, cached",
    "shape": "Stages K × replicas R, micro-batches M",
    "speed": "Samples per second",
    "cache": "Cache of frozen outputs",
    "step": "One step, as predicted",
    "time": "Where the time went",
    "memory": "Memory of each process",
    "learning-rate": "Learning rate",
    "gradients": "Gradient norm",
}
"""Name of each figure's element on the page -> title, in the order of the page."""
Y_TITLES = {"loss": "loss", "layers": "layers", "speed": "samples/s", "gradients": "norm"}
"""Name of a figure over the optimizer steps -> title of its y axis, for figures that need one."""
WIDE = ("losses-over-time", "step", "time", "memory")
"""Figures that take the full width of the page."""
OVER_STEPS = {
    "loss": (
        "The training loss is the mean since the entry before; of an epoch, if logging_steps is longer.",
        "No loss was recorded: the training ended before its first epoch did, or another Trainer wrote the folder.",
    ),
    "quality": (
        "Metrics as logged.",
        "No metric of an evaluation was logged: set eval_strategy and compute_metrics.",
    ),
    "layers": ("The numbers of each layout.", "No layouts were recorded."),
    "shape": ("M is the number that most steps ran with, or the planned one.", "No layouts were recorded."),
    "speed": (
        "While training, without evaluating, saving and changing layouts.",
        "The time of steps was not recorded.",
    ),
    "learning-rate": ("The schedule goes by steps, whatever the layout.", "No learning rate was logged."),
    "gradients": (
        "Before clipping; the gradients of frozen layers are not in it.",
        "No gradient norm was logged.",
    ),
}
"""Name of a figure over the optimizer steps -> caption, and the text without data."""

Drawn = tuple[str, "go.Figure | None"]
"""A caption and a figure; or the reason for no figure, and None."""


def all_drawings(training: Training, runs: Mapping[str, Training]) -> dict[str, Drawn]:
    """Create the figures by their names in `TITLES`, in the order of the page.

    Args:
        training: the training.
        runs: name -> training, for this training and a second one to compare with; empty without one.
    """
    evaluated = [n for n in training.names if n.startswith("eval_") and not n.endswith(TECHNICAL)]
    losses = {n: n.replace("eval_", "evaluation_").removesuffix("_loss") for n in evaluated if "loss" in n}
    metrics = {n: n.removeprefix("eval_") for n in evaluated if "loss" not in n}
    layers, shape = _counts(training)
    curves: dict[str, Curves] = {
        "loss": _logged(training, {"loss": "training", **losses}),
        "quality": _logged(training, metrics),
        "layers": layers,
        "shape": shape,
        "speed": _speeds(training),
        "learning-rate": _logged(training, {"learning_rate": "learning rate"}),
        "gradients": _logged(training, {"grad_norm": "of all layers that train"}),
    }
    drawn = {name: _draw_over_steps(training, name, of_figure) for name, of_figure in curves.items()}
    if _is_whole(training):
        frozen = training.layouts[-1].frozen
        words = f" At the end it was frozen in part: {frozen}." if training.layouts[-1].frozen_modules else ""
        drawn["layers"] = f"The model was trained as a whole, so that its layers are not counted.{words}", None
    drawn |= {"cache": _draw_cache(training), "step": _draw_step(training)}
    drawn |= {"time": _draw_time(training), "memory": _draw_memory(training)}
    if runs:
        drawn["losses-over-time"] = _draw_comparison(runs)
    return {name: drawn[name] for name in TITLES if name in drawn}


# ---------------------------------------------------------------------------------------- over steps
def _draw_over_steps(training: Training, name: str, curves: Curves) -> Drawn:
    caption, missing = OVER_STEPS[name]
    if not curves:
        return missing, None
    figure = _figure(Y_TITLES.get(name, ""), training)
    for label, curve in curves.items():
        _add_curve(figure, label, curve)
    figure.update_traces(cliponaxis=False)  # shows markers at the first and the last step in full
    figure.update_traces(stackgroup="layers" if name == "layers" else None)
    figure.update_yaxes(rangemode="normal" if name == "quality" else "tozero")
    return caption, figure


def _draw_comparison(runs: Mapping[str, Training]) -> Drawn:
    """Draw the losses of trainings over the seconds since `train()` was called."""
    figure = _figure("loss")
    for (name, training), color in zip(runs.items(), COLORS, strict=False):
        for key, dash in (("loss", "solid"), ("eval_loss", "dot")):
            curve = training.curve_over_time(key)
            if curve[0]:
                label = f"{name}, {'training' if key == 'loss' else 'evaluation'}"
                _add_curve(figure, label, curve, line={"color": color, "dash": dash})
    figure.update_xaxes(title="seconds since train() was called", rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    if not figure.data:
        return "No losses with times were recorded.", None
    return "A Trainer that records no times has its steps spread evenly over its run.", figure


def _logged(training: Training, labels: Mapping[str, str]) -> Curves:
    """Return the curves of logged numbers. `labels`: name -> label."""
    return {label: curve for name, label in labels.items() if (curve := training.curve(name))[0]}


def _add_curve(figure: go.Figure, label: str, curve: Curve, **options: Any) -> None:
    xs, ys = thinned(*curve)
    figure.add_scatter(x=xs, y=ys, name=label, mode="lines+markers" if len(xs) < MOST_MARKERS else "lines", **options)


def thinned(xs: Sequence[Any], ys: Sequence[float]) -> tuple[list[Any], list[float]]:
    """Reduce a long curve to `MOST_POINTS`: keep the lowest and the highest point of each section."""
    if len(xs) <= MOST_POINTS:
        return list(xs), list(ys)
    edges = [round(k * len(xs) / (MOST_POINTS // 2)) for k in range(MOST_POINTS // 2 + 1)]
    chosen: list[int] = []
    for section in (range(begin, end) for begin, end in pairwise(edges)):
        chosen += sorted({min(section, key=ys.__getitem__), max(section, key=ys.__getitem__)})
    return [xs[k] for k in chosen], [ys[k] for k in chosen]


def _counts(training: Training) -> tuple[Curves, Curves]:
    """Return the numbers of layers, and of stages, replicas and micro-batches, over the training."""
    twice = [layout for layout in training.layouts for _ in range(2)]  # at the first and the last step
    steps = [step for layout in training.layouts for step in (layout.first_step, layout.last_step)]
    layers = {
        "cached (not computed)": (steps, [layout.num_cached for layout in twice]),
        "frozen (forward only)": (steps, [layout.num_frozen - layout.num_cached for layout in twice]),
        "trained": (steps, [layout.num_layers - layout.num_frozen for layout in twice]),
    }
    shape = {
        "K stages": (steps, [layout.num_stages for layout in twice]),
        "R replicas": (steps, [layout.num_replicas for layout in twice]),
        "M micro-batches": (steps, [layout.num_microbatches for layout in twice]),
    }
    return (layers, shape) if steps else ({}, {})


def _speeds(training: Training) -> Curves:
    """Return samples per second between two log entries, and as the mean of each layout."""
    lines = [line for line in training.lines if line["kind"] == "time" and line["steps"] and line["rows"]]
    if not lines:
        return {}
    size = -(-len(lines) // MOST_BINS)
    x, y = list[int](), list[float]()
    for some in (lines[k : k + size] for k in range(0, len(lines), size)):
        seconds = sum(line["seconds"].get(what, 0.0) for line in some for what in ("steps", "batches"))
        last = some[-1]["global_step"]
        x += [last - sum(line["steps"] for line in some), last]
        y += [sum(line["rows"] for line in some) / seconds] * 2
    known = [layout for layout in training.layouts if layout.samples_per_second is not None]
    means = (
        [step for layout in known for step in (layout.first_step, layout.last_step, None)],
        [speed for layout in known for speed in (layout.samples_per_second, layout.samples_per_second, None)],
    )
    return {"between two log entries": (x, y), "mean of the layout": means}


def _draw_cache(training: Training) -> Drawn:
    steps, hits = training.curve("cache_hit_rate")
    older, size = training.curve("cache_older_hit_rate")[1], training.curve("cache_bytes")[1]
    if not any((*hits, *older)):
        return _why_uncached(training), None
    figure = _figure("samples found", training)
    of_layers = any(layout.num_frozen for layout in training.layouts)
    figure.add_bar(x=steps, y=hits, name="behind all frozen layers" if of_layers else "of frozen modules")
    if any(older):
        figure.add_bar(x=steps, y=older, name="behind fewer")
    figure.add_scatter(x=steps, y=[value / MIB for value in size], name="size", mode="lines+markers", yaxis="y2")
    figure.update_layout(
        barmode="stack",
        yaxis={"tickformat": ".0%", "range": [0, 1.02]},
        yaxis2={"overlaying": "y", "side": "right", "title": "size, MiB", "rangemode": "tozero", "showgrid": False},
    )
    figure.update_yaxes(automargin=True)
    found = "Share of an epoch's samples that were found, drawn at the epoch's end"
    return f"{found}, and size of the store on this node.", figure


def _why_uncached(training: Training) -> str:
    reasons = [line["reason"] for line in training.lines if line["kind"] == "cache_off" and "module" not in line]
    if reasons:
        return f"Nothing was found: the cache was off, because {reasons[-1]}."
    of_modules = why_not_read(training)
    if of_modules:
        return " ".join(f"The output of {module} was not read: {why}." for module, why in of_modules)
    if any(layout.frozen_modules for layout in training.layouts):
        return "No output of a frozen module was read."
    if training.layouts and not any(layout.num_frozen for layout in training.layouts):
        return "No layer was frozen, so there was nothing to keep."
    stored = sum(training.curve("cache_rows_stored")[1])
    if stored:
        return f"{stored:,.0f} samples were put into it, but none was read: other layers froze, or the training ended."
    return "No layers were looked for in a cache: they were frozen too late, or the cache was off."


# ---------------------------------------------------------------------------------------- sums
def _draw_time(training: Training) -> Drawn:
    total = sum(training.seconds.values())
    if not total:
        return "The time was not recorded.", None
    figure = _figure("")
    names = {
        what: f"{label}<br>{training.seconds[what]:.1f} s, {training.seconds[what] / total:.0%}"
        for what, label in ACTIVITIES.items()
        if training.seconds.get(what, 0.0) > 0
    }
    rest = {what: training.seconds[what] for what in names}
    for layout in training.layouts:
        if layout.seconds:
            rest["steps"] -= layout.seconds
            figure.add_bar(x=[layout.seconds], y=[names["steps"]], name=layout.label, orientation="h")
    figure.add_bar(x=[max(rest[what], 0.0) for what in names], y=list(names.values()), name="other", orientation="h")
    figure.update_layout(barmode="stack", height=110 + 38 * len(names), xaxis={"title": "seconds"})
    figure.update_yaxes(autorange="reversed", showgrid=False, categoryorder="array", categoryarray=[*names.values()])
    return " ".join(_words_on_time(training, total)), figure


def _words_on_time(training: Training, total: float) -> list[str]:
    words = [f"{total:.1f} s of the main process, by the clock; steps by layout."]
    if training.layouts and not _is_whole(training):
        words.append(
            "Before the first step the layers are found, timed and cut; after the last one they are gathered."
        )
    if training.repeated_steps:
        words.append(f"In it are {training.repeated_steps} steps that were done again after an interruption.")
    if training.facts.get("device_type", "cpu") != "cpu":
        words.append("Work that a device has not finished when a call returns counts for what waits for it.")
    phases: defaultdict[str, float] = defaultdict(float)
    for phase, seconds in (item for event in training.events for item in event["phases"].items()):
        phases[phase] += seconds
    if phases:
        parts = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items())
        moved = sum(event["bytes_moved"] for event in training.events) / MIB
        words.append(f"Changing layouts, on the slowest process of each phase: {parts}; {moved:.1f} MiB were moved.")
    return words


def _draw_memory(training: Training) -> Drawn:
    used = [(layout, layout.usage) for layout in _distinct(training.layouts) if layout.usage is not None]
    if not used:
        return "Memory was not recorded.", None
    figure = _figure("MiB")
    is_on_device = any(usage.get("device_peak_bytes") for _, usage in used)
    boxes = {"measured": [usage["device_peak_bytes" if is_on_device else "resident_bytes"] for _, usage in used]}
    if is_on_device:  # memory of the stage's tensors, not comparable with a whole process
        boxes["predicted"] = [layout.event["predicted"]["memory_bytes"] for layout, _ in used]
    for label, by_layout in boxes.items():
        figure.add_box(
            x=[layout.label for (layout, _), values in zip(used, by_layout, strict=True) for _ in values],
            y=[value / MIB for values in by_layout for value in values],
            name=label,
            boxpoints="all",
        )
    figure.update_layout(boxmode="group")
    words = (
        "A point for each process. Predicted: parameters, gradients, Adam's state, activations, messages. Measured by"
        " torch, without its own workspaces; peaks of one layout hide lower ones of later layouts."
        if is_on_device
        else "A point for each process: all that it holds, Python and libraries included; memory that was freed may"
        " stay with it. A prediction, which is of the stage's tensors alone, would not compare with it."
    )
    return words, figure


# ---------------------------------------------------------------------------------------- one step
def _draw_step(training: Training) -> Drawn:
    found = [(layout, step) for layout in _distinct(training.layouts) if (step := _step_of(layout)) is not None]
    if not found:
        return _why_untimed(training), None
    bars: dict[str, list[tuple[float, float, str, str]]] = {}  # label -> begin, seconds, row, text
    for number, (layout, (timeline, names)) in enumerate(found[:MOST_LAYOUTS_DRAWN], 1):
        rows = [f"{number}. {layout.label}, stage {stage}" for stage in range(layout.num_stages)]
        bars.setdefault(WAITING, []).extend((0.0, timeline.seconds, row, f"{timeline.bubble:.1%}") for row in rows)
        for span in timeline.spans:
            bar = (span.start, span.end - span.start, rows[span.stage], names[span.micro_batch])
            bars.setdefault(PASSES[span.kind][0], []).append(bar)
    figure = _figure("")
    colors = {**dict(PASSES.values()), WAITING: "#e3e7ec"}
    for label, drawn in bars.items():
        begins, lengths, rows_of, texts = zip(*drawn, strict=True)
        figure.add_bar(
            base=[1e3 * begin for begin in begins],
            x=[1e3 * length for length in lengths],
            y=rows_of,
            text=texts,
            name=label,
            orientation="h",
            marker={"color": colors[label], "line": {"color": "white", "width": 1}},
            hovertemplate=f"{label} %{{text}}: %{{x:.3g}} ms<extra></extra>",
            textposition="inside",
            textangle=0,
        )
    figure.update_layout(
        barmode="overlay", height=110 + 30 * len({bar[2] for bar in bars[WAITING]}), xaxis={"title": "milliseconds"}
    )
    figure.update_yaxes(autorange="reversed", showgrid=False)
    words = (
        "Simulated from the times of the parts' forwards, measured before the training, on the slowest process; a"
        " backward counts as two of them, and messages take no time. One pipeline of each layout; all train the same"
        " global batch. Of batches that are cut along their tokens, the recorded one with most of them is shown, from"
        " what slices took on the stages themselves; 1.2 is slice 2 of part 1."
    )
    if len(found) > MOST_LAYOUTS_DRAWN:
        words += f" {len(found) - MOST_LAYOUTS_DRAWN} more layouts are not drawn."
    return words, figure


def _step_of(layout: LayoutPeriod) -> tuple[Timeline, list[str]] | None:
    """Return a step of one pipeline, and the names of its micro-batches or slices."""
    cut = max(
        (cut for cut in layout.slices if cut.get("latencies")),
        key=lambda cut: cut["rows"] * cut["tokens"],
        default=None,
    )
    if cut is not None:
        names = [f"{p}.{i}" for p, (_, lengths) in enumerate(cut["parts"]) for i in range(len(lengths))]
        parts = [RowSlices(rows, tuple(lengths)) for rows, lengths in cut["parts"]]
        stages = [StageLatency(*(SliceLatency(*one) for one in stage)) for stage in cut["latencies"]]
        return simulate_slices(stages, parts), names
    prediction = layout.prediction
    if prediction is None:
        return None
    m, forward = prediction["num_microbatches"], prediction["forward"]
    schedule = layout.event["predicted"]["schedule"]
    timeline = simulate(forward, prediction["backward"], m, schedule, len(forward) // layout.num_stages)
    return timeline, list(map(str, range(m)))


def _why_untimed(training: Training) -> str:
    if any(layout.slices for layout in training.layouts):
        return (
            "Batches were cut along their tokens, and how long slices take is not known; token_slices='auto' times"
            " them where it can (the log says why not). How they were cut is in the table of slices."
        )
    if _is_whole(training):
        return "The model was trained as a whole, so that no parts of it were timed."
    return (
        "The model's parts were not timed: full_determinism forbids it, there was one stage and nothing was frozen,"
        " they could not be, no layouts were recorded, or the version was an earlier one."
    )


# ---------------------------------------------------------------------------------------- helpers
def _figure(y_title: str, over_steps: Training | None = None) -> go.Figure:
    """Return an empty figure in the page's style. Over steps, it has a line at each new layout."""
    axis = {"zeroline": False, "gridcolor": "#e8ebef", "automargin": True}
    figure = go.Figure(
        layout={
            "template": "none",  # plotly's own templates take a second for each figure
            "height": 280,
            "margin": {"l": 56, "r": 16, "t": 36, "b": 44},
            "font": {"family": "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif", "size": 12},
            "legend": {"orientation": "h", "yref": "container", "y": 1, "yanchor": "top"},
            "showlegend": True,
            "colorway": COLORS,
            "xaxis": axis,
            "yaxis": {**axis, "title": y_title},
        }
    )
    if over_steps is not None:
        figure.update_layout(hovermode="x unified")
        figure.update_xaxes(title="optimizer step", range=[0, max(over_steps.last_step, 1)])
        for layout in over_steps.layouts[1:]:
            figure.add_vline(x=layout.first_step, line={"color": "#b6bcc6", "width": 1, "dash": "dash"})
    return figure


def _is_whole(training: Training) -> bool:
    """Whether the model was never split into layers."""
    return bool(training.layouts) and not any(layout.num_layers for layout in training.layouts)


def _distinct(layouts: Sequence[LayoutPeriod]) -> list[LayoutPeriod]:
    """Return the layouts with steps, each once: a resumed training repeats its layout."""
    found: dict[tuple[Any, ...], LayoutPeriod] = {}
    for layout in layouts:
        split = (layout.num_stages, *layout.event["stage_bounds"])  # each stage has one or more virtual stages
        key = (*split, layout.num_frozen, layout.num_cached, layout.num_microbatches)
        if layout.last_step > layout.first_step and (key not in found or found[key].usage is None):
            found[key] = layout
    return list(found.values())
