#!/usr/bin/env python
"""The cost of a data set of many rows before the first step: memory and CPU seconds, the stock Trainer beside ours.

    OMP_NUM_THREADS=1 python benchmarks/many_rows.py [--rows 100000000] [--out results.json]

Each run (in the set's order and shuffled) is a process of its own. Its figures are the peak of resident memory, and
the CPU seconds, until the first step has ended, minus the figures of a run of 1,000 rows.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import BertConfig, BertForSequenceClassification, Trainer

from hf_pipetransformer import PipeTransformerTrainer

import harness
from harness import Figures, Ratio

FEW = 1000


class Rows(Dataset[Any]):
    """Samples that take no memory."""

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


def train(kind: str, order: str, rows: int) -> None:
    """Train one step, and print its memory and time."""
    base: type[Trainer] = PipeTransformerTrainer if kind == "ours" else Trainer
    trainer_class = type("Run", (InOrder, base) if order == "in order" else (base,), {})
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=60, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        trainer = harness.make_trainer(
            model, Rows(rows), folder, [], kind == "ours", trainer_class=trainer_class, max_steps=1
        )
        began = time.process_time()
        trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("FOUND", json.dumps({"peak_mib": peak, "cpu_seconds": time.process_time() - began}))


def more_than_few(kind: str, order: str, rows: int) -> Figures:
    few, many = (_in_process(kind, order, count) for count in (FEW, rows))
    return {name: many[name] - few[name] for name in many}


def _in_process(kind: str, order: str, rows: int) -> Figures:
    command = [sys.executable, __file__, "--run", kind, order, "--rows", str(rows)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: Figures = json.loads(out.split("FOUND")[1])
    return found


def main() -> None:
    """Measure all cases and print the table."""
    parser = harness.parser_of(__doc__, turns=1)
    parser.add_argument("--rows", type=int, default=10**8)
    parser.add_argument("--run", nargs=2, metavar=("KIND", "ORDER"), help="one training, in this process")
    options = harness.start(parser)
    if options.run:
        train(*options.run, options.rows)
        return
    cases = {f"{k}, {o}": partial(more_than_few, k, o, options.rows) for o in ("in order", "shuffled") for k in KINDS}
    stock = Ratio("memory to stock", "peak_mib", lambda name: name.replace("ours", "stock"))
    harness.report(options, harness.take_turns(cases, options), [stock])


KINDS = ("stock", "ours")


if __name__ == "__main__":
    main()
