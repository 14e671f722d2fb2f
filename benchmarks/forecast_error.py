#!/usr/bin/env python
"""How far `hf-pipetransformer plan --profile cpu` (or cuda) is from the steps that it predicts.

    python benchmarks/forecast_error.py --processes 2 --out results.json

In each turn the model's parts are timed, as `plan` does it, then trainings of a few steps are measured. DDP is the
stock Trainer, which a forecast takes for K = 1. A pipeline with frozen layers has no cache; the rows of f alone have
K = 1. "predicted / measured" is taken within a turn; prediction and measurement of a turn lie a minute apart, so the
machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from hf_pipetransformer.forecast.device_table import CacheHost
from hf_pipetransformer.forecast.forecast import Job, Machine, Step, forecast
from hf_pipetransformer.forecast.local_profile import ROWS_TO_TIME, Subject, profile_here
from hf_pipetransformer.forecast.placeholder_model import build_placeholder_model
from hf_pipetransformer.forecast.workload import Workload, measure_workload
from hf_pipetransformer.freezing.policies import FreezePolicy, NeverFreeze, SchedulePolicy

import cached_step
import harness
import pipeline_step
from harness import Figures, Ratio

FILLING, READING = 1, 2  # epochs of a training whose layers freeze after the first one
PROFILE = "profile"


def predict(options: argparse.Namespace, workload: Workload) -> Figures:
    """Profile this machine and forecast each of the trainings, on the main process. Collective over all processes."""
    found: Figures = {}
    if harness.PartialState().is_main_process:
        config, world = harness.load_config(options.model), harness.num_processes()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        rows = min(options.rows // world, ROWS_TO_TIME)
        subject = Subject(config, AutoModelForSequenceClassification, device, rows, workload)
        profile = profile_here(subject, world)
        machine = Machine(profile.times, None, world, CacheHost(profile.read_bytes_per_second, 1e9))

        def epochs(k: int, policy: FreezePolicy, caches: bool) -> tuple[Step, ...]:
            job = Job(
                world, options.rows, cached_step.EPOCHS, options.rows * options.steps, policy, None, k,
                is_elastic=False, caches=caches, num_microbatches=options.microbatches if k > 1 else "auto",
            )  # fmt: skip
            return forecast(job, workload, machine).epochs

        first, m = options.frozen[0], options.microbatches
        steps = {"DDP": epochs(1, NeverFreeze(), False)[0], "K=1": epochs(1, NeverFreeze(), False)[0]}
        steps[f"K={world} 1f1b M={m}"] = epochs(world, NeverFreeze(), False)[0]
        steps[f"K={world} 1f1b M={m} f={first}"] = epochs(world, SchedulePolicy({0: first}), False)[0]
        for f in options.frozen:
            course = epochs(1, SchedulePolicy({1: f}), True)
            steps[f"f={f}, filling"], steps[f"f={f}, cached"] = course[FILLING], course[READING]
        found = {name: 1e3 * step.seconds for name, step in steps.items()}
    return harness.everyone(found)[0]


def measured_step(options: argparse.Namespace, case: dict[str, Any]) -> Figures:
    return {"step_ms": pipeline_step.step(case, options)["step_ms"]}


def measured_cache(options: argparse.Namespace, frozen: int) -> Figures:
    return cached_step.frozen_case(options, frozen, "on")


def main() -> None:
    """Predict and measure all cases and print the table. Every process must call this."""
    parser = harness.parser_of(__doc__, turns=2, processes=2)
    harness.add_model_arguments(parser)
    parser.add_argument("--frozen", type=int, nargs="+", default=[2, 4, 5], help="numbers of frozen layers f")
    parser.add_argument("--microbatches", type=int, default=4, help="M of the pipelines, K = processes")
    parser.add_argument("--steps", type=int, default=20, help="of each epoch")
    parser.add_argument("--warmup", type=int, default=3, help="first steps of each epoch that do not count")
    options = harness.start(parser)
    options.dtype, world = "auto", harness.num_processes()
    config = harness.load_config(options.model)
    workload = measure_workload(build_placeholder_model(config, AutoModelForSequenceClassification), options.tokens)
    pipeline = {"pipeline_parallel_size": world, "num_microbatches": options.microbatches}
    first = options.frozen[0]
    frozen = {"freeze_policy": "schedule", "freeze_schedule": {0: first}, "elastic": False, "activation_cache": "off"}
    name = f"K={world} 1f1b M={options.microbatches}"
    cases: dict[str, Callable[[], Figures]] = {
        PROFILE: partial(predict, options, workload),
        "DDP": partial(measured_step, options, {}),
        "K=1": partial(measured_step, options, {"pipeline_parallel_size": 1}),
        name: partial(measured_step, options, pipeline),
        f"{name} f={first}": partial(measured_step, options, {**pipeline, **frozen}),
    }
    cases |= {f"f={f}": partial(measured_cache, options, f) for f in options.frozen}
    turns = [beside_each_other(turn) for turn in harness.take_turns(cases, options)]
    names = list(turns[0])
    ratio = Ratio("predicted / measured", "ms", lambda case: f"{case} " if f"{case} " in names else None, True)
    harness.report(options, turns, [ratio])


def beside_each_other(turn: harness.Turn) -> harness.Turn:
    """For each case one of what was measured, and one with a space behind its name of what was predicted."""
    found: harness.Turn = {}
    for case, predicted in turn[PROFILE].items():
        if case == harness.OTHERS:
            continue
        of_f, _, phase = case.partition(", ")
        figures = turn[of_f if phase else case]
        measured = figures["filling_ms" if phase == "filling" else "step_ms"]
        found[case] = {"ms": measured, harness.OTHERS: figures[harness.OTHERS]}
        found[f"{case} "] = {"ms": predicted}
    return found


if __name__ == "__main__":
    main()
