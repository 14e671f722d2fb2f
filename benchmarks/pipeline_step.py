#!/usr/bin/env python
"""How long a training step takes in a pipeline, beside plain `transformers.Trainer` under DDP.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml benchmarks/pipeline_step.py --output results.json

All variants run one after the other in the same processes, in rounds, so that whatever else the machine does hits all
of them alike:

    round 1    ddp   K = 1   K = 2 1f1b   K = 2 gpipe
    round 2    ddp   K = 1   K = 2 1f1b   K = 2 gpipe
    ...

`--schedules 1f1b interleaved1f1b zbv --virtual_stages 2 3` compares other schedules (zbv has V = 2).

Each run has a new model and a new Trainer. A step is the time from one `on_step_end` to the next: loading, forward,
backward, clipping and optimizer. The first eight steps do not count: in them the last stage checks the loss by
computing it again, a third of a step (docs/numerics.md). The global batch is `--rows` x `--tokens` whatever the
layout: on two processes, `per_device_train_batch_size` is half of the rows; a pipeline of two stages gets all of them
and cuts them into M micro-batches.

What is compared is the ratio of medians *within* a round, then the median over the rounds. A ratio is put in brackets,
and left out of the median, where other programs took more than `--max_others` cores during either of its two runs (if
that happened in every round, all count, and the median says little).
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
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import wraps
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

import hf_pipetransformer
from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.pipeline.gradients import StageGradients
from hf_pipetransformer.pipeline.schedule import PipelineScheduler
from hf_pipetransformer.planning.schedules import SCHEDULES

# The size of MiniLM-L6; what `BertConfig` says of the rest is MiniLM's, too.
MINILM = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
# Step time over that of DDP, on two processes; for others there is no target.
TARGETS = {(2, 1): 1.03, (2, 2): 1.18}
LABELS = 2
TABLE_WIDTH = 120  # where the output is no terminal
PARTS = ("data", "forward", "backward", "waiting", "loss", "clipping", "optimizer")


@dataclass(frozen=True)
class Variant:
    """What is timed. `stages` None: plain `Trainer`, DDP; 1: this library without a pipeline."""

    stages: int | None = None
    schedule: str = "1f1b"
    num_microbatches: int = 1
    virtual_stages: int | None = None

    @property
    def name(self) -> str:
        if self.stages is None:
            return "Trainer, DDP"
        virtual = "" if self.virtual_stages is None else f" V={self.virtual_stages}"
        return "K=1" if self.stages == 1 else f"K={self.stages} {self.schedule}{virtual} M={self.num_microbatches}"

    def target(self, world_size: int) -> float | None:
        """The ratio to DDP that is asked for: of 1F1B with M = 2 K, and of K = 1."""
        is_asked = self.stages == 1 or (self.schedule == "1f1b" and self.num_microbatches == 2 * (self.stages or 0))
        return TARGETS.get((world_size, self.stages or 0)) if is_asked else None


@dataclass
class Timing:
    """One run of a variant, after the warm-up steps.

    Attributes:
        steps_ms: wall-clock time of each step, on rank 0.
        cpu_ms: CPU time of a step, all threads, summed over the processes; hardly moved by other load.
        other_cores: cores that other programs, or a hypervisor, kept busy meanwhile: wall-clock times say little if
            it is not near 0.
        parts_ms: for each process, where a step's time goes (with `--profile`).
    """

    steps_ms: list[float]
    cpu_ms: float
    other_cores: float
    parts_ms: list[dict[str, float]] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.steps_ms)


class RandomRows(Dataset):
    """Rows of random tokens, all of one length; the same on every process."""

    def __init__(self, rows: int, tokens: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.input_ids = torch.randint(1, vocabulary, (rows, tokens), generator=generator)  # [rows, T]; 0 pads
        self.labels = torch.randint(0, LABELS, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.input_ids[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": self.labels[index]}


class StepClock(TrainerCallback):
    """Notes wall-clock and CPU time at the end of each step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.machine: list[float] = []  # seconds that all cores together have been busy
        self.at_warm: Callable[[], None] | None = None
        self.warmup = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())
        times = psutil.cpu_times()
        self.machine.append(sum(getattr(times, kind, 0.0) for kind in ("user", "system", "nice", "steal")))
        if self.at_warm is not None and len(self.wall) == self.warmup:
            self.at_warm()


class Stopwatch(TrainerCallback):
    """Sums the time spent in the parts of a step; time in an inner part does not count for the outer one.

    Args:
        clock: seconds; `time.thread_time` counts only while the main thread computes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._clock = clock
        self._open: list[tuple[str, float]] = []

    def start(self, part: str) -> None:
        self._pass_time()
        self._open.append((part, self._clock()))

    def stop(self) -> None:
        self._pass_time()
        self._open.pop()

    def _pass_time(self) -> None:
        now = self._clock()
        if self._open:
            part, since = self._open[-1]
            self.seconds[part] += now - since
        self._open = [(part, now) for part, _ in self._open]

    @contextmanager
    def timing(self, owner: Any, attribute: str, part: str) -> Iterator[None]:
        """Inside, calls of `owner.attribute` count for `part`."""
        original = getattr(owner, attribute)

        @wraps(original)  # the Trainer reads the signature of a model's forward
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.start(part)
            try:
                return original(*args, **kwargs)
            finally:
                self.stop()

        setattr(owner, attribute, timed)
        try:
            yield
        finally:
            setattr(owner, attribute, original)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.start("optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.stop()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder or name of a model; default: random weights in MiniLM-L6's size")
    parser.add_argument("--rows", type=int, default=32, help="rows of the global batch")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each row")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2], help="numbers of stages K")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"], choices=list(SCHEDULES))
    parser.add_argument(
        "--virtual_stages", type=int, nargs="+", default=[2], help="V, the virtual stages per stage of interleaved1f1b"
    )
    parser.add_argument("--num_microbatches", type=int, nargs="+", default=[4], help="numbers of micro-batches M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of each run, with the warm-up")
    parser.add_argument("--warmup", type=int, default=9, help="first steps of each run that do not count")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument(
        "--profile",
        nargs="?",
        choices=["wall", "cpu"],
        const="wall",
        help="one more round, which tells where the time goes; cpu: main thread only, so that waiting and other"
        " load on the machine hardly count",
    )
    parser.add_argument(
        "--max_others", type=float, default=0.1, help="cores; runs with more of other load do not count"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    if not 0 < arguments.warmup < arguments.steps:
        parser.error(f"--warmup {arguments.warmup} must lie between 1 and --steps {arguments.steps} - 1")
    return arguments


def variants_of(arguments: argparse.Namespace) -> list[Variant]:
    """DDP first: the others are compared with it."""
    pipelines = [
        Variant(stages, schedule, count, virtual)
        for stages in arguments.stages
        if stages > 1
        for schedule in arguments.schedules
        for virtual in virtual_stages_with(schedule, arguments.virtual_stages)
        for count in arguments.num_microbatches
    ]
    return [Variant(), *(Variant(stages) for stages in arguments.stages if stages == 1), *pipelines]


def virtual_stages_with(schedule: str, requested: list[int]) -> list[int | None]:
    """Return what `virtual_pipeline_parallel_size` a schedule is measured with; None where it has no choice."""
    return [*requested] if SCHEDULES[schedule].most_virtual_stages is None else [None]


def load_config(name: str | None) -> PreTrainedConfig:
    if name is not None:
        return AutoConfig.from_pretrained(name, num_labels=LABELS)
    return AutoConfig.for_model("bert", num_labels=LABELS, **MINILM)


def make_model(name: str | None, config: PreTrainedConfig) -> nn.Module:
    """The same weights on every process and in every run."""
    set_seed(0)
    if name is not None:
        return AutoModelForSequenceClassification.from_pretrained(name, config=config)
    return AutoModelForSequenceClassification.from_config(config)


def make_trainer(
    variant: Variant, arguments: argparse.Namespace, config: PreTrainedConfig, folder: str, clock: StepClock
) -> Trainer:
    """A Trainer with the defaults of its class, except for what would add work besides the steps."""
    options: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": arguments.rows // PartialState().num_processes,
        "max_steps": arguments.steps,
        "use_cpu": not torch.accelerator.is_available(),
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }
    trainer_class: type[Trainer]
    training_arguments: TrainingArguments
    if variant.stages is None:
        trainer_class, training_arguments = Trainer, TrainingArguments(**options)
    else:
        trainer_class = PipeTransformerTrainer
        training_arguments = PipeTransformerTrainingArguments(
            pipeline_parallel_size=variant.stages,
            pipeline_schedule=variant.schedule,
            virtual_pipeline_parallel_size=variant.virtual_stages,
            num_microbatches=variant.num_microbatches,
            **options,
        )
    trainer = trainer_class(
        model=make_model(arguments.model, config),
        args=training_arguments,
        train_dataset=RandomRows(arguments.rows * arguments.steps, arguments.tokens, config.vocab_size),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run(
    variant: Variant, arguments: argparse.Namespace, config: PreTrainedConfig, profile: str | None = None
) -> Timing:
    """Train for some steps with a new Trainer. Collective over all processes."""
    with tempfile.TemporaryDirectory() as folder:
        clock = StepClock()
        trainer = make_trainer(variant, arguments, config, folder, clock)
        stopwatch = Stopwatch(time.thread_time if profile == "cpu" else time.perf_counter)
        gc.collect()  # an earlier Trainer, a circle of references, shall not be collected during the steps
        PartialState().wait_for_everyone()
        if profile:
            clock.warmup, clock.at_warm = arguments.warmup, stopwatch.seconds.clear
            with profiled(trainer, stopwatch):
                trainer.train()
        else:
            trainer.train()
    wall = [1e3 * (b - a) for a, b in zip(clock.wall, clock.wall[1:], strict=False)][arguments.warmup - 1 :]
    cpu_ms = 1e3 * (clock.cpu[-1] - clock.cpu[arguments.warmup - 1]) / len(wall)
    machine_ms = 1e3 * (clock.machine[-1] - clock.machine[arguments.warmup - 1]) / len(wall)
    parts = {part: 1e3 * stopwatch.seconds[part] / len(wall) for part in PARTS}
    parts["rest"] = (cpu_ms if profile == "cpu" else statistics.mean(wall)) - sum(parts.values())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (cpu_ms, parts))
    all_cpu_ms = sum(cpu for cpu, _ in everyone)  # of the processes on this machine, if it is the only one
    other_cores = max(0.0, machine_ms - all_cpu_ms) / statistics.mean(wall)
    return Timing(wall, all_cpu_ms, other_cores, [p for _, p in everyone] if profile else [])


@contextmanager
def profiled(trainer: Trainer, stopwatch: Stopwatch) -> Iterator[None]:
    """Inside, the parts of a step are timed: each call of the model, each backward, what lies between them."""
    assert trainer.model is not None
    trainer.add_callback(stopwatch)
    with (
        stopwatch.timing(trainer, "get_batch_samples", "data"),
        stopwatch.timing(trainer, "training_step", "loss"),  # what is left of it: weighing, and the loss's all-reduce
        stopwatch.timing(type(trainer.model), "forward", "forward"),
        stopwatch.timing(torch.autograd, "backward", "backward"),  # with DDP's reduction, which is awaited in it
        stopwatch.timing(PipelineScheduler, "step", "waiting"),  # what is left of it: messages to and from neighbours
        stopwatch.timing(StageGradients, "sum_over_stages", "waiting"),
        stopwatch.timing(trainer.accelerator, "clip_grad_norm_", "clipping"),
    ):
        yield


@dataclass(frozen=True)
class Ratio:
    """Step time over that of DDP in the same round."""

    value: float
    is_disturbed: bool

    def __str__(self) -> str:
        return f"({self.value:.3f})" if self.is_disturbed else f"{self.value:.3f}"


def ratios_to_ddp(rounds: list[dict[str, Timing]], name: str, max_others: float) -> list[Ratio]:
    pairs = [(timings[name], timings[Variant().name]) for timings in rounds]
    return [Ratio(a.median_ms / b.median_ms, max(a.other_cores, b.other_cores) > max_others) for a, b in pairs]


def median_of(ratios: list[Ratio]) -> float:
    undisturbed = [ratio.value for ratio in ratios if not ratio.is_disturbed]
    return statistics.median(undisturbed or [ratio.value for ratio in ratios])


def print_table(
    console: Console, variants: list[Variant], rounds: list[dict[str, Timing]], max_others: float, title: str
) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("variant")
    for heading in ("step ms", "CPU ms", "others' cores", "ratio per round", "ratio to DDP", "target"):
        table.add_column(heading, justify="right")
    for variant in variants:
        timings = [timing[variant.name] for timing in rounds]
        ratios = ratios_to_ddp(rounds, variant.name, max_others)
        target = variant.target(dist.get_world_size())
        table.add_row(
            variant.name,
            f"{statistics.median(t.median_ms for t in timings):.1f}",
            f"{statistics.median(t.cpu_ms for t in timings):.1f}",
            f"{statistics.median(t.other_cores for t in timings):.2f}",
            " ".join(map(str, ratios)),
            f"{median_of(ratios):.3f}",
            "" if target is None else f"<= {target:.2f}",
        )
    console.print(table)


def print_profile(console: Console, variants: list[Variant], timings: dict[str, Timing], clock: str) -> None:
    title = f"Where a step's {clock} time goes, ms (mean; 'waiting': schedule and messages)"
    table = Table(title=title, title_justify="left")
    table.add_column("variant")
    for heading in ("rank", *PARTS, "rest", "total"):
        table.add_column(heading, justify="right")
    for variant in variants:
        for rank, parts in enumerate(timings[variant.name].parts_ms):
            row = [f"{parts[part]:.1f}" for part in (*PARTS, "rest")]
            table.add_row(variant.name if rank == 0 else "", str(rank), *row, f"{sum(parts.values()):.1f}")
    console.print(table)


def as_json(
    arguments: argparse.Namespace, variants: list[Variant], rounds: list[dict[str, Timing]], load: float
) -> dict[str, Any]:
    ratios = {variant.name: ratios_to_ddp(rounds, variant.name, arguments.max_others) for variant in variants}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "hf_pipetransformer": hf_pipetransformer.__version__,
            **{name: version(name) for name in ("torch", "transformers", "accelerate")},
        },
        "machine": {
            "cores": os.cpu_count(),
            "architecture": platform.machine(),
            "accelerator": str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else None,
            "load_average_before": load,
        },
        "processes": dist.get_world_size(),
        "threads_per_process": torch.get_num_threads(),
        "backend": dist.get_backend(),
        "model": Path(arguments.model).name if arguments.model else {"bert": MINILM},
        "global_batch": {"rows": arguments.rows, "tokens": arguments.tokens},
        "steps": arguments.steps,
        "warmup": arguments.warmup,
        "summary": {
            variant.name: {
                "step_ms": statistics.median(timings[variant.name].median_ms for timings in rounds),
                "ratio_to_ddp": median_of(ratios[variant.name]),
                "ratio_to_ddp_per_round": [asdict(ratio) for ratio in ratios[variant.name]],
                "target": variant.target(dist.get_world_size()),
            }
            for variant in variants
        },
        "rounds": [{name: asdict(timing) for name, timing in timings.items()} for timings in rounds],
    }


def main() -> None:
    """Time all variants and print the table. Every process must call this."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    load = os.getloadavg()[0]
    state = PartialState(cpu=not torch.accelerator.is_available())  # makes the process group that every Trainer uses
    if state.num_processes < 2:
        raise SystemExit("Start at least two processes, by accelerate launch (see the top of this file).")
    if arguments.rows % state.num_processes:
        raise SystemExit(f"--rows {arguments.rows} must be a multiple of the {state.num_processes} processes.")
    config = load_config(arguments.model)
    variants = variants_of(arguments)
    console = Console(quiet=not state.is_main_process, width=max(TABLE_WIDTH, Console().width))

    rounds: list[dict[str, Timing]] = []
    for number in range(arguments.rounds):
        timings: dict[str, Timing] = {}
        for variant in variants:
            timings[variant.name] = run(variant, arguments, config)
            timing = timings[variant.name]
            console.print(
                f"round {number + 1}  {variant.name:20s} {timing.median_ms:8.1f} ms"
                f"   (others: {timing.other_cores:.2f} cores)"
            )
        rounds.append(timings)
    title = (
        f"Median step, global batch {arguments.rows} x {arguments.tokens} tokens, {state.num_processes} processes x"
        f" {torch.get_num_threads()} thread(s), {dist.get_backend()}, torch {torch.__version__}, transformers"
        f" {transformers.__version__}"
    )
    print_table(console, variants, rounds, arguments.max_others, title)
    if arguments.profile:
        profiles = {v.name: run(v, arguments, config, arguments.profile) for v in variants}
        print_profile(console, variants, profiles, arguments.profile)
    if arguments.output is not None and state.is_main_process:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(as_json(arguments, variants, rounds, load), indent=2) + "\n")
    PartialState().wait_for_everyone()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
