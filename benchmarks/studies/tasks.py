"""The studies' tasks: a model, data and a metric for each."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    ViTConfig,
    ViTForImageClassification,
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
        metric: name of the reported metric.
        compute_loss: the trainer's method, where the model's own loss is not used.
        options: arguments of the training, besides those that all tasks share.
    """

    build_model: Callable[[], nn.Module]
    train: Any
    validation: Any
    collate: Callable[[Rows], dict[str, Any]]
    compute_metrics: Callable[[Any], dict[str, float]]
    metric: str
    compute_loss: Callable[..., Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def sst2(model: str, folder: Path, samples: int, seed: int, from_config: bool = False) -> Task:
    """Sentences: `train.jsonl` and `validation.jsonl` with "sentence" and "label"."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def rows(name: str, most: int | None) -> Rows:
        lines = _lines(folder / name, most, seed)
        encoded = tokenizer([line["sentence"] for line in lines], truncation=True, max_length=64)["input_ids"]
        return [{"input_ids": ids, "label": line["label"]} for ids, line in zip(encoded, lines, strict=True)]

    return Task(
        lambda: _load(AutoModelForSequenceClassification, model, from_config, num_labels=2),
        rows("train.jsonl", samples),
        rows("validation.jsonl", None),
        DataCollatorWithPadding(tokenizer),
        _accuracy,
        "accuracy",
        options={"learning_rate": 5e-5},
    )


SQUAD_TOKENS, SQUAD_SHARED = 192, 64
"""Of a window, and those that neighbouring windows share."""


def squad(model: str, folder: Path, samples: int, seed: int, from_config: bool = False) -> Task:
    """Questions: `train.jsonl` and `validation.jsonl` with SQuAD 1.1's columns, as `recipes/run_qa.py` trains on them.

    Texts are cut into overlapping windows. Padding is left out of the loss: frozen layers' outputs can then be cached.
    The metric is SQuAD's own F1, in percent, over the words of the best answer. Questions without an answer, as SQuAD
    2.0 has them, are left out.
    """
    sys.path.append(str(Path(__file__).parents[2] / "recipes"))
    from datasets import Dataset

    from answers import choose_answer, squad_metrics
    from run_qa import DataTrainingArguments, PaddingMaskedTrainer, answer_all, make_windows

    tokenizer = AutoTokenizer.from_pretrained(model)
    files = {f"{name}_file": str(folder / f"{name}.jsonl") for name in ("train", "validation")}
    settings = DataTrainingArguments(
        **files, max_seq_length=SQUAD_TOKENS, doc_stride=SQUAD_SHARED, pad_to_max_length=False, mask_padding=True
    )

    def read(name: str, most: int | None) -> tuple[Dataset, Dataset]:
        lines = [line for line in _lines(folder / f"{name}.jsonl", None, seed) if line["answers"]["text"]]
        questions = Dataset.from_list(lines[:most])
        return questions, make_windows(questions, tokenizer, settings, f"Cutting {name}")

    questions, windows = read("validation", None)

    def compute_metrics(prediction: Any) -> dict[str, float]:
        found = answer_all(questions, windows, prediction.predictions, settings.rules)
        chosen = [choose_answer(found[str(question["id"])], settings.rules) for question in questions]
        return squad_metrics(chosen, [question["answers"]["text"] for question in questions])

    return Task(
        lambda: _load(AutoModelForQuestionAnswering, model, from_config),
        read("train", samples)[1].remove_columns(["example", "offsets"]),
        windows,
        DataCollatorWithPadding(tokenizer),
        compute_metrics,
        "f1",
        PaddingMaskedTrainer.compute_loss,
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
        patch_size=2,
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
        options={"learning_rate": 1e-3, "warmup_steps": 45},
    )


def _lines(path: Path, most: int | None, seed: int) -> Rows:
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    random.Random(seed).shuffle(lines)  # files are often sorted by label
    return lines[:most]


def _accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def _load(cls: Any, model: str, from_config: bool, **changes: Any) -> nn.Module:
    """A model of its weights, or of its shape alone."""
    if from_config:
        return cls.from_config(AutoConfig.from_pretrained(model, **changes))
    return cls.from_pretrained(model, **changes)


# ---------------------------------------------------------------------------------------------------------
# Requests: 50 intents; half of them name a second, unwanted one. Pairs of wordings of an intent and a day
# ---------------------------------------------------------------------------------------------------------
ACTIONS = (
    ("cancel", "call off", "get rid of", "end", "drop"),
    ("book", "reserve", "order", "get me", "arrange"),
    ("change", "move", "modify", "rearrange", "switch"),
    ("check the status of", "find out about", "look up", "tell me about", "track"),
    ("pay for", "settle the bill for", "transfer the money for", "cover the cost of", "put on my card"),
)
OBJECTS = (
    ("the flight", "my plane ticket", "the trip by air"),
    ("the hotel room", "my accommodation", "the overnight stay"),
    ("the phone contract", "my mobile plan", "the SIM subscription"),
    ("the parcel", "my package", "the delivery"),
    ("the gym membership", "my fitness club", "the training pass"),
    ("the concert ticket", "my seat at the show", "the gig"),
    ("the rental car", "my hired vehicle", "the van I rent"),
    ("the doctor's appointment", "my visit to the physician", "the medical check"),
    ("the insurance", "my policy", "the coverage"),
    ("the restaurant table", "my dinner reservation", "the lunch for two"),
)
BEFORE = (
    "please",
    "hello,",
    "could you",
    "I would like to",
    "it is urgent:",
    "hi there, can you",
    "my wish is to",
    "",
)
UNWANTED = (
    "I do not want to {other}, I want to {wanted}",
    "{wanted}, but do not {other}",
    "instead of having to {other}, {wanted}",
    "never mind what I said about wanting to {other}; {wanted}",
    "{wanted} and leave it to others to {other}",
)
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October")


class Requests:
    """Draws requests."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def intent(self) -> tuple[int, int]:
        return self.random.randrange(len(ACTIONS)), self.random.randrange(len(OBJECTS))

    def clause(self, intent: tuple[int, int]) -> str:
        action, thing = intent
        return f"{self.random.choice(ACTIONS[action])} {self.random.choice(OBJECTS[thing])}"

    def text(self, intent: tuple[int, int], unwanted: float = 0.5) -> str:
        wanted = self.clause(intent)
        if self.random.random() < unwanted:
            other = self.intent()
            while other == intent:
                other = self.intent()
            wanted = self.random.choice(UNWANTED).format(wanted=wanted, other=self.clause(other))
        return f"{self.random.choice(BEFORE)} {wanted}".strip()

    def pair(self) -> tuple[str, str]:
        """Two wordings of an intent and a day."""
        intent, day, month = self.intent(), self.random.randint(1, 28), self.random.randrange(len(MONTHS))
        first = f"{self.text(intent)}, {day} {MONTHS[month]}"
        return first, f"{self.clause(intent)} on {month + 1:02d}/{day:02d}"
