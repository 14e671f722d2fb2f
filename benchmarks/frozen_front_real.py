"""A new head on a pretrained model, and a model whose lower half is frozen: the stock Trainer beside ours.

    OMP_NUM_THREADS=1 python benchmarks/frozen_front_real.py sst2 --model MODEL --data SST2 [--out results.json]
    OMP_NUM_THREADS=1 python benchmarks/frozen_front_real.py digits [--out results.json]

sst2     a new head on a sentence encoder (MiniLM, 6 layers); batches are padded to their longest sentence
digits   a ViT (8 layers) trained for 12 epochs, then with its lower half frozen

MODEL is a folder with a BertModel and its tokenizer; SST2 has train.jsonl and validation.jsonl. Rates of dropout are
0 in what is frozen, so that both train the same thing. One process, fp32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

Rows = list[dict[str, Any]]
Task = tuple[Callable[[], nn.Module], Rows, Rows, Callable[[Rows], Any], dict[str, Any]]


class Clock(TrainerCallback):
    """Seconds of each epoch: of the clock, and of the CPU."""

    def __init__(self) -> None:
        self.began = 0.0, 0.0
        self.epochs: list[tuple[float, float]] = []

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter(), time.process_time()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.epochs.append((time.perf_counter() - self.began[0], time.process_time() - self.began[1]))


def fit(
    model: nn.Module, rows: Rows, held_out: Rows, collate: Callable[[Rows], Any], is_ours: bool, **options: Any
) -> dict[str, Any]:
    kinds: Any = (
        (PipeTransformerTrainer, PipeTransformerTrainingArguments) if is_ours else (Trainer, TrainingArguments)
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = kinds[1](
            folder, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no", **options
        )
        trainer = kinds[0](
            model,
            arguments,
            train_dataset=rows,
            eval_dataset=held_out,
            data_collator=collate,
            callbacks=[clock],
            compute_metrics=lambda found: {"accuracy": (found[0].argmax(-1) == found[1]).mean()},
        )
        trainer.train()
        accuracy = trainer.evaluate()["eval_accuracy"]
    return {"seconds": [s for s, _ in clock.epochs], "cpu_seconds": [c for _, c in clock.epochs], "accuracy": accuracy}


def sst2(
    args: argparse.Namespace,
) -> Task:
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def rows_of(name: str) -> Rows:
        found = [json.loads(line) for line in (Path(args.data) / f"{name}.jsonl").read_text().splitlines()]
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
        chosen = [found[number] for number in order[: args.samples]]
        return [{**tokenizer(row["sentence"], truncation=True), "labels": row["label"]} for row in chosen]

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(
            args.model, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.1
        )
        model.base_model.requires_grad_(False)
        model.bert.pooler.requires_grad_(True)
        return model

    options = {"per_device_train_batch_size": 32, "num_train_epochs": 5, "learning_rate": 2e-3}
    return build, rows_of("train"), rows_of("validation"), DataCollatorWithPadding(tokenizer), options


def digits(_: argparse.Namespace) -> Task:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images / 8 - 1, dtype=torch.float32)[:, None]
    rows = [{"pixel_values": image, "labels": int(label)} for image, label in zip(images, data.target, strict=True)]
    torch.manual_seed(0)
    rows = [rows[number] for number in torch.randperm(len(rows)).tolist()]
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=384,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    options = {"per_device_train_batch_size": 32, "num_train_epochs": 4, "learning_rate": 1e-3}
    first = ViTForImageClassification(config)
    fit(first, rows[:1400], rows[1400:], default_data_collator, is_ours=False, **{**options, "num_train_epochs": 12})
    weights = first.state_dict()

    def build() -> nn.Module:
        model = ViTForImageClassification(config)
        model.load_state_dict(weights)
        for module in (model.vit.embeddings, *model.vit.layers[:4]):
            module.requires_grad_(False)
        return model

    return build, rows[:1400], rows[1400:], default_data_collator, {**options, "num_train_epochs": 6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["sst2", "digits"])
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    build, rows, held_out, collate, options = {"sst2": sst2, "digits": digits}[args.task](args)
    found: dict[str, Any] = {}
    models = {name: build() for name in ("stock", "ours")}
    for name, model in models.items():
        torch.manual_seed(1)
        found[name] = fit(model, rows, held_out, collate, is_ours=name == "ours", **options)
    pairs = zip(models["stock"].parameters(), models["ours"].parameters(), strict=True)
    stock, ours = found["stock"]["cpu_seconds"], found["ours"]["cpu_seconds"]
    found |= {
        "largest difference of a weight": max(float((one - other).detach().abs().max()) for one, other in pairs),
        "first epoch, ours / stock": ours[0] / stock[0],
        "later epochs, stock / ours": sum(stock[1:]) / sum(ours[1:]),
        "all epochs, stock / ours": sum(stock) / sum(ours),
    }
    print(json.dumps(found, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
