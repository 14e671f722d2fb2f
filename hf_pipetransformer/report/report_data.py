"""Reads the records that a training has written to its folder, and combines them for a report.

    pipeline_events.jsonl           layouts, with what was predicted of them
    pipeline_metrics.jsonl          logged numbers, time, memory
    [checkpoint-*/]trainer_state.json   logged numbers, where the former lack them

A folder may contain several trainings, and a training may consist of several calls of `train()`, each resumed from a
checkpoint of an earlier one. Steps of an interrupted call after that checkpoint were repeated; they are omitted from
the curves, but included in the time:

    call 1   steps 1 ... 200 [saved] 201 ... 260 interrupted        1 ... 200 count
    call 2               resumed at  201 ... 500                  201 ... 500
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..file_formats import EVENT, LOG_HISTORY, METRIC, checked, read_records
from ..planning.timeline import Timeline
from ..run import events_file, metrics_file
from ..token_slices.slice_planning import RowSlices, SliceLatency
from ..token_slices.slice_timeline import StageLatency, simulate_slices

STATE_NAME = "trainer_state.json"
BEGINNINGS = ("start", "resume")

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """A plan and the period in which it was in effect, from its event to the next one.

    Attributes:
        event: the event as recorded.
        last_step: the last optimizer step with this plan.
        steps: number of steps with this plan whose time is known.
        rows: number of samples trained in these steps, over all pipelines.
        seconds: time of these steps on the main process.
        waiting: time in which the main process waited between these steps for the next batch.
        usage: memory and number of micro-batches as measured; None if not recorded.
        slices: how batches were split along their tokens; empty if they were not.
    """

    event: Line
    last_step: int
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    usage: Line | None = None
    slices: tuple[Line, ...] = ()

    @property
    def first_step(self) -> int:
        """Number of optimizer steps done when the plan took effect."""
        return int(self.event["global_step"])

    @property
    def num_stages(self) -> int:
        return int(self.event["pipeline_parallel_size"])

    @property
    def num_replicas(self) -> int:
        return int(self.event["data_parallel_size"])

    @property
    def num_frozen(self) -> int:
        return int(self.event["num_frozen_layers"])

    @property
    def num_cached(self) -> int:
        return int(self.event.get("num_cached_layers", 0))

    @property
    def num_microbatches(self) -> int:
        """M of most steps; the planned M if that is unknown."""
        used = self.usage.get("num_microbatches") if self.usage is not None else None
        return int(used or self.event["num_microbatches"])

    @property
    def shape(self) -> str:
        """Stages × replicas, such as "4 × 1"."""
        return f"{self.num_stages} × {self.num_replicas}"

    @property
    def label(self) -> str:
        """The shape, and how many layers are frozen and cached."""
        counts = (("frozen", self.num_frozen), ("cached", self.num_cached))
        return ", ".join([self.shape, *(f"{number} {what}" for what, number in counts if number)])

    @property
    def prediction(self) -> Line | None:
        """Prediction of a step with the M that was used; None if parts were not timed, or sequences were split."""
        if self.slices:
            return None
        steps = self.event.get("predicted", {}).get("steps", [])
        return next((step for step in steps if step["num_microbatches"] == self.num_microbatches), None)

    @property
    def timed_slices(self) -> Line | None:
        """The largest recorded batch, by tokens, that was split along its tokens with measured times."""
        timed = [cut for cut in self.slices if cut.get("latencies")]
        return max(timed, key=lambda cut: cut["rows"] * cut["tokens"], default=None)

    @property
    def samples_per_second(self) -> float | None:
        """Throughput while training, without evaluation, saving and changes of the layout."""
        taken = self.seconds + self.waiting
        return self.rows / taken if self.rows and taken > 0 else None


@dataclass(frozen=True)
class Training:
    """One training, from step 0 or from the first step that is recorded in the folder.

    Attributes:
        name: time at which it started.
        calls: number of calls of `train()`.
        events: the valid events of layouts and slices.
        lines: the valid lines of metrics.
        logs: (step, name -> number), as logged.
        seconds: activity -> time of the main process, over all calls, including repeated steps.
        repeated_steps: number of steps that were repeated after an interruption.
        is_complete: whether the last call has returned; None if unknown.
        problems: what is missing, and why.
    """

    name: str
    calls: int
    events: tuple[Line, ...]
    lines: tuple[Line, ...]
    logs: tuple[tuple[int, Mapping[str, float]], ...]
    seconds: Mapping[str, float]
    repeated_steps: int
    is_complete: bool | None
    problems: tuple[str, ...] = field(default=())

    @cached_property
    def last_step(self) -> int:
        steps = [int(line["global_step"]) for line in (*self.events, *self.lines)]
        return max(steps + [step for step, _ in self.logs], default=0)

    @cached_property
    def facts(self) -> Line:
        """Recorded facts about the model, the machine and the arguments, from the start of the last call."""
        return next((event["facts"] for event in reversed(self.events) if "facts" in event), {})

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        layouts: list[Layout] = []
        for event in self.events:
            if event["event"] != events_file.SLICES:
                layouts.append(Layout(event, self.last_step))
                layouts[-2:-1] = [replace(before, last_step=layouts[-1].first_step) for before in layouts[-2:-1]]
            elif layouts:
                layouts[-1] = replace(layouts[-1], slices=(*layouts[-1].slices, event["slices"]))
        for line in self.lines:
            if not layouts or line["kind"] not in ("time", "usage"):
                continue
            step = int(line["global_step"])
            # an event at step s applies to the steps after s
            index = max((k for k, layout in enumerate(layouts) if layout.first_step < step), default=0)
            old = layouts[index]
            if line["kind"] == "usage":
                layouts[index] = replace(old, usage=line)
            elif line["steps"]:
                seconds = line["seconds"]
                layouts[index] = replace(
                    old,
                    steps=old.steps + line["steps"],
                    rows=old.rows + line["rows"],
                    seconds=old.seconds + seconds.get("steps", 0.0),
                    waiting=old.waiting + seconds.get("batches", 0.0),
                )
        return tuple(layouts)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values that were logged under a name."""
        found = {step: values[name] for step, values in self.logs if name in values}
        return list(found), list(found.values())

    @property
    def names(self) -> list[str]:
        """Names of all logged values, in the order of their first appearance."""
        return list(dict.fromkeys(name for _, values in self.logs for name in values))


def read_trainings(folder: Path) -> list[Training]:
    """Return all trainings of a folder, the oldest first.

    Args:
        folder: a training's `output_dir`.

    Raises:
        ValueError: it has no record of a training, or a line of a record is damaged.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Pass the output_dir of a training run.")
    event_lines, bad_events = read_records(folder / events_file.FILE_NAME, EVENT)
    metric_lines, bad_metrics = read_records(folder / metrics_file.FILE_NAME, METRIC)
    state = _newest_state(folder)
    if not event_lines and not metric_lines and state is None:
        raise ValueError(
            f"{folder} contains none of {events_file.FILE_NAME}, {metrics_file.FILE_NAME} and {STATE_NAME} (nor a"
            " checkpoint with one). Pass the output_dir of a training run with PipeTransformerTrainer."
        )
    problems = [
        f"{name}: {number} {'line' if number == 1 else 'lines'} cannot be read and were left out."
        for name, number in ((events_file.FILE_NAME, bad_events), (metrics_file.FILE_NAME, bad_metrics))
        if number
    ]
    groups = _group_calls(_calls(event_lines, metric_lines)) or [[_Call("", [], [])]]
    trainings = [_join(group, state if group is groups[-1] else None) for group in groups]
    trainings[-1] = replace(trainings[-1], problems=(*problems, *trainings[-1].problems))
    return trainings


@dataclass(frozen=True)
class _Call:
    """One call of `train()`."""

    name: str
    events: list[Line]
    lines: list[Line]

    @property
    def first_step(self) -> int:
        return int((self.events or self.lines)[0]["global_step"])

    @property
    def is_resumed(self) -> bool:
        if self.events:
            return bool(self.events[0]["event"] != "start")
        return self.first_step > 0


def _calls(event_lines: Sequence[Line], metric_lines: Sequence[Line]) -> list[_Call]:
    calls: dict[str, _Call] = {}
    name = ""
    for number, event in enumerate(event_lines):
        if event["event"] in BEGINNINGS:
            name = event.get("run") or f"line {number + 1:06d}"  # of an early version; this sorts before any date
        calls.setdefault(name, _Call(name, [], [])).events.append(event)
    for line in metric_lines:
        calls.setdefault(line["run"], _Call(line["run"], [], [])).lines.append(line)
    return sorted(calls.values(), key=lambda call: (not call.name.startswith("line"), call.name))


def _group_calls(calls: Sequence[_Call]) -> list[list[_Call]]:
    groups: list[list[_Call]] = []
    for call in calls:
        if not call.events and not any(line.get("steps") for line in call.lines):
            continue  # the call failed before its first step
        if call.is_resumed and groups:
            groups[-1].append(call)
        else:
            groups.append([call])
    return groups


def _join(calls: Sequence[_Call], state: Line | None) -> Training:
    """Combine the calls of one training.

    Args:
        calls: the calls in order of time.
        state: the Trainer's own state, from the newest checkpoint.
    """
    ends = [call.first_step for call in calls[1:]]
    kept_events: list[Line] = []
    kept_lines: list[Line] = []
    seconds: dict[str, float] = {}
    repeated = 0
    for index, call in enumerate(calls):
        end = min(ends[index:], default=None)
        # an event at the step of the checkpoint applies to steps that were repeated
        kept_events += [e for e in call.events if end is None or e["global_step"] < end]
        for line in call.lines:
            is_kept = end is None or line["global_step"] <= end
            if is_kept:
                kept_lines.append(line)
            if line["kind"] == "time":
                repeated += 0 if is_kept else line["steps"]
                for what, value in line["seconds"].items():
                    seconds[what] = seconds.get(what, 0.0) + value
    logs = _logged(kept_lines)
    problems = []
    history = [
        (int(entry["step"]), _numbers(entry)) for entry in (state or {}).get("log_history", []) if "step" in entry
    ]
    # if the training started here, the lines contain everything, and the state may be that of another training
    is_of_this = not kept_lines or calls[0].is_resumed
    before = [(step, values) for step, values in history if is_of_this and (not logs or step < logs[0][0])]
    if not kept_lines:
        problems.append(
            f"{metrics_file.FILE_NAME} has nothing of this training (it was made by an earlier version, or by another"
            " Trainer): time and memory are not known"
            + (f", and losses only up to the last {STATE_NAME}." if before else ".")
        )
    if not kept_events:
        problems.append(
            f"{events_file.FILE_NAME} has nothing of this training (something else distributed the model, or it was"
            " another Trainer): layouts and frozen layers are not known."
        )
    if repeated:
        problems.append(f"{repeated} steps were done again after an interruption; the curves show the second time.")
    last = calls[-1].lines[-1] if calls[-1].lines else None
    is_complete: bool | None = None
    if last is not None:
        is_complete = any(line["kind"] == "end" and line["has_ended"] for line in calls[-1].lines)
        if not is_complete:
            problems.append(f"The training was interrupted after step {last['global_step']}, or is still running.")
    return Training(
        name=calls[0].name,
        calls=len(calls),
        events=tuple(kept_events),
        lines=tuple(kept_lines),
        logs=tuple(before + logs),
        seconds=seconds,
        repeated_steps=repeated,
        is_complete=is_complete,
        problems=tuple(problems),
    )


def _logged(lines: Sequence[Line]) -> list[tuple[int, dict[str, float]]]:
    """Steps and numbers that were logged.

    An evaluation after `train()` counts only if there is none yet. It may use other weights (those of the best
    checkpoint) or other data (MNLI's second set), but has the name and the step of the training's last evaluation.
    """
    logs: list[tuple[int, dict[str, float]]] = []
    seen: set[str] = set()
    ended: set[str] = set()  # calls of `train()`
    for line in lines:
        if line["kind"] == "end":
            ended.add(line["run"])
        elif line["kind"] == "log":
            values = _numbers(line["values"])
            if line["run"] in ended:
                values = {n: value for n, value in values.items() if n not in seen or not n.startswith("eval_")}
            seen |= set(values)
            logs.append((int(line["global_step"]), values))
    return logs


def timeline_of_slices(cut: Line) -> Timeline:
    """Simulate the predicted step of a batch that was split along its tokens.

    Args:
        cut: a record of slices with its latencies.
    """
    parts = [RowSlices(rows, tuple(lengths)) for rows, lengths in cut["parts"]]
    stages = [StageLatency(*(SliceLatency(*one) for one in stage)) for stage in cut["latencies"]]
    return simulate_slices(stages, parts)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The values that are numbers, including "nan" and "inf", which are written as strings."""
    numbers = {}
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number or value in ("nan", "inf", "-inf"):
            numbers[name] = float(value)
    return numbers


def _newest_state(folder: Path) -> Line | None:
    """The newest state of the Trainer that can be read; None if there is none.

    Raises:
        ValueError: its log has another format.
    """
    paths = [*folder.glob(f"checkpoint-*/{STATE_NAME}"), folder / STATE_NAME]
    for path in sorted((p for p in paths if p.is_file()), key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            continue
        if isinstance(state, dict):
            return checked(state, LOG_HISTORY, str(path.relative_to(folder)))
    return None


def thinned(xs: Sequence[Any], ys: Sequence[float], most: int = 1500) -> tuple[list[Any], list[float]]:
    """Reduce a long curve to at most `most` points: the lowest and the highest of each section, to keep all peaks."""
    if len(xs) <= most:
        return list(xs), list(ys)
    edges = [round(k * len(xs) / (most // 2)) for k in range(most // 2 + 1)]
    chosen: list[int] = []
    for begin, end in pairwise(edges):
        stretch = range(begin, end)
        chosen += sorted({min(stretch, key=ys.__getitem__), max(stretch, key=ys.__getitem__)})
    return [xs[k] for k in chosen], [ys[k] for k in chosen]
