"""Reads the records of a folder back: its trainings, and the layouts of each training.

A folder may contain several trainings, and a training may consist of several calls of `train()`, each resumed from a
checkpoint of an earlier one. Steps of an interrupted call after that checkpoint were repeated; they are omitted from
the curves, but included in the time:

    call 1   steps 1 ... 200 [saved] 201 ... 260 interrupted        1 ... 200 count
    call 2               resumed at  201 ... 500                  201 ... 500

Logs from before the first record, or of another Trainer, are read from `[checkpoint-*/]trainer_state.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...file_formats import COUNT, is_number, read_json
from .files import BEGINNINGS, EVENTS, METRICS, SLICES, frozen_in_words, read_lines

STATE_NAME = "trainer_state.json"
LOG_HISTORY = {"log_history?": [{"step?": COUNT}]}
NO_NUMBERS = ("nan", "inf", "-inf")

Line = Mapping[str, Any]


def _recorded(name: str) -> property:
    """A whole number of a layout's event."""
    return property(lambda layout: int(layout.event[name]))


@dataclass
class LayoutPeriod:
    """A plan and the period during which it was in effect, from its event to the next one.

    Attributes:
        event: the event as recorded.
        last_step: the last optimizer step with this plan. It took effect after `first_step` steps.
        steps: number of timed steps with this plan.
        rows: number of samples trained in these steps, over all pipelines.
        seconds: time of these steps on the main process.
        waiting: time that the main process waited for the next batch between these steps.
        usage: memory and number of micro-batches as measured; None if not recorded.
        slices: how batches were split along their tokens; empty if they were not.
        paces: (steps, seconds) between two log entries.
    """

    event: Line
    last_step: int
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    usage: Line | None = None
    slices: list[Line] = field(default_factory=list)
    paces: list[tuple[int, float]] = field(default_factory=list)

    first_step = _recorded("global_step")
    num_stages, num_replicas = _recorded("pipeline_parallel_size"), _recorded("data_parallel_size")
    num_frozen, num_cached = _recorded("num_frozen_layers"), _recorded("num_cached_layers")

    @property
    def num_layers(self) -> int:
        """Number of layers; 0 if the model was not split into layers, for which earlier versions recorded 1."""
        number = int(self.event.get("num_layers", 0))
        return number if number > 1 or self.num_frozen else 0

    @property
    def frozen_modules(self) -> Line | None:
        """The modules that the user had frozen; None if there were none, or if they were not recorded."""
        return self.event.get("frozen_modules") or None

    @property
    def frozen(self) -> str:
        """The frozen layers and modules in words: "5 of 6 layers", "bert (99.9% of the parameters)", "nothing".

        Empty if the model was not split and its frozen modules were not recorded.
        """
        modules = self.frozen_modules
        parts = [] if modules is None else [frozen_in_words(modules)]
        if self.num_frozen or (self.num_layers and modules is None):
            parts.insert(0, f"{self.num_frozen} of {self.num_layers} layers")
        return "; ".join(parts) or ("nothing" if "frozen_modules" in self.event else "")

    def is_split_like(self, other: LayoutPeriod) -> bool:
        """Whether K, R and the cuts between stages are the same."""
        return self.shape == other.shape and self.event["stage_bounds"] == other.event["stage_bounds"]

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
        """The shape, and the frozen and cached layers, or the frozen modules."""
        counts = (("frozen", self.num_frozen), ("cached", self.num_cached))
        parts = [self.shape, *(f"{number} {what}" for what, number in counts if number)]
        if self.frozen_modules is not None and not self.num_frozen:
            first, *others = self.frozen_modules["names"]
            parts.append(f"{first}{', ...' if others else ''} frozen")
        return ", ".join(parts)

    @property
    def stage_bytes(self) -> float:
        """Predicted bytes of the largest stage; 0 if unknown."""
        return max(self.event["predicted"]["memory_bytes"], default=0)

    @property
    def prediction(self) -> Line | None:
        """Prediction of a step with the actual M; None if parts were not timed, or sequences were split."""
        steps = [] if self.slices else self.event["predicted"]["steps"]
        return next((step for step in steps if step["num_microbatches"] == self.num_microbatches), None)

    @property
    def samples_per_second(self) -> float | None:
        """Throughput while training, without evaluation, saving and changes of the layout."""
        taken = self.seconds + self.waiting
        return self.rows / taken if self.rows and taken > 0 else None


@dataclass
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
        problems: missing records, each with the reason.
    """

    name: str
    calls: int
    events: list[Line] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    logs: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    repeated_steps: int = 0
    is_complete: bool | None = None
    problems: list[str] = field(default_factory=list)

    @cached_property
    def last_step(self) -> int:
        steps = [int(line["global_step"]) for line in (*self.events, *self.lines)]
        return max(steps + [step for step, _ in self.logs], default=0)

    @cached_property
    def facts(self) -> Line:
        """Recorded facts about the model, the machine and the arguments, from the start of the last call."""
        return next((event["facts"] for event in reversed(self.events) if "facts" in event), {})

    @cached_property
    def layouts(self) -> list[LayoutPeriod]:
        layouts: list[LayoutPeriod] = []
        for event in self.events:
            if event["event"] != SLICES:
                if layouts:
                    layouts[-1].last_step = event["global_step"]
                layouts.append(LayoutPeriod(event, self.last_step))
            elif layouts:
                layouts[-1].slices.append(event["slices"])
        for line in self.lines if layouts else ():
            # an event at step s applies to the steps after s
            under = [layout for layout in layouts if layout.first_step < line["global_step"]] or layouts[:1]
            if line["kind"] == "usage":
                under[-1].usage = line
            elif line["kind"] == "time" and line["steps"]:
                under[-1].steps += line["steps"]
                under[-1].rows += line["rows"]
                under[-1].seconds += line["seconds"].get("steps", 0.0)
                under[-1].paces.append((line["steps"], line["seconds"].get("steps", 0.0)))
                under[-1].waiting += line["seconds"].get("batches", 0.0)
        return layouts

    @property
    def num_layout_changes(self) -> int:
        """How often K, R or the cuts between stages changed."""
        return sum(not after.is_split_like(before) for before, after in pairwise(self.layouts))

    @cached_property
    def reads(self) -> list[tuple[Line, int]]:
        """Log entries on the cache, one per epoch, each with the number of samples since the previous entry."""
        entries = [line for line in self.lines if line["kind"] == "log" and "cache_hit_rate" in line["values"]]
        trained = [line for line in self.lines if line["kind"] == "time"]
        found, begin = [], 0
        for entry in entries:
            end = entry["global_step"]
            rows = sum(line["rows"] for line in trained if begin < line["global_step"] <= end)
            found.append((entry, rows))
            begin = end
        return found

    def share_read(self, name: str) -> float:
        """Mean of a share in the log entries on the cache ("cache_hit_rate") over all samples of the training."""
        rows = sum(line["rows"] for line in self.lines if line["kind"] == "time")
        return sum(entry["values"].get(name, 0.0) * number for entry, number in self.reads) / max(rows, 1)

    def num_evaluated(self, name: str) -> int | None:
        """Number of samples of the last evaluation with a metric such as "eval_accuracy"; None if unknown.

        The Trainer logs seconds and samples per second of a data set with the prefix of its metrics. Their product is
        the number, unless rounding (to four and three decimals) makes it ambiguous.
        """
        prefix = name.rpartition("_")[0]
        seconds, speeds = (self.curve(f"{prefix}_{what}")[1] for what in ("runtime", "samples_per_second"))
        if not seconds or not speeds or 5e-5 * speeds[-1] + 5e-4 * seconds[-1] > 0.5:
            return None
        return round(seconds[-1] * speeds[-1])

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values that were logged under a name."""
        found = {step: values[name] for step, values in self.logs if name in values}
        return list(found), list(found.values())

    @property
    def total_seconds(self) -> float:
        """Seconds of all calls of `train()`, or as another Trainer logged them at its end; 0 if unknown."""
        logged = self.curve("train_runtime")[1]
        return sum(self.seconds.values()) or (logged[-1] if logged else 0.0)

    @property
    def total_rows(self) -> float:
        """Number of samples trained, over all layouts, or as another Trainer has logged it; 0 if unknown."""
        runtime, speed = self.curve("train_runtime")[1], self.curve("train_samples_per_second")[1]
        logged = runtime[-1] * speed[-1] if runtime and speed else 0.0
        return sum(line["rows"] for line in self.lines if line["kind"] == "time") or logged

    def curve_over_time(self, name: str) -> tuple[list[float], list[float]]:
        """Seconds of training and values that were logged under a name.

        Without a clock (another Trainer's log), the steps are spread evenly over the training.
        """
        steps, values = self.curve(name)
        if self.seconds:
            passed, at = 0.0, {0: 0.0}
            for line in self.lines:
                if line["kind"] == "time":
                    passed += sum(line["seconds"].values())
                    at[int(line["global_step"])] = passed
            return [at.get(step, passed) for step in steps], values
        if not self.total_seconds or not self.last_step:
            return [], []
        return [self.total_seconds * step / self.last_step for step in steps], values

    @property
    def names(self) -> list[str]:
        """Names of all logged values, in the order of their first appearance."""
        return list(dict.fromkeys(name for _, values in self.logs for name in values))


@dataclass
class _TrainCall:
    """One call of `train()`."""

    name: str
    events: list[Line] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    @property
    def first_step(self) -> int:
        return int((self.events or self.lines)[0]["global_step"])

    @property
    def is_resumed(self) -> bool:
        if self.events:
            return bool(self.events[0]["event"] != BEGINNINGS[0])
        return self.first_step > 0


def read_trainings(folder: Path, last_run: str | None = None) -> list[Training]:
    """Return the trainings of a folder, the oldest first; an empty list if it has no record of a training.

    Args:
        folder: a training's `output_dir`.
        last_run: name of a `train()` that must have been recorded; later records are left out.

    Raises:
        ValueError: a line of a record is damaged.
    """
    history, problems = _logged_by_trainer(folder), []
    calls: dict[str, _TrainCall] = {}
    for name in (EVENTS, METRICS):
        records, broken = read_lines(folder, name)
        for record in records:
            if last_run is None or record["run"] <= last_run:  # a call's name is its start time
                call = calls.setdefault(record["run"], _TrainCall(record["run"]))
                (call.events if name == EVENTS else call.lines).append(record)
        if broken:
            problems.append(f"{name}: {broken} {'line' if broken == 1 else 'lines'} cannot be read and were left out.")
    if not calls and history is None:
        return []
    if last_run is not None and last_run not in calls:
        return []
    groups: list[list[_TrainCall]] = []
    for _, call in sorted(calls.items()):
        if not call.events and not any(line.get("steps") for line in call.lines):
            continue  # the call failed before its first step
        if call.is_resumed and groups:
            groups[-1].append(call)
        else:
            groups.append([call])
    groups = groups or [[_TrainCall("")]]
    trainings = [_joined(group, (history or []) if group is groups[-1] else []) for group in groups]
    trainings[-1].problems[:0] = problems
    return trainings


def _joined(calls: Sequence[_TrainCall], history: list[tuple[int, dict[str, float]]]) -> Training:
    """Combine the calls of one training.

    Args:
        calls: the calls in order of time.
        history: the log history in the Trainer's own state.
    """
    training = Training(calls[0].name, len(calls))
    for index, call in enumerate(calls):
        end = min((later.first_step for later in calls[index + 1 :]), default=None)
        # an event at the step of the checkpoint applies to steps that were repeated
        training.events += [event for event in call.events if end is None or event["global_step"] < end]
        for line in call.lines:
            is_kept = end is None or line["global_step"] <= end
            training.lines += [line] if is_kept else []
            if line["kind"] == "time":
                training.repeated_steps += 0 if is_kept else line["steps"]
                for what, seconds in line["seconds"].items():
                    training.seconds[what] = training.seconds.get(what, 0.0) + seconds
    logs = _logged(training.lines)
    # if the training started here, the lines are complete, and the state may belong to another training
    if not training.lines or calls[0].is_resumed:
        training.logs += [(step, values) for step, values in history if not logs or step < logs[0][0]]
    if not training.lines:
        known = f", and losses only up to the last {STATE_NAME}" if training.logs else ""
        training.problems.append(
            f"{METRICS} has nothing of this training (it was made by another Trainer): time and memory are not"
            f" known{known}."
        )
    training.logs += logs
    if not training.events:
        training.problems.append(
            f"{EVENTS} has nothing of this training (something else distributed the model, or it was another"
            " Trainer): layouts and frozen layers are not known."
        )
    if training.repeated_steps:
        training.problems.append(
            f"{training.repeated_steps} steps were done again after an interruption; the curves show the second time."
        )
    last = calls[-1].lines
    if last:
        training.is_complete = any(line["kind"] == "end" and line["has_ended"] for line in last)
        if not training.is_complete:
            training.problems.append(
                f"The training was interrupted after step {last[-1]['global_step']}, or is still running."
            )
    return training


def _logged(lines: Sequence[Line]) -> list[tuple[int, dict[str, float]]]:
    """Steps and numbers that were logged.

    An evaluation after `train()` counts only if there is none yet. It may use other weights (the best checkpoint's) or
    other data (MNLI's second set), but has the name and the step of the training's last evaluation.
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


def _logged_by_trainer(folder: Path) -> list[tuple[int, dict[str, float]]] | None:
    """Steps and numbers in the newest readable state of the Trainer; None if there is none."""
    paths = [path for path in (*folder.glob(f"checkpoint-*/{STATE_NAME}"), folder / STATE_NAME) if path.is_file()]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(OSError, ValueError):
            entries = read_json(path, LOG_HISTORY).get("log_history", [])
            return [(entry["step"], _numbers(entry)) for entry in entries if "step" in entry]
    return None


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The values that are numbers, including "nan" and "inf", which are written as strings."""
    return {name: float(value) for name, value in values.items() if is_number(value) or value in NO_NUMBERS}
