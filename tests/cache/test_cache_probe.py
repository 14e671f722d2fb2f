"""Which models may have the states of their frozen layers kept, and that asking leaves no trace."""

from __future__ import annotations

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

from hf_pipetransformer.cache.cache_probe import FLOAT32_TOLERANCE, CacheVerdict, probe_boundaries
from hf_pipetransformer.model.frozen_prefix import FreezableLayers
from hf_pipetransformer.model.layer_stack import LayerStack, output_tensors

Sample = dict[str, Any]
Collate = Callable[[list[Sample]], dict[str, Any]]

LENGTHS = (7, 3, 9, 5)


# ---------------------------------------------------------------------------------------------------------
# Samples, and batches of them
# ---------------------------------------------------------------------------------------------------------


def text(lengths: Sequence[int] = LENGTHS, *, label_tokens: bool = False) -> list[Sample]:
    """Sentences with a class each, or with a label for each token."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for row, length in enumerate(lengths):
        ids = torch.randint(5, 59, (length,), generator=generator)
        samples.append({"input_ids": ids, "labels": ids if label_tokens else torch.tensor(row % 2)})
    return samples


def questions() -> list[Sample]:
    """Each with its answer's first and last token."""
    place = torch.tensor(1)
    return [{"input_ids": row["input_ids"], "start_positions": place, "end_positions": place} for row in text()]


def images() -> list[Sample]:
    batch = MODELS["vit"].batch(rows=4)
    return [{name: value[row] for name, value in batch.items()} for row in range(4)]


def samples_for(name: str) -> list[Sample]:
    batch = MODELS[name].batch()
    return images() if "pixel_values" in batch else text(label_tokens=batch["labels"].dim() == 2)


def padding(side: str = "right", *, with_mask: bool = True, dtype: torch.dtype = torch.float32) -> Collate:
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
        if with_mask and "input_ids" in batch:
            batch["attention_mask"] = column([torch.ones_like(sample["input_ids"]) for sample in samples], 0)
        return batch

    return collate


def taken_apart(model: nn.Module, samples: list[Sample], collate: Collate) -> tuple[LayerStack, FreezableLayers]:
    batch = collate([dict(sample) for sample in samples[:2]])
    stack = LayerStack.discover(model, batch)
    return stack, FreezableLayers.of(stack, batch)


def probe(model: nn.Module, samples: list[Sample], collate: Collate, **options: Any) -> tuple[CacheVerdict, ...]:
    verdicts = probe_boundaries(*taken_apart(model, samples, collate), samples, collate, **options)
    assert [verdict.num_frozen for verdict in verdicts] == list(range(1, len(verdicts) + 1))
    assert all((verdict.slot is None) == (verdict.reason is not None) for verdict in verdicts)
    return verdicts


def accepted(verdicts: Sequence[CacheVerdict]) -> list[int]:
    return [verdict.num_frozen for verdict in verdicts if verdict.reason is None]


def assert_refused(verdicts: Sequence[CacheVerdict], reason: str) -> None:
    """For every number of layers."""
    for verdict in verdicts:
        assert verdict.reason and re.search(reason, verdict.reason), f"{verdict.num_frozen} layers: {verdict.reason}"


def tiny(model_class: str, **sizes: Any) -> nn.Module:
    cls = getattr(hf, model_class)
    return without_dropout(cls(cls.config_class(**{**ENCODER, **sizes})))


# ---------------------------------------------------------------------------------------------------------
# Which models
# ---------------------------------------------------------------------------------------------------------

ACCEPTED = (
    "bert-masked-lm",
    "roberta",
    "distilbert",
    "mpnet",
    "deberta-v2",
    "electra",
    "modernbert",
    "albert",  # its one layer freezes with the first unit, for all of them
    "gpt2-classification",
    "llama-tied",  # the head freezes with the embeddings
    "opt",
    "bloom",
    "mixtral",
    "mamba",
    "vit",
    "swin",
    "convnext",
)


@pytest.mark.parametrize("name", few(ACCEPTED, "roberta", "llama-tied", "mixtral", "vit"))
def test_accepted(name):
    verdicts = probe(MODELS[name].build(), samples_for(name), padding())
    assert [verdict.reason for verdict in verdicts] == [None] * len(verdicts)
    for verdict in verdicts:
        assert max(verdict.errors.values()) < FLOAT32_TOLERANCE
        # with other padding, an expert gets another number of tokens, and rounds otherwise
        exact = ("ignored",) if name == "mixtral" else ("padding", "loss", "ignored")
        assert all(verdict.errors[check] == 0 for check in exact if check in verdict.errors)


@pytest.mark.parametrize("name", ["modernbert", "llama", "mixtral", "vit"])
def test_accepted_in_bfloat16(name):
    verdicts = probe(MODELS[name].build().to(torch.bfloat16), samples_for(name), padding(dtype=torch.bfloat16))
    assert [verdict.reason for verdict in verdicts] == [None] * len(verdicts)


def test_the_rounding_of_autocast_is_no_reason():
    """States are in float32 there, and what computes them is not."""
    model, samples = tiny("BertForSequenceClassification", hidden_size=64), text((7, 3, 30, 12))
    stack, freezable = taken_apart(model, samples, padding())
    with torch.autocast("cpu", torch.bfloat16):
        verdicts = probe_boundaries(stack, freezable, samples, padding())
    assert [verdict.reason for verdict in verdicts] == [None] * len(verdicts)
    assert max(max(verdict.errors.values()) for verdict in verdicts) > FLOAT32_TOLERANCE


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("xlnet", torch.float32, r"hidden state has shape \[9, 4, 16\], not \[4 samples, 9 tokens"),
        ("longformer", torch.bfloat16, r"hidden state has shape \[4, 12, 16\], not \[4 samples, 9 tokens"),
        # a token's embedding is made of its neighbours', too
        ("mobilebert", torch.bfloat16, "ids of padding tokens change the hidden state"),
    ],
)
def test_refused(name, dtype, reason):
    assert_refused(probe(MODELS[name].build().to(dtype), text(), padding(dtype=dtype)), reason)


def test_a_state_that_is_padded_further_than_the_batch_is_refused():
    """Longformer's, to a multiple of its window: the longest row happens to be one."""
    verdicts = probe(MODELS["longformer"].build(), text((7, 3, 8, 5)), padding())
    assert_refused(verdicts, "hidden state depends on the padded length")


def test_mixing_without_a_mask_is_refused():
    config = hf.FNetConfig(**{name: size for name, size in ENCODER.items() if name != "num_attention_heads"})
    model = without_dropout(hf.FNetForSequenceClassification(config))
    for lengths in (LENGTHS, (6, 6, 6, 6)):
        assert_refused(probe(model, text(lengths), padding()), "ids of padding tokens change the hidden state")
    assert_refused(probe(model, text(), padding(with_mask=False)), "a sample has different inputs in another batch")
    assert accepted(probe(model, text((6, 6, 6, 6)), padding(with_mask=False))) == [1, 2, 3, 4]


def test_attention_by_blocks_is_refused_and_stays_as_it_is():
    """A short batch turns it off for good by other modules, which hides that it was ever there."""
    lengths = (52, 60, 45, 8)
    blocks = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
    model = tiny("BigBirdForSequenceClassification", **blocks, max_position_embeddings=80)
    stack, freezable = taken_apart(model, text(lengths), padding())
    modules = dict(model.named_modules())
    assert_refused(probe_boundaries(stack, freezable, text(lengths), padding()), "depends on the padded length")
    assert dict(model.named_modules()) == modules
    assert model.bert.attention_type == "block_sparse"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bert-classification", "hidden state depends on the padded length"),  # absolute positions
        ("roberta", "ids of padding tokens change the hidden state"),  # it counts positions by them
        ("modernbert", "the loss depends on the hidden state of padding"),  # which is where it looks for [CLS]
        ("llama", "the loss depends on the hidden state of padding"),  # which predicts the first token
    ],
)
def test_padding_on_the_left_is_refused_where_it_matters(name, reason):
    assert_refused(probe(MODELS[name].build(), samples_for(name), padding("left")), reason)


def test_padding_on_the_left_is_accepted_where_it_does_not_matter():
    verdicts = probe(MODELS["llama-classification"].build(), text(), padding("left"))
    assert accepted(verdicts) == [1, 2, 3, 4]
    assert all(verdict.padded_left for verdict in verdicts)


@pytest.mark.parametrize("name", ["roberta", "llama"])
def test_accepted_with_rows_of_one_length(name):
    """The rows are shortened for the examination, and a sound model is found sound."""
    is_labelled = MODELS[name].batch()["labels"].dim() == 2
    samples = text((6, 6, 6, 6), label_tokens=is_labelled)
    verdicts = probe(MODELS[name].build(), samples, padding())
    assert accepted(verdicts) == [verdict.num_frozen for verdict in verdicts]
    assert "padding" in verdicts[0].errors and not verdicts[0].padded_left


@pytest.mark.parametrize(("name", "numbers"), [("bart", [1, 2, 3]), ("t5", [3])])
def test_of_an_encoder_decoder_the_encoder_is_accepted_where_one_tensor_leaves_it(name, numbers):
    """T5's layers also hand on their position bias; its decoder does not take the encoder's."""
    verdicts = probe(MODELS[name].build(), text(label_tokens=True), padding())
    assert accepted(verdicts) == numbers
    assert {(verdict.slot.stack, verdict.slot.position) for verdict in verdicts if verdict.slot} == {(0, 0)}
    for verdict in verdicts[3:5]:
        assert re.search(r"[24] tensors are read above the frozen layers", verdict.reason)
    assert re.search("labels or a decoder's inputs change the hidden state", verdicts[5].reason)


# ---------------------------------------------------------------------------------------------------------
# Each check alone
# ---------------------------------------------------------------------------------------------------------


def drop_always(hidden: Tensor) -> Tensor:
    return nn.functional.dropout(hidden, 0.5, training=True)


def center_the_batch(hidden: Tensor) -> Tensor:
    return hidden - hidden[:, :1].mean(0)


def average_tokens(hidden: Tensor) -> Tensor:
    return hidden + hidden.mean(1, keepdim=True)


def count_rows(hidden: Tensor) -> Tensor:
    return hidden * (1 if len(hidden) > 1 else 2)


def need_two_rows(hidden: Tensor) -> Tensor:
    if len(hidden) < 2:
        raise ValueError("one row is not enough\nfor this layer")
    return hidden


@pytest.mark.parametrize(
    ("change", "below", "above"),
    [
        (drop_always, "random numbers, a call counter or training mode change the hidden state", None),
        (center_the_batch, "hidden state depends on the other samples", None),
        (count_rows, "a sample alone has a different hidden state than in a batch", None),
        # above the layers, too: it would read padding, which is not kept
        (
            average_tokens,
            "ids of padding tokens change the hidden state",
            "the loss depends on the hidden state of padding",
        ),
        (need_two_rows, *[r"fails on a part of the sample \(ValueError: one row is not enough\)$"] * 2),
    ],
)
def test_a_layer_that_does_what_it_should_not(change, below, above):
    """The third of four: whatever number of layers is frozen, it is among them or above them."""
    stack, freezable = taken_apart(MODELS["bert-classification"].build(), text(), padding())
    stack.units[2].module.attention.output.register_forward_hook(lambda module, inputs, output: change(output))
    verdicts = probe_boundaries(stack, freezable, text(), padding())
    assert_refused(verdicts[2:], below)
    if above is not None:
        assert_refused(verdicts[:2], above)
    else:
        assert accepted(verdicts) == [1, 2] or change is drop_always


def test_a_layer_that_reads_padding_is_named_where_padding_always_was_zero():
    """No batch shows it. But what is kept is without padding, and whether that comes back as zeros is not promised."""
    stack, freezable = taken_apart(MODELS["bert-classification"].build(), text(), padding())
    masks: list[Tensor] = []

    def clear_padding(module: nn.Module, inputs: Any, hidden: Tensor) -> Tensor:
        return hidden * masks[-1]

    def add_padding(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = inputs
        return hidden + (hidden * (1 - masks[-1])).sum(1, keepdim=True), *others

    stack.model.register_forward_pre_hook(
        lambda module, inputs, named: masks.append(named["attention_mask"].unsqueeze(-1)), with_kwargs=True
    )
    for unit in stack.units[:2]:
        unit.module.output.register_forward_hook(clear_padding)
    stack.units[2].module.register_forward_pre_hook(add_padding)
    verdicts = probe_boundaries(stack, freezable, text(), padding())
    assert_refused(verdicts, r"padding reaches real tokens in layer 'bert\.encoder\.layer\.2' \(\de")


def test_a_loss_over_padding_is_accepted_with_the_padding_if_that_is_always_the_same():
    def to_one_length(samples: list[Sample]) -> dict[str, Any]:
        batch = padding()(samples)
        missing = 16 - batch["input_ids"].shape[1]
        padded = {name: nn.functional.pad(batch[name], (0, missing)) for name in ("input_ids", "attention_mask")}
        return {**batch, **padded}

    model = MODELS["bert-question-answering"].build()
    assert accepted(probe(model, questions(), to_one_length, keeps_padding=True)) == [1, 2, 3, 4]
    assert all(verdict.reads_padding for verdict in probe(model, questions(), to_one_length))
    verdicts = probe(model, questions(), padding(), keeps_padding=True)
    assert_refused(verdicts, "a sample has different inputs in another batch")


@pytest.mark.parametrize("lengths", [(7, 3, 9, 5), (6, 6, 6, 6)], ids=["different", "alike"])
def test_samples_of_several_sequences_are_accepted(lengths):
    """Choices of an answer, padded to the longest one of the batch."""

    def collate(samples: list[Sample]) -> dict[str, Any]:
        flat = padding()([{"input_ids": choice} for sample in samples for choice in sample["choices"]])
        batch = {name: value.view(len(samples), 2, -1) for name, value in flat.items()}
        return {**batch, "labels": torch.tensor([sample["labels"] for sample in samples])}

    rows = [row["input_ids"] for row in text(lengths)]
    samples = [{"choices": [row, row.flip(0)[: len(row) - i % 2]], "labels": i % 2} for i, row in enumerate(rows)]
    verdicts = probe(MODELS["bert-multiple-choice"].build(), samples, collate)
    assert [verdict.reason for verdict in verdicts] == [None] * 4
    assert "padding" in verdicts[0].errors


def test_it_is_the_loss_that_is_trained_that_counts():
    def over_padding(batch: dict[str, Any]) -> Tensor:
        return model(**batch).logits.square().mean()

    def over_tokens(batch: dict[str, Any]) -> Tensor:
        return model(**batch).start_logits[batch["attention_mask"].bool()].square().mean()

    model = MODELS["bert-question-answering"].build()
    assert accepted(probe(model, questions(), padding(), loss_of=over_tokens)) == [1, 2, 3, 4]
    model = MODELS["bert-tokens"].build()
    tokens = text(label_tokens=True)
    assert accepted(probe(model, tokens, padding())) == [1, 2, 3, 4]
    assert_refused(probe(model, tokens, padding(), loss_of=over_padding), "the loss depends on the hidden state")


class Averages(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).mean(1, keepdim=True) + hidden


class LossAlone(nn.Module):
    """Three layers; it returns nothing but a loss."""

    def __init__(self, last: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), last(8, 8)])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        first = hidden[torch.arange(len(hidden)), attention_mask.int().argmax(1)]
        return {"loss": nn.functional.cross_entropy(first, labels)}


def test_a_model_that_returns_nothing_but_a_loss_can_be_probed():
    def loss_of(batch: dict[str, Any]) -> Tensor:
        return model(**batch)["loss"]

    model = LossAlone()
    assert accepted(probe(model, text(), padding(), loss_of=loss_of)) == [1, 2, 3]
    model = LossAlone(last=Averages)
    verdicts = probe(model, text(), padding(), loss_of=loss_of)
    assert_refused(verdicts[:2], "the loss depends on the hidden state of padding")
    assert_refused(verdicts[2:], "ids of padding tokens change the hidden state")


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


@pytest.mark.parametrize("labels", [(0, 1, 0, 1), (0, 0, 0, 0), (1, 1, 1, 1)], ids=str)
def test_labels_that_the_layers_read_are_refused_also_where_all_are_alike(labels):
    samples = [{**one, "labels": torch.tensor(label)} for one, label in zip(text(), labels, strict=True)]
    assert_refused(probe(ReadsLabels(), samples, padding()), "labels or a decoder's inputs change the hidden state")
    assert accepted(probe(MODELS["bert-classification"].build(), samples, padding())) == [1, 2, 3, 4]


class CountsCalls(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs) * (1 + self.calls % 2)


def test_a_layer_that_counts_its_calls_is_refused_and_counts_on_from_where_it_was():
    model = MODELS["bert-classification"].build()
    layer: Any = model.get_submodule("bert.encoder.layer.0")
    layer.intermediate = CountsCalls(layer.intermediate)
    stack, freezable = taken_apart(model, text(), padding())
    layer.intermediate.calls = 7
    assert_refused(probe_boundaries(stack, freezable, text(), padding()), "a call counter")
    assert layer.intermediate.calls == 7


def test_a_hook_that_changes_inputs_in_training_only_is_refused():
    model = MODELS["bert-classification"].build()
    stack, freezable = taken_apart(model, text(), padding())

    def mix(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return (args, {**kwargs, "input_ids": kwargs["input_ids"].flip(0)}) if module.training else None

    model.register_forward_pre_hook(mix, with_kwargs=True)
    assert_refused(probe_boundaries(stack, freezable, text(), padding()), "training mode change")
    assert not stack.runner.num_frozen and model.training


def test_a_head_that_keeps_training_the_embeddings_is_refused():
    """Of a single layer all that the head needs stays trainable, the tied embeddings as well."""
    model = tiny("LlamaForCausalLM", **{**DECODER, "num_hidden_layers": 1, "tie_word_embeddings": True})
    verdicts = probe(model, text(label_tokens=True), padding())
    assert_refused(verdicts, "depends on 'model.embed_tokens.weight', which is not frozen with it")
    untied = tiny("LlamaForCausalLM", **{**DECODER, "num_hidden_layers": 1})
    assert accepted(probe(untied, text(label_tokens=True), padding())) == [1]


# ---------------------------------------------------------------------------------------------------------
# Samples
# ---------------------------------------------------------------------------------------------------------


def test_a_random_collator_is_refused():
    def collate(samples: list[Sample]) -> dict[str, Any]:
        batch = padding()(samples)
        return {**batch, "input_ids": torch.where(torch.rand(batch["input_ids"].shape) < 0.3, 4, batch["input_ids"])}

    verdicts = probe(MODELS["bert-classification"].build(), text((17, 13, 19, 15)), collate)
    assert_refused(verdicts, "a sample has different inputs in another batch")


def test_a_mask_that_does_not_tell_rows_from_padding_is_refused():
    def collate(samples: list[Sample]) -> dict[str, Any]:
        batch = padding()(samples)
        batch["attention_mask"][:, 1] = 0
        return batch

    assert_refused(probe(MODELS["bert-classification"].build(), text(), collate), "the attention mask is not")


def test_a_loss_that_reads_more_than_the_last_layers_output_is_refused():
    model = MODELS["bert-classification"].build()

    def mixed(batch: dict[str, Any]) -> Tensor:
        """As a mixup does it, before the model sees the inputs."""
        return model(**{**batch, "input_ids": batch["input_ids"].flip(0)}).loss

    def of_all_layers(batch: dict[str, Any]) -> Tensor:
        outputs = model(**batch, output_hidden_states=True)
        return outputs.loss + sum(state[:, 0].mean() for state in outputs.hidden_states)

    assert accepted(probe(model, text(), padding(), loss_of=lambda batch: model(**batch).loss)) == [1, 2, 3, 4]
    for loss_of in (mixed, of_all_layers):
        assert accepted(probe(model, text(), padding(), loss_of=loss_of)) == []


def test_a_collator_may_take_the_labels_out_of_its_samples():
    def collate(samples: list[Sample]) -> dict[str, Any]:
        labels = torch.stack([sample.pop("labels") for sample in samples])
        return {**padding()(samples), "labels": labels}

    assert accepted(probe(MODELS["bert-classification"].build(), text(), collate)) == [1, 2, 3, 4]


# ---------------------------------------------------------------------------------------------------------
# What it leaves behind
# ---------------------------------------------------------------------------------------------------------


def test_the_probe_leaves_everything_as_it_was():
    def collate(samples: list[Sample]) -> dict[str, Any]:
        random.random(), np.random.rand(), torch.rand(1)
        return padding()(samples)

    model = MODELS["llama-tied"].build()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.layers[1].eval()
    samples = text(label_tokens=True)
    stack, freezable = taken_apart(model, samples, collate)

    def traces() -> list[Any]:
        return [
            [module.training for module in model.modules()],
            [(name, id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()],
            [(name, id(buffer)) for name, buffer in model.named_buffers()],
            ["forward" in vars(module) for module in model.modules()],
            stack.runner.installed,
            stack.runner.units,
            random.getstate(),
            [np.asarray(part).tolist() for part in np.random.get_state()],
            torch.get_rng_state().tolist(),
            [sorted(sample) for sample in samples],
        ]

    before, weights = traces(), {name: value.clone() for name, value in model.state_dict().items()}
    assert accepted(probe_boundaries(stack, freezable, samples, collate)) == [1, 2, 3, 4]
    assert traces() == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_layers_is_refused():
    model, batch = MODELS["bert-classification"].build(), padding()(text())
    stack = LayerStack.uncut(model)
    verdicts = probe_boundaries(stack, FreezableLayers.of(stack, batch), text(), padding())
    assert_refused(verdicts, "no layers that can be run one at a time")
    assert output_tensors(model(**batch)).keys() >= {"loss"}
