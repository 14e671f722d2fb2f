"""`hf-pipetransformer compare`: two trainings side by side, such as one with freezing and a plain one.

Each folder is an `output_dir`, of a `PipeTransformerTrainer` or of a stock `Trainer` that has saved its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..records.files import EVENTS, METRICS
from ..records.history import STATE_NAME, Training, read_trainings
from .words import final_quality


def trainings_in(folder: Path) -> list[Training]:
    """Return the trainings of a folder, the oldest first.

    Raises:
        ValueError: there is none.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Pass the output_dir of a training run.")
    trainings = read_trainings(folder)
    if not trainings:
        raise ValueError(
            f"{folder} contains none of {EVENTS}, {METRICS} and {STATE_NAME} (nor a checkpoint with one). Pass the"
            " output_dir of a training run with PipeTransformerTrainer."
        )
    return trainings


def pair(first: Path, second: Path) -> dict[str, Training]:
    """Return the last training of each folder by its name: the folder's last part, or the path if these are equal.

    Raises:
        ValueError: they are one folder, or one has no training.
    """
    one, two = first.resolve(), second.resolve()
    if one == two:
        raise ValueError(f"{first} and {second} are the same folder. Pass the output_dir of two trainings.")
    names = (one.name, two.name) if one.name != two.name else (str(first), str(second))
    return {name: trainings_in(folder)[-1] for name, folder in zip(names, (first, second), strict=True)}


def rows_of(runs: Mapping[str, Training]) -> list[dict[str, str]]:
    """Return the table: for each quantity its value in each training, and the second over the first where it is time.

    Args:
        runs: name -> training, two of them.
    """
    (first, a), (second, b) = runs.items()
    rows: list[dict[str, str]] = []

    def add(what: str, values: Sequence[str], ratio: float | None = None) -> None:
        if any(values):
            relation = f"{ratio:.2f}" if ratio is not None else ""
            rows.append({"": what, first: values[0], second: values[1], f"{second} / {first}": relation})

    def add_numbers(what: str, values: Sequence[float]) -> None:
        ratio = values[1] / values[0] if all(values) else None
        add(what, [f"{value:,.1f}" if value else "" for value in values], ratio)

    both = (a, b)
    shapes = [dict.fromkeys(layout.shape for layout in run.layouts) for run in both]
    add("layouts (stages × replicas)", [" → ".join(shape) for shape in shapes])
    last = [run.layouts[-1] if run.layouts else None for run in both]
    add("layers frozen at the end", ["" if one is None else f"{one.num_frozen} of {one.num_layers}" for one in last])
    add("steps", [f"{run.last_step:,}" for run in both])
    add_numbers("seconds in all", [run.total_seconds for run in both])
    add_numbers("seconds of steps", [sum(run.seconds.get(what, 0.0) for what in ("steps", "batches")) for run in both])
    add_numbers("samples/s, all in", [run.total_rows / run.total_seconds if run.total_seconds else 0 for run in both])
    losses = [run.curve("loss")[1] or run.curve("train_loss")[1] for run in both]
    add("last training loss", [f"{values[-1]:.4g}" if values else "" for values in losses])
    qualities = [final_quality(run) for run in both]
    for name in dict.fromkeys(quality[0] for quality in qualities if quality is not None):
        add(f"{name} at the end", [f"{q[1]:.4g}" if q is not None and q[0] == name else "" for q in qualities])
    return rows


def headline(runs: Mapping[str, Training]) -> str:
    """Return which of two trainings was faster, by how much, and the difference in accuracy."""
    (first, a), (second, b) = runs.items()
    if not a.total_seconds or not b.total_seconds:
        return f"The time of {first if not a.total_seconds else second} is not known."
    ratio = b.total_seconds / a.total_seconds
    text = (
        f"{first} took {a.total_seconds:,.1f} s and {second} {b.total_seconds:,.1f} s: {first} was {ratio:.2f} times"
    )
    text += " as fast"
    (one, two) = (final_quality(run) for run in (a, b))
    if one is not None and two is not None and one[0] == two[0]:
        text += f", and its {one[0]} is {abs(one[1] - two[1]):.4g} {'lower' if one[1] < two[1] else 'higher'}"
    if a.total_rows and b.total_rows and abs(a.total_rows / b.total_rows - 1) > 0.01:
        text += f" ({a.total_rows:,.0f} samples, not {b.total_rows:,.0f})"
    return f"{text}."


def as_text(rows: list[dict[str, str]]) -> str:
    """Format the table for a terminal."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in zip(*lines, strict=True)]
    columns[0] = [name.strip().ljust(len(name)) for name in columns[0]]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
