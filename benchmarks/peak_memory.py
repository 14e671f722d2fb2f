#!/usr/bin/env python
"""What a process needs and how fast it trains, where memory is what lacks: four ways, at several batch sizes.

    OMP_NUM_THREADS=1 python benchmarks/peak_memory.py --model "$MODEL" --data data/sst2 --output memory.jsonl
    python benchmarks/peak_memory.py --output memory.jsonl --report

    plain           full fine-tuning
    checkpointed    the same with gradient checkpointing
    lora            adapters on all layers
    frozen          the first `--frozen` layers frozen from the start, and read from the cache
    lora-upper      adapters on the layers above those; the others are frozen and cached in the same way

Each run is a process of its own. Its peak is the largest resident memory during `train()`, minus that before the model
was built (imports, data and tokenizer): weights, gradients, states, activations, and the pages of the cache's files
that are mapped. Samples a second are those of the first epoch, which fills the cache, and of the second. All batch
sizes take the same number of epochs; the learning rate is `--rate` for 32 samples and grows with the square root of
the batch. Runs of the same round follow one another.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
from end_to_end_tasks import sst2
from shared_prefix import RATE_OF_ADAPTERS, with_adapters
from transformers import TrainerCallback, set_seed

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

WAYS = ("plain", "checkpointed", "lora", "frozen", "lora-upper")
SAMPLED_EVERY = 0.002
"""Seconds between two looks at the resident memory."""


class Peak(threading.Thread):
    """The largest resident memory of this process, in bytes, above what it has when this is made."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._process, self._ended = psutil.Process(), threading.Event()
        self._before, self.above = self._process.memory_info().rss, 0

    def run(self) -> None:
        while not self._ended.wait(SAMPLED_EVERY):
            self.above = max(self.above, self._process.memory_info().rss - self._before)

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return self.above


class EpochTimes(TrainerCallback):
    """Seconds of each epoch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def train(way: str, batch: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one model in this process."""
    torch.set_num_threads(1)
    task = sst2(options.model, options.data, options.samples, seed=0)
    is_adapted, is_frozen = way.startswith("lora"), way in ("frozen", "lora-upper")
    freezing = {"freeze_policy": "schedule", "freeze_schedule": {0: options.frozen}} if is_frozen else {}
    set_seed(seed)
    peak, times = Peak(), EpochTimes()
    peak.start()
    model = task.build_model()
    if is_adapted:
        model = with_adapters(model, options.frozen if is_frozen else 0)
    with tempfile.TemporaryDirectory() as folder:
        args = PipeTransformerTrainingArguments(
            folder,
            num_train_epochs=options.epochs,
            learning_rate=options.rate * math.sqrt(batch / 32) * (RATE_OF_ADAPTERS if is_adapted else 1.0),
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=64,
            gradient_checkpointing=way == "checkpointed",
            seed=seed,
            use_cpu=options.cpu,
            save_strategy="no",
            logging_steps=1000,
            report_to=[],
            disable_tqdm=True,
            **freezing,
        )
        trainer = PipeTransformerTrainer(
            model,
            args,
            train_dataset=task.train,
            eval_dataset=task.validation,
            data_collator=task.collate,
            compute_metrics=task.compute_metrics,
            callbacks=[times],
        )
        trainer.train()
        above = peak.stop()
        result = {"way": way, "batch": batch, "seed": seed, "samples": options.samples, "frozen": options.frozen}
        speeds = {f"samples_per_second_{n}": options.samples / s for n, s in enumerate(times.seconds, 1)}
        return {**result, "peak_bytes": above, **speeds, "accuracy": trainer.evaluate()[f"eval_{task.metric}"]}


def report(entries: list[dict[str, Any]]) -> None:
    """Print a row for each way and batch size: medians over the seeds, and the spread of the speeds."""
    print("| way | samples in a batch | peak MiB | samples/s, first epoch | second epoch | accuracy | seeds |")
    print("|---|---|---|---|---|---|---|")
    by_point: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for entry in entries:
        by_point.setdefault((entry["way"], entry["batch"]), []).append(entry)
    for (way, batch), runs in sorted(by_point.items(), key=lambda point: (WAYS.index(point[0][0]), point[0][1])):
        first, second = ([run[f"samples_per_second_{n}"] for run in runs] for n in (1, 2))
        accuracies = [100 * run["accuracy"] for run in runs]
        print(
            f"| {way} | {batch} | {statistics.median(run['peak_bytes'] for run in runs) / 2**20:.0f}"
            f" | {statistics.median(first):.1f} | {statistics.median(second):.1f} ({min(second):.1f} to"
            f" {max(second):.1f}) | {statistics.mean(accuracies):.1f} ({min(accuracies):.1f} to"
            f" {max(accuracies):.1f}) | {len(runs)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines, which is continued")
    parser.add_argument("--report", action="store_true", help="print what is in the file, and train nothing")
    parser.add_argument("--model", help="a folder with a BERT's weights and tokenizer")
    parser.add_argument("--data", type=Path, default=Path("data/sst2"))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 32, 128])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--frozen", type=int, default=4)
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU although there is an accelerator")
    parser.add_argument("--only", nargs=3, metavar=("WAY", "BATCH", "SEED"), help="train this one, in this process")
    options = parser.parse_args()
    if options.only:
        way, batch, seed = options.only
        with options.output.open("a") as file:
            file.write(json.dumps(train(way, int(batch), int(seed), options)) + "\n")
        return
    done = [json.loads(line) for line in options.output.open()] if options.output.exists() else []
    if not options.report:
        if options.model is None:
            parser.error("--model is missing (docs/benchmarks.md says where there is one)")
        known = {(entry["way"], entry["batch"], entry["seed"]) for entry in done}
        for seed, batch, way in product(options.seeds, options.batches, options.ways):
            if (way, batch, seed) not in known:
                one = ["--only", way, str(batch), str(seed)]
                subprocess.run([sys.executable, __file__, *sys.argv[1:], *one], check=True)
        done = [json.loads(line) for line in options.output.open()]
    report(done)


if __name__ == "__main__":
    main()
