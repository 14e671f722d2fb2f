"""Users' data sets, samplers, collators and evaluations."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, Sampler

from ..kit import Classifier, Job, built, case, pad, texts


class Curriculum(Sampler):
    """Samples from short to long in the first epoch, at random in later ones."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = sorted(range(len(self.rows)), key=lambda i: len(self.rows[i]["input_ids"]))
        if self.epoch:
            random.Random(self.epoch).shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return len(self.rows)


class WithCurriculum:
    def _get_train_sampler(self, *_: Any) -> Any:
        return Curriculum(self.train_dataset.rows)  # type: ignore[attr-defined]


@case("sampler", layouts=("K2", "DP2"))
def curriculum_sampler_with_set_epoch() -> Job:
    """By length in the first epoch, shuffled by the epoch's number later."""
    return Job(trainer=WithCurriculum)


class CountsAccess(Dataset):
    """Each access to a sample gives its next word as the first."""

    def __init__(self) -> None:
        self.rows = texts().rows
        self.seen: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, seen = self.rows[index], self.seen.get(index, 0)
        self.seen[index] = seen + 1
        words = row["input_ids"]
        return {**row, "input_ids": words[seen % len(words) :] + words[: seen % len(words)]}


@case("sampler", layouts=("one", "K2"))
def data_set_that_counts_its_accesses() -> Job:
    """A sample depends on how often it was read, and the checks before training read it too."""
    return Job(data=CountsAccess())


def without_repeats(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows with the same first word are kept once."""
    return pad(list({row["input_ids"][0] % 9: row for row in rows}.values()))


@case("collator", layouts=("K2",))
def collator_that_drops_rows() -> Job:
    """Fewer rows than samples, another number in each batch."""
    return Job(collator=without_repeats)


def with_strings(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {**pad(rows), "text": [" ".join(map(str, row["input_ids"])) for row in rows], "origin": "here"}


class PopsStrings:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        strings, labels = inputs.pop("text"), inputs.pop("labels")
        inputs.pop("origin")
        outputs = model(**inputs)
        lengths = torch.tensor([1.0 + len(text.split()) / 4 for text in strings])
        loss = (F.cross_entropy(outputs["logits"], labels, reduction="none") * lengths).mean()
        return (loss, outputs) if return_outputs else loss


@case("collator", layouts=("K2", "one", "DP2", "K2 acc2"), expect="equal")
def strings_in_the_batch() -> Job:
    """A list of strings and a string; the loss weighs rows by them."""
    options = {"remove_unused_columns": False}
    return Job(model=built(Classifier), collator=with_strings, trainer=PopsStrings, options=options)


class EightFeatures(Classifier):
    """Adds a bias for each of eight features of the batch, for any number of rows."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None, bias: Any = None
    ) -> dict[str, Tensor]:
        self.factor = 1.0 + bias.float().mean() if bias is not None else 1.0
        return super().forward(input_ids, attention_mask, labels)

    def score(self, features: Tensor) -> Tensor:
        return super().score(features) * self.factor


def with_eight_numbers(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {**pad(rows), "bias": torch.arange(8) / 8}


@case("collator", layouts=("K2", "DP2", "K2 acc2"))
def table_with_as_many_entries_as_rows() -> Job:
    """A tensor of eight numbers for the whole batch of eight rows; the head reads it."""
    return Job(model=built(EightFeatures), collator=with_eight_numbers, options={"remove_unused_columns": False})


class Nested(Classifier):
    def forward(self, text: dict[str, Tensor], labels: Tensor | None = None) -> dict[str, Tensor]:
        return super().forward(text["input_ids"], text["attention_mask"], labels)


def nested_pad(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = pad(rows)
    return {"text": {k: batch[k] for k in ("input_ids", "attention_mask")}, "labels": batch["labels"]}


@case("collator", layouts=("one", "DP2", "K2", "one acc2"))
def nested_dicts_in_a_batch() -> Job:
    """`{"text": {...}, "labels": ...}`."""
    return Job(model=built(Nested), collator=nested_pad, options={"remove_unused_columns": False})
