"""Observes a training and writes its record (`records/files.py`): layouts, logged numbers, times and memory."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import accelerate
import psutil
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from ...file_formats import is_number
from ...model.frozen_prefix import frozen_modules, name_ranges
from ...own_files import open_regular
from ...pipeline.devices import name_of_device, peak_memory
from ...planning.layout import Layout
from ...planning.predictions import CostModel
from .files import EVENTS, METRICS, layout_of, prediction_of

logger = logging.getLogger(__name__)

RECORDED_ARGUMENTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
    *("learning_rate", "lr_scheduler_type", "optim", "weight_decay", "max_grad_norm", "warmup_steps"),
    *("seed", "mixed_precision", "gradient_checkpointing", "full_determinism"),
    *("pipeline_parallel_size", "pipeline_schedule", "virtual_pipeline_parallel_size", "num_microbatches"),
    *("pipeline_layers", "token_slices", "replica_sharding"),
    *("freeze_policy", "freeze_alpha", "freeze_strategy", "freeze_steps", "freeze_schedule", "max_frozen_layers"),
    *("elastic", "activation_cache", "activation_cache_dtype", "activation_cache_max_gib", "eval_frozen_modules"),
)
"""Recorded training arguments. Others may contain tokens and paths."""
SECONDS_BETWEEN_LOOKS = 0.1
"""Minimum time between two readings of the resident memory."""
LEAST_FROZEN = 0.01
"""Smallest share of the parameters for which frozen modules are recorded. Many models have a small frozen table."""
MOST_NAMES = 20
"""Maximum number of recorded names of frozen modules."""


@dataclass
class Tally:
    """Number of optimizer steps, samples of their global batches, and seconds of this process by activity."""

    steps: int = 0
    rows: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class RunRecorder(TrainerCallback):
    """Observes the training on every process, and writes the record on the main process.

    It never raises. Only `end_layout` communicates.

    Args:
        args: the training arguments.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self.run: str | None = None
        """Name of this `train()` in all records: its start time."""
        self._args = args
        self._writes = self._is_training = self._has_warned = False
        self._reset()
        self._doing = "other"  # activity until the next event, unless the event says otherwise
        self._mark = 0.0
        self._micro_batches: Counter[int] = Counter()
        self._most_resident = 0
        self._looked = 0.0  # when the resident memory was read last: it costs a small model's step a percent
        self._process = psutil.Process()

    def _reset(self) -> None:
        self.total, self._line, self._layout = Tally(), Tally(), Tally()
        """Tallies of the whole `train()`; since the last line of seconds; under the current layout."""
        self._loss: torch.Tensor | None = None  # sum over the steps since a loss was logged
        self._loss_since = 0  # number of steps when it was logged
        self._has_logged_loss = False  # in this epoch, by the Trainer

    # ------------------------------------------------------------------------------------ called by the trainer
    @contextmanager
    def recording(self, trainer: Trainer, before: Sequence[TrainerCallback] = ()) -> Iterator[None]:
        """Record a `train()` inside the context, and how it ends.

        Args:
            trainer: the trainer.
            before: callbacks that stay before the recorder. These callbacks and the recorder are placed before all
                others: loggers that save the model at the end must find it complete, and some callbacks remove numbers
                from the logs.
        """
        handler = trainer.callback_handler
        # the recorder of the last training has stayed to record logs after its end
        others = [c for c in handler.callbacks if not isinstance(c, RunRecorder) and not any(c is b for b in before)]
        handler.callbacks[:] = [*before, self, *others]
        self.begin(trainer.is_world_process_zero())
        has_ended = False
        try:
            yield
            has_ended = True
        finally:
            self.end(has_ended, trainer.state.global_step)

    def begin(self, is_main_process: bool) -> None:
        """Begin the record of a `train()`."""
        self._writes = is_main_process
        self._is_training = True
        self._reset()
        self.run = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self._mark = time.perf_counter()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Count the time inside the context as spent on `what`, and the time before it as spent on "batches"."""
        self._lap("batches")
        self._doing = what
        try:
            yield
        finally:
            self._doing = "other"
            self._lap(what)

    def count_batch(self, global_rows: int, micro_batches: int, loss: torch.Tensor) -> None:
        """Count a batch that has been trained.

        Args:
            global_rows: number of samples of the batch in all pipelines.
            micro_batches: M on the last stage; 0 on the other stages, which do not know it.
            loss: the loss of the global batch, a scalar. Read only if the Trainer logs no loss until the epoch ends.
        """
        if self._writes:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        for tally in self._tallies:
            tally.rows += global_rows
        if micro_batches:
            self._micro_batches[micro_batches] += 1

    def end_layout(self, gather: Callable[[Any], list[Any]], global_step: int) -> Tally:
        """Write each process's memory usage under the layout that ends, and return the tally of that layout.

        Collective over all processes. Writes no line if one of them has run no step.

        Args:
            gather: returns every process's small object on every process; collective.
            global_step: number of steps done.
        """
        usage = None
        if self._most_resident:
            # peak since the start: a reset for each layout would disturb the statistics of other code
            used = self._micro_batches.most_common(1)
            usage = self._most_resident, peak_memory(self._args.device), used[0][0] if used else None
        everyone = gather(usage)
        if None not in everyone:
            resident, peaks, counts = zip(*everyone, strict=True)
            self._flush(global_step)
            known = {"resident_bytes": resident, "device_peak_bytes": [peak for peak in peaks if peak is not None]}
            m = max(filter(None, counts), default=None)
            self._write(METRICS, {"kind": "usage"}, global_step, {**known, "num_microbatches": m})
        self._most_resident = 0
        self._micro_batches.clear()
        done, self._layout = self._layout, Tally()
        return done

    def record_event(self, event: str, costs: CostModel, plan: Layout, state: TrainerState, **measured: Any) -> None:
        """Write a change of the layout, or another event.

        Args:
            event: name of the event (`records/files.py`).
            costs: predict memory and seconds of the plan.
            plan: the plan in force from now on.
            state: the Trainer's state.
            measured: "seconds" of the change, on the slowest process; "bytes_moved" to all processes together;
                "phases" of the change, each in seconds on its slowest process; "facts" of the run (`facts_of_run`);
                "slices" of a batch; "frozen_modules" of the user (`frozen_by_user`).
        """
        if self._writes:
            unmoved = {"seconds": 0.0, "bytes_moved": 0, "phases": {}}
            values = {"epoch": state.epoch or 0.0, **layout_of(plan), **unmoved, **measured}
            values["predicted"] = prediction_of(costs, plan)
            self._write(EVENTS, {"event": event}, state.global_step, values)

    def record_cache_off(self, reason: str, global_step: int, module: str | None = None) -> None:
        """Write why the outputs of frozen layers, or of a frozen module, were not cached, or are no longer cached."""
        of_module = {} if module is None else {"module": module}
        self._write(METRICS, {"kind": "cache_off"}, global_step, {"reason": reason, **of_module})

    def record_log(self, values: Mapping[str, Any], state: TrainerState) -> None:
        """Write the numbers among the logged values of this step."""
        numbers = {name: _plain(value) for name, value in values.items() if is_number(value)}
        self._write(METRICS, {"kind": "log"}, state.global_step, {"epoch": state.epoch, "values": numbers})

    def end(self, has_ended: bool, global_step: int) -> None:
        """End the record, when `train()` returns, or raises if `has_ended` is False."""
        if self._is_training:
            self._lap("ending")
            self._flush(global_step)
            self._write(METRICS, {"kind": "end"}, global_step, {"has_ended": has_ended})
        self._is_training = False

    # ------------------------------------------------------------------------------------ called by the loop
    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self._lap("preparing")
        self._write(METRICS, {"kind": "begin"}, state.global_step, {})

    def on_epoch_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self._lap("other")
        self._record_loss(state)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._lap("batches")
        self._doing = "other"

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._lap("steps")
        for tally in self._tallies:
            tally.steps += 1
        if self._mark > self._looked + SECONDS_BETWEEN_LOOKS or not self._most_resident:
            self._looked = self._mark
            self._most_resident = max(self._most_resident, self._process.memory_info().rss)

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self._doing = "evaluating"

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        self._lap(self._doing)
        self._doing = "other" if self._doing == "evaluating" else self._doing
        self._flush(state.global_step)
        self.record_log(logs or {}, state)
        if "loss" in (logs or {}):
            self._loss, self._loss_since, self._has_logged_loss = None, self.total.steps, True

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._lap("evaluating")
        self._doing = "other"

    on_predict = on_evaluate

    def on_save(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self._lap("saving")
        self._flush(state.global_step)  # a training resumed from here starts a new line

    def on_epoch_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self._lap("other")
        self._flush(state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        self._lap("ending")
        self._record_loss(state)

    # ------------------------------------------------------------------------------------ inside
    def _record_loss(self, state: TrainerState) -> None:
        """Write the mean loss of the steps of an epoch, if the Trainer has logged none of them."""
        steps = self.total.steps - self._loss_since
        if self._loss is not None and steps and not self._has_logged_loss:
            self.record_log({"loss": float(self._loss) / steps}, state)
        self._loss, self._loss_since, self._has_logged_loss = None, self.total.steps, False

    @property
    def _tallies(self) -> tuple[Tally, ...]:
        return self.total, self._line, self._layout

    def _lap(self, what: str) -> None:
        """Count the time since the last call as spent on `what`."""
        now = time.perf_counter()
        if self._is_training:
            for tally in self._tallies:
                tally.seconds[what] += now - self._mark
        self._mark = now

    def _flush(self, global_step: int) -> None:
        done, self._line = self._line, Tally()
        if done.seconds:
            seconds = {what: round(value, 6) for what, value in done.seconds.items()}
            self._write(METRICS, {"kind": "time"}, global_step, {**vars(done), "seconds": seconds})

    def _write(self, name: str, kind: Mapping[str, str], global_step: int, values: Mapping[str, Any]) -> None:
        """Append a line to the file of that name."""
        if not self._writes or self.run is None:
            return
        line = {**kind, "run": self.run, "time": round(time.time(), 3), "global_step": global_step, **values}
        path = Path(self._args.output_dir or ".") / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # an error on the only writing process would hang the others
            if not self._has_warned:
                logger.warning("%s cannot be written (%s), so the report will be incomplete.", path, error)
            self._has_warned = True


def facts_of_run(model: nn.Module, args: TrainingArguments) -> dict[str, Any]:
    """Return the properties of a training that do not change during it, in plain values."""
    device = args.device
    arguments = {name: getattr(args, name) for name in RECORDED_ARGUMENTS if hasattr(args, name)}
    config = getattr(model, "config", None)
    return {
        "model": type(model).__name__,
        "name_or_path": getattr(config, "_name_or_path", "") or None,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "world_size": args.world_size,
        "global_batch_size": args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps,
        "device": name_of_device(device),
        "device_type": device.type,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "threads": torch.get_num_threads(),
        "versions": {
            "hf_pipetransformer": sys.modules[__name__.partition(".")[0]].__version__,
            **{library.__name__: library.__version__ for library in (torch, transformers, accelerate)},
            "python": ".".join(map(str, sys.version_info[:3])),
        },
        "arguments": {name: _plain(value) for name, value in arguments.items()},
    }


def frozen_by_user(model: nn.Module) -> dict[str, Any] | None:
    """Return the frozen modules of a model, in plain values; None if they have hardly any parameters.

    Call it while no freeze policy has frozen layers.

    Returns:
        A dict with the "names" of the outermost frozen modules, at most `MOST_NAMES` (neighbours in a list count as
        one); their "count"; their "share" of the parameters; and "by", who froze them: "you" or "PEFT".
    """
    modules = frozen_modules(model)
    sizes = {id(p): p.numel() for p in model.parameters()}
    frozen = {id(p) for module in modules.values() for p in module.parameters()}
    share = sum(sizes[p] for p in frozen) / max(sum(sizes.values()), 1)
    if share < LEAST_FROZEN:
        return None
    names = [name or type(model).__name__ for name in name_ranges(list(modules))]
    by = "PEFT" if hasattr(model, "peft_config") else "you"
    return {"names": names[:MOST_NAMES], "count": len(names), "share": round(share, 4), "by": by}


def _plain(value: Any) -> Any:
    """Convert a value to plain values for JSON. Infinity and NaN become strings, because JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (bool, int, float, type(None))):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(getattr(value, "value", value))
