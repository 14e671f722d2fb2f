#!/usr/bin/env python
"""How long saving and resuming take, beside plain `transformers.Trainer` under DDP.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml benchmarks/checkpointing.py --output results.json

All variants run one after the other in the same processes, in rounds, so that whatever else the machine does hits all
of them alike:

    round 1    Trainer, DDP   K=1   K=2
    round 2    Trainer, DDP   K=1   K=2
    ...

A run trains with a new model and a new Trainer and saves every few steps; then another Trainer resumes from the last
checkpoint. On the slowest process it is measured

    step      from one step's end to the next one's, without the steps before which there was a save
    save      from a step's end to `on_save`: as long as the training stands still
    publish   of it, the checksums and the wait for the disk, which the stock Trainer does without
    start     from the call of `train()` to the first step, from the beginning
    resume    the same from a checkpoint: it holds finding the layers and cutting the model, as a start does

The model, AdamW's state and the random states are in both checkpoints. What is compared is the ratio to DDP *within* a
round, then the median over the rounds. `--folder` says which disk is written to.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from pipeline_step import MINILM, RandomRows, load_config, make_model
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.resilience.progress import PROGRESS

DDP = 0
"""In place of a number of stages: plain `Trainer`."""
TABLE_WIDTH = 120  # where the output is no terminal


@dataclass
class Timing:
    """One run of a variant; what its medians are of.

    Attributes:
        step_ms: of each step.
        save_s: of each save but the first, for which folders are made.
        publish_s: of each of these; empty for the stock Trainer.
        checkpoint_bytes: of the last one's files.
        start_s: of a training from the beginning.
        resume_s: of one from the last checkpoint.
    """

    step_ms: list[float]
    save_s: list[float]
    publish_s: list[float]
    checkpoint_bytes: int
    start_s: float
    resume_s: float

    @property
    def medians(self) -> dict[str, float]:
        return {
            "step_ms": statistics.median(self.step_ms),
            "save_s": statistics.median(self.save_s),
            "publish_s": statistics.median(self.publish_s) if self.publish_s else 0.0,
            "checkpoint_bytes": self.checkpoint_bytes,
            "start_s": self.start_s,
            "resume_s": self.resume_s,
        }


class SaveClock(TrainerCallback):
    """Notes when steps begin and end and when saves end, and how long checkpoints are being published."""

    def __init__(self) -> None:
        self.first_step_at = 0.0
        self.steps: list[float] = []
        self.saves: list[float] = []
        self.publishing: list[float] = []
        self._last = 0.0  # end of a step or a save
        self._has_saved = True  # the first step is no measure either
        self._published_since: float | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.first_step_at = self.first_step_at or time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        if not self._has_saved:
            self.steps.append(now - self._last)
        self._last, self._has_saved = now, False

    def on_save(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.saves.append(now - self._last)
        self._last, self._has_saved = now, True

    def enter(self, phase: str, step: int) -> None:
        """Of the library: the phase that begins."""
        now = time.perf_counter()
        if self._published_since is not None:
            self.publishing.append(now - self._published_since)
        self._published_since = now if phase == "publish" else None

    @contextmanager
    def hearing_of_phases(self) -> Iterator[None]:
        PROGRESS.on_enter = self.enter
        try:
            yield
        finally:
            PROGRESS.on_enter = None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder or name of a model; default: random weights in MiniLM-L6's size")
    parser.add_argument("--rows", type=int, default=16, help="rows of the global batch")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each row")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2], help="numbers of stages K")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=4, help="of each run; the first does not count")
    parser.add_argument("--save_every", type=int, default=3, help="steps")
    parser.add_argument("--folder", help="where checkpoints go; default: the system's folder for temporary files")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    if arguments.saves < 2 or arguments.save_every < 2:
        parser.error(
            "--saves and --save_every must be at least 2: a first save and the step after a save do not count."
        )
    return arguments


def name_of(stages: int) -> str:
    return "Trainer, DDP" if stages == DDP else f"K={stages}"


def make_trainer(
    stages: int, arguments: argparse.Namespace, config: PreTrainedConfig, folder: str, clock: SaveClock, saves: bool
) -> Trainer:
    """A Trainer with the defaults of its class, except for what would add work besides steps and saves."""
    steps = arguments.saves * arguments.save_every
    options: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": arguments.rows // PartialState().num_processes,
        "max_steps": steps if saves else steps + 1,
        "use_cpu": not torch.accelerator.is_available(),
        "save_strategy": "steps" if saves else "no",
        "save_steps": arguments.save_every,
        "save_total_limit": 1,
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }
    trainer_class: type[Trainer] = Trainer
    training_arguments: TrainingArguments
    if stages == DDP:
        training_arguments = TrainingArguments(**options)
    else:
        trainer_class = PipeTransformerTrainer
        training_arguments = PipeTransformerTrainingArguments(pipeline_parallel_size=stages, **options)
    trainer = trainer_class(
        model=make_model(arguments.model, config),
        args=training_arguments,
        train_dataset=RandomRows(arguments.rows * (steps + 1), arguments.tokens, config.vocab_size),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run(stages: int, arguments: argparse.Namespace, config: PreTrainedConfig) -> Timing:
    """Train and save, then resume. Collective over all processes."""
    clock, resumed = SaveClock(), SaveClock()
    with shared_folder(arguments.folder) as folder:
        trainer = make_trainer(stages, arguments, config, folder, clock, saves=True)
        start_s = seconds_to_first_step(trainer.train, clock)
        checkpoint = Path(folder, f"checkpoint-{trainer.state.max_steps}")
        size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        PartialState().wait_for_everyone()  # all have read it
        trainer = make_trainer(stages, arguments, config, folder, resumed, saves=False)
        resume_s = seconds_to_first_step(lambda: trainer.train(resume_from_checkpoint=str(checkpoint)), resumed)
    return Timing(
        [1e3 * seconds for seconds in slowest(clock.steps)],
        slowest(clock.saves[1:]),
        slowest(clock.publishing[1:]),
        size,
        start_s,
        resume_s,
    )


@contextmanager
def shared_folder(parent: str | None) -> Iterator[str]:
    """A new folder, the same for all processes, that is there until all are done. Collective over all processes."""
    with tempfile.TemporaryDirectory(prefix="checkpointing-", dir=parent) as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield names[0]
        PartialState().wait_for_everyone()


def seconds_to_first_step(train: Callable[[], Any], clock: SaveClock) -> float:
    """Train; on the slowest process. Collective over all processes."""
    gc.collect()  # an earlier Trainer, a circle of references, shall not be collected meanwhile
    PartialState().wait_for_everyone()
    began = time.perf_counter()
    with clock.hearing_of_phases():
        train()
    PartialState().wait_for_everyone()
    return slowest([clock.first_step_at - began])[0]


def slowest(seconds: list[float]) -> list[float]:
    """Of all processes, each measurement of the one that took longest. Collective over all processes."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds)
    return [max(values) for values in zip(*everyone, strict=True)]


def summary_of(rounds: list[dict[str, Timing]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds, those of the ratios to DDP within each round among them."""
    summary = {}
    for name in rounds[0]:
        medians = [timings[name].medians for timings in rounds]
        base = [timings[name_of(DDP)].medians for timings in rounds]
        pairs = list(zip(medians, base, strict=True))
        summary[name] = {
            **{what: statistics.median(m[what] for m in medians) for what in medians[0]},
            "save_to_ddp": statistics.median(m["save_s"] / b["save_s"] for m, b in pairs),
            "resume_to_ddp": statistics.median(m["resume_s"] / b["resume_s"] for m, b in pairs),
            "save_in_steps": statistics.median(1e3 * m["save_s"] / m["step_ms"] for m in medians),
        }
    return summary


def table_of(summary: dict[str, dict[str, float]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("variant")
    columns = ("step ms", "save s", "to DDP", "in steps", "publish s", "MB", "start s", "resume s", "to DDP")
    for column in columns:
        table.add_column(column, justify="right")
    for name, figures in summary.items():
        table.add_row(
            name,
            f"{figures['step_ms']:.0f}",
            f"{figures['save_s']:.2f}",
            f"{figures['save_to_ddp']:.2f}",
            f"{figures['save_in_steps']:.1f}",
            f"{figures['publish_s']:.2f}" if figures["publish_s"] else "",
            f"{figures['checkpoint_bytes'] / 1e6:.0f}",
            f"{figures['start_s']:.2f}",
            f"{figures['resume_s']:.2f}",
            f"{figures['resume_to_ddp']:.2f}",
        )
    return table


def as_json(arguments: argparse.Namespace, rounds: list[dict[str, Timing]], load: float) -> dict[str, Any]:
    options = {k: v for k, v in vars(arguments).items() if k not in ("model", "folder", "output")}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "accelerate")},
        "cores": os.cpu_count(),
        "load_average_before": load,
        "processes": dist.get_world_size(),
        "threads_per_process": torch.get_num_threads(),
        "model": Path(arguments.model).name if arguments.model else {"bert": MINILM},
        "options": options,
        "summary": summary_of(rounds),
        "rounds": [{name: asdict(timing) for name, timing in timings.items()} for timings in rounds],
    }


def main() -> None:
    """Time all variants and print the table. Every process must call this."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    state = PartialState(cpu=not torch.accelerator.is_available())  # makes the process group that every Trainer uses
    if state.num_processes < 2 or arguments.rows % state.num_processes:
        raise SystemExit(
            f"Start at least two processes, by accelerate launch (see the top of this file), and --rows"
            f" {arguments.rows} must be a multiple of their number."
        )
    config = load_config(arguments.model)
    console = Console(quiet=not state.is_main_process, width=max(TABLE_WIDTH, Console().width))
    rounds: list[dict[str, Timing]] = []
    for number in range(arguments.rounds):
        timings: dict[str, Timing] = {}
        for stages in (DDP, *arguments.stages):
            timing = timings[name_of(stages)] = run(stages, arguments, config)
            console.print(f"round {number + 1}  {name_of(stages):14s} save {timing.medians['save_s']:.2f} s")
        rounds.append(timings)
    title = f"Medians, {arguments.rows} x {arguments.tokens} tokens, {state.num_processes} processes x 1 thread"
    console.print(table_of(summary_of(rounds), title))
    if arguments.output is not None and state.is_main_process:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(as_json(arguments, rounds, load), indent=2) + "\n")
    PartialState().wait_for_everyone()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
