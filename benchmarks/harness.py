"""What all benchmarks have in common: arguments, processes, turns, ratios, the table and the JSON file.

A benchmark declares cases, each a function that measures once and returns figures. All cases run in turns in the same
processes, so other programs on the machine disturb all of them alike:

    turn 1    Trainer, DDP   K = 1   K = 2
    turn 2    Trainer, DDP   K = 1   K = 2

Ratios are taken *within* a turn, then the median over the turns. A ratio is put in parentheses, and left out of the
median, if other programs took more than `--max_others` cores during one of its two runs (if that happened in every
turn, all count, and the median says little).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

Figures = dict[str, float]
"""The figures of a case in one turn; units are in the names. "others" is added: cores that other programs took."""
Turn = dict[str, Figures]
"""Name of each case -> its figures."""

OTHERS = "others"
TABLE_WIDTH = 150  # where the output is no terminal
MINILM = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
"""The size of MiniLM-L6; what `BertConfig` says of the rest is MiniLM's, too."""


@dataclass(frozen=True)
class Ratio:
    """A column that compares a figure with another case's in the same turn.

    Attributes:
        name: heading of the column.
        figure: which figure is compared.
        base: name of the case with which all are compared, or a function that names it for each case, None for none.
        is_speed_up: whether the base's figure is divided by the case's, and not the other way round.
        targets: case -> the target, as text.
    """

    name: str
    figure: str
    base: str | Callable[[str], str | None]
    is_speed_up: bool = False
    targets: Mapping[str, str] | None = None

    def of(self, turn: Turn, case: str) -> tuple[float, float] | None:
        """The ratio of a case, and the cores that other programs took; None without a base."""
        base = self.base if isinstance(self.base, str) else self.base(case)
        if base not in turn or self.figure not in turn[case]:
            return None
        value, of_base = turn[case][self.figure], turn[base][self.figure]
        ratio = of_base / value if self.is_speed_up else value / of_base
        return ratio, max(turn[case].get(OTHERS, 0.0), turn[base].get(OTHERS, 0.0))


# ---------------------------------------------------------------------------------------------------------
# Arguments and processes
# ---------------------------------------------------------------------------------------------------------
def parser_of(doc: str | None, turns: int = 3, processes: int | None = None) -> argparse.ArgumentParser:
    """A parser with the arguments that all benchmarks have.

    Args:
        doc: the benchmark's docstring.
        turns: default number of turns.
        processes: default number of processes; None if a benchmark starts none.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", "--rounds", type=int, default=turns, help=f"default: {turns}")
    parser.add_argument("--out", "--output", type=Path, help="JSON file for the results")
    parser.add_argument("--max_others", type=float, default=0.1, help="cores that other programs may take")
    if processes is not None:
        parser.add_argument(
            "--processes", type=int, default=processes, help="to start, unless a launcher has started them"
        )
    return parser


def add_model_arguments(parser: argparse.ArgumentParser, rows: int = 32, tokens: int = 48) -> None:
    """Add the arguments of benchmarks that train a BERT on random tokens."""
    parser.add_argument("--model", help="folder or name of a model; default: random weights in MiniLM-L6's size")
    parser.add_argument("--rows", type=int, default=rows, help="samples of the global batch")
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens of each sample")


def start(parser: argparse.ArgumentParser, parsed: argparse.Namespace | None = None) -> argparse.Namespace:
    """Parse the arguments, start the processes where no launcher has, and set this one up.

    With several processes, the first process only starts them, and ends with their exit code.

    Args:
        parser: of `parser_of`.
        parsed: its arguments, if they have been parsed.
    """
    options = parsed or parser.parse_args()
    if options.turns < 1:
        parser.error(f"--turns {options.turns} must be at least 1")
    if getattr(options, "processes", 1) > 1 and "RANK" not in os.environ:
        command = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        module = getattr(sys.modules["__main__"], "__spec__", None)  # of `python -m`
        script = ("-m", module.name) if module is not None else (sys.argv[0],)
        command += (f"--nproc-per-node={options.processes}", *script, *sys.argv[1:])
        sys.exit(subprocess.run(command, env=environment).returncode)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    PartialState(cpu=not torch.accelerator.is_available())  # makes the process group that every Trainer uses
    return options


def num_processes() -> int:
    return PartialState().num_processes


def everyone(value: Any) -> list[Any]:
    """The values of all processes. Collective over all processes."""
    if num_processes() == 1:
        return [value]
    values: list[Any] = [None] * num_processes()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def shared_folder(parent: str | Path | None = None) -> Iterator[str]:
    """A new folder, the same on all processes, that is there until all are done. Collective over all processes."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=parent) as own:
        yield everyone(own)[0]
        PartialState().wait_for_everyone()


# ---------------------------------------------------------------------------------------------------------
# Turns
# ---------------------------------------------------------------------------------------------------------
def take_turns(cases: Mapping[str, Callable[[], Figures]], options: argparse.Namespace) -> list[Turn]:
    """Measure all cases in turns. Collective over all processes.

    Args:
        cases: name -> a function that measures once; its figures count on the main process.
        options: of `start`.
    """
    turns: list[Turn] = []
    for number in range(options.turns):
        turn: Turn = {}
        for name, case in cases.items():
            turn[name] = _measured(case)
            values = "  ".join(f"{figure} {shown(value)}" for figure, value in turn[name].items())
            console().print(f"turn {number + 1}  {name}:  {values}", highlight=False)
        turns.append(turn)
    return turns


def _measured(case: Callable[[], Figures]) -> Figures:
    gc.collect()  # an earlier Trainer, a circle of references, shall not be collected meanwhile
    PartialState().wait_for_everyone()
    busy, own, began = _busy_seconds(), sum(os.times()[:4]), time.perf_counter()
    figures = case()
    all_own = sum(everyone(sum(os.times()[:4]) - own))
    others = (_busy_seconds() - busy - all_own) / (time.perf_counter() - began)
    return {**figures, OTHERS: max(0.0, others)}


def _busy_seconds() -> float:
    """Seconds that all cores of the machine together have been busy."""
    times = psutil.cpu_times()
    return sum(getattr(times, kind, 0.0) for kind in ("user", "system", "nice", "steal"))


def summary_of(turns: Sequence[Turn], ratios: Sequence[Ratio], max_others: float) -> dict[str, dict[str, Any]]:
    """For each case the medians of its figures, and for each ratio its median and values; disturbed ones apart."""
    summary: dict[str, dict[str, Any]] = {}
    for case in turns[0]:
        summary[case] = {figure: statistics.median(turn[case][figure] for turn in turns) for figure in turns[0][case]}
        for ratio in ratios:
            found = [value for turn in turns if (value := ratio.of(turn, case)) is not None]
            if found:
                undisturbed = [value for value, others in found if others <= max_others]
                summary[case][ratio.name] = {
                    "median": statistics.median(undisturbed or [value for value, _ in found]),
                    "turns": [value for value, _ in found],
                    "is_disturbed": [others > max_others for _, others in found],
                }
    return summary


# ---------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------
def console() -> Console:
    """Prints on the main process."""
    return Console(quiet=not PartialState().is_main_process, width=max(TABLE_WIDTH, Console().width))


def shown(value: float) -> str:
    """Three digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def report(
    options: argparse.Namespace, turns: Sequence[Turn], ratios: Sequence[Ratio] = (), **more: Any
) -> dict[str, dict[str, Any]]:
    """Print the table, write the file, and end the process group. Collective over all processes.

    Args:
        options: of `start`.
        turns: of `take_turns`.
        ratios: columns that compare cases.
        **more: further entries of the file.

    Returns:
        `summary_of` the turns.
    """
    summary = summary_of(turns, ratios, options.max_others)
    figures = list(dict.fromkeys(figure for turn in turns for of_case in turn.values() for figure in of_case))
    table = Table(title=f"Medians of {len(turns)} turns, {num_processes()} process(es)", title_justify="left")
    targets = any(ratio.targets for ratio in ratios)
    for column in ("case", *figures, *(n for r in ratios for n in (r.name, "in each turn")), *["target"] * targets):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=column == "case")
    for case, values in summary.items():
        cells = [case, *(shown(values[figure]) if figure in values else "" for figure in figures)]
        for ratio in ratios:
            found = values.get(ratio.name)
            cells.append(f"{found['median']:.3f}" if found else "")
            pairs = zip(found["turns"], found["is_disturbed"], strict=True) if found else ()
            cells.append(" ".join(f"({value:.2f})" if is_off else f"{value:.2f}" for value, is_off in pairs))
        if targets:
            cells.append(next((r.targets[case] for r in ratios if r.targets and case in r.targets), ""))
        table.add_row(*cells)
    console().print(table)
    write(options, summary=summary, turns=list(turns), **more)
    finish()
    return summary


def write(options: argparse.Namespace, **results: Any) -> None:
    """Write the JSON file, if there shall be one, on the main process."""
    if options.out is not None and PartialState().is_main_process:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**facts(options), **results}, indent=1) + "\n")


def finish() -> None:
    """End the process group. Collective over all processes."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """Date, commit, versions, machine and options. Paths are no business of a reader: their names alone are kept."""
    given = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    given = {key: str(value) if isinstance(value, Fraction) else value for key, value in given.items()}
    if given.get("model"):
        given["model"] = Path(given["model"]).name
    found = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": found.stdout.strip() or None,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine(), "load": os.getloadavg()[0]},
        "processes": num_processes(),
        "threads": torch.get_num_threads(),
        "options": {key: str(value) if callable(value) else value for key, value in given.items()},
    }


# ---------------------------------------------------------------------------------------------------------
# Trainings
# ---------------------------------------------------------------------------------------------------------
class RandomRows(Dataset[dict[str, Any]]):
    """Samples of random tokens, all of one length, with two classes; the same on every process."""

    def __init__(self, rows: int, tokens: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.input_ids = torch.randint(1, vocabulary, (rows, tokens), generator=generator)  # [rows, T]; 0 pads
        self.labels = torch.randint(0, 2, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.input_ids[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": self.labels[index]}


class StepClock(TrainerCallback):
    """Wall-clock and CPU seconds at the end of each step, and of each epoch."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.epochs: list[Figures] = []
        self._epoch_began = 0.0, 0.0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._epoch_began = time.perf_counter(), time.process_time()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        wall, cpu = self._epoch_began
        self.epochs.append({"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu})

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def step_ms(self, warmup: int, epoch: slice = slice(None)) -> float:
        """The median milliseconds of a step.

        Args:
            warmup: number of first steps that do not count, at least 1.
            epoch: which steps are looked at.
        """
        ends = self.wall[epoch]
        return statistics.median(1e3 * (b - a) for a, b in zip(ends[warmup - 1 :], ends[warmup:], strict=False))

    def cpu_ms(self, warmup: int) -> float:
        """The mean CPU milliseconds of a step, summed over the processes. Collective over all processes."""
        steps = len(self.cpu) - warmup
        return sum(everyone(1e3 * (self.cpu[-1] - self.cpu[warmup - 1]) / steps))


def load_config(name: str | None) -> PreTrainedConfig:
    """A model's configuration, or one of MiniLM's size."""
    if name is not None:
        return AutoConfig.from_pretrained(name, num_labels=2)
    return AutoConfig.for_model("bert", num_labels=2, **MINILM)


def make_model(name: str | None, config: PreTrainedConfig) -> nn.Module:
    """The same weights on every process and in every call."""
    set_seed(0)
    if name is not None:
        return AutoModelForSequenceClassification.from_pretrained(name, config=config)
    return AutoModelForSequenceClassification.from_config(config)


def make_trainer(
    model: nn.Module,
    data: Any,
    folder: str,
    callbacks: Sequence[TrainerCallback],
    is_ours: bool,
    trainer_class: type[Trainer] | None = None,
    keywords: Mapping[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """A Trainer with the defaults of its class, but without work besides the steps (logging, saving).

    Args:
        model: the model to train.
        data: the training set.
        folder: `output_dir`.
        callbacks: of the trainer.
        is_ours: whether it is `PipeTransformerTrainer`, and not the stock Trainer.
        trainer_class: a subclass in place of it.
        keywords: further arguments of the trainer.
        **options: training arguments.
    """
    arguments_class = PipeTransformerTrainingArguments if is_ours else TrainingArguments
    defaults = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    on_cpu = {"use_cpu": not torch.accelerator.is_available(), "log_level": "error"}
    kind = trainer_class or (PipeTransformerTrainer if is_ours else Trainer)
    arguments = arguments_class(output_dir=folder, **{**defaults, **on_cpu, **options})
    trainer = kind(model=model, args=arguments, train_dataset=data, callbacks=list(callbacks), **(keywords or {}))
    trainer.remove_callback(PrinterCallback)
    return trainer
