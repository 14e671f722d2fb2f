"""Losses that leave items out in other ways than by the label -100, or read what hooks keep."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    ElectraConfig,
    ElectraForPreTraining,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    TimeSeriesTransformerConfig,
    TimeSeriesTransformerForPrediction,
    ViTConfig,
    ViTForMaskedImageModeling,
)
from transformers.models.bert.modeling_bert import BertForQuestionAnswering
from user_code.kit import Rows

from ..kit import LABELS, VOCABULARY, Layer, Network, Script, bert, bert_config, case, samples, with_loss

SMALL = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ADAM: dict[str, Any] = {"num_train_epochs": 1, "optim": "adamw_torch", "learning_rate": 0.01, "adam_epsilon": 1e-4}
TWO_PARTS: dict[str, Any] = {"activation_cache": "off", "num_microbatches": 2}
FEW = (9, 17, 22, 23, 30, 41)
"""Samples with items that are left out; none of them is among the four that are tried before the first step."""


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def script(model: Any, rows: list[dict[str, Tensor]], **options: Any) -> Script:
    return Script(model=model, data=Rows(rows), collator=stacked, product=TWO_PARTS, options={**ADAM, **options})


def answers(start: int, end: int) -> Script:
    """Texts of 8 words, with these positions of the answers in a few samples."""
    words = samples(48)
    rows = []
    for i in range(len(words)):
        row = {name: torch.as_tensor(value) for name, value in words[i].items() if name != "labels"}
        at = int(row["input_ids"].sum()) % 6
        positions = (start, end) if i in FEW else (at, at + 1)
        rows.append(row | dict(zip(("start_positions", "end_positions"), map(torch.tensor, positions), strict=True)))
    return script(BertForQuestionAnswering(bert_config(num_labels=2)), rows)


@case("K2", "R2")
def answers_outside_of_the_text() -> Script:
    """Answers that truncation has cut off have the tokenizer's largest length as positions."""
    return answers(512, 512)


@case("K2", expect="exact", because="start_positions and end_positions")
def answers_that_end_outside_of_the_text() -> Script:
    """A loss of two means with different numbers of answers."""
    return answers(5, 512)


@case("K2", "R2")
def pixels_without_a_class() -> Script:
    """Pixels of the class 255, which Segformer ignores."""
    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[2, 2],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        num_attention_heads=[1, 2],
        patch_sizes=[3, 3],
        strides=[2, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        num_labels=LABELS,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        **PLAIN,
    )
    model = SegformerForSemanticSegmentation(config)
    model.decode_head.batch_norm = torch.nn.Identity()  # with batch normalisation, batches stay whole
    for name, weight in model.decode_head.named_parameters():
        if name.endswith("weight"):
            weight.data *= 10  # as of a wider head: so narrow an untrained one gives all pixels the same loss
    rows = []
    for i in range(48):
        labels = torch.randint(LABELS, (16, 16))
        labels[: (4 + i % 8) * (i in FEW)] = 255
        rows.append({"pixel_values": torch.randn(3, 16, 16), "labels": labels})
    return script(model, rows)


@case("K2")
def values_that_are_missing_in_series() -> Script:
    """The loss of a time series is a mean over the values with a mask."""
    config = TimeSeriesTransformerConfig(
        prediction_length=4,
        context_length=6,
        lags_sequence=[1, 2],
        num_time_features=1,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        scaling=None,
    )
    rows = []
    for i in range(48):
        observed = torch.ones(4)
        observed[: (1 + i % 3) * (i in FEW)] = 0
        rows.append(
            {
                "past_values": torch.randn(8),
                "past_time_features": torch.linspace(0, 1, 8)[:, None],
                "past_observed_mask": torch.ones(8),
                "future_values": torch.randn(4),
                "future_time_features": torch.linspace(1, 1.4, 4)[:, None],
                "future_observed_mask": observed,
            }
        )
    return script(TimeSeriesTransformerForPrediction(config), rows, label_names=["future_values"])


@case("K2")
def numbers_of_masked_patches() -> Script:
    """The loss of masked images is a mean over the masked patches; their number differs."""
    config = ViTConfig(image_size=16, patch_size=4, encoder_stride=4, **SMALL, **PLAIN)
    rows = []
    for i in range(48):
        mask = torch.zeros(16, dtype=torch.bool)
        mask[torch.randperm(16)[: 2 + i % 9 if i in FEW else 8]] = True
        rows.append({"pixel_values": torch.randn(3, 16, 16), "bool_masked_pos": mask})
    return script(ViTForMaskedImageModeling(config), rows, label_names=[])


@case("K2")
def tokens_that_the_mask_leaves_out() -> Script:
    """The loss of ELECTRA's discriminator is a mean over the tokens in the attention mask."""
    config = ElectraConfig(vocab_size=VOCABULARY, embedding_size=16, max_position_embeddings=32, **SMALL, **PLAIN)
    rows = []
    for i in range(48):
        mask = torch.ones(12, dtype=torch.int64)
        mask[12 - (3 + i % 5) * (i in FEW) :] = 0
        words = torch.randint(5, VOCABULARY, (12,))
        rows.append({"input_ids": words * mask, "attention_mask": mask, "labels": (words % 3 == 0).long()})
    return script(ElectraForPreTraining(config), rows)


@case("K2")
def targets_with_the_value_of_an_ignored_label() -> Script:
    """A regression with targets of -100.0."""
    words = samples(48)
    rows = [
        {name: torch.as_tensor(value) for name, value in words[i].items()}
        | {"labels": torch.tensor(-100.0 if i in FEW else float(i % 3))}
        for i in range(len(words))
    ]
    return script(bert(num_labels=1), rows)


def hooked(inside: bool, steers: bool) -> Script:
    """A penalty on outputs that hooks keep, of modules inside of all layers or of the last layer."""
    model, kept = Network(4), {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> Tensor | None:
            kept[name] = output
            return output * 1.5 if steers else None

        return hook

    for name, module in model.named_modules():
        if name.endswith(".linear") if inside else name == "layers.3":
            module.register_forward_hook(keep(name))

    def loss(trainer: Any, model: Any, inputs: dict[str, Tensor]) -> Any:
        outputs = model(**inputs)
        return outputs["loss"] + (0.0 if steers else 0.1 * sum(v.pow(2).mean() for v in kept.values())), outputs

    return with_loss(loss, model)


@case("K2", expect="exact", because="the forward hook")
def hooks_inside_of_layers_keep_outputs() -> Script:
    """Features for the loss (hint losses); each process has those of its own layers."""
    return hooked(inside=True, steers=False)


@case("K2")
def hooks_inside_of_layers_steer() -> Script:
    """Hooks that return another output."""
    return hooked(inside=True, steers=True)


@case("K2")
def hook_on_the_last_layer_keeps_its_output() -> Script:
    """The last layer's process runs the loss."""
    return hooked(inside=False, steers=False)


class AddedLoss(torch.autograd.Function):
    """Adds the gradient of an auxiliary loss to the backward, as code of mixtures of experts does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones(())


class LayerWithLoss(Layer):
    """In training mode with an auxiliary loss, a mean over the samples of each call."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return AddedLoss.apply(y, 0.01 * y.pow(2).mean()) if self.training else y


@case("K2")
def gradients_of_auxiliary_losses_in_layers() -> Script:
    """On parts of a batch they would be added once for each part."""
    return Script(model=Network(4, LayerWithLoss), data=samples(48), product={"activation_cache": "off"}, options=ADAM)
