"""`hf-pipetransformer compare`: two trainings side by side, such as one with freezing and a plain one.

Each folder is an `output_dir`, of a `PipeTransformerTrainer` or of a stock `Trainer` that has saved its state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..parts.records.files import EVENTS, METRICS
from ..parts.records.history import STATE_NAME, Training, read_trainings
from .words import FEW_STEPS, final_quality, quality_metric, why_not_read

MUCH_PREPARATION = 0.25
"""Share of time before the first step above which a longer training would have a clearly different speed-up."""
ERRORS_TO_DIFFER = 2
"""Number of standard errors that a difference between two accuracies must exceed to count as evidence."""
ROUNDED = 6e-5
"""Largest rounding error of an accuracy with four digits."""
SETTINGS = {
    "model": "model",
    "num_parameters": "parameters",
    "world_size": "processes",
    "backend": "backend",
    "device": "device",
    "threads": "threads a process",
    "global_batch_size": "global batch",
}
"""Recorded property of a training -> name in the table of differences."""


def trainings_in(folder: Path) -> list[Training]:
    """Return the trainings of a folder, the oldest first.

    Raises:
        ValueError: there is no training.
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
    """Return name -> last training of each folder. The name is the folder's last part, or its path if both are equal.

    Raises:
        ValueError: the folders are the same, or one has no training.
    """
    one, two = first.resolve(), second.resolve()
    if one == two:
        raise ValueError(f"{first} and {second} are the same folder. Pass the output_dir of two trainings.")
    names = (one.name, two.name) if one.name != two.name else (str(first), str(second))
    return {name: trainings_in(folder)[-1] for name, folder in zip(names, (first, second), strict=True)}


def rows_of(runs: Mapping[str, Training]) -> list[dict[str, str]]:
    """Return the table: each quantity's value in both trainings, and for times the second over the first.

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
    add("frozen at the end", ["" if one is None else one.frozen for one in last])
    reads = [run.share_read("cache_hit_rate") for run in both]
    if any(reads):
        skipped = [run.share_read("cache_layers_skipped") for run in both]
        for what, shares in (("samples read from the cache", reads), ("forward passes skipped", skipped)):
            known = zip(shares, both, strict=True)
            add(what, [f"{share:.0%}" if run.layouts else "" for share, run in known])
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
    """Return a sentence on the speed of two trainings and their difference in accuracy."""
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
        difference = f"{abs(one[1] - two[1]):.4g} {'lower' if one[1] < two[1] else 'higher'}"
        text += f", and its {one[0]} is {difference if one[1] != two[1] else 'the same'}"
    if a.total_rows and b.total_rows and abs(a.total_rows / b.total_rows - 1) > 0.01:
        text += f" ({a.total_rows:,.0f} samples, not {b.total_rows:,.0f})"
    return f"{text}."


def notes(runs: Mapping[str, Training]) -> list[str]:
    """Return the sentences after the headline: reasons for uncertainty, and frozen modules that were not read.

    The headline is uncertain after few steps, a long preparation, or evaluations on few samples.
    """
    sentences = []
    for name, run in runs.items():
        spent, start = sum(run.seconds.values()), run.seconds.get("preparing", 0.0)
        if 0 < run.last_step < FEW_STEPS:
            sentences.append(
                f"The factor is uncertain: {name} has only {run.last_step} step{'s' if run.last_step > 1 else ''}, of"
                " which the first take longer (warm-up). Train for longer."
            )
        elif start > MUCH_PREPARATION * spent:
            sentences.append(
                f"{name} spent {start:,.1f} of its {spent:,.1f} s before the first step, so a longer training would"
                " have another factor. Compare the seconds of steps."
            )
    sentences += _doubt_of_quality(*runs.values())
    for name, run in runs.items():
        reasons = why_not_read(run)
        sentences += [
            f"In {name}, the output of {module} was not read from the cache: {why}." for module, why in reasons
        ]
    unknown = [name for name, run in runs.items() if not run.facts]
    if unknown:
        sentences.append(
            f"The arguments of {' and '.join(unknown)} were not recorded, which another Trainer does not do: other"
            " differences between the trainings are not known."
        )
    return sentences


def _doubt_of_quality(a: Training, b: Training) -> list[str]:
    """Return a sentence if evaluation samples alone may explain the difference of two accuracies.

    Only for shares of correct samples: an accuracy that is not a whole number of samples counts other items, such as
    tokens.
    """
    name = quality_metric(a)
    if name != quality_metric(b) or name.rpartition("_")[2] != "accuracy":
        return []
    shares, counts = [], []
    for run in (a, b):
        values, count = run.curve(name)[1], run.num_evaluated(name)
        if not values or not count or not 0 <= values[-1] <= 1:
            return []
        if abs(values[-1] * count - round(values[-1] * count)) > count * ROUNDED + 1e-3:
            return []
        shares.append(values[-1])
        counts.append(count)
    if counts[0] != counts[1]:
        return [f"The accuracies are of {counts[0]:,} and {counts[1]:,} evaluation samples: not the same data."]
    difference = abs(shares[0] - shares[1])
    error = math.sqrt(sum(share * (1 - share) / count for share, count in zip(shares, counts, strict=True)))
    if not 0 < difference <= ERRORS_TO_DIFFER * error:
        return []
    within = (
        f"is within the standard error of {counts[0]:,} evaluation samples ({error:.2g})"
        if difference <= error
        else f"is less than {ERRORS_TO_DIFFER} standard errors of {counts[0]:,} evaluation samples ({error:.2g} each)"
    )
    return [f"The difference in accuracy of {difference:.2g} {within}: it is not evidence of a difference."]


def differences(runs: Mapping[str, Training]) -> list[dict[str, str]]:
    """Return the table of settings that differ, among the settings that both trainings have recorded."""
    (first, a), (second, b) = runs.items()
    mine, theirs = _settings(a), _settings(b)
    return [
        {"": name, first: value, second: theirs[name]}
        for name, value in mine.items()
        if name in theirs and value != theirs[name]
    ]


def _settings(training: Training) -> dict[str, str]:
    """The recorded properties and arguments of a training by name, as text."""
    facts = training.facts
    if not facts:
        return {}
    named = {name: facts.get(field) for field, name in SETTINGS.items()}
    if "frozen_modules" in training.layouts[0].event:  # earlier versions did not record them
        begin = training.layouts[0].frozen_modules
        named["frozen by you at the start"] = None if begin is None else ", ".join(begin["names"])
    named |= {**facts["versions"], **facts["arguments"]}
    return {name: "none" if value is None else str(value) for name, value in named.items()}


def as_text(rows: list[dict[str, str]]) -> str:
    """Format the table for a terminal."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in zip(*lines, strict=True)]
    columns[0] = [name.strip().ljust(len(name)) for name in columns[0]]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
