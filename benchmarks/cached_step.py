#!/usr/bin/env python
"""How long a training step takes with frozen layers from the cache, beside plain `transformers.Trainer` under DDP.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml benchmarks/cached_step.py --output results.json

All runs come one after the other in the same processes, in rounds:

    round 1    f = 2 uncached   ddp   f = 2 cached   4 layers alone   f = 4 uncached   ddp   f = 4 cached   ...
    round 2    ...

A run with frozen layers has four epochs, and K = 1:

    epoch 1    nothing is frozen
    epoch 2    f layers are frozen; with the cache their output is put there       writing
    epoch 3    with the cache it is taken from there                               reading
    epoch 4    again

Compared are the median steps of epochs 3 and 4 with those of DDP just before, and that of epoch 2 with and without
the cache; what is shown is the median over the rounds. The first steps of an epoch do not count, nor does DDP's first
epoch: what it is compared with has been running for two. DDP runs anew for each f because a machine may be slower in
one minute than in the next.

"Layers alone" is the plain Trainer under DDP with a model that has only the layers which are not frozen, behind frozen
embeddings: the least that a step takes whose frozen layers cost nothing. What a cached step takes beyond that is the
cost of the cache and of this library.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import os
import platform
import statistics
import tempfile
import warnings
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from pipeline_step import RandomRows, StepClock, load_config, make_model
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedConfig, PrinterCallback, Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

EPOCHS = 4
DDP_EPOCHS = 2
"""The first of them warms up."""
TARGETS = {2: 1.9, 4: 3.6, 5: 7.0}
"""Frozen layers of MiniLM's 6 -> DDP's step over the cached step, on two processes."""
WRITING_TARGET = 1.10
"""A writing epoch over the same epoch without a cache."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder or name of a model; default: random weights in MiniLM-L6's size")
    parser.add_argument("--rows", type=int, default=32, help="rows of the global batch")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each row")
    parser.add_argument("--frozen", type=int, nargs="+", default=[2, 4, 5], help="numbers of frozen layers f")
    parser.add_argument("--dtype", default="auto", help="activation_cache_dtype")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of each epoch")
    parser.add_argument("--warmup", type=int, default=2, help="first steps of each epoch that do not count")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


def make_upper_layers(name: str | None, config: PreTrainedConfig, frozen: int) -> nn.Module:
    """A model with `frozen` layers fewer, whose embeddings are not trained."""
    fewer = copy.deepcopy(config)
    fewer.num_hidden_layers -= frozen
    model = make_model(name, fewer)
    model.base_model.embeddings.requires_grad_(False)
    return model


def run(
    frozen: int, cache: str, arguments: argparse.Namespace, config: PreTrainedConfig, model: nn.Module | None = None
) -> list[float]:
    """Median step of each epoch in ms, of a new Trainer; DDP for `frozen` = 0. Collective over all processes."""
    clock = StepClock()
    count = EPOCHS if frozen else DDP_EPOCHS
    options: dict[str, Any] = {
        "per_device_train_batch_size": arguments.rows // PartialState().num_processes,
        "num_train_epochs": count,
        "use_cpu": not torch.accelerator.is_available(),
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer_class: type[Trainer] = Trainer
        training_arguments = TrainingArguments(output_dir=folder, **options)
        if frozen:
            trainer_class = PipeTransformerTrainer
            training_arguments = PipeTransformerTrainingArguments(
                output_dir=folder,
                freeze_policy="schedule",
                freeze_schedule={1: frozen},
                activation_cache=cache,
                activation_cache_dtype=arguments.dtype,
                **options,
            )
        trainer = trainer_class(
            model=model if model is not None else make_model(arguments.model, config),
            args=training_arguments,
            train_dataset=RandomRows(arguments.rows * arguments.steps, arguments.tokens, config.vocab_size),
            callbacks=[clock],
        )
        train_alone(trainer)
    steps = [1e3 * (b - a) for a, b in zip(clock.wall, clock.wall[1:], strict=False)]
    epochs = [steps[max(e * arguments.steps - 1, 0) :][: arguments.steps - 1] for e in range(count)]
    return [statistics.median(epoch[arguments.warmup :]) for epoch in epochs]


def train_alone(trainer: Trainer) -> None:
    """Train, with nothing left to do of an earlier training. Collective over all processes."""
    trainer.remove_callback(PrinterCallback)
    gc.collect()  # an earlier Trainer, a circle of references, shall not be collected during the steps
    PartialState().wait_for_everyone()
    trainer.train()
    PartialState().wait_for_everyone()  # the folder is needed until all are done


def summary_of(rounds: list[dict[str, list[float]]], frozen: list[int]) -> dict[int, dict[str, float]]:
    """Ratios within each round, their medians."""
    return {
        f: {
            "reading_ms": statistics.median(statistics.median(r[f"{f} on"][2:]) for r in rounds),
            "uncached_ms": statistics.median(r[f"{f} off"][1] for r in rounds),
            "ddp_over_reading": statistics.median(
                r[f"{f} ddp"][-1] / statistics.median(r[f"{f} on"][2:]) for r in rounds
            ),
            "reading_over_layers_alone": statistics.median(
                statistics.median(r[f"{f} on"][2:]) / r[f"{f} alone"][-1] for r in rounds
            ),
            "ddp_over_layers_alone": statistics.median(r[f"{f} ddp"][-1] / r[f"{f} alone"][-1] for r in rounds),
            "ddp_over_uncached": statistics.median(r[f"{f} ddp"][-1] / r[f"{f} off"][2] for r in rounds),
            "writing_over_uncached": statistics.median(r[f"{f} on"][1] / r[f"{f} off"][1] for r in rounds),
        }
        for f in frozen
    }


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    state = PartialState(cpu=not torch.accelerator.is_available())
    config = load_config(arguments.model)
    console = Console(quiet=not state.is_main_process)
    rounds: list[dict[str, list[float]]] = []
    for number in range(arguments.rounds):
        timings: dict[str, list[float]] = {}
        for f in arguments.frozen:
            timings[f"{f} off"] = run(f, "off", arguments, config)
            timings[f"{f} ddp"] = run(0, "off", arguments, config)
            timings[f"{f} on"] = run(f, "on", arguments, config)
            alone = make_upper_layers(arguments.model, config, f)
            timings[f"{f} alone"] = run(0, "off", arguments, config, alone)
        console.print(f"round {number + 1}", {name: [round(ms, 1) for ms in steps] for name, steps in timings.items()})
        rounds.append(timings)
    summary = summary_of(rounds, arguments.frozen)
    table = Table(
        title=f"{arguments.rows} x {arguments.tokens} tokens, {state.num_processes} processes x 1 thread; DDP"
        f" {statistics.median(r[f'{f} ddp'][-1] for r in rounds for f in arguments.frozen):.1f} ms"
    )
    for column in (
        "f",
        "reading ms",
        "DDP / reading",
        "target",
        "DDP / layers alone",
        "reading / layers alone",
        "DDP / uncached",
        "writing / uncached",
        "target",
    ):
        table.add_column(column, justify="right")
    for f, figures in summary.items():
        table.add_row(
            str(f),
            f"{figures['reading_ms']:.1f}",
            f"{figures['ddp_over_reading']:.2f}",
            f">= {TARGETS[f]}" if f in TARGETS else "",
            f"{figures['ddp_over_layers_alone']:.2f}",
            f"{figures['reading_over_layers_alone']:.3f}",
            f"{figures['ddp_over_uncached']:.2f}",
            f"{figures['writing_over_uncached']:.3f}",
            f"<= {WRITING_TARGET:.2f}",
        )
    console.print(table)
    if arguments.output and state.is_main_process:
        facts = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "transformers", "accelerate")},
            "load_average": os.getloadavg()[0],
            "options": {key: str(value) for key, value in vars(arguments).items() if key not in ("model", "output")},
        }
        arguments.output.write_text(json.dumps({**facts, "summary": summary, "rounds": rounds}, indent=2))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
