"""Half of the layers frozen from the start and cached, with the library, beside plain training by stock Trainers.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.half_frozen --model "$MODEL" --turns 5 --out half.json

intents    50 intents of short requests, 10 samples of each; head and pooler at 25 times the rate
pairs      two wordings of a request and its date, 256 pairs; a contrastive loss, by sentence-transformers' trainer

One process. A turn is a seed. The held-out requests are the same for all seeds. Epochs and rates are those that were
best on a validation set at equal cost (an active layer 3, a frozen one 1, a cached one 0).
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from benchmarks import harness
from benchmarks.harness import Figures, Ratio
from benchmarks.studies.tasks import ACTIONS, OBJECTS, Requests
from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

HEAD_FACTOR, SCALE, POOL = 25, 20.0, 200
CLASSES = len(ACTIONS) * len(OBJECTS)
CASES = {
    "intents, plain": (4, 2e-4),
    "intents, half": (4.5, 4e-4),
    "pairs, plain": (8, 2e-4),
    "pairs, half": (9.5, 4e-4),
}
"""Epochs and learning rate."""


class SentenceTrainer(PipeTransformerTrainer, SentenceTransformerTrainer):
    """sentence-transformers' trainer with freezing and the cache."""


@dataclass
class SentenceArguments(SentenceTransformerTrainingArguments, PipeTransformerTrainingArguments):
    """The fields of both."""


def intents(options: dict[str, Any], is_half: bool, path: str) -> tuple[Trainer, Callable[[], float]]:
    """A trainer, and what tells the share of held-out requests that it gets right."""
    tokenizer = AutoTokenizer.from_pretrained(path)

    def rows(drawn: Requests, each: int) -> Dataset:
        labels = [k for k in range(CLASSES) for _ in range(each)]
        encoded = tokenizer([drawn.text(divmod(k, len(OBJECTS))) for k in labels], truncation=True, max_length=64)
        return Dataset.from_dict({**encoded, "labels": labels})

    torch.manual_seed(options["seed"])
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=CLASSES)
    head = {id(p) for name, p in model.named_parameters() if "pooler" in name or "classifier" in name}
    rate = options["learning_rate"]
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in head], "lr": rate},
        {"params": [p for p in model.parameters() if id(p) in head], "lr": rate * HEAD_FACTOR},
    ]
    kinds: Any = (
        (PipeTransformerTrainer, PipeTransformerTrainingArguments) if is_half else (Trainer, TrainingArguments)
    )
    trainer = kinds[0](
        model=model,
        args=kinds[1](**options),
        train_dataset=rows(Requests(options["seed"]), 10),
        data_collator=DataCollatorWithPadding(tokenizer),
        optimizers=(torch.optim.AdamW(groups, weight_decay=0.0), None),
    )

    def right() -> float:
        found = trainer.predict(rows(Requests(20_000), 16))
        return float((found.predictions.argmax(-1) == found.label_ids).mean())

    return trainer, right


def pairs(options: dict[str, Any], is_half: bool, path: str) -> tuple[Trainer, Callable[[], float]]:
    """A trainer, and a function for the share of held-out wordings that are nearest to their partner among 200."""

    def drawn(requests: Requests, count: int) -> Dataset:
        both = [requests.pair() for _ in range(count)]
        return Dataset.from_dict({"anchor": [a for a, _ in both], "positive": [b for _, b in both]})

    body = Transformer(path, max_seq_length=64)
    model = SentenceTransformer(modules=[body, Pooling(body.get_embedding_dimension()), Normalize()], device="cpu")
    kinds: Any = (SentenceTransformerTrainer, SentenceTransformerTrainingArguments)
    if is_half:
        kinds = SentenceTrainer, SentenceArguments
    trainer = kinds[0](
        model=model,
        args=kinds[1](**options, weight_decay=0.0),
        train_dataset=drawn(Requests(options["seed"]), 256),
        loss=MultipleNegativesRankingLoss(model, scale=SCALE),
    )

    def right() -> float:
        test, found = drawn(Requests(20_000), 5 * POOL), []
        anchors, positives = (
            model.encode(list(test[name]), convert_to_tensor=True, show_progress_bar=False)
            for name in ("anchor", "positive")
        )
        for first, second in zip(anchors.split(POOL), positives.split(POOL), strict=True):
            found += ((first @ second.t()).argmax(1).cpu() == torch.arange(len(first))).tolist()
        return sum(found) / len(found)

    return trainer, right


def measure(case: str, path: str, seeds: itertools.count[int]) -> Figures:
    """Train and test once. The times are of `train()`, with all probes and the cache."""
    (epochs, rate), (task, recipe) = CASES[case], case.split(", ")
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "output_dir": folder,
            "num_train_epochs": epochs,
            "learning_rate": rate,
            "per_device_train_batch_size": 16,
            "seed": next(seeds),
            "use_cpu": not torch.accelerator.is_available(),
            "save_strategy": "no",
            "logging_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        if recipe == "half":
            options |= {"freeze_policy": "schedule", "freeze_schedule": {"0": 0.5}, "activation_cache": "on"}
        trainer, right = {"intents": intents, "pairs": pairs}[task](options, recipe == "half", path)
        began, began_cpu = time.perf_counter(), time.process_time()
        trainer.train()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "accuracy": right()}


def main() -> None:
    """Train all cases and print the table."""
    parser = harness.parser_of(__doc__, turns=3)
    parser.add_argument("--model", required=True, help="a folder with a BERT's weights and tokenizer")
    options = harness.start(parser)
    cases = {name: partial(measure, name, options.model, itertools.count()) for name in CASES}
    turns = harness.take_turns(cases, options)
    for turn in turns:
        for task in ("intents", "pairs"):
            turn[f"{task}, half"]["points"] = 100 * (
                turn[f"{task}, half"]["accuracy"] - turn[f"{task}, plain"]["accuracy"]
            )
    ratio = Ratio("plain / it", "cpu_seconds", lambda name: name.split(", ")[0] + ", plain", is_speed_up=True)
    harness.report(options, turns, [ratio])


if __name__ == "__main__":
    main()
