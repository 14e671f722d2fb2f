"""Users' code that once gave other numbers silently, or failed where the stock Trainer works."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
)

from ..kit import (
    IGNORED,
    LABELS,
    VOCABULARY,
    WIDTH,
    Classifier,
    Job,
    Rows,
    Setting,
    bert_classifier,
    built,
    case,
    large_weights,
    own_loss,
    pad,
    sizes,
    tags_of,
    texts,
)

# ---------------------------------------------------------------------------------------------------------
# 1. All stages train on the same batch
# ---------------------------------------------------------------------------------------------------------


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2, "[CLS]": 3, "[SEP]": 4}
    words |= {f"w{i}": i for i in range(5, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def unlabelled(seed: int = 0, samples: int = 22) -> Rows:
    return Rows([{"input_ids": row["input_ids"]} for row in texts(samples, seed).rows])


@case("collator", replays=True)
def masked_lm_with_a_seeded_collator_and_evaluation(setting: Setting) -> Job:
    """`DataCollatorForLanguageModeling(seed=42)`; evaluations draw from the same generator."""
    collator = DataCollatorForLanguageModeling(tiny_tokenizer(), mlm_probability=0.4, seed=42)
    return Job(
        model=large_weights(BertForMaskedLM(BertConfig(**sizes()))),
        data=unlabelled(),
        evaluated=unlabelled(9, 11) if not setting.is_reference else None,
        collator=collator,
        options={"eval_strategy": "no" if setting.is_reference else "steps", "eval_steps": 2},
        drive=_without_evaluations,
    )


def _without_evaluations(trainer: Any) -> None:
    """The reference makes none, as they draw."""
    trainer.train()
    trainer.state.log_history = [e for e in trainer.state.log_history if "eval_loss" not in e]


def images(samples: int = 22) -> Rows:
    generator = torch.Generator().manual_seed(3)
    labels = [0 if i % 10 < 7 else 1 + i % 2 for i in range(samples)]
    return Rows([{"pixel_values": torch.randn(3, 8, 8, generator=generator) + k, "labels": k} for k in labels])


def tiny_vit(**changes: Any) -> ViTForImageClassification:
    names = {k: v for k, v in sizes().items() if k not in ("vocab_size", "max_position_embeddings")}
    return large_weights(ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **names | changes)))


def stack(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


class CutMix:
    """A mixin, with soft labels and a generator of its own."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)  # type: ignore[misc]
        if not self.model.training or inputs["labels"].is_floating_point():  # type: ignore[attr-defined]
            return inputs
        if not hasattr(self, "generator"):
            self.generator = numpy.random.default_rng()
        order = torch.as_tensor(self.generator.permutation(len(inputs["labels"])))
        share = float(self.generator.beta(1.0, 1.0))
        pixels = inputs["pixel_values"].clone()
        pixels[..., :4] = inputs["pixel_values"][order][..., :4]
        labels = F.one_hot(inputs["labels"], LABELS).float()
        return {"pixel_values": pixels, "labels": share * labels + (1 - share) * labels[order]}

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


@case("trainer override", replays=True)
def cutmix_in_prepare_inputs(setting: Setting) -> Job:
    """CutMix with `numpy.random.default_rng()` in `_prepare_inputs`."""
    return Job(model=tiny_vit(), data=images(), collator=stack, trainer=CutMix)


class MixesInForward(Classifier):
    draws = 12  # six steps of two micro-batches

    def __init__(self, tape: Any) -> None:
        super().__init__()
        self.tape = tape

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        embedded = self.bert.embeddings.word_embeddings(input_ids)
        order = torch.arange(len(embedded))
        if self.training:
            while self.tape.replays and len(self.tape.values) > self.draws:
                self.tape.values.popleft()  # of examinations
            order = self.tape.draw(lambda: torch.randperm(len(embedded)))
            if len(order) < len(embedded):  # the reference: two micro-batches of a pipeline in one
                rest = self.tape.draw(lambda: order)
                order = torch.cat([order, rest + len(order)])
            embedded = 0.7 * embedded + 0.3 * embedded[order]
        hidden = self.bert(inputs_embeds=embedded, attention_mask=attention_mask).last_hidden_state
        logits = self.head(hidden[:, 0])
        if labels is None:
            return {"logits": logits}
        loss = 0.7 * F.cross_entropy(logits, labels) + 0.3 * F.cross_entropy(logits, labels[order])
        return {"loss": loss, "logits": logits}


@case("model with state", is_taped=True, expect="refused", because="random numbers before its layers")
def mixup_inside_forward(setting: Setting) -> Job:
    """Manifold mixup with `torch.randperm` in the model's own forward."""
    return Job(model=built(MixesInForward, setting.tape))


def drops_words(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Loses half of the words of 15% of the rows."""
    generator = numpy.random.default_rng()
    kept = []
    for row in rows:
        words = row["input_ids"]
        if generator.random() < 0.15:
            words = [word for word in words if generator.random() < 0.5] or words[:1]
        kept.append({**row, "input_ids": words})
    return pad(kept)


@case("collator", replays=True)
def collator_with_its_own_generator(setting: Setting) -> Job:
    """`numpy.random.default_rng()` changes 15% of the rows."""
    return Job(collator=drops_words)


# ---------------------------------------------------------------------------------------------------------
# 2. The loss is what one process computes
# ---------------------------------------------------------------------------------------------------------


def _with_regulariser(self: Any, model: Any, inputs: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels) + 0.05 * model.classifier.weight.pow(2).sum()


@case("loss", layouts=("K2", "DP2", "K2 acc2", "one acc2"))
def mean_over_rows_plus_a_constant_term(setting: Setting) -> Job:
    """Cross entropy and the square of the head's weights."""
    return Job(trainer=own_loss(_with_regulariser))


CLASS_WEIGHTS = torch.tensor([1.0, 1.0, 10.0])


def _weighted_in_training(self: Any, model: Any, inputs: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, weight=CLASS_WEIGHTS if model.training else None)


@case("loss")
def class_weights_in_training_only(setting: Setting) -> Job:
    """Class weights where `model.training`."""
    return Job(trainer=own_loss(_weighted_in_training))


class TagsLoss:
    """A mixin; the labels have another name."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        tags = inputs.pop("tags")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), tags.flatten(), ignore_index=IGNORED)
        return (loss, outputs) if return_outputs else loss


def tagged(first_full: int = 0, **columns: Any) -> Rows:
    """Rows with tags; the first ones may be of full length."""
    data = texts(tags=tags_of, **columns)
    for row in data.rows[:first_full]:
        row["input_ids"] = (row["input_ids"] * 3)[:9]
        row["tags"] = [word % LABELS for word in row["input_ids"]]
    for row in data.rows:
        del row["labels"]
    return data


@case("loss", layouts=("K2", "DP2"))
def labels_under_another_name(setting: Setting) -> Job:
    """`label_names=["tags"]`: a mean over words, where the first four rows are full length."""
    model = large_weights(BertForTokenClassification(BertConfig(**sizes())))
    options = {"label_names": ["tags"], "remove_unused_columns": False}
    return Job(model=model, data=tagged(4), trainer=TagsLoss, options=options)


class GlobalNormSGD(torch.optim.Optimizer):
    """A step of fixed length over all parameters together."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        everything = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.pow(2).sum() for p in everything]).sum().sqrt()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


@case("optimizer", layouts=("K2", "DP2"))
def optimizer_with_a_global_norm(setting: Setting) -> Job:
    """A user's optimizer that divides by the norm of all gradients."""
    model = bert_classifier()
    return Job(model=model, keywords={"optimizers": (GlobalNormSGD(model.parameters()), None)})


# ---------------------------------------------------------------------------------------------------------
# 3. The cache serves the function that the model is now
# ---------------------------------------------------------------------------------------------------------


class Interrupt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.epoch >= 3.3:
            raise KeyboardInterrupt


def _with_another_activation(function: Any) -> Any:
    model = bert_classifier()
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = function()
    return model


@case("model with state", layouts=("one cache",))
def interrupted_cache_and_another_activation(setting: Setting) -> Job:
    """The default folder of an interrupted job, the same weights, another activation function."""
    options = {"num_train_epochs": 5, "learning_rate": 1e-3}

    def drive(trainer: Any) -> None:
        if not setting.is_reference:
            first = type(trainer)(
                model=_with_another_activation(nn.GELU),
                args=trainer.args,
                train_dataset=texts(),
                data_collator=pad,
                callbacks=[Interrupt()],
            )
            with suppress(KeyboardInterrupt):
                first.train()
        trainer.train()

    return Job(model=_with_another_activation(nn.Tanh), options=options, drive=drive)


class WithBatchNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        layers = self.bert.encoder.layer
        layers[0].output = NormalisedOutput(layers[0].output)


class NormalisedOutput(nn.Module):
    def __init__(self, output: nn.Module) -> None:
        super().__init__()
        self.output, self.norm = output, nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.output(hidden, residual).transpose(1, 2)).transpose(1, 2)


@case("model with state", layouts=("one cache", "one", "K2"))
def batch_norm_in_a_layer(setting: Setting) -> Job:
    """Batch normalisation in the first layer."""
    return Job(model=built(WithBatchNorm), options={"num_train_epochs": 4})


class Masked(Classifier):
    """A layer's weights are multiplied by a mask, as in pruning."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.bert.encoder.layer[0]
        layer.register_buffer("mask", torch.ones(WIDTH))
        layer.register_forward_hook(_apply_mask)


def _apply_mask(module: Any, _: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (output[0] * module.mask, *output[1:])
    return output * module.mask


class Prunes(TrainerCallback):
    """Switches off one more channel now and then."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        if state.global_step in (2, 8, 10):
            model.bert.encoder.layer[0].mask[state.global_step] = 0.0


@case("callback", layouts=("one cache", "K2", "K2 cache", "DP2 cache"))
def pruning_mask_changed_by_a_callback(setting: Setting) -> Job:
    """A buffer of a frozen layer changes while the cache is on."""
    return Job(model=built(Masked), callbacks=[Prunes()], options={"num_train_epochs": 4})
