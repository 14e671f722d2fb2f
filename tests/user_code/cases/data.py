"""Users' data sets, samplers, collators and evaluations."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, Sampler, WeightedRandomSampler
from transformers import BatchEncoding

from ..kit import (
    PAD,
    Classifier,
    Job,
    Setting,
    built,
    case,
    pad,
    texts,
)

# ---------------------------------------------------------------------------------------------------------
# Samplers and data sets
# ---------------------------------------------------------------------------------------------------------


class Weighted:
    def _get_train_sampler(self, *_: Any) -> Any:
        weights = [1.0 + 5.0 * row["labels"] for row in self.train_dataset.rows]  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(11)
        return WeightedRandomSampler(weights, len(weights), generator=generator)


@case("sampler", layouts=("K2", "DP2", "K2 acc2"), expect="equal")
def weighted_random_sampler(setting: Setting) -> Job:
    """`_get_train_sampler` returns a `WeightedRandomSampler` with a generator of its own."""
    return Job(trainer=Weighted)


class Curriculum(Sampler):
    """From short to long; later ones at random."""

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
def curriculum_sampler_with_set_epoch(setting: Setting) -> Job:
    """By length in the first epoch, shuffled by the epoch's number later."""
    return Job(trainer=WithCurriculum)


class Augments(Dataset):
    """Loses a word of each sample, by a generator of its own."""

    def __init__(self) -> None:
        self.rows, self.generator = texts().rows, random.Random()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        words = list(row["input_ids"])
        words[self.generator.randrange(len(words))] = 7
        return {**row, "input_ids": words}


@case("sampler", replays=True)
def augmentation_with_the_data_sets_generator(setting: Setting) -> Job:
    """`random.Random()` in `__getitem__`."""
    return Job(data=Augments())


class AugmentsGlobally(Augments):
    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        words = list(row["input_ids"])
        words[int(torch.randint(len(words), ()))] = random.randrange(5, 48)
        return {**row, "input_ids": words}


@case("sampler", replays=True, expect="equal")
def augmentation_with_global_generators(setting: Setting) -> Job:
    """`random` and `torch.randint` in `__getitem__`."""
    return Job(data=AugmentsGlobally())


class CountsAccess(Augments):
    """Each access to a sample gives its next word as the first."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, int] = {}

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, seen = self.rows[index], self.seen.get(index, 0)
        self.seen[index] = seen + 1
        words = row["input_ids"]
        return {**row, "input_ids": words[seen % len(words) :] + words[: seen % len(words)]}


@case("sampler", layouts=("one", "K2"))
def data_set_that_counts_its_accesses(setting: Setting) -> Job:
    """What a sample is depends on how often it was read; examinations read it, too."""
    return Job(data=CountsAccess())


# ---------------------------------------------------------------------------------------------------------
# Collators
# ---------------------------------------------------------------------------------------------------------


def without_repeats(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows with the same first word are kept once."""
    return pad(list({row["input_ids"][0] % 9: row for row in rows}.values()))


@case("collator", layouts=("K2",))
def collator_that_drops_rows(setting: Setting) -> Job:
    """Fewer rows than samples, another number in each batch."""
    return Job(collator=without_repeats)


@case("collator", layouts=("K2", "DP2"), expect="equal")
def batch_encoding(setting: Setting) -> Job:
    """The collator returns a tokenizer's `BatchEncoding`."""
    return Job(collator=lambda rows: BatchEncoding(pad(rows)))


class TakesAll(Classifier):
    """Looks at whatever a collator has put into a batch."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None, **extra: Any
    ) -> dict[str, Tensor]:
        features = self.features(input_ids, attention_mask)
        logits = self.head(features)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels, weight=extra.get("weight")), "logits": logits}


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
def strings_in_the_batch(setting: Setting) -> Job:
    """A list of strings and a string; the loss weighs rows by them."""
    return Job(
        model=built(TakesAll), collator=with_strings, trainer=PopsStrings, options={"remove_unused_columns": False}
    )


class EightFeatures(Classifier):
    """Adds a bias for each of eight features of the batch, whatever the number of rows."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None, bias: Any = None
    ) -> dict[str, Tensor]:
        features = self.features(input_ids, attention_mask)
        logits = self.head(features) * (1.0 + bias.float().mean() if bias is not None else 1.0)
        return (
            {"loss": F.cross_entropy(logits, labels), "logits": logits} if labels is not None else {"logits": logits}
        )


def with_eight_numbers(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {**pad(rows), "bias": torch.arange(8) / 8}


@case("collator", layouts=("K2", "DP2", "K2 acc2"))
def table_with_as_many_entries_as_rows(setting: Setting) -> Job:
    """A tensor of eight numbers that belongs to the batch, in a batch of eight rows."""
    return Job(model=built(EightFeatures), collator=with_eight_numbers, options={"remove_unused_columns": False})


class ManyDocuments(Classifier):
    """Rows of variable numbers of documents, flat in one tensor, with their owners."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, owner: Tensor, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        features = self.features(input_ids, attention_mask)
        count = int(owner.max()) + 1
        pooled = torch.zeros(count, features.shape[1]).index_add(0, owner, features)
        logits = self.head(pooled)
        return (
            {"loss": F.cross_entropy(logits, labels), "logits": logits} if labels is not None else {"logits": logits}
        )


def flat_documents(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    documents, owner = [], []
    for number, row in enumerate(rows):
        for _ in range(1 + row["input_ids"][0] % 2):
            documents.append({"input_ids": row["input_ids"]})
            owner.append(number)
    return {**pad(documents), "owner": torch.tensor(owner), "labels": torch.tensor([row["labels"] for row in rows])}


@case("collator", layouts=("K2", "one", "DP2", "one acc2"))
def documents_of_rows_in_one_flat_tensor(setting: Setting) -> Job:
    """More rows of words than labels, and indices between them."""
    return Job(model=built(ManyDocuments), collator=flat_documents, options={"remove_unused_columns": False})


def left_padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([[PAD] * (longest - len(row["input_ids"])) + row["input_ids"] for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": ids.ne(PAD).long(),
        "position_ids": (ids.ne(PAD).cumsum(1) - 1).clamp(min=0),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


@case("collator", layouts=("K2", "one cache"), expect="equal")
def padding_on_the_left(setting: Setting) -> Job:
    """With positions of its own."""
    return Job(collator=left_padded, options={"num_train_epochs": 4})


# ---------------------------------------------------------------------------------------------------------
# Evaluation while training
# ---------------------------------------------------------------------------------------------------------


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}


def best_class(logits: Any, labels: Tensor) -> Tensor:
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.argmax(-1)


@case("trainer override", layouts=("K2", "DP2", "K2 freeze"), expect="equal")
def metrics_of_preprocessed_logits(setting: Setting) -> Job:
    """`compute_metrics` with `preprocess_logits_for_metrics`, at each epoch."""
    keywords = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": best_class}
    return Job(evaluated=texts(12, seed=9), keywords=keywords, options={"eval_strategy": "epoch"})


@case("trainer override", layouts=("K2", "DP2"), expect="equal")
def several_evaluation_sets(setting: Setting) -> Job:
    """`eval_dataset={"a": ..., "b": ...}`."""
    evaluated = {"a": texts(6, seed=9), "b": texts(9, seed=10)}
    return Job(evaluated=evaluated, options={"eval_strategy": "epoch", "per_device_eval_batch_size": 1})


class OwnPrediction:
    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        labels = inputs["labels"]
        with torch.no_grad():
            outputs = model(**inputs)
        return outputs.loss.detach(), outputs.logits.argmax(-1), labels


@case("trainer override", layouts=("one", "DP2", "K2"))
def own_prediction_step(setting: Setting) -> Job:
    """`prediction_step` that calls the model itself."""
    options = {"eval_strategy": "epoch"}
    return Job(
        trainer=OwnPrediction, evaluated=texts(12, seed=9), keywords={"compute_metrics": accuracy}, options=options
    )
