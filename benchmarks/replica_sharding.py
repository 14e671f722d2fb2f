#!/usr/bin/env python
"""Memory of a stage's replicas, and time of a step, with and without `replica_sharding="optimizer"`.

    python benchmarks/replica_sharding.py --processes 4 --out results.json

A BERT with random weights, in MiniLM-L6's size unless `--model` says otherwise, is trained with AdamW. (The plain
Trainer's FSDP needs an accelerator.)

Memory is counted at the end of a step, and gradients before the optimizer's step: MiB of the storages of the model's
parameters, of their gradients, and of the optimizer's tensors, on the process that has most of them. "share" is the
optimizer's over a process's without sharding, times R: 1 if it is divided exactly.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback

import harness
from harness import Figures, RandomRows, Ratio, StepClock

DDP = "ddp"
MIB = 2**20


class Memory(TrainerCallback):
    """Counts the MiB that this process holds."""

    def __init__(self) -> None:
        self.held: Figures = {}

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.held["gradients_mib"] = mib_of(p.grad for p in model.parameters() if p.grad is not None)

    def on_step_end(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
        self.held["parameters_mib"] = mib_of(model.parameters())
        states = optimizer.state.values()
        self.held["optimizer_mib"] = mib_of(v for s in states for v in s.values() if torch.is_tensor(v) and v.dim())


def mib_of(tensors: Iterable[torch.Tensor]) -> float:
    """MiB of the tensors' storages, each counted once."""
    storages = [(t._values() if t.is_sparse else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) / MIB


def step(case: dict[str, Any], options: argparse.Namespace) -> Figures:
    """Train for some steps with a new Trainer. Collective over all processes."""
    config, clock, memory = harness.load_config(options.model), StepClock(), Memory()
    with tempfile.TemporaryDirectory() as folder:
        harness.make_trainer(
            harness.make_model(options.model, config),
            RandomRows(options.rows * options.steps, options.tokens, config.vocab_size),
            folder,
            [clock, memory],
            is_ours=bool(case),
            per_device_train_batch_size=options.rows // harness.num_processes(),
            max_steps=options.steps,
            **case,
        ).train()
    all_held = harness.everyone(memory.held)
    held = {name: max(of_one[name] for of_one in all_held) for name in memory.held}
    return {"step_ms": clock.step_ms(options.warmup), **held}


def main() -> None:
    """Measure all cases and print the table. Every process must call this."""
    parser = harness.parser_of(__doc__, processes=4)
    harness.add_model_arguments(parser)
    parser.add_argument("--stages", type=int, nargs="+", default=[1], help="numbers of stages K")
    parser.add_argument("--steps", type=int, default=10, help="of each run, with the warm-up")
    parser.add_argument("--warmup", type=int, default=3, help="first steps of each run that do not count")
    options = harness.start(parser)
    cases: dict[str, dict[str, Any]] = {DDP: {}}
    for k in options.stages:
        for sharding in ("none", "optimizer"):
            cases[f"K={k} {sharding}"] = {"pipeline_parallel_size": k, "replica_sharding": sharding}
    turns = harness.take_turns({name: partial(step, case, options) for name, case in cases.items()}, options)
    for turn in turns:
        for name, case in cases.items():
            if case.get("replica_sharding") == "optimizer":
                replicas = harness.num_processes() // case["pipeline_parallel_size"]
                whole = turn[name.replace("optimizer", "none")]["optimizer_mib"]
                turn[name]["share"] = turn[name]["optimizer_mib"] * replicas / whole
    targets = {name: "<= 1.05" for name in cases if name.endswith("optimizer")}
    harness.report(options, turns, [Ratio("to DDP", "step_ms", DDP, targets=targets)])


if __name__ == "__main__":
    main()
