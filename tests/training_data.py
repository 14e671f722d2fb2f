"""Small deterministic data sets and collators for tests with a Trainer.

    data = TrainingData("text-classification", 32)
    model = MODELS[ZOO_MODEL["text-classification"]].build()
    Trainer(model, arguments, train_dataset=data, data_collator=PadCollator("text-classification"))

Sample i depends on the seed and on i alone. Each is a dict of plain Python values with a column "idx" that no model
reads, as real data sets have. Text is 5 to 24 tokens long, and a batch is padded to its longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from model_zoo import EOS, FIRST_WORD, LABELS, LAST_WORD, PAD
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, get_worker_info

Kind = Literal["text-classification", "causal-lm", "seq2seq", "image-classification", "question-answering"]

# For each kind of data, a model of the zoo that reads it.
ZOO_MODEL: dict[Kind, str] = {
    "text-classification": "bert-classification",
    "causal-lm": "llama-tied",
    "seq2seq": "t5",
    "image-classification": "vit",
    "question-answering": "bert-question-answering",
}
SHORTEST, LONGEST = 5, 24
IGNORED = -100  # the label that no loss counts


class TrainingData(Dataset):
    """Generated samples with labels that follow from their inputs, so a loss can fall.

    Args:
        kind: Task of the samples.
        size: Number of samples.
        seed: Other seeds give other samples.
    """

    def __init__(self, kind: Kind, size: int, seed: int = 0) -> None:
        self.kind, self.size, self.seed = kind, size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + index)
        return {**_SAMPLE_MAKERS[self.kind](generator), "idx": index}


class StreamedData(IterableDataset):
    """The same samples without a length and without random access, in the same order every epoch.

    Workers of a data loader take turns, as with a streamed file: each sample comes once.
    """

    def __init__(self, kind: Kind, size: int, seed: int = 0) -> None:
        self.samples = TrainingData(kind, size, seed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (self.samples[index] for index in range(first, len(self.samples), step))


class PadCollator:
    """Makes a batch of samples of one kind. It is an object because data loader workers receive it by pickle."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if self.kind == "image-classification":
            return {name: torch.tensor([s[name] for s in samples]) for name in ("pixel_values", "labels")}
        # The softmax of question answering runs over all positions, so its loss depends on the length of the padding:
        # it is fixed, as it is in practice.
        length = LONGEST if self.kind == "question-answering" else 0
        input_ids = _padded([s["input_ids"] for s in samples], PAD, length)
        attention_mask = _padded([[1] * len(s["input_ids"]) for s in samples], 0, length)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.kind in ("causal-lm", "seq2seq"):
            return {**batch, "labels": _padded([s["labels"] for s in samples], IGNORED)}
        answers = ("labels",) if self.kind == "text-classification" else ("start_positions", "end_positions")
        return {**batch, **{name: torch.tensor([s[name] for s in samples]) for name in answers}}


def _padded(rows: list[list[int]], filler: int, length: int = 0) -> torch.Tensor:
    """Pad to the longest row, or to `length` if that is more."""
    padded = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=filler)
    return torch.nn.functional.pad(padded, (0, max(0, length - padded.shape[1])), value=filler)


def _integer(generator: torch.Generator, low: int, high: int) -> int:
    """A number from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def _words(generator: torch.Generator) -> list[int]:
    length = _integer(generator, SHORTEST, LONGEST)
    return torch.randint(FIRST_WORD, LAST_WORD + 1, (length,), generator=generator).tolist()


def _text_classification(generator: torch.Generator) -> dict[str, Any]:
    words = _words(generator)
    return {"input_ids": words, "labels": words[0] % LABELS}


def _causal_lm(generator: torch.Generator) -> dict[str, Any]:
    words = _words(generator)
    return {"input_ids": words, "labels": words}


def _seq2seq(generator: torch.Generator) -> dict[str, Any]:
    """The target is the first half of the source."""
    words = _words(generator)
    return {"input_ids": [*words, EOS], "labels": [*words[: len(words) // 2], EOS]}


def _image_classification(generator: torch.Generator) -> dict[str, Any]:
    label = _integer(generator, 0, LABELS - 1)
    pixels = torch.randn(3, 16, 16, generator=generator) + label
    return {"pixel_values": pixels.tolist(), "labels": label}


def _question_answering(generator: torch.Generator) -> dict[str, Any]:
    words = _words(generator)
    start = _integer(generator, 1, len(words) - 2)
    end = _integer(generator, start, len(words) - 1)
    return {"input_ids": words, "start_positions": start, "end_positions": end}


_SAMPLE_MAKERS = {
    "text-classification": _text_classification,
    "causal-lm": _causal_lm,
    "seq2seq": _seq2seq,
    "image-classification": _image_classification,
    "question-answering": _question_answering,
}
