#!/usr/bin/env python
"""Half of the layers frozen from the start, and cached, against plain training: with the library itself.

    OMP_NUM_THREADS=1 python benchmarks/half_frozen.py --output half.jsonl              # train; continues the file
    python benchmarks/half_frozen.py --output half.jsonl --report

`time_to_accuracy.py` has found where this recipe reaches what plain training reaches at more of the cost, in a loop of
its own whose cost is counted. Here the stock Trainers train the same texts plainly, and the library's with
`freeze_schedule={"0": L/2}` and the activation cache, one process each, one after the other in rounds with a seed of
their own:

    intents    what a short request wants (50 classes); `Trainer`, head (pooler and classifier) at 25 times the rate
    pairs      two wordings of a request; `SentenceTransformerTrainer`, contrastive loss

The epochs and rates of both recipes are those that `time_to_accuracy.py` has chosen on its validation sets (`RUNS`).
Times are those of `train()`, with all that the library does before and after the steps; ratios are of the two runs of
a round. What is right is counted on test sets that nothing was chosen on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

from time_to_accuracy_tasks import ACTIONS, OBJECTS, POOL, SCALE, Requests, model_folder

HEAD_FACTOR = 25
CLASSES = len(ACTIONS) * len(OBJECTS)


@dataclass(frozen=True)
class Run:
    """One recipe on one task."""

    task: str
    recipe: str
    epochs: float
    rate: float


RUNS = (
    Run("intents", "plain", 4, 2e-4),
    Run("intents", "half", 4.5, 4e-4),
    Run("pairs", "plain", 8, 2e-4),
    Run("pairs", "half", 9.5, 4e-4),
)


class SentenceTrainer(PipeTransformerTrainer, SentenceTransformerTrainer):
    """sentence-transformers' trainer with freezing and the cache."""


@dataclass
class SentenceArguments(SentenceTransformerTrainingArguments, PipeTransformerTrainingArguments):
    """The fields of both."""


def options_of(run: Run, folder: str, seed: int, layers: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "output_dir": folder,
        "num_train_epochs": run.epochs,
        "learning_rate": run.rate,
        "per_device_train_batch_size": 16,
        "seed": seed,
        "use_cpu": not torch.accelerator.is_available(),
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
    }
    if run.recipe == "half":
        options |= {"freeze_policy": "schedule", "freeze_schedule": {"0": layers // 2}, "activation_cache": "on"}
    return options


# ---------------------------------------------------------------------------------------- tasks
def intents(run: Run, seed: int, folder: str, model_path: Path) -> tuple[Trainer, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model_path)

    def rows(drawn: Requests, each: int) -> Dataset:
        labels = [k for k in range(CLASSES) for _ in range(each)]
        encoded = tokenizer([drawn.text(divmod(k, len(OBJECTS))) for k in labels], truncation=True, max_length=64)
        return Dataset.from_dict({**encoded, "labels": labels})

    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=CLASSES)
    head = {id(p) for name, p in model.named_parameters() if "pooler" in name or "classifier" in name}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in head], "lr": run.rate},
        {"params": [p for p in model.parameters() if id(p) in head], "lr": run.rate * HEAD_FACTOR},
    ]
    options = options_of(run, folder, seed, model.config.num_hidden_layers)
    classes: tuple[Any, Any] = (Trainer, TrainingArguments)
    if run.recipe == "half":
        classes = PipeTransformerTrainer, PipeTransformerTrainingArguments
    trainer = classes[0](
        model=model,
        args=classes[1](**options),
        train_dataset=rows(Requests(seed), 10),
        data_collator=DataCollatorWithPadding(tokenizer),
        optimizers=(torch.optim.AdamW(groups, weight_decay=0.0), None),
    )
    test = rows(Requests(20_000), 16)

    def right() -> list[bool]:
        predicted = trainer.predict(test)
        return list((predicted.predictions.argmax(-1) == predicted.label_ids).tolist())

    return trainer, right


def pairs(run: Run, seed: int, folder: str, model_path: Path) -> tuple[Trainer, Any]:
    def drawn(requests: Requests, count: int) -> Dataset:
        both = [requests.pair() for _ in range(count)]
        return Dataset.from_dict({"anchor": [a for a, _ in both], "positive": [b for _, b in both]})

    body = Transformer(str(model_path), max_seq_length=64)
    model = SentenceTransformer(modules=[body, Pooling(body.get_embedding_dimension()), Normalize()], device="cpu")
    layers = body.auto_model.config.num_hidden_layers
    classes: tuple[Any, Any] = (SentenceTransformerTrainer, SentenceTransformerTrainingArguments)
    if run.recipe == "half":
        classes = SentenceTrainer, SentenceArguments
    trainer = classes[0](
        model=model,
        args=classes[1](**options_of(run, folder, seed, layers), weight_decay=0.0),
        train_dataset=drawn(Requests(seed), 256),
        loss=MultipleNegativesRankingLoss(model, scale=SCALE),
    )
    test = drawn(Requests(20_000), 5 * POOL)

    def right() -> list[bool]:
        anchors, positives = (
            model.encode(list(test[name]), convert_to_tensor=True, show_progress_bar=False)
            for name in ("anchor", "positive")
        )
        found = []
        for first, second in zip(anchors.split(POOL), positives.split(POOL), strict=True):
            found += ((first @ second.t()).argmax(1).cpu() == torch.arange(len(first))).tolist()
        return found

    return trainer, right


TASKS = {"intents": intents, "pairs": pairs}


# ---------------------------------------------------------------------------------------- measuring
def measure(run: Run, seed: int, model_path: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trainer, right = TASKS[run.task](run, seed, folder, model_path)
        began, began_cpu = time.perf_counter(), time.process_time()
        trainer.train()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        correct = right()
    accuracy = 100 * sum(correct) / len(correct)
    return {**vars(run), "seed": seed, "seconds": seconds, "cpu_seconds": cpu_seconds, "accuracy": accuracy}


def report(rows: list[dict[str, Any]]) -> None:
    for task in TASKS:
        of_task = {(row["recipe"], row["seed"]): row for row in rows if row["task"] == task}
        seeds = sorted({seed for recipe, seed in of_task if recipe == "half" and ("plain", seed) in of_task})
        if not seeds:
            continue
        print(f"{task}, {len(seeds)} seeds")
        for recipe in ("plain", "half"):
            some = [of_task[recipe, seed] for seed in seeds]
            told = f"  {recipe:6} {some[0]['epochs']:g} epochs at {some[0]['rate']:g}: right"
            told += f" {statistics.fmean(row['accuracy'] for row in some):.1f}%"
            for what in ("seconds", "cpu_seconds"):
                told += f", {what} {statistics.median(row[what] for row in some):.1f}"
            print(told)
        differences = [of_task["half", s]["accuracy"] - of_task["plain", s]["accuracy"] for s in seeds]
        error = statistics.stdev(differences) / len(seeds) ** 0.5 if len(seeds) > 1 else float("nan")
        ratios = [
            [of_task["plain", s][what] / of_task["half", s][what] for s in seeds]
            for what in ("seconds", "cpu_seconds")
        ]
        wall, cpu = (f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in ratios)
        print(
            f"  half: {statistics.fmean(differences):+.1f} +- {error:.1f} points; faster {wall}, by CPU seconds {cpu}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines, which is continued")
    parser.add_argument("--report", action="store_true", help="print what is in the file, and train nothing")
    parser.add_argument("--model", type=Path, help="a folder with a BERT's weights and tokenizer")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    if arguments.output.exists():
        rows = [json.loads(line) for line in arguments.output.read_text().splitlines()]
    if not arguments.report:
        done = {(row["task"], row["recipe"], row["seed"]) for row in rows}
        for seed in range(arguments.seeds):
            for run in RUNS:
                if run.task not in arguments.tasks or (run.task, run.recipe, seed) in done:
                    continue
                rows.append(measure(run, seed, model_folder(arguments.model)))
                with arguments.output.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    report(rows)


if __name__ == "__main__":
    main()
