#!/usr/bin/env python
"""What a search gains whose trials freeze the same pretrained layers from the start and share one store.

    OMP_NUM_THREADS=1 python benchmarks/shared_prefix.py --model "$MODEL" --data data/sst2 --output sweep.jsonl
    python benchmarks/shared_prefix.py --output sweep.jsonl --report

Trials differ in learning rate and seed (head, order of the samples). Each of the ways to train runs all of them with
`PipeTransformerTrainer`, one process, one stage:

    plain         nothing is frozen
    frozen        the first `--frozen` layers from the start; the first trial fills the store, the others read it
    lora          adapters on all layers, all else but the head frozen by PEFT: no layer is skipped
    lora-upper    adapters on the layers above the first `--frozen`, which are frozen and shared as above

The ways take turns trial by trial, so that a machine that gets slower meets all of them. Counted cost: for each sample
and layer 3 if it trains, 2 with an adapter, 1 if it is frozen and computed, 0 if it is read, over that of plain
training. Accuracies are of the validation set, on which the best trial is chosen; so is the best of every way.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from end_to_end_tasks import Task, sst2
from torch import nn
from transformers import set_seed

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

WAYS = ("plain", "frozen", "lora", "lora-upper")
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


def run_trial(
    task: Task, way: str, rate: float, seed: int, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Train and evaluate one trial; returns its times, its accuracy, and how many samples were read."""
    is_adapted, is_frozen = way.startswith("lora"), way in ("frozen", "lora-upper")
    set_seed(seed)
    model = task.build_model()
    if is_adapted:
        model = with_adapters(model, options.frozen if is_frozen else 0)
    freezing = {
        "freeze_policy": "schedule",
        "freeze_schedule": {0: options.frozen},
        "activation_cache_dir": str(folder / "store"),
    }
    args = PipeTransformerTrainingArguments(
        str(folder / "out"),
        num_train_epochs=options.epochs,
        learning_rate=rate * (RATE_OF_ADAPTERS if is_adapted else 1.0),
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=64,
        lr_scheduler_type="linear",
        seed=seed,
        use_cpu=options.cpu,
        save_strategy="no",
        eval_strategy="no",
        logging_steps=1000,
        report_to=[],
        disable_tqdm=True,
        **(freezing if is_frozen else {}),
    )
    trainer = PipeTransformerTrainer(
        model,
        args,
        train_dataset=task.train,
        eval_dataset=task.validation,
        data_collator=task.collate,
        compute_metrics=task.compute_metrics,
    )
    began, began_cpu = time.perf_counter(), time.process_time()
    trainer.train()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    lines = (folder / "out" / "pipeline_metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rates = [v["cache_hit_rate"] for line in lines if "cache_hit_rate" in (v := json.loads(line).get("values") or {})]
    shutil.rmtree(folder / "out")
    return {
        "way": way,
        "rate": rate,
        "seed": seed,
        "frozen": options.frozen,
        "epochs": options.epochs,
        "samples": options.samples,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "units": counted(way, model_layers(model), options.frozen, options.epochs, rates),
        "hit_rates": rates,
        task.metric: trainer.evaluate()[f"eval_{task.metric}"],
    }


def model_layers(model: nn.Module) -> int:
    return int(model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]


def counted(way: str, layers: int, frozen: int, epochs: float, hit_rates: list[float]) -> float:
    """Cost of a trial in epochs of plain training."""
    if way == "plain":
        return epochs
    if way == "lora":
        return 2 / 3 * epochs
    active = 3 if way == "frozen" else 2
    misses = sum(1 - rate for rate in hit_rates)
    return ((layers - frozen) * active * epochs + frozen * misses) / (3 * layers)


def report(entries: list[dict[str, Any]], metric: str = "accuracy") -> None:
    """Print the totals of each way, over those of plain training."""
    by_way = {way: [entry for entry in entries if entry["way"] == way] for way in WAYS}
    rivals = {"frozen": "plain", "lora": "plain", "lora-upper": "lora"}
    print("| way | trials | seconds | CPU s | units | over | time | units | best trial | mean | best, over that |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for way, found in by_way.items():
        if not found:
            continue
        rival = by_way.get(rivals.get(way, ""), [])
        best = 100 * max(entry[metric] for entry in found)
        row = [way, str(len(found)), *(f"{_sum(found, name):.1f}" for name in ("seconds", "cpu_seconds", "units"))]
        row += [rivals.get(way, ""), *(_ratio(found, rival, name) for name in ("cpu_seconds", "units"))]
        row += [f"{best:.1f}", f"{100 * statistics.mean(entry[metric] for entry in found):.1f}"]
        row += [f"{best - 100 * max(entry[metric] for entry in rival):+.1f}" if rival else ""]
        print("| " + " | ".join(row) + " |")


def _sum(entries: list[dict[str, Any]], name: str) -> float:
    return sum(float(entry[name]) for entry in entries)


def _ratio(entries: list[dict[str, Any]], rivals: list[dict[str, Any]], name: str) -> str:
    return f"1/{_sum(rivals, name) / _sum(entries, name):.2f}" if len(entries) == len(rivals) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines, which is continued")
    parser.add_argument("--report", action="store_true", help="print the totals in the file, and train nothing")
    parser.add_argument("--model", help="a folder with a BERT's weights and tokenizer")
    parser.add_argument("--data", type=Path, default=Path("data/sst2"))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--frozen", type=int, default=4)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-4, 2e-4, 4e-4, 8e-4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--cpu", action="store_true", help="train on the CPU although there is an accelerator")
    options = parser.parse_args()
    done = [json.loads(line) for line in options.output.open()] if options.output.exists() else []
    if not options.report:
        if options.model is None:
            parser.error("--model is missing (docs/benchmarks.md says where there is one)")
        torch.set_num_threads(1)
        known = {(entry["way"], entry["rate"], entry["seed"]) for entry in done}
        task = sst2(options.model, options.data, options.samples, seed=0)
        with tempfile.TemporaryDirectory() as folder:
            for (rate, seed), way in product(product(options.rates, options.seeds), options.ways):
                if (way, rate, seed) not in known:
                    done.append(run_trial(task, way, rate, seed, options, Path(folder, way)))
                    with options.output.open("a") as file:
                        file.write(json.dumps(done[-1]) + "\n")
    report(done)


if __name__ == "__main__":
    main()
