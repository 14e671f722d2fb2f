#!/usr/bin/env python
"""How far `hf-pipetransformer plan --profile cpu` (or cuda) is from the steps that it predicts.

    OMP_NUM_THREADS=1 accelerate launch --config_file accelerate_configs/cpu_2.yaml benchmarks/forecast_error.py \
        --output results.json

In rounds: the model's parts are timed, as `plan` does it, then trainings of a few steps are measured, one after the
other in the same processes:

    round 1    profile   DDP   K = 1   K = 2   K = 2, f = 2   f = 2, filling and from the cache   f = 4 ...
    round 2    profile   DDP   K = 1   ...

DDP is the stock Trainer, which a forecast takes for K = 1. A pipeline with frozen layers has no cache; the rows of f
alone have K = 1. Sequences are not cut along their tokens in any row.

A row's error is predicted over measured step, less 1; what counts is the median over the rounds. Prediction and
measurement of a round lie a minute apart, so the machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import warnings
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import cached_step
import pipeline_step
import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.forecast.device_table import CacheHost
from hf_pipetransformer.forecast.forecast import Job, Machine, Step, forecast
from hf_pipetransformer.forecast.local_profile import ROWS_TO_TIME, Subject, profile_here
from hf_pipetransformer.forecast.placeholder_model import build_placeholder_model
from hf_pipetransformer.forecast.workload import Workload, measure_workload
from hf_pipetransformer.freezing.policies import FreezePolicy, NeverFreeze, SchedulePolicy

GOAL = 0.15
FILLING, READING = 1, 2  # epochs of a training whose layers freeze after the first one
Row = dict[str, float]
"""Name of what was measured -> ms of a step."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder or name of a configuration; default: MiniLM-L6's size")
    parser.add_argument("--rows", type=int, default=32, help="rows of the global batch")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each row")
    parser.add_argument("--frozen", type=int, nargs="+", default=[2, 4, 5], help="numbers of frozen layers f")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4], help="M of the pipelines, K = processes")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="of each epoch")
    parser.add_argument(
        "--warmup", type=int, default=9, help="of each epoch, not counted: in eight the loss is checked"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    if not 0 < arguments.warmup < arguments.steps:
        parser.error(f"--warmup {arguments.warmup} must lie between 1 and --steps {arguments.steps} - 1")
    return arguments


def predict(arguments: argparse.Namespace, config: PreTrainedConfig, workload: Workload) -> Row:
    """Profile this machine and forecast each of the trainings. For one process only."""
    world, device = dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    rows = min(arguments.rows // world, ROWS_TO_TIME)
    profile = profile_here(Subject(config, AutoModelForSequenceClassification, device, rows, workload), world)
    machine = Machine(profile.times, None, world, CacheHost(profile.read_bytes_per_second, 1e9))

    def step_ms(step: Step) -> float:
        return 1e3 * step.seconds

    def epochs(k: int, m: int | None, policy: FreezePolicy, caches: bool) -> tuple[Step, ...]:
        job = Job(
            world, arguments.rows, cached_step.EPOCHS, arguments.rows * arguments.steps, policy, None, k,
            is_elastic=False, caches=caches, num_microbatches=m or "auto",
        )  # fmt: skip
        return forecast(job, workload, machine).epochs

    one_stage = step_ms(epochs(1, None, NeverFreeze(), False)[0])
    predicted = {"DDP": one_stage, "K = 1": one_stage}
    frozen = arguments.frozen[0]
    for m in arguments.microbatches:
        predicted[f"K = {world}, M = {m}"] = step_ms(epochs(world, m, NeverFreeze(), False)[0])
        course = epochs(world, m, SchedulePolicy({0: frozen}), False)
        predicted[f"K = {world}, M = {m}, f = {frozen}"] = step_ms(course[0])
    for f in arguments.frozen:
        course = epochs(1, None, SchedulePolicy({1: f}), True)
        predicted[f"f = {f}, filling"] = step_ms(course[FILLING])
        predicted[f"f = {f}, cached"] = step_ms(course[READING])
    return predicted


def measure(arguments: argparse.Namespace, config: PreTrainedConfig) -> Row:
    """Train a little in each way. Collective over all processes."""
    world = dist.get_world_size()

    def step_ms(variant: pipeline_step.Variant) -> float:
        return pipeline_step.run(variant, arguments, config).median_ms

    measured = {"DDP": step_ms(pipeline_step.Variant()), "K = 1": step_ms(pipeline_step.Variant(1))}
    frozen = arguments.frozen[0]
    for m in arguments.microbatches:
        measured[f"K = {world}, M = {m}"] = step_ms(pipeline_step.Variant(world, "1f1b", m))
        measured[f"K = {world}, M = {m}, f = {frozen}"] = frozen_pipeline_ms(world, m, frozen, arguments, config)
    for f in arguments.frozen:
        epochs = cached_step.run(f, "on", arguments, config)
        measured[f"f = {f}, filling"] = epochs[FILLING]
        measured[f"f = {f}, cached"] = statistics.median(epochs[READING:])
    return measured


def frozen_pipeline_ms(
    num_stages: int, num_microbatches: int, frozen: int, arguments: argparse.Namespace, config: PreTrainedConfig
) -> float:
    """Median step of a pipeline whose lowest layers are frozen from the start. Collective over all processes."""
    clock = pipeline_step.StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = PipeTransformerTrainer(
            model=pipeline_step.make_model(arguments.model, config),
            args=PipeTransformerTrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=arguments.rows // dist.get_world_size(),
                max_steps=arguments.steps,
                pipeline_parallel_size=num_stages,
                num_microbatches=num_microbatches,
                freeze_policy="schedule",
                freeze_schedule={0: frozen},
                elastic=False,
                activation_cache="off",
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                log_level="error",
            ),
            train_dataset=pipeline_step.RandomRows(
                arguments.rows * arguments.steps, arguments.tokens, config.vocab_size
            ),
            callbacks=[clock],
        )
        cached_step.train_alone(trainer)
    return statistics.median([1e3 * (b - a) for a, b in pairwise(clock.wall)][arguments.warmup - 1 :])


def main() -> None:
    arguments = parse_arguments()
    arguments.dtype = "auto"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    state = PartialState(cpu=not torch.accelerator.is_available())
    if state.num_processes < 2:
        raise SystemExit("Start at least two processes, by accelerate launch (see the top of this file).")
    config = pipeline_step.load_config(arguments.model)
    console = Console(quiet=not state.is_main_process)
    placeholders = build_placeholder_model(config, AutoModelForSequenceClassification)
    workload = measure_workload(placeholders, arguments.tokens)
    rounds: list[dict[str, Row]] = []
    for number in range(arguments.rounds):
        everyone = [predict(arguments, config, workload) if state.is_main_process else None]
        dist.broadcast_object_list(everyone)
        assert everyone[0] is not None
        rounds.append({"predicted_ms": everyone[0], "measured_ms": measure(arguments, config)})
        console.print(f"round {number + 1}", rounds[-1])
    errors = {
        name: [r["predicted_ms"][name] / r["measured_ms"][name] - 1 for r in rounds]
        for name in rounds[0]["measured_ms"]
    }
    summary = {
        name: {
            **{kind: statistics.median(r[kind][name] for r in rounds) for kind in ("predicted_ms", "measured_ms")},
            "error": statistics.median(values),
        }
        for name, values in errors.items()
    }
    table = Table(
        title=f"A step of {arguments.rows} x {arguments.tokens} tokens, {state.num_processes} processes x"
        f" {torch.get_num_threads()} thread(s); goal: at most {GOAL:.0%} off"
    )
    for column in ("", "predicted ms", "measured ms", "error", "in each round"):
        table.add_column(column, justify="left" if not column else "right")
    for name, figures in summary.items():
        table.add_row(
            name,
            f"{figures['predicted_ms']:.1f}",
            f"{figures['measured_ms']:.1f}",
            f"{figures['error']:+.0%}" + ("" if abs(figures["error"]) <= GOAL else " !"),
            " ".join(f"{error:+.0%}" for error in errors[name]),
        )
    console.print(table)
    if arguments.output and state.is_main_process:
        facts = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **{package: version(package) for package in ("torch", "transformers", "accelerate")},
            "processes": state.num_processes,
            "threads_per_process": torch.get_num_threads(),
            "load_average": os.getloadavg()[0],
            "options": {key: str(value) for key, value in vars(arguments).items() if key not in ("model", "output")},
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({**facts, "summary": summary, "rounds": rounds}, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
