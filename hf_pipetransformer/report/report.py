"""`hf-pipetransformer report`: a single HTML file about a training that needs no network access.

The file contains plotly.js, compressed from 4.8 MB to 1.9 MB. It needs the packages of the optional extra "report".
"""

from __future__ import annotations

import base64
import gzip
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from ..file_formats import is_number
from ..own_files import replace_file
from ..parts.records.files import share_in_words
from ..parts.records.history import LayoutPeriod, Line, Training
from ..planning.tables import MIB
from .comparison import differences, headline, notes, pair, rows_of, trainings_in
from .words import GLOSSARY, changes, final_quality, verdict

FILE_NAME = "report.html"
NEEDED = ("plotly", "jinja2")
TEMPLATE = "report.html.jinja"
DEFAULTS = {"elastic": True, "mixed_precision": "no", "max_steps": -1, "weight_decay": 0}
"""Default values of recorded arguments other than None and False. A report omits arguments with default values."""


def write_report(folder: Path, output: Path | None = None, beside: Path | None = None) -> Path:
    """Write the report of the last training in a folder.

    Args:
        folder: the training's `output_dir`.
        output: path of the report; None: `report.html` in the folder.
        beside: `output_dir` of a training to compare it with.

    Returns:
        The path of the report.

    Raises:
        ValueError: the folder has no training, a package is missing, or the file cannot be written.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"The report requires {' and '.join(missing)}. Install with pip install 'hf_pipetransformer[report]'."
        )
    trainings = trainings_in(folder)
    runs = pair(folder, beside) if beside is not None else {}
    path = output or folder / FILE_NAME
    if path.is_dir():
        raise ValueError(f"--output is {path}, which is a folder. Pass a file path, such as {path / FILE_NAME}.")
    import jinja2
    from plotly.offline import get_plotlyjs_version

    from .figures import TITLES, WIDE, all_drawings

    training = trainings[-1]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    text: str = environment.get_template(TEMPLATE).render(
        title=str(training.facts.get("model", folder.resolve().name)),
        subtitle=" · ".join(_subtitle(training, folder)),
        tiles=_tiles(training),
        verdict=[*([headline(runs), *notes(runs)] if runs else []), *verdict(training, is_compared=bool(runs))],
        notes=training.problems,
        drawings=all_drawings(training, runs),
        titles=TITLES,
        wide=WIDE,
        json_of=_json_of,
        tables=[table for table in _tables(trainings, runs) if table.rows],
        changes=changes(training),
        lists=[("arguments", "Run", _arguments(training.facts)), ("glossary", "Terms", GLOSSARY)],
        version=sys.modules[__name__.partition(".")[0]].__version__,
        written=datetime.now().strftime("%Y-%m-%d %H:%M"),
        plotly_version=get_plotlyjs_version(),
        plotly_gz=_packed_plotly(),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise ValueError(f"The report cannot be written: {error}. Pass another --output.") from None
    return path


@cache
def _packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _json_of(figure: Any) -> str:
    """Return a figure as JSON for a script element. "<" is escaped: a "</script>" in a name would end the element."""
    text: str = figure.to_json()
    return text.replace("<", "\\u003c")


def _subtitle(training: Training, folder: Path) -> list[str]:
    facts = training.facts
    words = [folder.resolve().name]
    words += [training.name[:16].replace("T", " ")] if training.name else []
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
    """Return value and label of the numbers at the top of the page; unknown ones are omitted."""
    tiles = []
    total = sum(training.seconds.values())
    if total:
        tiles.append((_duration(total), f"for {training.last_step:,} steps, all in"))
    layouts = [layout for layout in training.layouts if layout.last_step > layout.first_step]
    if layouts:
        shapes = [shape for shape, _ in groupby(layout.shape for layout in layouts)]
        tiles.append((" → ".join(shapes if len(shapes) <= 4 else [shapes[0], "…", shapes[-1]]), "stages × replicas"))
        modules = layouts[-1].frozen_modules
        if layouts[-1].num_frozen:
            tiles.append((f"{layouts[-1].num_frozen} of {layouts[-1].num_layers}", "layers frozen"))
        elif modules is not None:
            tiles.append((share_in_words(modules), f"of the parameters frozen by {modules['by']}"))
    speeds = [layout.samples_per_second for layout in layouts if layout.samples_per_second is not None]
    if speeds:
        tiles.append((" → ".join(f"{speed:,.0f}" for speed in {speeds[0]: 0, speeds[-1]: 0}), "samples/s"))
    if any(training.curve("cache_hit_rate")[1]):
        tiles.append((f"{training.share_read('cache_hit_rate'):.0%}", "of samples read from the cache"))
        tiles.append((f"{training.share_read('cache_layers_skipped'):.0%}", "of the forward passes skipped"))
    quality, losses = final_quality(training), training.curve("loss")[1]
    if quality is not None:
        tiles.append((f"{quality[1]:.4g}", f"{quality[0]} at the end"))
    elif losses:
        tiles.append((f"{losses[-1]:.4g}", "training loss, last entry"))
    return tiles


# ---------------------------------------------------------------------------------------- tables
@dataclass(frozen=True)
class Table:
    """A table of the page. A table without rows is omitted.

    Attributes:
        name: name of its element on the page.
        title: title of the table.
        caption: how to read it.
        rows: header -> cell, for each row.
        is_first: whether it precedes the figures.
    """

    name: str
    title: str
    caption: str
    rows: list[dict[str, str]]
    is_first: bool = False


def _tables(trainings: Sequence[Training], runs: Mapping[str, Training]) -> tuple[Table, ...]:
    training, layouts = trainings[-1], trainings[-1].layouts
    return (
        Table(
            "comparison",
            "Compared",
            "Seconds in all include everything from the call of train() to its end; those of steps do not.",
            rows_of(runs) if runs else [],
            is_first=True,
        ),
        Table(
            "differences",
            "What else differs",
            "Recorded properties and arguments that are not the same in both trainings.",
            differences(runs) if runs else [],
            is_first=True,
        ),
        Table(
            "reads",
            "Cache, epoch by epoch",
            "Share of the epoch's samples whose frozen outputs were read, and share of the forward passes that was not"
            " computed. Some samples are computed as well, to compare them with what was stored.",
            [_read_row(entry, rows) for entry, rows in training.reads],
        ),
        Table(
            "layouts",
            "Layouts",
            f"{_changed(training)} M as used, where that was recorded; a step's time on average, by the main process;"
            " memory of the process (on an accelerator: of its tensors) with most, beside what was predicted for its"
            " stage's tensors.",
            _without_empty_columns(
                [_layout_row(layout, before) for before, layout in zip([None, *layouts], layouts, strict=False)]
            ),
        ),
        Table(
            "slices",
            "Slices along the tokens",
            "How the first shapes of batches were cut on the first replica; predicted is forward and backward of one"
            " step.",
            [_slice_row(layout, cut) for layout in layouts for cut in layout.slices],
        ),
        Table(
            "trainings",
            "Trainings in this folder",
            "This report is of the last one.",
            [_training_row(training) for training in trainings] if len(trainings) > 1 else [],
        ),
    )


def _changed(training: Training) -> str:
    """Return how often the layout changed, in words."""
    number = training.num_layout_changes
    if not number:
        return "The layout did not change."
    return f"The layout changed {number} time{'s' if number > 1 else ''} (K, R or the cuts between stages)."


def _without_empty_columns(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    filled = {header for row in rows for header, cell in row.items() if cell}
    return [{header: cell for header, cell in row.items() if header in filled} for row in rows]


def _read_row(entry: Line, rows: int) -> dict[str, str]:
    values, epoch = entry["values"], entry.get("epoch")
    read = values["cache_hit_rate"] + values.get("cache_older_hit_rate", 0.0)
    return {
        "after epoch": f"{epoch:.3g}" if is_number(epoch) else "",
        "step": f"{entry['global_step']:,}",
        "samples": f"{rows:,}",
        "read": f"{read:.0%}",
        "forward passes skipped": f"{values.get('cache_layers_skipped', 0.0):.0%}",
        "samples stored": f"{values.get('cache_rows_stored', 0):,.0f}",
        "MiB": f"{values.get('cache_bytes', 0) / MIB:,.1f}",
    }


def _layout_row(layout: LayoutPeriod, before: LayoutPeriod | None) -> dict[str, str]:
    """Return a row of the table of layouts. `before`: the previous layout."""
    event, prediction, usage, speed = layout.event, layout.prediction, layout.usage, layout.samples_per_second
    peaks = (usage.get("device_peak_bytes") or usage["resident_bytes"]) if usage else []
    is_change = event["event"] == "transform"
    is_freeze = is_change and before is not None and layout.is_split_like(before)
    return {
        "event": "freeze" if is_freeze else event["event"],
        "steps": f"{layout.first_step + 1:,}–{layout.last_step:,}" if layout.last_step > layout.first_step else "none",
        "K × R": layout.shape,
        "stages from layer": ", ".join(map(str, event["stage_bounds"][:-1])) if layout.num_layers else "",
        "frozen": layout.frozen,
        "cached": f"{layout.num_cached} layers" if layout.num_layers else "",
        "M": str(layout.num_microbatches),
        "samples/s": f"{speed:,.1f}" if speed is not None else "",
        "ms a step": f"{1e3 * layout.seconds / layout.steps:,.1f}" if layout.steps else "",
        "ms predicted": f"{1e3 * prediction['seconds']:,.1f}" if prediction is not None else "",
        "MiB": f"{max(peaks) / MIB:,.0f}" if peaks else "",
        "MiB predicted": f"{layout.stage_bytes / MIB:,.1f}" if layout.stage_bytes else "",
        "change, s": f"{event['seconds']:.3f}" if is_change else "",
        "MiB moved": f"{event['bytes_moved'] / MIB:,.1f}" if is_change else "",
    }


def _slice_row(layout: LayoutPeriod, cut: Line) -> dict[str, str]:
    parts = dict.fromkeys(f"{part} × ({' + '.join(map(str, lengths))})" for part, lengths in cut["parts"])
    seconds = cut["predicted_seconds"]
    return {
        "K × R": layout.shape,
        "frozen": layout.frozen,
        "samples × tokens": f"{cut['rows']} × {cut['tokens']:,}",
        "parts": str(len(cut["parts"])),
        "samples of a part × (slices, in tokens)": "; ".join(parts),
        "ms predicted": f"{1e3 * seconds:,.1f}" if seconds is not None else "",
    }


def _training_row(training: Training) -> dict[str, str]:
    losses, total = training.curve("loss")[1], sum(training.seconds.values())
    return {
        "began": training.name[:19].replace("T", " "),
        "model": str(training.facts.get("model", "")),
        "steps": f"{training.last_step:,}",
        "calls of train()": str(training.calls),
        "time": _duration(total) if total else "",
        "last loss": f"{losses[-1]:.4g}" if losses else "",
        "state": {True: "ended", False: "interrupted or running", None: "not known"}[training.is_complete],
    }


def _arguments(facts: Line) -> list[tuple[str, str]]:
    """Return the recorded facts and arguments of the run as text, without arguments that have default values."""
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
        if value is not None and value != DEFAULTS.get(argument, False):
            if isinstance(value, dict):
                value = ", ".join(f"{key} → {item}" for key, item in value.items())
            words.append((argument, f"{value:g}" if isinstance(value, float) else str(value)))
    return words


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
