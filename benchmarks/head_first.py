#!/usr/bin/env python
"""How long until an accuracy is reached: plain fine-tuning, and the head first over the cache, by the library itself.

    OMP_NUM_THREADS=1 python benchmarks/head_first.py --model "$MODEL" --cpu --output head_first.jsonl
    python benchmarks/head_first.py --output head_first.jsonl --report

The task is `intents` of `time_to_accuracy_tasks.py`: requests made from rules, 50 classes, 10 samples of each. Plain
training runs for several numbers of epochs, each with its own linear decay, and a new head learns five times as fast
as the rest. Otherwise the head is trained alone first (`freeze_schedule={0: "all"}`), one forward of each sample and
then from the cache, and the whole model for fewer epochs afterwards. Rates were chosen by `time_to_accuracy.py` on
other seeds. Each seed draws other samples and another head; ways take turns. Seconds are those of `train()`, both of
them; the process's CPU seconds beside them depend less on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    set_seed,
)

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

from time_to_accuracy_tasks import ACTIONS, OBJECTS, Requests

CLASSES = len(ACTIONS) * len(OBJECTS)
HEAD_EPOCHS, HEAD_RATE = 10, 2e-3
RATE, FACTOR_OF_HEAD = 4e-4, 5.0
FIRST_SEED = 100
"""Seeds below were used to choose rates."""


def samples_of(tokenizer: Any, seed: int, each: int) -> list[dict[str, Any]]:
    drawn = Requests(seed)
    labels = [label for label in range(CLASSES) for _ in range(each)]
    texts = [drawn.text(divmod(label, len(OBJECTS))) for label in labels]
    encoded = tokenizer(texts, truncation=True, max_length=64)["input_ids"]
    return [{"input_ids": ids, "label": label} for ids, label in zip(encoded, labels, strict=True)]


def train(
    model: PreTrainedModel,
    train_set: Any,
    collate: Any,
    epochs: float,
    rate: float,
    head: float,
    cpu: bool,
    **freezing: Any,
) -> tuple[float, float]:
    """Train, and return the seconds and the CPU seconds."""
    in_head = {id(p) for p in model.classifier.parameters()}
    body = [p for p in model.parameters() if id(p) not in in_head]
    groups = [{"params": body, "lr": rate}, {"params": [*model.classifier.parameters()], "lr": rate * head}]
    with tempfile.TemporaryDirectory() as folder:
        args = PipeTransformerTrainingArguments(
            folder,
            num_train_epochs=epochs,
            learning_rate=rate,
            per_device_train_batch_size=16,
            use_cpu=cpu,
            save_strategy="no",
            logging_steps=1000,
            report_to=[],
            disable_tqdm=True,
            **freezing,
        )
        trainer = PipeTransformerTrainer(
            model,
            args,
            train_dataset=train_set,
            data_collator=collate,
            optimizers=(torch.optim.AdamW(groups, weight_decay=0.0), None),
        )
        began, cpu_began = time.perf_counter(), time.process_time()
        trainer.train()
        return time.perf_counter() - began, time.process_time() - cpu_began


@torch.no_grad()
def accuracy(model: PreTrainedModel, samples: list[dict[str, Any]], collate: Any) -> float:
    model.eval()
    right = []
    for at in range(0, len(samples), 64):
        batch = collate(samples[at : at + 64])
        labels = batch.pop("labels")
        right += (model(**batch).logits.argmax(-1) == labels).tolist()
    return 100 * float(np.mean(right))


def run(way: str, epochs: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    collate = DataCollatorWithPadding(tokenizer)
    training, held_out = samples_of(tokenizer, seed, 10), samples_of(tokenizer, seed + 50_000, 16)
    set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=CLASSES)
    of_head, factor = (0.0, 0.0), FACTOR_OF_HEAD
    if way == "head first":
        frozen = {"freeze_policy": "schedule", "freeze_schedule": {0: "all"}, "activation_cache": "on"}
        of_head = train(model, training, collate, HEAD_EPOCHS, HEAD_RATE, 1.0, options.cpu, **frozen)
        factor = 1.0
    of_all = train(model, training, collate, epochs, RATE, factor, options.cpu)
    return {
        "way": way,
        "epochs": epochs,
        "seed": seed,
        "seconds": of_head[0] + of_all[0],
        "cpu_seconds": of_head[1] + of_all[1],
        "cpu_seconds_of_head": of_head[1],
        "accuracy": accuracy(model.cpu(), held_out, collate),
    }


def report(entries: list[dict[str, Any]]) -> None:
    """Print a row for each way and number of epochs: medians of times, means and ranges of accuracies."""
    print("| way | epochs of the whole model | seconds | CPU s | of them the head | accuracy | seeds |")
    print("|---|---|---|---|---|---|---|")
    for way, epochs in dict.fromkeys((entry["way"], entry["epochs"]) for entry in entries):
        runs = [entry for entry in entries if (entry["way"], entry["epochs"]) == (way, epochs)]
        reached = [entry["accuracy"] for entry in runs]
        names = ("seconds", "cpu_seconds", "cpu_seconds_of_head")
        times = " | ".join(f"{statistics.median(entry[name] for entry in runs):.1f}" for name in names)
        spread = f"{statistics.mean(reached):.1f} ({min(reached):.1f} to {max(reached):.1f})"
        print(f"| {way} | {epochs:g} | {times} | {spread} | {len(runs)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines, which is continued")
    parser.add_argument("--report", action="store_true", help="print what is in the file, and train nothing")
    parser.add_argument("--model", help="a folder with a BERT's weights and tokenizer")
    parser.add_argument("--plain", nargs="*", type=float, default=[3, 4, 6, 8], help="epochs of plain training")
    parser.add_argument("--head_first", nargs="*", type=float, default=[1, 2, 3], help="epochs behind the head's")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU although there is an accelerator")
    options = parser.parse_args()
    done = [json.loads(line) for line in options.output.open()] if options.output.exists() else []
    if not options.report:
        if options.model is None:
            parser.error("--model is missing (docs/benchmarks.md says where there is one)")
        torch.set_num_threads(1)
        known = {(entry["way"], entry["epochs"], entry["seed"]) for entry in done}
        points = [*(("plain", e) for e in options.plain), *(("head first", e) for e in options.head_first)]
        for seed, (way, epochs) in product(range(FIRST_SEED, FIRST_SEED + options.seeds), points):
            if (way, epochs, seed) not in known:
                done.append(run(way, epochs, seed, options))
                with options.output.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
    report(done)


if __name__ == "__main__":
    main()
