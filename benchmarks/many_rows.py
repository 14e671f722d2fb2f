"""What a data set of many rows costs before the first step: memory and CPU seconds, the stock Trainer beside ours.

    OMP_NUM_THREADS=1 python benchmarks/many_rows.py [--rows 100000000] [--out results.json]

Each of the four runs (in the set's order and shuffled) is a process of its own, of which it is the peak of resident
memory above that of a run of 1,000 rows, and the seconds until the first step has ended.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Rows(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.full((8,), index % 50), "labels": index % 2}


class InOrder:
    """A trainer that reads the rows one after the other."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


def run(kind: str, order: str, rows: int) -> None:
    from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

    classes: Any = (Trainer, TrainingArguments)
    if kind == "ours":
        classes = PipeTransformerTrainer, PipeTransformerTrainingArguments
    trainer_class = type("Run", (InOrder, classes[0]) if order == "sequential" else (classes[0],), {})
    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = classes[1](folder, max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no")
        trainer = trainer_class(BertForSequenceClassification(config), arguments, train_dataset=Rows(rows))
        began = time.process_time()
        trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("FOUND", json.dumps({"peak_mib": peak, "cpu_seconds": time.process_time() - began}))


def measured(kind: str, order: str, rows: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--run", kind, order, "--rows", str(rows)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(out.split("FOUND")[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10**8)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.run:
        run(*args.run, args.rows)
        return
    results = {}
    for order in ("sequential", "shuffled"):
        for kind in ("stock", "ours"):
            few, many = measured(kind, order, 1000), measured(kind, order, args.rows)
            results[f"{kind}, {order}"] = {
                "MiB more than for 1,000 rows": many["peak_mib"] - few["peak_mib"],
                "CPU seconds more than for 1,000 rows": many["cpu_seconds"] - few["cpu_seconds"],
            }
            print(f"{kind}, {order}", json.dumps(results[f"{kind}, {order}"]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
