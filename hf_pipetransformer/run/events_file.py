"""Record each change of the layout as a line in `output_dir/pipeline_events.jsonl`."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from ..cache.activation_cache import CacheCounts
from ..own_files import open_regular
from ..planning.layout import Layout
from ..planning.predictions import CostModel
from ..token_slices.slice_choice import StepSeconds
from ..token_slices.slice_planning import RowSlices

logger = logging.getLogger(__name__)

FILE_NAME = "pipeline_events.jsonl"
SLICES = "slices"
"""An event that does not change the layout: how batches of a new shape are split along their tokens."""


def layout_of(plan: Layout) -> dict[str, Any]:
    """Return the layout of a plan, in plain values."""
    return {
        "num_layers": plan.num_units,
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
        A dict with "memory_bytes", the bytes of each process of a pipeline without the memory of torch and Python
        themselves; and "steps", which is empty unless the model's units have been timed. It has an entry for the
        plan's number of micro-batches M: seconds of a micro-batch's forward and backward in each virtual stage, and of
        the work after the pipeline (gradient reduction and optimizer). It also has the "schedule" that runs and
        "rows_per_pipeline".
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
                "end": round(prediction.seconds_at_end, 9),
                "seconds": round(prediction.seconds, 9),
            }
        )
    rows = plan.rows_per_pipeline
    return {"schedule": plan.runs_as, "rows_per_pipeline": rows, "memory_bytes": memory, "steps": steps}


def record(
    folder: str | Path,
    event: str,
    costs: CostModel,
    plan: Layout,
    global_step: int,
    epoch: float,
    seconds: float = 0.0,
    bytes_moved: int = 0,
    phases: Mapping[str, float] | None = None,
    run: str | None = None,
    facts: Mapping[str, Any] | None = None,
    slices: Mapping[str, Any] | None = None,
) -> None:
    """Append one event to the run's file.

    Args:
        folder: the run's `output_dir`.
        event: "start", "resume" or "transform"; "cache" if a different number of layers counts as cached and nothing
            moves; or "slices", how batches of a new shape are split along their tokens.
        costs: predicts the plan's memory and steps.
        plan: the plan in force from now on.
        global_step: number of optimizer steps done.
        epoch: number of epochs done.
        seconds: duration of the change in seconds, on the slowest process.
        bytes_moved: number of bytes received by all processes together.
        phases: duration in seconds of each phase of the change, on the process that was slowest in it.
        run: name of this `train()`.
        facts: properties of the run that do not change during it.
        slices: the result of `slices_of`, for the event "slices".
    """
    entry = {
        "event": event,
        "run": run,
        "time": round(time.time(), 3),
        "global_step": global_step,
        "epoch": epoch,
        **layout_of(plan),
        "seconds": round(seconds, 6),
        "bytes_moved": bytes_moved,
        "phases": {name: round(value, 6) for name, value in (phases or {}).items()},
        "predicted": prediction_of(costs, plan),
    }
    if slices is not None:
        # the slices are those of the main process's replica; other replicas may split otherwise
        entry["slices"] = {"replica": plan.replica_of(0), **slices}
    if facts is not None:
        entry["facts"] = dict(facts)
    path = Path(folder) / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError as error:  # only one process writes; if it raised here, the others would hang
        logger.warning("The event %r could not be recorded: %s", event, error)


def slices_of(parts: Sequence[RowSlices], seconds: float | None) -> dict[str, Any]:
    """Return how a batch is split, in plain values: for each part, the number of samples and the lengths of slices.

    If stages have been timed, "latencies" holds the coefficients of each stage's forward and backward.
    """
    cut: dict[str, Any] = {
        "rows": sum(part.rows for part in parts),
        "tokens": sum(parts[0].lengths),
        "parts": [[part.rows, list(part.lengths)] for part in parts],
        "predicted_seconds": None if seconds is None else round(float(seconds), 6),
    }
    if isinstance(seconds, StepSeconds):
        cut["latencies"] = [[list(map(float, one)) for one in astuple(stage)] for stage in seconds.stages]
    return cut


def describe_slices(parts: Sequence[RowSlices], seconds: float | None) -> str:
    """Describe how a batch is split, in one line for the log."""
    kinds = Counter((part.rows, part.lengths) for part in parts)
    cut = ", ".join(
        f"{f'{count} x ' if count > 1 else ''}{rows} row{'' if rows == 1 else 's'} in "
        + ("one slice" if len(lengths) == 1 else f"slices of {'+'.join(map(str, lengths))} tokens")
        for (rows, lengths), count in kinds.items()
    )
    predicted = "" if seconds is None else f"; forward and backward predicted {seconds:.3g} s"
    return f"Batches of {sum(part.rows for part in parts)} rows x {sum(parts[0].lengths)} tokens: {cut}{predicted}"


def cache_metrics(counts: CacheCounts, nbytes: int, num_layers: int) -> dict[str, float]:
    """Return the use of the activation cache in an epoch, as metrics to log.

    Args:
        counts: counts of samples, summed over all processes.
        nbytes: size of the store, in bytes.
        num_layers: number of the model's layers.
    """
    rows = max(counts.rows, 1)
    return {
        # share of the layers' forward passes: a sample found behind f of L layers counts f / L
        "cache_layers_skipped": round(counts.layers_skipped / (rows * num_layers), 4),
        "cache_hit_rate": round(counts.hits / rows, 4),
        "cache_older_hit_rate": round(counts.older_hits / rows, 4),
        "cache_rows_stored": counts.stored + counts.older_stored,
        "cache_rows_dropped": counts.dropped,
        "cache_load_seconds": round(counts.load_seconds, 3),
        "cache_bytes": nbytes,
    }
