"""`hf-pipetransformer report`: a single HTML file that shows what happened in a training, without network access.

The file contains plotly.js, compressed from 4.8 MB to 1.9 MB. It needs the packages of the optional extra "report".
"""

from __future__ import annotations

import base64
import gzip
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..own_files import replace_file
from ..planning.plan import MIB
from .report_data import Layout, Training, read_trainings
from .report_words import GLOSSARY, changes, final_quality, verdict

FILE_NAME = "report.html"
NEEDED = ("plotly", "jinja2")
TEMPLATE = "report.html.jinja"
DEFAULTS = {"elastic": True, "mixed_precision": "no", "max_steps": -1, "weight_decay": 0}
"""Default values of recorded arguments, if they are not None or False; a report omits arguments with these values."""


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Write the report of the last training in a folder.

    Args:
        folder: the training's `output_dir`.
        output: path of the report; None: `report.html` in the folder.

    Returns:
        The path of the report.

    Raises:
        ValueError: there is nothing to report, a package is missing, or the file cannot be written.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"The report requires {' and '.join(missing)}. Install with pip install 'hf_pipetransformer[report]'."
        )
    trainings = read_trainings(folder)
    path = output or folder / FILE_NAME
    if path.is_dir():
        raise ValueError(f"--output is {path}, which is a folder. Pass a file path, such as {path / FILE_NAME}.")
    text = page(trainings, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise ValueError(f"The report cannot be written: {error}. Pass another --output.") from None
    return path


def page(trainings: Sequence[Training], folder: Path) -> str:
    """Render the page of the last training."""
    import jinja2
    from plotly.offline import get_plotlyjs_version

    from . import report_figures

    training = trainings[-1]
    facts = training.facts
    drawings = report_figures.all_drawings(training)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    text: str = environment.get_template(TEMPLATE).render(
        title=str(facts.get("model", folder.resolve().name)),
        subtitle=" · ".join(_subtitle(training, folder)),
        tiles=[{"value": value, "label": label} for value, label in _tiles(training)],
        verdict=verdict(training),
        notes=training.problems,
        drawings=drawings,
        json_of=_json_of,
        layouts=_layout_table(training.layouts),
        changes=changes(training),
        glossary=GLOSSARY,
        slices=_slice_table(training.layouts),
        arguments=_arguments(facts),
        trainings=_training_table(trainings) if len(trainings) > 1 else [],
        version=sys.modules[__name__.partition(".")[0]].__version__,
        written=datetime.now().strftime("%Y-%m-%d %H:%M"),
        plotly_version=get_plotlyjs_version(),
        plotly_gz=_packed_plotly(),
    )
    return text


@cache
def _packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _json_of(figure: Any) -> str:
    """A figure's data as JSON for a script element, with "<" escaped, as a "</script>" in a name would end it."""
    text: str = figure.to_json()
    return text.replace("<", "\\u003c")


def _subtitle(training: Training, folder: Path) -> list[str]:
    facts = training.facts
    words = [folder.resolve().name]
    if not training.name.startswith("line"):
        words.append(training.name[:16].replace("T", " "))
    if facts:
        count = facts["world_size"]
        words.append(f"{count} process{'es' if count > 1 else ''} on {facts['device']}")
        words.append(f"{facts['num_parameters'] / 1e6:,.1f} M parameters")
    if training.calls > 1:
        words.append(f"resumed {training.calls - 1} time{'s' if training.calls > 2 else ''}")
    if training.is_complete is False:
        words.append("not ended")
    return words


def _tiles(training: Training) -> list[tuple[str, str]]:
    """Value and label of the numbers at the top of the page; unknown ones are omitted."""
    tiles = []
    total = sum(training.seconds.values())
    if total:
        tiles.append((_duration(total), f"for {training.last_step:,} steps, all in"))
    layouts = [layout for layout in training.layouts if layout.last_step > layout.first_step]
    if layouts:
        shapes = [layout.shape for k, layout in enumerate(layouts) if k == 0 or layout.shape != layouts[k - 1].shape]
        shown = shapes if len(shapes) <= 4 else [shapes[0], "…", shapes[-1]]
        tiles.append((" → ".join(shown), "stages × replicas"))
        frozen, number = layouts[-1].num_frozen, layouts[-1].event["num_layers"]
        if frozen:
            tiles.append((f"{frozen} of {number}", "layers frozen"))
    speeds = [layout.samples_per_second for layout in layouts if layout.samples_per_second is not None]
    if speeds:
        is_elastic = len(speeds) > 1
        label = "samples/s"
        if is_elastic:
            label += f" (× {speeds[-1] / speeds[0]:.2f})"
        tiles.append(
            (" → ".join(f"{speed:,.0f}" for speed in ((speeds[0], speeds[-1]) if is_elastic else speeds)), label)
        )
    hits = training.curve("cache_hit_rate")[1]
    if any(hits):
        tiles.append((f"{max(hits):.0%}", "of samples cached, at best"))
    quality = final_quality(training)
    if quality is not None:
        tiles.append((f"{quality[1]:.4g}", f"{quality[0]} at the end"))
    losses = training.curve("loss")[1]
    if losses and quality is None:
        tiles.append((f"{losses[-1]:.4g}", "training loss, last entry"))
    return tiles


def _layout_table(layouts: Sequence[Layout]) -> list[tuple[str, ...]]:
    """The header and a row for each layout; empty without layouts."""
    if not layouts:
        return []
    head = ("event", "steps", "K × R", "stages from layer", "frozen", "cached", "M", "samples/s", "ms a step")
    # on a CPU the whole process is measured, with which the prediction for the stage's tensors does not compare
    on_cpu = any(layout.usage and not layout.usage.get("device_peak_bytes") for layout in layouts)
    of_memory = ("MiB of the process",) if on_cpu else ("MiB measured", "MiB predicted")
    more = ("ms predicted", *of_memory, "change, s", "MiB moved")
    rows: list[tuple[str, ...]] = [(*head, *more)]
    for layout in layouts:
        event, prediction, usage = layout.event, layout.prediction, layout.usage
        peaks = (usage.get("device_peak_bytes") or usage["resident_bytes"]) if usage else []
        predicted = event.get("predicted", {}).get("memory_bytes", [])
        speed = layout.samples_per_second
        is_change = event["event"] not in ("start", "resume", "cache")
        rows.append(
            (
                str(event["event"]),
                f"{layout.first_step + 1:,}–{layout.last_step:,}" if layout.last_step > layout.first_step else "none",
                layout.shape,
                ", ".join(str(bound) for bound in event["stage_bounds"][:-1]),
                f"{layout.num_frozen} of {event['num_layers']}",
                str(layout.num_cached),
                str(layout.num_microbatches),
                f"{speed:,.1f}" if speed is not None else "",
                f"{1e3 * layout.seconds / layout.steps:,.1f}" if layout.steps else "",
                f"{1e3 * prediction['seconds']:,.1f}" if prediction is not None else "",
                f"{max(peaks) / MIB:,.0f}" if peaks else "",
                *([] if on_cpu else [f"{max(predicted) / MIB:,.1f}" if predicted else ""]),
                f"{event['seconds']:.3f}" if is_change else "",
                f"{event['bytes_moved'] / MIB:,.1f}" if is_change else "",
            )
        )
    return rows


def _slice_table(layouts: Sequence[Layout]) -> list[tuple[str, ...]]:
    """The header and a row for each shape of batch that was split along its tokens; empty if there is none."""
    rows = [
        (
            layout.shape,
            f"{layout.num_frozen} of {layout.event['num_layers']}",
            f"{cut['rows']} × {cut['tokens']:,}",
            str(len(cut["parts"])),
            "; ".join(dict.fromkeys(f"{part} × ({' + '.join(map(str, lengths))})" for part, lengths in cut["parts"])),
            f"{1e3 * cut['predicted_seconds']:,.1f}" if cut["predicted_seconds"] is not None else "",
        )
        for layout in layouts
        for cut in layout.slices
    ]
    head = ("K × R", "frozen", "samples × tokens", "parts", "samples of a part × (slices, in tokens)", "ms predicted")
    return [head, *rows] if rows else []


def _arguments(facts: Any) -> list[tuple[str, str]]:
    """The recorded facts and arguments of the run, as text."""
    if not facts:
        return []
    name = facts.get("name_or_path")
    words = [
        *([("from", Path(name).name if Path(name).is_absolute() else name)] if name else []),
        ("processes", str(facts["world_size"])),
        ("backend", str(facts.get("backend") or "none")),
        ("device", str(facts["device"])),
        ("threads a process", str(facts["threads"])),
        ("global batch", str(facts["global_batch_size"])),
        *((package, str(number)) for package, number in facts["versions"].items()),
    ]
    for argument, value in facts["arguments"].items():
        is_default = value == DEFAULTS[argument] if argument in DEFAULTS else value is False
        if value is not None and not is_default:
            if isinstance(value, dict):
                value = ", ".join(f"{key} → {item}" for key, item in value.items())
            words.append((argument, f"{value:g}" if isinstance(value, float) else str(value)))
    return words


def _training_table(trainings: Sequence[Training]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("began", "model", "steps", "calls of train()", "time", "last loss", "state")]
    for training in trainings:
        losses = training.curve("loss")[1]
        total = sum(training.seconds.values())
        state = {True: "ended", False: "interrupted or running", None: "not known"}[training.is_complete]
        rows.append(
            (
                training.name[:19].replace("T", " "),
                str(training.facts.get("model", "")),
                f"{training.last_step:,}",
                str(training.calls),
                _duration(total) if total else "",
                f"{losses[-1]:.4g}" if losses else "",
                state,
            )
        )
    return rows


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
