#!/usr/bin/env python
"""What replicas of a stage hold, and how long a step takes, with and without `replica_sharding`.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 4 benchmarks/replica_sharding.py --output results.json

A BERT with random weights, in MiniLM-L6's size unless `--model` says otherwise, is trained with AdamW on all
processes, by each variant in turn, in rounds, so that whatever else the machine does hits all of them alike:

    round 1    ddp   K=1 none   K=1 optimizer
    round 2    ddp   K=1 none   K=1 optimizer
    ...

Memory is counted at the end of a step, and gradients before the optimizer's step: the bytes of the storages of the
model's parameters, of their gradients, and of the optimizer's tensors, on the process that has most of them. A share
is that of the optimizer's state over what a process has without sharding, times R; its bound is `BOUND`. Times are
those of rank 0; what is compared is the ratio of medians within a round, then the median over the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from pipeline_step import RandomRows, StepClock, load_config, make_model
from transformers import PreTrainedConfig, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import hf_pipetransformer
from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.planning.plan import REPLICA_SHARDINGS

BOUND = 1.1
"""Most bytes of optimizer state on a process, times R, in relation to those of a process that holds all of them."""


@dataclass(frozen=True)
class Variant:
    """What is measured. `sharding` None: plain `Trainer`, DDP."""

    stages: int = 1
    sharding: str | None = None

    @property
    def name(self) -> str:
        return "ddp" if self.sharding is None else f"K={self.stages} {self.sharding}"


@dataclass
class Measured:
    """One run of a variant.

    Attributes:
        steps_ms: wall-clock time of each step after the warm-up, on rank 0.
        parameters, gradients, optimizer: bytes on each process.
    """

    steps_ms: list[float]
    parameters: list[int]
    gradients: list[int]
    optimizer: list[int]


class Memory(TrainerCallback):
    """Counts what this process holds."""

    def __init__(self) -> None:
        self.parameters = self.gradients = self.optimizer = 0

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.gradients = bytes_of(p.grad for p in model.parameters() if p.grad is not None)

    def on_step_end(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
        self.parameters = bytes_of(model.parameters())
        states = optimizer.state.values()
        self.optimizer = bytes_of(v for state in states for v in state.values() if torch.is_tensor(v) and v.dim())


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    storages = [(t._values() if t.is_sparse else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder or name of a model; default: random weights in MiniLM-L6's size")
    parser.add_argument("--rows", type=int, default=32, help="rows of the global batch")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each row")
    parser.add_argument("--stages", type=int, nargs="+", default=[1], help="numbers of stages K")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of each run, with the warm-up")
    parser.add_argument("--warmup", type=int, default=3, help="first steps of each run that do not count")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    if not 2 < arguments.warmup < arguments.steps:
        parser.error(f"--warmup {arguments.warmup} must lie between 3 and --steps {arguments.steps} - 1")
    return arguments


def run(variant: Variant, arguments: argparse.Namespace, config: PreTrainedConfig) -> Measured:
    """Train for some steps with a new Trainer. Collective over all processes."""
    clock, memory = StepClock(), Memory()
    with tempfile.TemporaryDirectory() as folder:
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
        training_arguments: TrainingArguments
        trainer_class: type[Trainer]
        if variant.sharding is None:
            trainer_class, training_arguments = Trainer, TrainingArguments(**options)
        else:
            trainer_class = PipeTransformerTrainer
            training_arguments = PipeTransformerTrainingArguments(
                pipeline_parallel_size=variant.stages, replica_sharding=str(variant.sharding), **options
            )
        trainer = trainer_class(
            model=make_model(arguments.model, config),
            args=training_arguments,
            train_dataset=RandomRows(arguments.rows * arguments.steps, arguments.tokens, config.vocab_size),
            callbacks=[clock, memory],
        )
        trainer.remove_callback(PrinterCallback)
        gc.collect()
        dist.barrier()
        trainer.train()
    wall = [1e3 * (b - a) for a, b in zip(clock.wall, clock.wall[1:], strict=False)][arguments.warmup - 1 :]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (memory.parameters, memory.gradients, memory.optimizer))
    return Measured(wall, *(list(of_all) for of_all in zip(*everyone, strict=True)))


def summary(variants: list[Variant], rounds: list[dict[str, Measured]]) -> dict[str, dict[str, Any]]:
    """For each variant the largest bytes on a process, and its step time over that of DDP in the same round."""
    world, table = dist.get_world_size(), {}
    for variant in variants:
        first = rounds[0][variant.name]
        ratios = [_median(r[variant.name]) / _median(r[variants[0].name]) for r in rounds]
        table[variant.name] = {
            "parameter_bytes": max(first.parameters),
            "gradient_bytes": max(first.gradients),
            "optimizer_bytes": max(first.optimizer),
            "step_ms": statistics.median(_median(r[variant.name]) for r in rounds),
            "ratio_to_ddp": statistics.median(ratios),
            "ratios_to_ddp": ratios,
        }
    for variant in variants:
        if variant.sharding not in (None, "none"):
            undivided = table[Variant(variant.stages, "none").name]["optimizer_bytes"]
            share = table[variant.name]["optimizer_bytes"] * (world // variant.stages) / undivided
            table[variant.name] |= {"optimizer_share_times_replicas": share, "within_bound": share <= BOUND}
    return table


def _median(measured: Measured) -> float:
    return statistics.median(measured.steps_ms)


def main() -> None:
    arguments = parse_arguments()
    PartialState(cpu=not torch.accelerator.is_available())
    config = load_config(arguments.model)
    variants = [Variant(), *(Variant(k, sharding) for k in arguments.stages for sharding in REPLICA_SHARDINGS)]
    load = os.getloadavg()[0]
    rounds = [{variant.name: run(variant, arguments, config) for variant in variants} for _ in range(arguments.rounds)]
    table = summary(variants, rounds)
    if dist.get_rank() == 0:
        for name, row in table.items():
            held = ", ".join(
                f"{what} {row[f'{what}_bytes'] / 2**20:,.1f}" for what in ("parameter", "gradient", "optimizer")
            )
            print(
                f"{name:16} MiB on a process: {held}; step {row['step_ms']:,.0f} ms, {row['ratio_to_ddp']:.3f} x DDP"
            )
        if arguments.output is not None:
            result = {
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "versions": {
                    "hf_pipetransformer": hf_pipetransformer.__version__,
                    **{name: version(name) for name in ("torch", "transformers", "accelerate")},
                },
                "machine": {"cores": os.cpu_count(), "architecture": platform.machine(), "load_before": load},
                "arguments": {key: str(v) if isinstance(v, Path) else v for key, v in vars(arguments).items()},
                "variants": table,
                "rounds": [{name: asdict(measured) for name, measured in r.items()} for r in rounds],
            }
            arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
