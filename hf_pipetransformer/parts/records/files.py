"""The files that record a training in its `output_dir`. The report and the model card are made from them.

    pipeline_events.jsonl     each change of the layout, with its predicted memory and times
    pipeline_metrics.jsonl    logged numbers, times and memory between these changes

    {"kind": "begin", ...}  the first step is about to begin
    {"kind": "log",   ...}  the Trainer's logs: loss, learning rate, metrics of an evaluation, hit rates
    {"kind": "time",  ...}  seconds of the main process since the last such line, by activity; steps and samples
    {"kind": "usage", ...}  under the layout that has just ended: memory of each process, micro-batches M
    {"kind": "cache_off", ...}  why the cache of frozen layers is off, or why a frozen "module" is computed each time
    {"kind": "end",   ...}  `train()` has returned (or raised); a training that was killed has no such line

The Trainer writes its own `trainer_state.json` with checkpoints only. These files are written during training, so an
interrupted run leaves a record too. All lines of one `train()` have the same "run", in both files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...file_formats import (
    COUNT,
    FLAG,
    NUMBER,
    OBJECT,
    SIZE,
    TEXT,
    Both,
    Format,
    Is,
    Maybe,
    read_records,
)
from ...planning.layout import Layout
from ...planning.predictions import CostModel

if TYPE_CHECKING:  # types only: the package is optional
    from ...token_slices.slice_timeline import SlicePlan

EVENTS = "pipeline_events.jsonl"
METRICS = "pipeline_metrics.jsonl"
BEGINNINGS = ("start", "resume")
"""First event of a `train()`. The other events are "transform"; "cache", if only the number of cached layers changes
and no parameter moves; "modules", if the user's frozen modules have changed; and `SLICES`."""
SLICES = "slices"
"""Event for batches of a new shape: how they are split along their tokens. The layout stays."""

MOST_TO_NAME = 3
"""Maximum number of frozen modules that a sentence names."""

_FACTS = {
    "model?": TEXT,
    "name_or_path?": Maybe(TEXT),
    "num_parameters": COUNT,
    "world_size": SIZE,
    "global_batch_size": COUNT,
    "device": TEXT,
    "device_type?": TEXT,
    "backend?": Maybe(TEXT),
    "threads": COUNT,
    "versions": OBJECT,
    "arguments": OBJECT,
}
_FROZEN_MODULES = {"names": [TEXT, ...], "count": SIZE, "share": NUMBER, "by": TEXT}
_STEP = Both(
    {
        "num_microbatches": SIZE,
        "forward": [NUMBER, ...],
        "backward": [NUMBER, ...],
        "seconds": NUMBER,
    },
    Is("a step with as many times forward as backward", lambda step: len(step["forward"]) == len(step["backward"])),
)
_LATENCY = (NUMBER, NUMBER, NUMBER, NUMBER, NUMBER)
_EVENT = Both(
    {
        "event": TEXT,
        "run": TEXT,
        "global_step": COUNT,
        "epoch": NUMBER,
        "num_layers?": COUNT,
        "num_frozen_layers": COUNT,
        "num_cached_layers": COUNT,
        "pipeline_parallel_size": SIZE,
        "data_parallel_size": SIZE,
        "num_microbatches": SIZE,
        "stage_bounds": [COUNT, ...],
        "seconds": NUMBER,
        "bytes_moved": NUMBER,
        "phases": {str: NUMBER},
        "predicted": {"schedule": TEXT, "memory_bytes": [NUMBER], "steps": [_STEP]},
        "slices?": {
            "rows": SIZE,
            "tokens": SIZE,
            "parts": [(SIZE, [SIZE, ...]), ...],
            "predicted_seconds": Maybe(NUMBER),
            "latencies?": [(_LATENCY, _LATENCY)],
        },
        "frozen_modules?": Maybe(_FROZEN_MODULES),
        "facts?": _FACTS,
    },
    Is(
        "an event with times of whole stages",
        lambda event: (
            not any(len(step["forward"]) % event["pipeline_parallel_size"] for step in event["predicted"]["steps"])
        ),
    ),
    Is('an event with its slices, which "slices" has', lambda e: e["event"] != SLICES or "slices" in e),
)
_OF_KIND: dict[str, Format] = {
    "log": {"values": OBJECT},
    "time": {"steps": COUNT, "rows": COUNT, "seconds": {str: NUMBER}},
    "usage": {
        "resident_bytes": [COUNT, ...],
        "device_peak_bytes?": [COUNT],
        "num_microbatches?": Maybe(SIZE),
    },
    "cache_off": {"reason": TEXT, "module?": TEXT},
    "end": {"has_ended": FLAG},
}
_METRIC = Both({"kind": TEXT, "run": TEXT, "global_step": COUNT}, lambda line: _OF_KIND.get(line["kind"], OBJECT))


def frozen_in_words(frozen: Mapping[str, Any]) -> str:
    """Return the modules of an event's "frozen_modules", and their share: "bert (99.9% of the parameters)"."""
    names = frozen["names"][:MOST_TO_NAME]
    more = frozen["count"] - len(names)
    names += [f"{more} more module{'s' if more > 1 else ''}"] if more else []
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"{listed} ({share_in_words(frozen)} of the parameters)"


def share_in_words(frozen: Mapping[str, Any]) -> str:
    """Return the modules' share of the parameters in percent, rounded down: 99.97% must not read as 100%."""
    return f"{math.floor(1e3 * frozen['share'] + 1e-6) / 10:g}%"


def sentence_on_frozen(frozen: Mapping[str, Any]) -> str:
    """Return the frozen modules and who froze them: "bert (99.9% of the parameters) is frozen by you"."""
    is_one = frozen["count"] == 1 and re.search(r"\d-\d+$", frozen["names"][0]) is None  # "layer.0-3" are several
    return f"{frozen_in_words(frozen)} {'is' if is_one else 'are'} frozen by {frozen['by']}"


def read_lines(folder: Path, name: str) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of `EVENTS` or `METRICS` in an `output_dir`, and the number of unreadable lines.

    Raises:
        ValueError: a line is damaged.
    """
    return read_records(folder / name, {EVENTS: _EVENT, METRICS: _METRIC}[name])


def layout_of(plan: Layout) -> dict[str, Any]:
    """Return the layout of a plan, in plain values.

    "num_layers" is missing if the model is not split: the model then counts as one unit.
    """
    is_split = plan.num_units > 1 or plan.num_frozen_layers > 0
    return {
        **({"num_layers": plan.num_units} if is_split else {}),
        "num_frozen_layers": plan.num_frozen_layers,
        "num_cached_layers": plan.num_cached_layers,
        "pipeline_parallel_size": plan.pipeline_parallel_size,
        "data_parallel_size": plan.data_parallel_size,
        "num_microbatches": plan.num_microbatches,
        "num_virtual_stages": plan.num_virtual_stages,
        "stage_bounds": list(plan.stage_bounds),
    }


def prediction_of(costs: CostModel, plan: Layout) -> dict[str, Any]:
    """Return the predictions of a plan, in plain values.

    Returns:
        A dict with "schedule", the schedule that runs; "rows_per_pipeline"; "memory_bytes", the bytes of each process
        of a pipeline without the memory of torch and Python themselves; and "steps". "steps" is empty if the model's
        units have not been timed. Otherwise it has one entry, for the plan's number of micro-batches M: seconds of a
        micro-batch's forward and backward in each virtual stage, and of the step.
    """
    of_stages = costs.stage_bytes(plan)
    memory = [of_stages[plan.stage_of(rank)] for rank in range(plan.pipeline_parallel_size)]
    steps = []
    if costs.times is not None:
        prediction = costs.predict(plan)
        forward, backward = costs.stage_seconds(plan)
        steps.append(
            {
                "num_microbatches": plan.num_microbatches,
                "forward": [round(seconds, 9) for seconds in forward],
                "backward": [round(seconds, 9) for seconds in backward],
                "seconds": round(prediction.seconds, 9),
            }
        )
    rows = plan.rows_per_pipeline
    return {"schedule": plan.runs_as, "rows_per_pipeline": rows, "memory_bytes": memory, "steps": steps}


def slices_of(plan: SlicePlan) -> dict[str, Any]:
    """Return how a batch is split, in plain values: for each part, the number of samples and the lengths of slices.

    If stages have been timed, "latencies" contains the coefficients of each stage's forward and backward.
    """
    cut: dict[str, Any] = {
        "rows": sum(part.rows for part in plan.parts),
        "tokens": sum(plan.parts[0].lengths),
        "parts": [[part.rows, list(part.lengths)] for part in plan.parts],
        "predicted_seconds": None if plan.seconds is None else round(plan.seconds, 6),
    }
    if plan.stages:
        cut["latencies"] = [[list(map(float, one)) for one in astuple(stage)] for stage in plan.stages]
    return cut
