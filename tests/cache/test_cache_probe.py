"""Models with frozen layers that may be cached. The probe leaves no trace."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from model_zoo import MODELS
from selection import few
from torch import Tensor, nn

from hf_pipetransformer.model.frozen_prefix import FreezableLayers
from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.parts.prefix_cache.cache.cache_probe import CacheVerdict, Trial, probe_boundaries

Sample = dict[str, Any]
Collate = Callable[[list[Sample]], dict[str, Any]]

LENGTHS, ALIKE = (7, 3, 9, 5), (6, 6, 6, 6)


# ------------------------------------------------------------------------------------ Samples, and batches of them


def text(lengths: Sequence[int] = LENGTHS, *, label_tokens: bool = False) -> list[Sample]:
    """Sentences with a class each, or with a label for each token."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for row, length in enumerate(lengths):
        ids = torch.randint(5, 59, (length,), generator=generator)
        samples.append({"input_ids": ids, "labels": ids if label_tokens else torch.tensor(row % 2)})
    return samples


def images() -> list[Sample]:
    batch = MODELS["vit"].batch(rows=4)
    return [{name: value[row] for name, value in batch.items()} for row in range(4)]


def padding(side: str = "right") -> Collate:
    """A collator that pads to the longest row of the batch."""

    def column(values: list[Tensor], fill: int) -> Tensor:
        if values[0].dim() == 1:
            padded = [torch.full((max(map(len, values)) - len(value),), fill) for value in values]
            pairs = zip(values, padded, strict=True)
            values = [torch.cat(pair if side == "right" else pair[::-1]) for pair in pairs]
        return torch.stack(values)

    def collate(samples: list[Sample]) -> dict[str, Any]:
        batch = {
            name: column([sample[name] for sample in samples], -100 if name == "labels" else 0) for name in samples[0]
        }
        if "input_ids" in batch:
            batch["attention_mask"] = column([torch.ones_like(sample["input_ids"]) for sample in samples], 0)
        return batch

    return collate


@dataclasses.dataclass
class Case:
    """A model and samples to probe; `change` alters the layers after they have been found."""

    model: nn.Module
    samples: list[Sample] = dataclasses.field(default_factory=text)
    collate: Collate = dataclasses.field(default_factory=padding)
    loss_of: Callable[[dict[str, Any]], Tensor] | None = None
    change: Callable[[LayerStack], None] = lambda stack: None

    def probe(self) -> tuple[CacheVerdict, ...]:
        return self.trial().verdicts

    def trial(self) -> Trial:
        batch = self.collate([dict(sample) for sample in self.samples[:2]])
        stack = LayerStack.discover(self.model, batch)
        freezable = FreezableLayers.of(stack, batch)
        self.change(stack)
        given = {"loss_of": self.loss_of} if self.loss_of else {}
        trial = probe_boundaries(stack, freezable, self.samples, self.collate, **given)
        assert [verdict.num_frozen for verdict in trial.verdicts] == list(range(1, len(trial.verdicts) + 1))
        assert all((verdict.slot is None) == (verdict.reason is not None) for verdict in trial.verdicts)
        return trial


def zoo(name: str, **parts: Any) -> Case:
    if "samples" not in parts:
        batch = MODELS[name].batch()
        parts["samples"] = images() if "pixel_values" in batch else text(label_tokens=batch["labels"].dim() == 2)
    return Case(MODELS[name].build(), **parts)


def accepted(verdicts: Sequence[CacheVerdict]) -> list[int]:
    return [verdict.num_frozen for verdict in verdicts if verdict.reason is None]


# ------------------------------------------------------------------------------------ Accepted models

MODELS_THAT_ARE_SOUND = (
    "roberta",
    "deberta-v2",
    "modernbert",
    "albert",  # its one layer freezes with the first unit, for all of them
    "gpt2-classification",
    "llama-tied",  # the head freezes with the embeddings
    "mixtral",
    "mamba",
    "vit",
    "swin",
    "convnext",
)


@pytest.mark.parametrize("name", few(MODELS_THAT_ARE_SOUND, "roberta", "llama-tied", "mixtral", "vit"))
def test_sound_models_are_accepted(name: str) -> None:
    verdicts = zoo(name).probe()
    assert [verdict.reason for verdict in verdicts] == [None] * len(verdicts)


def answers() -> Case:
    """The loss of question answering is over padding: the positions of an answer compete with it."""
    place = torch.tensor(1)
    samples = [{"input_ids": row["input_ids"], "start_positions": place, "end_positions": place} for row in text()]
    return zoo("bert-question-answering", samples=samples)


ACCEPTED: dict[str, Callable[[], Case]] = {
    "samples of one length": lambda: zoo("roberta", samples=text(ALIKE)),
    "one sample": lambda: zoo("bert-classification", samples=text((7,))),
    "padding on the left that nobody reads": lambda: zoo("llama-classification", collate=padding("left")),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    verdicts = ACCEPTED[name]().probe()
    assert [verdict.reason for verdict in verdicts] == [None] * len(verdicts)
    assert all(verdict.padded_left == ("on the left" in name) for verdict in verdicts)


def test_of_an_encoder_decoder_the_encoder_is_accepted_where_one_tensor_leaves_it() -> None:
    """T5's layers also hand on their position bias; its decoder does not take the encoder's."""
    verdicts = zoo("t5").probe()
    assert accepted(verdicts) == [3]
    assert all(re.search(r"[24] tensors are read above the frozen layers", v.reason or "") for v in verdicts[3:5])
    assert LABELS in (verdicts[5].reason or "")


# ------------------------------------------------------------------------------------ Refused models


def drop_always(hidden: Tensor) -> Tensor:
    return nn.functional.dropout(hidden, 0.5, training=True)


def third(change: Callable[[Tensor], Tensor]) -> Case:
    """A model with four layers; `change` is applied to an output in the third one."""

    def hook(stack: LayerStack) -> None:
        output = stack.units[2].module.attention.output
        output.register_forward_hook(lambda module, inputs, hidden: change(hidden))

    return zoo("bert-classification", change=hook)


def with_mixed_inputs() -> Case:
    """A loss that mixes the inputs before the model sees them, as mixup does."""
    case = zoo("bert-classification")
    case.loss_of = lambda batch: case.model(**{**batch, "input_ids": batch["input_ids"].flip(0)}).loss
    return case


PADDING, LENGTH = "padding, random numbers, a call counter", "hidden state depends on the padded length"
LOSS = "the loss differs"
LABELS = "labels or a decoder's inputs change the hidden state"

REFUSED: dict[str, tuple[Callable[[], Case], str]] = {
    "another order of dimensions": (lambda: zoo("xlnet"), r"shape \[9, 4, 16\], not \[4 samples, 9 tokens"),
    "left, absolute positions": (lambda: zoo("bert-classification", collate=padding("left")), LENGTH),
    "multiplies by the length": (lambda: third(lambda hidden: hidden * hidden.shape[1]), LENGTH),
    "draws": (lambda: third(drop_always), "random numbers, a call counter or training mode change"),
    "other samples": (lambda: third(lambda hidden: hidden - hidden[:, :1].mean(0)), "on the other samples in"),
    "averages tokens": (lambda: third(lambda hidden: hidden + hidden.mean(1, keepdim=True)), PADDING),
    "a loss over padding": (answers, LOSS),
    "a loss of mixed inputs": (with_mixed_inputs, ""),
}
ACCEPTED_BELOW = ("multiplies by the length", "other samples")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Every number of frozen layers is refused, or, for `ACCEPTED_BELOW`, three and more."""
    build, reason = REFUSED[name]
    verdicts = build().probe()
    if name in ACCEPTED_BELOW:
        assert accepted(verdicts) == [1, 2]
    for verdict in verdicts[2 * (name in ACCEPTED_BELOW) :]:
        if verdict.num_frozen > 2 or name != "draws":
            assert verdict.reason and re.search(reason, verdict.reason), f"{verdict.num_frozen}: {verdict.reason}"


# ------------------------------------------------------------------------------------ The contents of the key


def test_images_beside_text_are_kept_by_the_images_alone() -> None:
    """Only the model knows the image of each text, but the vision tower reads no text."""
    batch = MODELS["clip"].batch(rows=4)
    samples = [{name: batch[name][row] for name in ("input_ids", "pixel_values")} for row in range(4)]
    trial = zoo("clip", samples=samples).trial()
    assert accepted(trial.verdicts) == [1, 2, 3]
    assert trial.unread == {"input_ids", "attention_mask"}
