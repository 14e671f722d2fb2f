"""Which models may have the states of their frozen layers kept, and that asking leaves no trace."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from model_zoo import DECODER, ENCODER, MODELS, without_dropout
from selection import few
from torch import Tensor, nn

from hf_pipetransformer.cache.cache_probe import CacheVerdict, Trial, probe_boundaries
from hf_pipetransformer.model.frozen_prefix import FreezableLayers
from hf_pipetransformer.model.layer_stack import LayerStack

Sample = dict[str, Any]
Collate = Callable[[list[Sample]], dict[str, Any]]

LENGTHS, ALIKE, LONG = (7, 3, 9, 5), (6, 6, 6, 6), (17, 13, 19, 15)


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


def padding(side: str = "right", *, dtype: torch.dtype = torch.float32) -> Collate:
    """A collator that pads to the longest row of the batch."""

    def column(values: list[Tensor], fill: int) -> Tensor:
        if values[0].dim() == 1:
            padded = [torch.full((max(map(len, values)) - len(value),), fill) for value in values]
            pairs = zip(values, padded, strict=True)
            values = [torch.cat(pair if side == "right" else pair[::-1]) for pair in pairs]
        stacked = torch.stack(values)
        return stacked.to(dtype) if stacked.is_floating_point() else stacked

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
    """What is probed; `change` is done to the layers when they have been found."""

    model: nn.Module
    samples: list[Sample] = dataclasses.field(default_factory=text)
    collate: Collate = dataclasses.field(default_factory=padding)
    loss_of: Callable[[dict[str, Any]], Tensor] | None = None
    change: Callable[[LayerStack], None] = lambda stack: None
    keeps_padding: bool = False

    def probe(self) -> tuple[CacheVerdict, ...]:
        return self.trial().verdicts

    def trial(self) -> Trial:
        batch = self.collate([dict(sample) for sample in self.samples[:2]])
        stack = LayerStack.discover(self.model, batch)
        freezable = FreezableLayers.of(stack, batch)
        self.change(stack)
        options: dict[str, Any] = {"keeps_padding": self.keeps_padding, "loss_of": self.loss_of}
        given = {name: value for name, value in options.items() if value}
        trial = probe_boundaries(stack, freezable, self.samples, self.collate, **given)
        assert [verdict.num_frozen for verdict in trial.verdicts] == list(range(1, len(trial.verdicts) + 1))
        assert all((verdict.slot is None) == (verdict.reason is not None) for verdict in trial.verdicts)
        return trial


def zoo(name: str, **parts: Any) -> Case:
    if "samples" not in parts:
        batch = MODELS[name].batch()
        parts["samples"] = images() if "pixel_values" in batch else text(label_tokens=batch["labels"].dim() == 2)
    return Case(MODELS[name].build(), **parts)


def in_bfloat16(name: str) -> Case:
    case = zoo(name, collate=padding(dtype=torch.bfloat16))
    case.model.to(torch.bfloat16)
    return case


def accepted(verdicts: Sequence[CacheVerdict]) -> list[int]:
    return [verdict.num_frozen for verdict in verdicts if verdict.reason is None]


def tiny(model_class: str, **sizes: Any) -> nn.Module:
    cls = getattr(hf, model_class)
    return without_dropout(cls(cls.config_class(**{**ENCODER, **sizes})))


# ------------------------------------------------------------------------------------ What is accepted

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


class LossAlone(nn.Module):
    """Three layers, of which short rows run `layers_for_short` only; it returns nothing but a loss."""

    def __init__(self, layers_for_short: int) -> None:
        super().__init__()
        self.words, self.layers_for_short = nn.Embedding(64, 8), layers_for_short
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.words(input_ids)
        for layer in self.layers[: 3 if input_ids.shape[1] > 4 else self.layers_for_short]:
            hidden = layer(hidden)
        first = hidden[torch.arange(len(hidden)), attention_mask.int().argmax(1)]
        return {"loss": nn.functional.cross_entropy(first, labels)}


def loss_alone(layers_for_short: int = 3) -> Case:
    model = LossAlone(layers_for_short)
    return Case(model, loss_of=lambda batch: model(**batch)["loss"])


def choices() -> Case:
    """Samples of several sequences: choices of an answer, padded to the longest one of the batch."""

    def collate(samples: list[Sample]) -> dict[str, Any]:
        flat = padding()([{"input_ids": choice} for sample in samples for choice in sample["choices"]])
        batch = {name: value.view(len(samples), 2, -1) for name, value in flat.items()}
        return {**batch, "labels": torch.tensor([sample["labels"] for sample in samples])}

    rows = [row["input_ids"] for row in text()]
    samples = [{"choices": [row, row.flip(0)[: len(row) - i % 2]], "labels": i % 2} for i, row in enumerate(rows)]
    return zoo("bert-multiple-choice", samples=samples, collate=collate)


def answers(to_length: int = 0, over_tokens: bool = False, keeps_padding: bool = False) -> Case:
    """The loss of question answering is over padding: the positions of an answer compete with it."""
    place = torch.tensor(1)
    samples = [{"input_ids": row["input_ids"], "start_positions": place, "end_positions": place} for row in text()]

    def collate(samples: list[Sample]) -> dict[str, Any]:
        batch = padding()(samples)
        missing = max(0, to_length - batch["input_ids"].shape[1])
        padded = {name: nn.functional.pad(batch[name], (0, missing)) for name in ("input_ids", "attention_mask")}
        return {**batch, **padded}

    case = zoo("bert-question-answering", samples=samples, collate=collate, keeps_padding=keeps_padding)
    if over_tokens:
        case.loss_of = lambda batch: case.model(**batch).start_logits[batch["attention_mask"].bool()].square().mean()
    return case


def without_labels(samples: list[Sample]) -> dict[str, Any]:
    """A collator may take the labels out of its samples."""
    labels = torch.stack([sample.pop("labels") for sample in samples])
    return {**padding()(samples), "labels": labels}


def write_into_input(stack: LayerStack) -> None:
    def double(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].mul_(2)

    stack.units[2].module.attention.register_forward_pre_hook(double)


ACCEPTED: dict[str, Callable[[], Case]] = {
    "a decoder in bfloat16": lambda: in_bfloat16("llama"),
    "samples of one length": lambda: zoo("roberta", samples=text(ALIKE)),
    "labels of one class": lambda: zoo("bert-classification", samples=with_labels(0, 0, 0, 0)),
    "samples of several sequences": choices,
    "one sample": lambda: zoo("bert-classification", samples=text((7,))),
    "padding on the left that nobody reads": lambda: zoo("llama-classification", collate=padding("left")),
    "padding in the loss, kept": lambda: answers(16, keeps_padding=True),
    "a loss over tokens": lambda: answers(over_tokens=True),
    "a model that returns a loss alone": loss_alone,
    "a layer that writes into its input": lambda: zoo("bert-classification", change=write_into_input),
    "a collator that changes its samples": lambda: zoo("bert-classification", collate=without_labels),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    verdicts = ACCEPTED[name]().probe()
    assert [verdict.reason for verdict in verdicts] == [None] * len(verdicts)
    assert all(verdict.padded_left == ("on the left" in name) for verdict in verdicts)


def test_the_rounding_of_autocast_is_no_reason() -> None:
    """States are in float32 there, and what computes them is not."""
    case = Case(tiny("BertForSequenceClassification", hidden_size=64), text((7, 3, 30, 12)))
    with torch.autocast("cpu", torch.bfloat16):
        verdicts = case.probe()
    assert accepted(verdicts) == [1, 2, 3, 4]


@pytest.mark.parametrize(("name", "numbers"), [("bart", [1, 2, 3]), ("t5", [3])])
def test_of_an_encoder_decoder_the_encoder_is_accepted_where_one_tensor_leaves_it(
    name: str, numbers: list[int]
) -> None:
    """T5's layers also hand on their position bias; its decoder does not take the encoder's."""
    verdicts = zoo(name).probe()
    assert accepted(verdicts) == numbers
    assert {(verdict.slot.stack, verdict.slot.position) for verdict in verdicts if verdict.slot} == {(0, 0)}
    assert all(re.search(r"[24] tensors are read above the frozen layers", v.reason or "") for v in verdicts[3:5])
    assert "labels or a decoder's inputs change the hidden state" in (verdicts[5].reason or "")


# ------------------------------------------------------------------------------------ What is refused


def drop_always(hidden: Tensor) -> Tensor:
    return nn.functional.dropout(hidden, 0.5, training=True)


def need_two_rows(hidden: Tensor) -> Tensor:
    if len(hidden) < 2:
        raise ValueError("one row is not enough\nfor this layer")
    return hidden


def third(change: Callable[[Tensor], Tensor]) -> Case:
    """The third of four layers does what it should not."""

    def hook(stack: LayerStack) -> None:
        output = stack.units[2].module.attention.output
        output.register_forward_hook(lambda module, inputs, hidden: change(hidden))

    return zoo("bert-classification", change=hook)


def with_labels(*labels: int) -> list[Sample]:
    return [{**one, "labels": torch.tensor(label)} for one, label in zip(text(), labels, strict=True)]


class ReadsLabels(nn.Module):
    """Adds an embedding of the label to BERT's input, as a conditioned model does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny("BertForSequenceClassification")
        self.classes = nn.Embedding(2, 16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        words = self.model.bert.embeddings.word_embeddings(input_ids)
        condition = self.classes(labels)[:, None]
        return self.model(inputs_embeds=words + condition, attention_mask=attention_mask, labels=labels)


def image_and_text() -> Case:
    batch = MODELS["clip"].batch(rows=4)
    return zoo("clip", samples=[{n: batch[n][row] for n in ("input_ids", "pixel_values")} for row in range(4)])


class CountsCalls(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs) * (1 + self.calls % 2)


def counting() -> Case:
    case = zoo("bert-classification")
    layer = case.model.bert.encoder.layer[0]
    layer.intermediate = CountsCalls(layer.intermediate)
    return case


def change_inputs_in_training(stack: LayerStack) -> None:
    def mix(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return (args, {**kwargs, "input_ids": kwargs["input_ids"].flip(0)}) if module.training else None

    stack.model.register_forward_pre_hook(mix, with_kwargs=True)


def read_zeroed_padding(stack: LayerStack) -> None:
    """No batch shows it. But what is kept is without padding, and whether that comes back as zeros is not promised."""
    masks: list[Tensor] = []

    def add_padding(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = inputs
        return hidden + (hidden * (1 - masks[-1])).sum(1, keepdim=True), *others

    stack.model.register_forward_pre_hook(
        lambda module, inputs, named: masks.append(named["attention_mask"].unsqueeze(-1)), with_kwargs=True
    )
    for unit in stack.units[:2]:
        unit.module.output.register_forward_hook(lambda module, inputs, hidden: hidden * masks[-1])
    stack.units[2].module.register_forward_pre_hook(add_padding)


def of_another_loss(name: str) -> Case:
    case = zoo("bert-tokens" if name == "padding" else "bert-classification")

    def loss_of(batch: dict[str, Any]) -> Tensor:
        if name == "padding":
            return case.model(**batch).logits.square().mean()
        if name == "mixed":  # as a mixup does it, before the model sees the inputs
            return case.model(**{**batch, "input_ids": batch["input_ids"].flip(0)}).loss
        outputs = case.model(**batch, output_hidden_states=True)
        return outputs.loss + sum(state[:, 0].mean() for state in outputs.hidden_states)

    case.loss_of = loss_of
    return case


def random_words(samples: list[Sample]) -> dict[str, Any]:
    batch = padding()(samples)
    return {**batch, "input_ids": torch.where(torch.rand(batch["input_ids"].shape) < 0.3, 4, batch["input_ids"])}


def hole_in_the_mask(samples: list[Sample]) -> dict[str, Any]:
    batch = padding()(samples)
    batch["attention_mask"][:, 1] = 0
    return batch


CONVOLUTIONS = {"embedding_size": 16, "head_ratio": 1, "conv_kernel_size": 3}
BLOCKS = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 80}
ONE_TIED = {**DECODER, "num_hidden_layers": 1, "tie_word_embeddings": True}
PADDING, LENGTH = "padding, random numbers, a call counter", "hidden state depends on the padded length"
LOSS, INPUTS = "the loss differs", "a sample has different inputs in another batch"
LABELS = "labels or a decoder's inputs change the hidden state"

REFUSED: dict[str, tuple[Callable[[], Case], str]] = {
    "another order of dimensions": (lambda: zoo("xlnet"), r"shape \[9, 4, 16\], not \[4 samples, 9 tokens"),
    "padded further": (lambda: in_bfloat16("longformer"), r"shape \[4, 12, 16\], not \[4 samples, 9 tokens"),
    "convolutions": (lambda: Case(tiny("ConvBertForSequenceClassification", **CONVOLUTIONS), text(ALIKE)), PADDING),
    "left, absolute positions": (lambda: zoo("bert-classification", collate=padding("left")), LENGTH),
    "left, positions by padding": (lambda: zoo("roberta", collate=padding("left")), PADDING),
    "multiplies by the length": (lambda: third(lambda hidden: hidden * hidden.shape[1]), LENGTH),
    "draws": (lambda: third(drop_always), "random numbers, a call counter or training mode change"),
    "other samples": (lambda: third(lambda hidden: hidden - hidden[:, :1].mean(0)), "on the other samples in"),
    "alone": (lambda: third(lambda hidden: hidden * (1 + (len(hidden) == 1))), "on the other samples in the batch"),
    "averages tokens": (lambda: third(lambda hidden: hidden + hidden.mean(1, keepdim=True)), PADDING),
    "fails": (lambda: third(need_two_rows), r"fails on a part of the sample \(ValueError: one row is not enough\)$"),
    "padding that was zero": (
        lambda: zoo("bert-classification", change=read_zeroed_padding),
        PADDING,
    ),
    "a loss over padding": (answers, LOSS),
    "padding that is kept, and varies": (lambda: answers(keeps_padding=True), INPUTS),
    "an own loss over padding": (lambda: of_another_loss("padding"), LOSS),
    "a loss of mixed inputs": (lambda: of_another_loss("mixed"), ""),
    "a loss of all layers": (lambda: of_another_loss("all layers"), ""),
    "labels": (lambda: Case(ReadsLabels()), LABELS),
    "labels that are all alike": (lambda: Case(ReadsLabels(), with_labels(0, 0, 0, 0)), LABELS),
    "counts its calls": (counting, "a call counter"),
    "a hook": (lambda: zoo("bert-classification", change=change_inputs_in_training), "training mode change"),
    "tied embeddings": (
        lambda: Case(tiny("LlamaForCausalLM", **ONE_TIED), text(label_tokens=True)),
        "depends on 'model.embed_tokens.weight', which is not frozen with it",
    ),
    "layers by length": (lambda: loss_alone(layers_for_short=2), "which layers run depends on the input"),
    "a random collator": (lambda: zoo("bert-classification", samples=text(LONG), collate=random_words), INPUTS),
    "a mask with a hole": (lambda: zoo("bert-classification", collate=hole_in_the_mask), "the attention mask is not"),
}
ABOVE = {
    "fails": "fails on a part of the sample",
    "draws": "",
}
"""Why two layers may not be cached either, where the third is the fault."""
ACCEPTED_BELOW = ("multiplies by the length", "other samples", "alone")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """For every number of layers, unless only those of the third layer are refused."""
    build, reason = REFUSED[name]
    verdicts = build().probe()
    if name in ACCEPTED_BELOW:
        assert accepted(verdicts) == [1, 2]
    for verdict in verdicts[2 * (name in ACCEPTED_BELOW) :]:
        expected = ABOVE.get(name, reason) if verdict.num_frozen <= 2 else reason
        if expected or name != "draws":
            assert verdict.reason and re.search(expected, verdict.reason), f"{verdict.num_frozen}: {verdict.reason}"


# ------------------------------------------------------------------------------------ What is in the key


def test_images_beside_text_are_kept_by_the_images_alone() -> None:
    """Which image belongs to which text only the model knows, but the vision tower reads no text."""
    trial = image_and_text().trial()
    assert accepted(trial.verdicts) == [1, 2, 3]
    assert trial.unread == {"input_ids", "attention_mask"}


class LooksFirst(ReadsLabels):
    """Reads hints only where a sentence begins with the word 7."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, hint: Tensor, labels: Tensor) -> Any:
        words = self.model.bert.embeddings.word_embeddings(input_ids)
        if bool((input_ids[:, 0] == 7).any()):
            words = words + hint[:, None, None]
        return self.model(inputs_embeds=words, attention_mask=attention_mask, labels=labels)


def test_an_input_that_another_branch_may_read_is_in_the_key() -> None:
    samples = [{**row, "hint": torch.tensor(float(number))} for number, row in enumerate(text())]
    assert not any(bool(row["input_ids"][0] == 7) for row in samples)
    trial = Case(LooksFirst(), samples).trial()
    assert accepted(trial.verdicts) == [1, 2, 3, 4]
    assert "hint" not in trial.unread


# ------------------------------------------------------------------------------------ What it leaves behind


def test_attention_by_blocks_is_refused_and_stays_as_it_is() -> None:
    """A short batch turns it off for good by other modules, which hides that it was ever there."""
    model = tiny("BigBirdForSequenceClassification", **BLOCKS)
    modules: dict[str, nn.Module] = {}
    case = Case(model, text((52, 60, 45, 8)), change=lambda stack: modules.update(model.named_modules()))
    assert all("depends on the padded length" in (verdict.reason or "") for verdict in case.probe())
    assert dict(model.named_modules()) == modules and model.bert.attention_type == "block_sparse"


def test_the_probe_leaves_everything_as_it_was() -> None:
    def collate(samples: list[Sample]) -> dict[str, Any]:
        random.random(), np.random.rand(), torch.rand(1)
        return padding()(samples)

    case = zoo("llama-tied", collate=collate)
    model = case.model
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.layers[1].eval()
    before: list[Any] = []

    def traces() -> list[Any]:
        return [
            [module.training for module in model.modules()],
            [(name, id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()],
            [(name, id(buffer)) for name, buffer in model.named_buffers()],
            ["forward" in vars(module) for module in model.modules()],
            random.getstate(),
            [np.asarray(part).tolist() for part in np.random.get_state()],
            torch.get_rng_state().tolist(),
            [sorted(sample) for sample in case.samples],
        ]

    case.change = lambda stack: before.extend(traces())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert accepted(case.probe()) == [1, 2, 3, 4]
    assert traces() == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
