"""The figures of a report. Each shows a training's records, or the reason why they cannot be shown.

All figures over steps have the same x axis, with a line at each change of the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..planning.plan import MIB
from ..planning.timeline import Timeline, simulate
from .report_data import Layout, Training, thinned, timeline_of_slices

BLUE, ORANGE, GREEN, TEAL, PURPLE, GREY = "#3b6fb6", "#ee8434", "#3f9b5b", "#2a9d9d", "#8661b0", "#8a929c"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, TEAL, "#c8485b", "#7a6a53", GREY)
MOST_LAYOUTS_DRAWN = 6
MOST_RANKS_DRAWN = 16
MOST_BINS = 400
"""Maximum number of points of the samples/s curve."""
MOST_MICRO_BATCHES_NAMED = 32
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
    makers: tuple[Callable[[Training], Drawing], ...] = (
        *(draw_loss, draw_quality, draw_layers, draw_shape, draw_speed, draw_cache),
        *(draw_step, draw_time, draw_memory, draw_learning_rate, draw_gradients),
    )
    return [maker(training) for maker in makers]


# ---------------------------------------------------------------------------------------- over steps
def draw_layers(training: Training) -> Drawing:
    name, title = "layers", "Layers: trained, frozen, cached"
    if not training.layouts:
        return Drawing(name, title, "No layouts were recorded.")
    figure = _figure("layers")
    x = _corners(training)
    rows: tuple[tuple[str, str, Callable[[Layout], int]], ...] = (
        ("cached (not computed)", TEAL, lambda layout: layout.num_cached),
        ("frozen (forward only)", "#a9c4e6", lambda layout: layout.num_frozen - layout.num_cached),
        ("trained", ORANGE, lambda layout: layout.event["num_layers"] - layout.num_frozen),
    )
    for label, color, count in rows:
        y = [value for layout in training.layouts for value in [count(layout)] * 2]
        if any(y):
            figure.add_scatter(
                x=x,
                y=y,
                name=label,
                mode="lines",
                stackgroup="layers",
                line={"width": 0.5, "color": color},
                fillcolor=color,
            )
    _over_steps(figure, training)
    return Drawing(name, title, "From the bottom up, as the training went on.", figure)


def draw_shape(training: Training) -> Drawing:
    name, title = "shape", "Stages K × replicas R, micro-batches M"
    if not training.layouts:
        return Drawing(name, title, "No layouts were recorded.")
    figure = _figure("number")
    x = _corners(training)
    lines: tuple[tuple[str, str, str, float, Callable[[Layout], int]], ...] = (
        ("K stages", BLUE, "solid", 5, lambda layout: layout.num_stages),
        ("R replicas", GREEN, "solid", 2.5, lambda layout: layout.num_replicas),
        ("M micro-batches", ORANGE, "dot", 2.5, lambda layout: layout.num_microbatches),
    )
    largest = 1
    for label, color, dash, width, get in lines:
        y = [value for layout in training.layouts for value in [get(layout)] * 2]
        largest = max(largest, *y)
        figure.add_scatter(x=x, y=y, name=label, mode="lines", line={"color": color, "dash": dash, "width": width})
    ticks = [2**k for k in range(largest.bit_length() + 1)]
    figure.update_yaxes(type="log", tickvals=ticks, ticktext=[str(tick) for tick in ticks])
    _over_steps(figure, training)
    unknown = any(layout.usage is None for layout in training.layouts)
    caption = "M is the number that most steps ran with" + (
        ", or the planned one, where that is not known." if unknown else "."
    )
    return Drawing(name, title, caption, figure)


def draw_speed(training: Training) -> Drawing:
    name, title = "speed", "Samples per second"
    lines = [line for line in training.lines if line["kind"] == "time" and line["steps"] and line["rows"]]
    if not lines:
        return Drawing(name, title, "The time of steps was not recorded.")
    figure = _figure("samples/s")
    size = -(-len(lines) // MOST_BINS)
    x: list[int] = []
    y: list[float] = []
    for k in range(0, len(lines), size):
        some = lines[k : k + size]
        rows = sum(line["rows"] for line in some)
        seconds = sum(line["seconds"].get(what, 0.0) for line in some for what in ("steps", "batches"))
        last = some[-1]["global_step"]
        x += [last - sum(line["steps"] for line in some), last]
        y += [rows / seconds, rows / seconds]
    figure.add_scatter(x=x, y=y, name="between two log entries", mode="lines", line={"color": BLUE, "width": 1.5})
    means = [(layout, layout.samples_per_second) for layout in training.layouts]
    known = [(layout, speed) for layout, speed in means if speed is not None]
    if known:
        figure.add_scatter(
            x=[value for layout, _ in known for value in (layout.first_step, layout.last_step, None)],
            y=[value for _, speed in known for value in (speed, speed, None)],
            name="mean of the layout",
            mode="lines",
            line={"color": ORANGE, "width": 2.5},
        )
    figure.update_yaxes(rangemode="tozero")
    _over_steps(figure, training)
    return Drawing(name, title, "While training, without evaluating, saving and changing layouts.", figure)


def draw_loss(training: Training) -> Drawing:
    name, title = "loss", "Loss"
    figure = _figure("loss")
    _add_curve(figure, training, "loss", BLUE, "training")
    names = [n for n in training.names if _is_quality(n) and n.endswith("loss")]
    for n, color in zip(names, COLORS[1:], strict=False):
        _add_curve(figure, training, n, color, n.removesuffix("_loss").replace("eval", "evaluation"), markers=True)
    if not figure.data:
        return Drawing(name, title, "No loss was logged: logging_steps is larger than the training, or it was killed.")
    _over_steps(figure, training)
    return Drawing(name, title, "As logged; the training loss is the mean since the entry before.", figure)


def draw_quality(training: Training) -> Drawing:
    name, title = "quality", "Evaluation"
    names = [n for n in training.names if _is_quality(n) and not n.endswith("loss")]
    if not names:
        return Drawing(name, title, "No metric of an evaluation was logged: set eval_strategy and compute_metrics.")
    figure = _figure("metric")
    for n, color in zip(names, COLORS, strict=False):
        _add_curve(figure, training, n, color, n.removeprefix("eval_"), markers=True)
    _over_steps(figure, training)
    left_out = f" {len(names) - len(COLORS)} more are not drawn." if len(names) > len(COLORS) else ""
    return Drawing(name, title, "Metrics as logged." + left_out, figure)


def draw_learning_rate(training: Training) -> Drawing:
    name, title = "learning-rate", "Learning rate"
    figure = _figure("learning rate")
    _add_curve(figure, training, "learning_rate", PURPLE, "learning rate")
    if not figure.data:
        return Drawing(name, title, "No learning rate was logged.")
    figure.update_yaxes(rangemode="tozero", exponentformat="power")
    _over_steps(figure, training)
    return Drawing(name, title, "The schedule goes by steps, whatever the layout.", figure)


def draw_gradients(training: Training) -> Drawing:
    name, title = "gradients", "Gradient norm"
    figure = _figure("norm")
    _add_curve(figure, training, "grad_norm", GREEN, "of all layers that train")
    if not figure.data:
        return Drawing(name, title, "No gradient norm was logged.")
    _over_steps(figure, training)
    return Drawing(name, title, "Before clipping; the gradients of frozen layers are not in it.", figure)


def draw_cache(training: Training) -> Drawing:
    name, title = "cache", "Cache of frozen layers"
    steps, hits = training.curve("cache_hit_rate")
    older = training.curve("cache_older_hit_rate")[1]
    if not any((*hits, *older)):
        return Drawing(name, title, _why_uncached(training))
    figure = make_subplots(specs=[[{"secondary_y": True}]])
    _style(figure, "samples found")
    size = training.curve("cache_bytes")[1]
    width = max(training.last_step / 40, 1)
    for label, values, color in (("behind all frozen layers", hits, TEAL), ("behind fewer", older, "#a9d6d6")):
        if any(values) or values is hits:
            figure.add_bar(x=steps, y=values, name=label, marker_color=color, width=width)
    figure.add_scatter(
        x=steps,
        y=[value / MIB for value in size],
        name="size",
        mode="lines+markers",
        line={"color": GREY, "dash": "dot"},
        secondary_y=True,
    )
    figure.update_layout(barmode="stack")
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02], secondary_y=False)
    figure.update_yaxes(title_text="size, MiB", rangemode="tozero", showgrid=False, tickmode="auto", secondary_y=True)
    _over_steps(figure, training)
    figure.update_xaxes(range=[0, training.last_step + width])
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
    if training.facts.get("arguments", {}).get("activation_cache") == "off":
        return 'There was none: activation_cache="off".'
    stored = sum(training.curve("cache_rows_stored")[1])
    if stored:
        return f"{stored:,.0f} samples were put into it, but none was read: other layers froze, or the training ended."
    return "No layers were looked for in a cache: they were frozen too late, or the cache was off."


# ---------------------------------------------------------------------------------------- sums
def draw_time(training: Training) -> Drawing:
    name, title = "time", "Where the time went"
    total = sum(training.seconds.values())
    if not total:
        return Drawing(name, title, "The time was not recorded.", is_wide=True)
    figure = _figure("")
    shown = [what for what in ACTIVITIES if training.seconds.get(what, 0.0) > 0]
    for layout, color in zip(training.layouts, _shades(len(training.layouts)), strict=True):
        if layout.seconds:
            figure.add_bar(
                x=[layout.seconds],
                y=[ACTIVITIES["steps"]],
                orientation="h",
                marker_color=color,
                text=[layout.shape],
                textposition="inside",
                insidetextanchor="middle",
                hovertemplate=f"{_label(layout)}: %{{x:.1f}} s<extra></extra>",
            )
    known = sum(layout.seconds for layout in training.layouts)
    rest = {what: training.seconds[what] - (known if what == "steps" else 0.0) for what in shown}
    figure.add_bar(
        x=[max(rest[what], 0.0) for what in shown],
        y=[ACTIVITIES[what] for what in shown],
        orientation="h",
        marker_color=GREY,
        hovertemplate="%{y}: %{x:.2f} s<extra></extra>",
    )
    for what in shown:
        value = training.seconds[what]
        figure.add_annotation(
            x=value,
            y=ACTIVITIES[what],
            text=f" {value:.1f} s · {100 * value / total:.1f} %",
            showarrow=False,
            xanchor="left",
        )
    figure.update_layout(
        barmode="stack", showlegend=False, height=110 + 30 * len(shown), margin={"l": 10, "r": 110, "t": 8}
    )
    figure.update_xaxes(title_text="seconds", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False, automargin=True)
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
    loading = training.curve("cache_load_seconds")[1]
    if loading:
        words.append(
            f"Reading from the cache, inside of the steps, took {sum(loading):.2f} s, all processes added up."
        )
    return words


def draw_memory(training: Training) -> Drawing:
    name, title = "memory", "Memory of each process"
    layouts = [layout for layout in _distinct(training.layouts) if layout.event.get("predicted") or layout.usage]
    if not layouts:
        return Drawing(name, title, "Memory was not recorded.", is_wide=True)
    is_on_device = any(layout.usage and layout.usage.get("device_peak_bytes") for layout in layouts)
    key = "device_peak_bytes" if is_on_device else "resident_bytes"
    what = "allocated on the device, peak so far" if is_on_device else "resident, after a step"
    labels = [_label(layout).replace(", ", "<br>") for layout in layouts]
    predicted = [_predicted_by_rank(layout) for layout in layouts]
    measured = [list(layout.usage[key]) if layout.usage else [] for layout in layouts]
    columns = [("predicted for the stage", predicted), (f"measured: {what}", measured)]
    if any(measured) and not is_on_device:
        del columns[0]  # the stage's tensors, which cannot be compared with a whole process
    figure = make_subplots(cols=len(columns), subplot_titles=[head for head, _ in columns])
    _style(figure, "MiB")
    for column, (_, values) in enumerate(columns, 1):
        for label, color, bars in _bars(values):
            figure.add_bar(
                x=labels,
                y=[value / MIB if value is not None else None for value in bars],
                name=label,
                legendgroup=label,
                showlegend=column == (1 if len(columns) == 1 or any(predicted) else 2),
                marker_color=color,
                row=1,
                col=column,
            )
    figure.update_layout(barmode="group", height=330, margin={"t": 64})
    figure.update_annotations(font={"size": 13})
    figure.update_xaxes(type="category", tickangle=0)
    figure.update_yaxes(title_text="MiB", row=1, col=len(columns))
    of_prediction = "Predicted: parameters, gradients, Adam's state, activations, messages. "
    if not any(measured):
        words = of_prediction + "Not measured: the training was interrupted before a layout ended."
    elif is_on_device:
        words = (
            of_prediction
            + "Measured by torch, without its own workspaces; peaks of one layout hide lower ones of later layouts."
        )
    else:
        words = (
            "All that the process holds, Python and libraries included; memory that was freed may stay with the"
            " process. A prediction, which is of the stage's tensors alone, would not compare with it."
        )
    return Drawing(name, title, words, figure, is_wide=True)


def _predicted_by_rank(layout: Layout) -> list[float]:
    """Predicted memory of each rank; that of the processes of a pipeline is the same in each replica."""
    return list(layout.event.get("predicted", {}).get("memory_bytes", [])) * layout.num_replicas


def _bars(by_layout: Sequence[Sequence[float]]) -> list[tuple[str, str, list[float | None]]]:
    """Label, color and one value per layout; for many processes only the largest, the median and the smallest."""
    world = max((len(values) for values in by_layout), default=0)
    if world <= MOST_RANKS_DRAWN:
        shades = _shades(world)
        return [
            (f"process {rank}", shades[rank], [values[rank] if rank < len(values) else None for values in by_layout])
            for rank in range(world)
        ]
    summaries: tuple[tuple[str, Callable[[Sequence[float]], float]], ...] = (
        ("largest", max),
        ("median", median),
        ("smallest", min),
    )
    return [
        (label, color, [of(values) if values else None for values in by_layout])
        for (label, of), color in zip(summaries, _shades(3), strict=True)
    ]


# ---------------------------------------------------------------------------------------- one step
@dataclass(frozen=True)
class _Step:
    """A predicted step of a layout.

    Attributes:
        layout: the layout that it belongs to.
        timeline: timeline of one pipeline.
        unit: what passes through the stages: "micro-batch" or "slice".
        names: names of the micro-batches or slices.
        seconds: predicted time of the step.
        seconds_at_end: part of it after the pipeline, for the all-reduce of gradients and the optimizer.
        batch: the batch for which it is predicted, as text.
    """

    layout: Layout
    timeline: Timeline
    unit: str
    names: list[str]
    seconds: float
    seconds_at_end: float = 0.0
    batch: str = ""

    @classmethod
    def of(cls, layout: Layout) -> _Step | None:
        """Create it from a layout; None if nothing was predicted."""
        prediction, cut = layout.prediction, layout.timed_slices
        if cut is not None:
            timeline, parts = timeline_of_slices(cut), cut["parts"]
            names = [
                f"{p}.{i}" if len(parts) > 1 else str(i) for p, part in enumerate(parts) for i in range(len(part[1]))
            ]
            return cls(
                layout, timeline, "slice", names, timeline.seconds, batch=f"{cut['rows']} × {cut['tokens']:,} tokens"
            )
        if prediction is None:
            return None
        m = prediction["num_microbatches"]
        schedule, forward = layout.event["predicted"]["schedule"], prediction["forward"]
        timeline = simulate(forward, prediction["backward"], m, schedule, len(forward) // layout.num_stages)
        names = list(map(str, range(m)))
        return cls(layout, timeline, "micro-batch", names, prediction["seconds"], prediction["end"])


def draw_step(training: Training) -> Drawing:
    name, title = "step", "One step, as predicted"
    steps = [step for step in map(_Step.of, _distinct(training.layouts)) if step is not None]
    if not steps:
        why = "The model's parts were not timed: "
        arguments = training.facts.get("arguments", {})
        if not training.layouts:
            why += "no layouts were recorded."
        elif any(layout.slices for layout in training.layouts) and arguments.get("token_slices") == "auto":
            why = (
                "How long slices take could not be told (the log says why), so batches were cut by rows alone: as in"
                " the table of slices."
            )
        elif any(layout.slices for layout in training.layouts):
            why = (
                'Batches were cut along their tokens, and how long slices take is not known: token_slices="auto" times'
                " them. How they were cut is in the table of slices."
            )
        elif arguments.get("full_determinism"):
            why += "full_determinism forbids it."
        else:
            why += "there was one stage and nothing was frozen, they could not be, or the version was an earlier one."
        return Drawing(name, title, why, is_wide=True)
    left_out = len(steps) - MOST_LAYOUTS_DRAWN
    steps = steps[:MOST_LAYOUTS_DRAWN]
    titles = [_title_of_step(step) for step in steps]
    heights = [step.layout.num_stages + 0.6 for step in steps]
    figure = make_subplots(
        rows=len(steps),
        shared_xaxes=True,
        subplot_titles=titles,
        row_heights=heights,
        vertical_spacing=min(0.09, 0.4 / len(steps)),
    )
    _style(figure, "")
    for row, step in enumerate(steps, 1):
        _add_step(figure, step, row, shows_legend=row == 1)
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    figure.update_layout(
        barmode="overlay",
        height=round(130 + 62 * len(steps) + 30 * sum(heights)),
        bargap=0.12,
        hovermode="closest",
        margin={"t": 64},
    )
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    figure.update_xaxes(rangemode="tozero", showgrid=True)
    figure.update_xaxes(title_text="milliseconds", row=len(steps), col=1)
    words = [
        "Simulated from the times of the model's parts, measured before the training, on the slowest process;",
        "messages take no time in it. One pipeline of each layout, on one scale; all train the same global batch.",
    ]
    if any(step.unit == "slice" for step in steps):
        words.append(
            "Where batches are cut along their tokens: the recorded batch with most of them, from what slices took on"
            " the stages themselves, without reducing gradients over replicas and the optimizer; 1.2 is slice 2 of"
            " part 1."
        )
    if left_out > 0:
        words.append(f"{left_out} more layouts are not drawn.")
    return Drawing(name, title, " ".join(words), figure, is_wide=True)


def _title_of_step(step: _Step) -> str:
    layout = step.layout
    head = f"<b>{layout.shape}</b>"
    if layout.num_frozen:
        head += f", {layout.num_frozen} of {layout.event['num_layers']} layers frozen"
    if layout.num_cached:
        head += f" ({layout.num_cached} cached)"
    if step.batch:
        head += f", {step.batch}"
    head += f": {1e3 * step.seconds:.3g} ms predicted"
    if layout.steps:
        head += f", {1e3 * layout.seconds / layout.steps:.3g} ms measured on average"
    return head


def _add_step(figure: go.Figure, step: _Step, row: int, shows_legend: bool) -> None:
    timeline = step.timeline
    stages = [f"stage {stage}" for stage in range(step.layout.num_stages)]
    is_interleaved = any(span.part for span in timeline.spans)

    def add(label: str, color: str, **bars: Any) -> None:
        marker = {"color": color, "line": {"color": "white", "width": 1}, **bars.pop("marker", {})}
        figure.add_bar(
            **bars,
            name=label,
            legendgroup=label,
            showlegend=shows_legend,
            orientation="h",
            marker=marker,
            row=row,
            col=1,
        )

    pattern = {"shape": "/", "fgcolor": "#b3bbc7", "bgcolor": "#f3f4f6", "size": 6}
    add(
        "waiting (bubble)",
        "#f3f4f6",
        base=[0.0] * len(stages),
        x=[1e3 * timeline.seconds] * len(stages),
        y=stages,
        marker={"pattern": pattern},
        hovertemplate=f"{100 * timeline.bubble:.1f} % of the pipeline's time is waiting<extra></extra>",
    )
    kinds = (
        ("forward", "forward", BLUE),
        ("backward", "backward", ORANGE),
        ("weights", "backward of weights", PURPLE),
    )
    for kind, label, color in kinds:
        spans = [span for span in timeline.spans if span.kind == kind]
        if not spans and kind == "weights":
            continue  # most schedules have no passes of this kind
        names = [step.names[span.micro_batch] for span in spans]
        virtual = [f", part {span.part + 1} of its layers" if is_interleaved else "" for span in spans]
        add(
            label,
            color,
            base=[1e3 * span.start for span in spans],
            x=[1e3 * (span.end - span.start) for span in spans],
            y=[stages[span.stage] for span in spans],
            text=[name if len(step.names) <= MOST_MICRO_BATCHES_NAMED else "" for name in names],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
            textfont={"color": "white", "size": 10},
            customdata=[name + part for name, part in zip(names, virtual, strict=True)],
            hovertemplate=f"{label} of {step.unit} %{{customdata}}: %{{x:.3g}} ms<extra></extra>",
        )
    add(
        "gradients over replicas, optimizer",
        GREY,
        base=[1e3 * timeline.seconds] * len(stages),
        x=[1e3 * step.seconds_at_end] * len(stages),
        y=stages,
        hovertemplate="gradients over replicas, and the optimizer, in the slowest stage: %{x:.3g} ms<extra></extra>",
    )


# ---------------------------------------------------------------------------------------- helpers
def _figure(y_title: str) -> go.Figure:
    figure = go.Figure()
    _style(figure, y_title)
    return figure


def _style(figure: go.Figure, y_title: str) -> None:
    figure.update_layout(
        template="none",  # plotly's own templates take a second for each figure
        height=280,
        margin={"l": 56, "r": 16, "t": 36, "b": 44},
        font={"family": "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif", "size": 12},
        legend={"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0, "xanchor": "left"},
        showlegend=True,
        colorway=COLORS,
    )
    axis = {"zeroline": False, "gridcolor": "#e8ebef", "automargin": True, "ticklabelstandoff": 4}
    figure.update_xaxes(axis, title_standoff=10)
    figure.update_yaxes(axis, title_standoff=10)
    figure.update_layout(yaxis_title_text=y_title)


def _over_steps(figure: go.Figure, training: Training) -> None:
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title_text="optimizer step", range=[0, max(training.last_step, 1)])
    for layout in training.layouts[1:]:
        figure.add_vline(x=layout.first_step, line={"color": "#b6bcc6", "width": 1, "dash": "dash"})


def _add_curve(
    figure: go.Figure, training: Training, name: str, color: str, label: str, markers: bool = False
) -> None:
    steps, values = training.curve(name)
    if not steps:
        return
    x, y = thinned(steps, values)
    mode = "lines+markers" if markers or len(x) == 1 else "lines"
    figure.add_scatter(x=x, y=y, name=label, mode=mode, cliponaxis=False, line={"color": color, "width": 2})


def _corners(training: Training) -> list[int]:
    return [step for layout in training.layouts for step in (layout.first_step, layout.last_step)]


def _distinct(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts that had steps, each once, since a resumed training starts with the layout that it had."""
    found: dict[tuple[Any, ...], Layout] = {}
    for layout in layouts:
        split = (layout.num_stages, *layout.event["stage_bounds"])  # of one or of several virtual stages each
        key = (*split, layout.num_frozen, layout.num_cached, layout.num_microbatches)
        if layout.last_step > layout.first_step and (key not in found or found[key].usage is None):
            found[key] = layout
    return list(found.values())


def _label(layout: Layout) -> str:
    frozen = f", {layout.num_frozen} frozen" if layout.num_frozen else ""
    cached = f", {layout.num_cached} cached" if layout.num_cached else ""
    return f"{layout.shape}{frozen}{cached}"


def _shades(count: int) -> list[str]:
    """Shades of blue, from dark to light."""
    dark, light = (43, 84, 140), (178, 203, 232)
    steps = [k / max(count - 1, 1) for k in range(count)]
    return [
        "rgb(" + ",".join(str(round(a + (b - a) * step)) for a, b in zip(dark, light, strict=True)) + ")"
        for step in steps
    ]


def _is_quality(name: str) -> bool:
    return name.startswith("eval_") and not name.endswith(TECHNICAL)
