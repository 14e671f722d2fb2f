"""The gain of a search with trials that freeze the same pretrained layers from the start and share one store.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.shared_prefix --model "$MODEL" --data data/sst2 --out sweep.json

Trials differ in learning rate and seed (head, order of the samples). Each of the ways to train runs all of them with
`PipeTransformerTrainer`, one process, one stage:

    plain         all layers are trained
    frozen        the first `--frozen` layers from the start; the first trial fills the store, the others read it
    lora          adapters on all layers, all else but the head frozen by PEFT: no layer is skipped
    lora-upper    adapters on the layers above the first `--frozen`, which are frozen and shared as above

A turn is a trial, so a machine that gets slower meets all ways. Accuracies are of the validation set. It also chooses
the best trial of every way.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import set_seed

from benchmarks import harness
from benchmarks.harness import Figures, Ratio
from benchmarks.studies.tasks import Task, sst2

RIVALS = {"frozen": "plain", "lora": "plain", "lora-upper": "lora"}
RATE_OF_ADAPTERS = 5.0
"""Factor of the learning rate for adapters, which need a larger one."""


def with_adapters(model: nn.Module, first: int) -> nn.Module:
    """Adapters on the query and value of the layers from `first` on; the classifier trains as well."""
    import peft

    layers = list(range(first, model.config.num_hidden_layers))  # type: ignore[union-attr, arg-type]
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"], layers_to_transform=layers
    )
    return peft.get_peft_model(model, config)


def way_of(way: str, frozen: int, store: str | None, rate: float) -> dict[str, Any]:
    """Training arguments of a way."""
    options: dict[str, Any] = {"learning_rate": rate * (RATE_OF_ADAPTERS if way.startswith("lora") else 1.0)}
    if way in ("frozen", "lora-upper"):
        options |= {"freeze_policy": "schedule", "freeze_schedule": {0: frozen}, "activation_cache_dir": store}
    return options


def trial(
    way: str, task: Task, options: argparse.Namespace, store: str, trials: itertools.cycle[tuple[float, int]]
) -> Figures:
    """Train and evaluate one trial."""
    rate, seed = next(trials)
    set_seed(seed)
    model = task.build_model()
    if way.startswith("lora"):
        model = with_adapters(model, options.frozen if way == "lora-upper" else 0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = harness.make_trainer(
            model,
            task.train,
            folder,
            [],
            is_ours=True,
            keywords={
                "eval_dataset": task.validation,
                "data_collator": task.collate,
                "compute_metrics": task.compute_metrics,
            },
            per_device_train_batch_size=options.batch,
            per_device_eval_batch_size=64,
            num_train_epochs=options.epochs,
            seed=seed,
            **way_of(way, options.frozen, str(Path(store, way)), rate),
        )
        began, began_cpu = time.perf_counter(), time.process_time()
        trainer.train()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        accuracy = trainer.evaluate()[f"eval_{task.metric}"]
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "accuracy": accuracy}


def main() -> None:
    """Train all trials in all ways and print the table, then the best trial of each way."""
    parser = harness.parser_of(__doc__, turns=8)
    parser.add_argument("--model", required=True, help="a folder with a BERT's weights and tokenizer")
    parser.add_argument("--data", type=Path, default=Path("data/sst2"))
    parser.add_argument("--ways", nargs="+", default=["plain", *RIVALS], choices=["plain", *RIVALS])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--frozen", type=int, default=4)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-4, 2e-4, 4e-4, 8e-4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="a turn is a rate with a seed")
    options = harness.start(parser)
    task = sst2(options.model, options.data, options.samples, seed=0)
    trials = list(itertools.product(options.rates, options.seeds))
    with tempfile.TemporaryDirectory() as store:
        cases = {way: partial(trial, way, task, options, store, itertools.cycle(trials)) for way in options.ways}
        turns = harness.take_turns(cases, options)
    for way in options.ways:
        best = max(turn[way]["accuracy"] for turn in turns)
        total = sum(turn[way]["cpu_seconds"] for turn in turns)
        print(f"{way:11} best trial {best:.3f}, {total:.1f} CPU seconds of all")
    harness.report(options, turns, [Ratio("rival / it", "cpu_seconds", RIVALS.get, is_speed_up=True)])


if __name__ == "__main__":
    main()
