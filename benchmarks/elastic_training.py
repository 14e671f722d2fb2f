#!/usr/bin/env python
"""Whole trainings on real sentences: a pipeline that freezes and turns into replicas, beside one that does not.

    OMP_NUM_THREADS=1 accelerate launch --config_file accelerate_configs/cpu_2.yaml benchmarks/elastic_training.py \
        --model FOLDER --train_file train.jsonl --validation_file validation.jsonl --output results.json

All variants run one after the other in the same processes, with the same data, seed, epochs and trainer:

    ddp        transformers.Trainer
    static     K stages to the end
    frozen     K stages to the end, layers freeze              elastic=False
    elastic    layers freeze, K shrinks, freed processes become replicas
    cached     the same, and what frozen layers give is kept

Files hold one JSON object a line, with "sentence" and "label". What is compared is the time of training (without
evaluation) and the accuracy at the end.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging as transformers_logging

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

VARIANTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "static": {},
    "frozen": {"freeze_policy": "alpha", "elastic": False, "activation_cache": "off"},
    "elastic": {"freeze_policy": "alpha", "activation_cache": "off"},
    "cached": {"freeze_policy": "alpha"},
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder or name of a pretrained encoder")
    parser.add_argument("--train_file", type=Path, required=True)
    parser.add_argument("--validation_file", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=2048, help="of the training file, chosen at random")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--cache_dtype", default="auto", help="activation_cache_dtype")
    parser.add_argument("--alpha", type=float, default=1 / 3)
    parser.add_argument("--stages", type=int, default=0, help="K at the start; 0: one for each process")
    parser.add_argument("--num_microbatches", default="4")
    parser.add_argument("--batch", type=int, default=32, help="rows of the global batch")
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


def read_rows(path: Path, tokenizer: Any, max_length: int, samples: int | None, seed: int) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    random.Random(seed).shuffle(rows)  # files are often sorted by label
    rows = rows[:samples]
    encoded = tokenizer([row["sentence"] for row in rows], truncation=True, max_length=max_length)["input_ids"]
    return [{"input_ids": ids, "label": row["label"]} for ids, row in zip(encoded, rows, strict=True)]


class EpochClock(TrainerCallback):
    """Seconds of each epoch's training, without evaluation."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def run(
    name: str, options: argparse.Namespace, train: list[Any], validation: list[Any], tokenizer: Any
) -> dict[str, Any]:
    world = PartialState().num_processes
    set_seed(options.seed)
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": options.batch // world,
            "per_device_eval_batch_size": 64,
            "num_train_epochs": options.epochs,
            "learning_rate": options.learning_rate,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "logging_strategy": "epoch",
            "seed": options.seed,
        }
        trainer_class: type[Trainer]
        if name == "ddp":
            trainer_class, arguments = (
                Trainer,
                TrainingArguments(**common, use_cpu=not torch.accelerator.is_available()),
            )
        else:
            trainer_class = PipeTransformerTrainer
            arguments = PipeTransformerTrainingArguments(
                **common,
                pipeline_parallel_size=options.stages or world,
                num_microbatches=options.num_microbatches,
                freeze_alpha=options.alpha,
                activation_cache_dtype=options.cache_dtype,
                **VARIANTS[name],
            )
        clock = EpochClock()
        trainer = trainer_class(
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=validation,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=accuracy,
            callbacks=[clock],
        )
        trainer.train()
        changes = [entry for entry in trainer.state.log_history if "transform_seconds" in entry]
        events = Path(folder, "pipeline_events.jsonl")
        return {
            "seconds": sum(clock.seconds),
            "epoch_seconds": clock.seconds,
            "accuracy": trainer.evaluate()["eval_accuracy"],
            "changes": changes,
            "events": [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else [],
            "cache": [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry],
        }


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    PipeTransformerTrainingArguments("unused")  # sets up the processes
    state = PartialState()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    train = read_rows(options.train_file, tokenizer, options.max_length, options.samples, options.seed)
    validation = read_rows(options.validation_file, tokenizer, options.max_length, None, options.seed)
    results = {name: run(name, options, train, validation, tokenizer) for name in options.variants}
    if state.is_main_process:
        report(options, results, state.num_processes)
    if dist.is_initialized():
        dist.destroy_process_group()


def report(options: argparse.Namespace, results: dict[str, dict[str, Any]], processes: int) -> None:
    base = results[options.variants[0]]["seconds"]
    table = Table(
        title=f"{options.samples} samples, {options.epochs} epochs, alpha {options.alpha:.3g}, {processes} processes"
    )
    for column in ("variant", "training s", "speed-up", "accuracy", "layouts (frozen: K x R)"):
        table.add_column(column)
    for name, result in results.items():
        layouts = " ".join(
            f"{c['num_frozen_layers']}: {c['pipeline_parallel_size']} x {c['data_parallel_size']}"
            for c in result["changes"]
        )
        table.add_row(
            name, f"{result['seconds']:.1f}", f"{base / result['seconds']:.2f}", f"{result['accuracy']:.4f}", layouts
        )
    Console().print(table)
    if options.output:
        facts = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "transformers", "accelerate")},
            "options": {key: str(value) for key, value in vars(options).items() if key not in ("model", "output")},
        }
        options.output.write_text(json.dumps({**facts, "results": results}, indent=2))


if __name__ == "__main__":
    main()
