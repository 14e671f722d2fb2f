"""Memory and speed of a process in five ways to train with little memory, at several batch sizes.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.peak_memory --model "$MODEL" --data data/sst2 --out memory.json

    plain           full fine-tuning
    checkpointed    the same with gradient checkpointing
    lora            adapters on all layers
    frozen          the first `--frozen` layers frozen from the start, and read from the cache
    lora-upper      adapters on the layers above those; the others are frozen and cached in the same way

Each run is a process of its own. Its peak is the largest resident memory during `train()`, minus that before the
model was built (imports, data and tokenizer), the cache's mapped pages included. The learning rate is `--rate` for 32
samples and grows with the square root of the batch.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import psutil
from transformers import set_seed

from benchmarks import harness
from benchmarks.harness import Figures, StepClock
from benchmarks.studies.shared_prefix import way_of, with_adapters
from benchmarks.studies.tasks import sst2

WAYS = ("plain", "checkpointed", "lora", "frozen", "lora-upper")
SAMPLED_EVERY = 0.002  # seconds between two looks at the resident memory


class Peak(threading.Thread):
    """The largest resident memory of this process, in bytes, minus its memory when this object is made."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._process, self._ended = psutil.Process(), threading.Event()
        self._before, self.above = self._process.memory_info().rss, 0
        self.start()

    def run(self) -> None:
        while not self._ended.wait(SAMPLED_EVERY):
            self.above = max(self.above, self._process.memory_info().rss - self._before)

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return self.above


def train(way: str, batch: int, options: argparse.Namespace) -> Figures:
    """Train one model in this process."""
    task = sst2(options.model, options.data, options.samples, seed=0)
    set_seed(0)
    peak, clock = Peak(), StepClock()
    model = task.build_model()
    if way.startswith("lora"):
        model = with_adapters(model, options.frozen if way == "lora-upper" else 0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = harness.make_trainer(
            model,
            task.train,
            folder,
            [clock],
            is_ours=True,
            keywords={
                "eval_dataset": task.validation,
                "data_collator": task.collate,
                "compute_metrics": task.compute_metrics,
            },
            per_device_train_batch_size=batch,
            num_train_epochs=options.epochs,
            gradient_checkpointing=way == "checkpointed",
            **way_of(way, options.frozen, None, options.rate * math.sqrt(batch / 32)),
        )
        trainer.train()
        peak_mib = peak.stop() / 2**20
        speeds = [options.samples / epoch["seconds"] for epoch in clock.epochs]
        accuracy = trainer.evaluate()[f"eval_{task.metric}"]
    return {"peak_mib": peak_mib, "samples_s_first": speeds[0], "samples_s_last": speeds[-1], "accuracy": accuracy}


def in_process(way: str, batch: int) -> Figures:
    command = [sys.executable, "-m", "benchmarks.studies.peak_memory", *sys.argv[1:], "--run", way, str(batch)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: Figures = json.loads(out.split("FOUND")[1])
    return found


def main() -> None:
    """Measure all ways and print the table."""
    parser = harness.parser_of(__doc__, turns=1)
    parser.add_argument("--model", required=True, help="a folder with a BERT's weights and tokenizer")
    parser.add_argument("--data", type=Path, default=Path("data/sst2"))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--frozen", type=int, default=4)
    parser.add_argument("--rate", type=float, default=4e-4, help="learning rate for batches of 32")
    parser.add_argument("--run", nargs=2, metavar=("WAY", "BATCH"), help="one training, in this process")
    options = harness.start(parser)
    if options.run:
        print("FOUND", json.dumps(train(options.run[0], int(options.run[1]), options)))
        return
    cases = {f"{way}, {batch}": partial(in_process, way, batch) for batch in options.batches for way in options.ways}
    harness.report(options, harness.take_turns(cases, options))


if __name__ == "__main__":
    main()
