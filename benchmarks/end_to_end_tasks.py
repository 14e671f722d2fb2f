"""What `end_to_end.py` trains: a model, data and a metric for each task."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """Everything that a Trainer needs besides its arguments.

    Attributes:
        build_model: a new model, with weights drawn after the seed has been set, or loaded.
        train, validation: samples.
        collate: makes a batch of them.
        compute_metrics: of a validation set.
        metric: name of the one that is reported.
        options: arguments of the training, besides those that all tasks share.
    """

    build_model: Callable[[], nn.Module]
    train: Rows
    validation: Rows
    collate: Callable[[Rows], dict[str, Any]]
    compute_metrics: Callable[[Any], dict[str, float]]
    metric: str
    options: dict[str, Any] = field(default_factory=dict)


def sst2(model: str, folder: Path, samples: int, seed: int) -> Task:
    """Sentences: `train.jsonl` and `validation.jsonl` with "sentence" and "label"."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def rows(name: str, most: int | None) -> Rows:
        lines = _lines(folder / name, most, seed)
        encoded = tokenizer([line["sentence"] for line in lines], truncation=True, max_length=64)["input_ids"]
        return [{"input_ids": ids, "label": line["label"]} for ids, line in zip(encoded, lines, strict=True)]

    return Task(
        lambda: AutoModelForSequenceClassification.from_pretrained(model, num_labels=2),
        rows("train.jsonl", samples),
        rows("validation.jsonl", None),
        DataCollatorWithPadding(tokenizer),
        _accuracy,
        "accuracy",
        {"learning_rate": 5e-5},
    )


SQUAD_TOKENS = 192


def squad(model: str, folder: Path, samples: int, seed: int) -> Task:
    """Questions: `train.jsonl` and `validation.jsonl` as SQuAD has them; those answered in the first 192 tokens.

    The metric is F1 over the tokens of the answer's span, which is a little stricter than F1 over its words. Nothing
    is cached, since the model's own loss reads padding.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)

    def rows(name: str, most: int | None) -> Rows:
        found: Rows = []
        for line in _lines(folder / name, None, seed):
            start = line["answers"]["answer_start"][0]
            stop = start + len(line["answers"]["text"][0])
            encoded = tokenizer(
                line["question"],
                line["context"],
                truncation="only_second",
                max_length=SQUAD_TOKENS,
                padding="max_length",  # a softmax over positions: its length must not depend on the batch
            )
            first, last = encoded.char_to_token(start, 1), encoded.char_to_token(stop - 1, 1)
            if first is not None and last is not None:
                found.append({**encoded, "start_positions": first, "end_positions": last})
        return found[:most]

    return Task(
        lambda: AutoModelForQuestionAnswering.from_pretrained(model),
        rows("train.jsonl", samples),
        rows("validation.jsonl", None),
        default_data_collator,
        _span_f1,
        "span F1",
        {"learning_rate": 1e-4},
    )


def digits(seed: int) -> Task:
    """scikit-learn's 1,797 images of 8 x 8, and a small ViT from scratch."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.RandomState(seed).permutation(len(data.target))
    samples: Rows = [
        {"pixel_values": (data.images[i][None] / 8 - 1).astype(np.float32), "labels": int(data.target[i])}
        for i in order
    ]
    config = ViTConfig(
        image_size=8,
        patch_size=1,
        num_channels=1,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )

    def collate(rows: Rows) -> dict[str, Any]:
        pixels = torch.from_numpy(np.stack([row["pixel_values"] for row in rows]))
        return {"pixel_values": pixels, "labels": torch.tensor([row["labels"] for row in rows])}

    return Task(
        lambda: ViTForImageClassification(config),
        samples[:1440],
        samples[1440:],
        collate,
        _accuracy,
        "accuracy",
        {"learning_rate": 1e-3, "warmup_steps": 45},
    )


def _lines(path: Path, most: int | None, seed: int) -> Rows:
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    random.Random(seed).shuffle(lines)  # files are often sorted by label
    return lines[:most]


def _accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def _span_f1(prediction: Any) -> dict[str, float]:
    starts, ends = (logits.argmax(-1) for logits in prediction.predictions[:2])
    scores = []
    for start, end, first, last in zip(starts, ends, *prediction.label_ids, strict=True):
        shared = min(end, last) - max(start, first) + 1
        scores.append(2 * shared / (end - start + 1 + last - first + 1) if shared > 0 else 0.0)
    return {"span F1": float(np.mean(scores))}
