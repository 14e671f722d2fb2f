"""The figures of a report. Each shows a training's records, or the reason why they cannot be shown.

All figures over steps have the same x axis, with a line at each change of the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from ..planning.tables import MIB
from ..planning.timeline import Timeline, simulate
from .report_data import Layout, Training, thinned, timeline_of_slices

BLUE, ORANGE, GREEN, TEAL, PURPLE, GREY = "#3b6fb6", "#ee8434", "#3f9b5b", "#2a9d9d", "#8661b0", "#8a929c"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, TEAL, "#c8485b", "#7a6a53", GREY)
MOST_LAYOUTS_DRAWN = 6
MOST_BINS = 400
"""Maximum number of points of the samples/s curve."""
TECHNICAL = ("_runtime", "_per_second", "_samples", "_time", "_seconds", "_bytes", "_flos", "_delta", "_allocated")

ACTIVITIES = {
    "steps": "training steps",
    "batches": "waiting for the next batch",
    "adapting": "freezing, changing layouts, looking at the cache",
    "evaluating": "evaluation",
    "saving": "checkpoints",
    "preparing": "before the first step: finding, timing and cutting the layers",
    "ending": "at the end: making the model whole",
    "other": "logging and all else",
}
PASSES = {"forward": ("forward", BLUE), "backward": ("backward", ORANGE), "weights": ("backward of weights", PURPLE)}
"""Kind of a pass -> label and color."""


@dataclass(frozen=True)
class Drawing:
    """A figure with its title and caption.

    Attributes:
        name: name of its element on the page.
        title: what it shows.
        caption: how to read it, and where its numbers come from.
        figure: the figure; None if it cannot be drawn, in which case `caption` gives the reason.
        is_wide: whether it takes the full width of the page.
    """

    name: str
    title: str
    caption: str
    figure: go.Figure | None = None
    is_wide: bool = False


def all_drawings(training: Training) -> list[Drawing]:
    """Create the figures in the order of the page."""
    quality = [n for n in training.names if n.startswith("eval_") and not n.endswith(TECHNICAL)]
    losses = {
        "loss": "training",
        **{n: n.replace("eval_", "evaluation_").removesuffix("_loss") for n in quality if "loss" in n},
    }
    metrics = {n: n.removeprefix("eval_") for n in quality if "loss" not in n}
    return [
        _draw_curves(
            training,
            Drawing("loss", "Loss", "As logged; the training loss is the mean since the entry before."),
            losses,
            "No loss was logged: logging_steps is larger than the training, or it was killed.",
        ),
        _draw_curves(
            training,
            Drawing("quality", "Evaluation", "Metrics as logged."),
            metrics,
            "No metric of an evaluation was logged: set eval_strategy and compute_metrics.",
        ),
        _draw_layers(training),
        _draw_shape(training),
        _draw_speed(training),
        _draw_cache(training),
        _draw_step(training),
        _draw_time(training),
        _draw_memory(training),
        _draw_curves(
            training,
            Drawing("learning-rate", "Learning rate", "The schedule goes by steps, whatever the layout."),
            {"learning_rate": "learning rate"},
            "No learning rate was logged.",
        ),
        _draw_curves(
            training,
            Drawing("gradients", "Gradient norm", "Before clipping; the gradients of frozen layers are not in it."),
            {"grad_norm": "of all layers that train"},
            "No gradient norm was logged.",
        ),
    ]


# ---------------------------------------------------------------------------------------- over steps
def _draw_curves(training: Training, drawing: Drawing, labels: dict[str, str], missing: str) -> Drawing:
    """Draw logged numbers: name -> label."""
    figure = _figure(drawing.title.lower(), training)
    for name, label in labels.items():
        steps, values = training.curve(name)
        if steps:
            x, y = thinned(steps, values)
            is_short = len(x) == 1 or name.startswith("eval_")
            figure.add_scatter(x=x, y=y, name=label, mode="lines+markers" if is_short else "lines")
    if not figure.data:
        return Drawing(drawing.name, drawing.title, missing)
    return Drawing(drawing.name, drawing.title, drawing.caption, figure)


def _draw_layers(training: Training) -> Drawing:
    counts: dict[str, Callable[[Layout], int]] = {
        "trained": lambda layout: layout.event["num_layers"] - layout.num_frozen,
        "frozen (forward only)": lambda layout: layout.num_frozen - layout.num_cached,
        "cached (not computed)": lambda layout: layout.num_cached,
    }
    drawing = _draw_layouts(training, "layers", "Layers: trained, frozen, cached", dict(reversed(counts.items())))
    if drawing.figure is not None:
        drawing.figure.update_traces(stackgroup="layers")
    return drawing


def _draw_shape(training: Training) -> Drawing:
    counts: dict[str, Callable[[Layout], int]] = {
        "K stages": lambda layout: layout.num_stages,
        "R replicas": lambda layout: layout.num_replicas,
        "M micro-batches": lambda layout: layout.num_microbatches,
    }
    return _draw_layouts(training, "shape", "Stages K × replicas R, micro-batches M", counts)


def _draw_layouts(training: Training, name: str, title: str, counts: dict[str, Callable[[Layout], int]]) -> Drawing:
    """Draw numbers of each layout, as the training went on."""
    if not training.layouts:
        return Drawing(name, title, "No layouts were recorded.")
    figure = _figure("number", training)
    x = [step for layout in training.layouts for step in (layout.first_step, layout.last_step)]
    for label, count in counts.items():
        figure.add_scatter(
            x=x, y=[n for layout in training.layouts for n in [count(layout)] * 2], name=label, mode="lines"
        )
    return Drawing(name, title, "M is the number that most steps ran with, or the planned one.", figure)


def _draw_speed(training: Training) -> Drawing:
    name, title = "speed", "Samples per second"
    lines = [line for line in training.lines if line["kind"] == "time" and line["steps"] and line["rows"]]
    if not lines:
        return Drawing(name, title, "The time of steps was not recorded.")
    figure = _figure("samples/s", training)
    size = -(-len(lines) // MOST_BINS)
    x, y = list[int](), list[float]()
    for some in (lines[k : k + size] for k in range(0, len(lines), size)):
        seconds = sum(line["seconds"].get(what, 0.0) for line in some for what in ("steps", "batches"))
        last = some[-1]["global_step"]
        x += [last - sum(line["steps"] for line in some), last]
        y += [sum(line["rows"] for line in some) / seconds] * 2
    figure.add_scatter(x=x, y=y, name="between two log entries", mode="lines")
    known = [layout for layout in training.layouts if layout.samples_per_second is not None]
    figure.add_scatter(
        x=[step for layout in known for step in (layout.first_step, layout.last_step, None)],
        y=[speed for layout in known for speed in (layout.samples_per_second, layout.samples_per_second, None)],
        name="mean of the layout",
        mode="lines",
    )
    figure.update_yaxes(rangemode="tozero")
    return Drawing(name, title, "While training, without evaluating, saving and changing layouts.", figure)


def _draw_cache(training: Training) -> Drawing:
    name, title = "cache", "Cache of frozen layers"
    steps, hits = training.curve("cache_hit_rate")
    older, size = training.curve("cache_older_hit_rate")[1], training.curve("cache_bytes")[1]
    if not any((*hits, *older)):
        return Drawing(name, title, _why_uncached(training))
    figure = _figure("samples found", training)
    figure.add_bar(x=steps, y=hits, name="behind all frozen layers")
    if any(older):
        figure.add_bar(x=steps, y=older, name="behind fewer")
    figure.add_scatter(x=steps, y=[value / MIB for value in size], name="size", mode="lines+markers", yaxis="y2")
    figure.update_layout(
        barmode="stack",
        yaxis={"tickformat": ".0%", "range": [0, 1.02]},
        yaxis2={"overlaying": "y", "side": "right", "title": "size, MiB", "rangemode": "tozero", "showgrid": False},
    )
    caption = (
        "Share of an epoch's samples that were found, drawn at the epoch's end, and size of the store on this node."
    )
    return Drawing(name, title, caption, figure)


def _why_uncached(training: Training) -> str:
    reasons = [line["reason"] for line in training.lines if line["kind"] == "cache_off"]
    if reasons:
        return f"Nothing was found: the cache was off, because {reasons[-1]}."
    if training.layouts and not any(layout.num_frozen for layout in training.layouts):
        return "No layer was frozen, so there was nothing to keep."
    stored = sum(training.curve("cache_rows_stored")[1])
    if stored:
        return f"{stored:,.0f} samples were put into it, but none was read: other layers froze, or the training ended."
    return "No layers were looked for in a cache: they were frozen too late, or the cache was off."


# ---------------------------------------------------------------------------------------- sums
def _draw_time(training: Training) -> Drawing:
    name, title = "time", "Where the time went"
    total = sum(training.seconds.values())
    if not total:
        return Drawing(name, title, "The time was not recorded.", is_wide=True)
    figure = _figure("")
    names = {
        what: f"{label}: {training.seconds[what]:.1f} s, {training.seconds[what] / total:.0%}"
        for what, label in ACTIVITIES.items()
        if training.seconds.get(what, 0.0) > 0
    }
    rest = {what: training.seconds[what] for what in names}
    for layout in training.layouts:
        if layout.seconds:
            rest["steps"] -= layout.seconds
            figure.add_bar(x=[layout.seconds], y=[names["steps"]], name=layout.label, orientation="h")
    figure.add_bar(x=[max(rest[what], 0.0) for what in names], y=list(names.values()), name="other", orientation="h")
    figure.update_layout(barmode="stack", height=110 + 30 * len(names), xaxis={"title": "seconds"})
    figure.update_yaxes(autorange="reversed", showgrid=False, categoryorder="array", categoryarray=[*names.values()])
    return Drawing(name, title, " ".join(_words_on_time(training, total)), figure, is_wide=True)


def _words_on_time(training: Training, total: float) -> list[str]:
    words = [f"{total:.1f} s of the main process, by the clock; steps by layout."]
    if training.repeated_steps:
        words.append(f"In it are {training.repeated_steps} steps that were done again after an interruption.")
    if training.facts.get("device_type", "cpu") != "cpu":
        words.append("Work that a device has not finished when a call returns counts for what waits for it.")
    phases: dict[str, float] = {}
    for event in training.events:
        for phase, seconds in event.get("phases", {}).items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    if phases:
        parts = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items())
        moved = sum(event.get("bytes_moved", 0) for event in training.events) / MIB
        words.append(f"Changing layouts, on the slowest process of each phase: {parts}; {moved:.1f} MiB were moved.")
    return words


def _draw_memory(training: Training) -> Drawing:
    name, title = "memory", "Memory of each process"
    used = [(layout, layout.usage) for layout in _distinct(training.layouts) if layout.usage is not None]
    if not used:
        return Drawing(name, title, "Memory was not recorded.", is_wide=True)
    figure = _figure("MiB")
    is_on_device = any(usage.get("device_peak_bytes") for _, usage in used)
    boxes = {"measured": [usage["device_peak_bytes" if is_on_device else "resident_bytes"] for _, usage in used]}
    if is_on_device:  # that of the stage's tensors, which cannot be compared with a whole process
        boxes["predicted"] = [layout.event.get("predicted", {}).get("memory_bytes", []) for layout, _ in used]
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
    return Drawing(name, title, words, figure, is_wide=True)


# ---------------------------------------------------------------------------------------- one step
def _draw_step(training: Training) -> Drawing:
    name, title = "step", "One step, as predicted"
    found = [(layout, step) for layout in _distinct(training.layouts) if (step := _step_of(layout)) is not None]
    if not found:
        return Drawing(name, title, _why_untimed(training), is_wide=True)
    figure = _figure("")
    bars: dict[str, list[tuple[float, float, str, str]]] = {}
    for number, (layout, (timeline, names, end)) in enumerate(found[:MOST_LAYOUTS_DRAWN], 1):
        rows = [f"{number}. {layout.label}, stage {stage}" for stage in range(layout.num_stages)]
        seconds = timeline.seconds
        bars.setdefault("waiting (bubble)", []).extend((0.0, seconds, row, f"{timeline.bubble:.1%}") for row in rows)
        for span in timeline.spans:
            bar = (span.start, span.end - span.start, rows[span.stage], names[span.micro_batch])
            bars.setdefault(PASSES[span.kind][0], []).append(bar)
        bars.setdefault("gradients over replicas, optimizer", []).extend((seconds, end, row, "") for row in rows)
    colors = {**dict(PASSES.values()), "waiting (bubble)": "#e3e7ec", "gradients over replicas, optimizer": GREY}
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
        barmode="overlay",
        height=110 + 30 * len({row for *_, row, _ in bars["forward"]}),
        xaxis={"title": "milliseconds"},
    )
    figure.update_yaxes(autorange="reversed", showgrid=False)
    words = (
        "Simulated from the times of the model's parts, measured before the training, on the slowest process;"
        " messages take no time in it. One pipeline of each layout; all train the same global batch. Of batches that"
        " are cut along their tokens, the recorded one with most of them is shown, from what slices took on the stages"
        " themselves; 1.2 is slice 2 of part 1."
    )
    if len(found) > MOST_LAYOUTS_DRAWN:
        words += f" {len(found) - MOST_LAYOUTS_DRAWN} more layouts are not drawn."
    return Drawing(name, title, words, figure, is_wide=True)


def _step_of(layout: Layout) -> tuple[Timeline, list[str], float] | None:
    """Return a step of one pipeline, the names of its micro-batches or slices, and the seconds after it."""
    prediction, cut = layout.prediction, layout.timed_slices
    if cut is not None:
        slices = [(p, i) for p, (_, lengths) in enumerate(cut["parts"]) for i in range(len(lengths))]
        return timeline_of_slices(cut), [f"{p}.{i}" for p, i in slices], 0.0
    if prediction is None:
        return None
    m, forward = prediction["num_microbatches"], prediction["forward"]
    schedule = layout.event["predicted"]["schedule"]
    timeline = simulate(forward, prediction["backward"], m, schedule, len(forward) // layout.num_stages)
    return timeline, list(map(str, range(m))), prediction["end"]


def _why_untimed(training: Training) -> str:
    if any(layout.slices for layout in training.layouts):
        return (
            "Batches were cut along their tokens, and how long slices take is not known; token_slices='auto' times"
            " them where it can (the log says why not). How they were cut is in the table of slices."
        )
    return (
        "The model's parts were not timed: full_determinism forbids it, there was one stage and nothing was frozen,"
        " they could not be, no layouts were recorded, or the version was an earlier one."
    )


# ---------------------------------------------------------------------------------------- helpers
def _figure(y_title: str, over_steps: Training | None = None) -> go.Figure:
    """Return an empty figure in the page's style; over the steps of a training, with a line at each new layout."""
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


def _distinct(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts that had steps, each once, since a resumed training starts with the layout that it had."""
    found: dict[tuple[Any, ...], Layout] = {}
    for layout in layouts:
        split = (layout.num_stages, *layout.event["stage_bounds"])  # of one or of several virtual stages each
        key = (*split, layout.num_frozen, layout.num_cached, layout.num_microbatches)
        if layout.last_step > layout.first_step and (key not in found or found[key].usage is None):
            found[key] = layout
    return list(found.values())
