"""Padding that is read later than in the trials or by others than the loss, and windows over neighbouring tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import (
    BertForQuestionAnswering,
    BertForTokenClassification,
    CanineConfig,
    CanineForSequenceClassification,
    ElectraConfig,
    ElectraForPreTraining,
    MobileBertConfig,
    MobileBertForSequenceClassification,
)
from user_code.kit import Rows

from ..kit import LABELS, VOCABULARY, At, Inputs, LossAndOutputs, Script, bert_config, case, own_loss, pad, samples
from .attack_front import reads
from .attack_recipes_front import of, ragged
from .late_losses import FEW, PLAIN, SMALL, script

# ---------------------------------------------------------------------------------------------------------
# A head of zeros, which reads nothing yet
# ---------------------------------------------------------------------------------------------------------


def answers() -> Rows:
    """Texts of several lengths with the positions of an answer."""
    texts, first, last = ragged(), torch.tensor(1), torch.tensor(2)
    rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in map(texts.__getitem__, range(32))]
    return Rows([{**row, "start_positions": first, "end_positions": last} for row in rows])


def answering(layers: int, **fields: Any) -> Script:
    """Question answering, whose loss reads padding, by a head that begins with zeros."""
    model = BertForQuestionAnswering(bert_config(num_labels=2))
    nn.init.zeros_(model.qa_outputs.weight)
    for part in (model.bert.embeddings, *model.bert.encoder.layer[:layers]):
        part.requires_grad_(False)
    return of(model, data=answers(), **fields)


@case("K1")
def zero_head_in_a_warmup() -> Script:
    """A head on a frozen BERT is still zero in the second step, as the rate begins at zero."""
    return answering(4, options={"lr_scheduler_type": "linear", "warmup_steps": 4})


@case("K1")
def zero_head_with_a_policy() -> Script:
    """A head of zeros, and a policy that stores what frozen layers return."""
    return answering(3, product={"freeze_policy": "schedule", "freeze_schedule": {"0": 3}})


@case("K2")
def zero_head_above_frozen_layers() -> Script:
    """A head of zeros; the lowest layers are frozen."""
    return answering(3)


@case("K2")
def zero_head_of_a_mean_over_the_mask() -> Script:
    """ELECTRA's discriminator with a head of zeros: all losses are equal, however they are averaged."""
    model = ElectraForPreTraining(
        ElectraConfig(vocab_size=VOCABULARY, embedding_size=16, max_position_embeddings=32, **SMALL, **PLAIN)
    )
    nn.init.zeros_(model.discriminator_predictions.dense_prediction.weight)
    rows = []
    for number in range(48):
        mask = torch.ones(12, dtype=torch.int64)
        mask[12 - (3 + number % 5) * (number in FEW) :] = 0
        words = torch.randint(5, VOCABULARY, (12,))
        rows.append({"input_ids": words * mask, "attention_mask": mask, "labels": (words % 3 == 0).long()})
    return script(model, rows)


# ---------------------------------------------------------------------------------------------------------
# Hooks on trained modules, which read padding
# ---------------------------------------------------------------------------------------------------------


def observed(begins: int, **fields: Any) -> Script:
    """A hook on the head records the mean of the logits, also of padding, from a step on; the loss ignores padding."""
    model, seen = BertForTokenClassification(bert_config()), list[float]()
    for part in (model.bert.embeddings, *model.bert.encoder.layer[: fields.pop("layers", 4)]):
        part.requires_grad_(False)

    def watch(model: Any, step: int) -> None:
        model.classifier.register_forward_hook(lambda _, given, made: seen.append(round(float(made.mean()), 4)))

    if begins == 0:
        watch(model, 0)
    callbacks = [At(watch, [begins], "on_epoch_begin")] if begins else []
    data = samples(32, 4, 10, by_word=True)
    return of(model, data=data, callbacks=callbacks, observe=lambda trainer: {"seen": seen[-8:]}, **fields)


@case("K1")
def hook_on_a_trained_head() -> Script:
    """A hook on a trained head records all logits from the start."""
    return observed(0)


@case("K1")
def hook_on_a_trained_head_from_the_third_epoch() -> Script:
    """A hook on a trained head records all logits from the third epoch on."""
    return observed(8)


@case("K1")
def hook_on_a_trained_head_with_a_policy() -> Script:
    """A hook on a trained head records all logits; a policy stores what frozen layers return."""
    return observed(0, layers=3, product={"freeze_policy": "schedule", "freeze_schedule": {"0": 3}})


# ---------------------------------------------------------------------------------------------------------
# Windows over neighbouring tokens
# ---------------------------------------------------------------------------------------------------------

LONG = 24


class ApartLater(Sampler[int]):
    """Short samples are beside long ones in the first epoch, and in a batch of their own, the last one, later."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        mixed = [row for part in range(4) for row in (*range(6 * part, 6 * part + 6), 24 + 2 * part, 25 + 2 * part)]
        return iter(mixed if self.epoch == 1 else range(32))


class SetsApart:
    """Gives the trainer this order."""

    def _get_train_sampler(self, *_: Any) -> ApartLater:
        return ApartLater()


def on(model: Any, embeddings: Tensor | None = None) -> Script:
    """Trains a head on a frozen model. Its first batch of an epoch does not show what padding does."""
    if embeddings is not None:
        with torch.no_grad():
            embeddings[0].normal_()  # as in most checkpoints
    model.base_model.requires_grad_(False)
    rows = [
        *map(samples(24, LONG, LONG).__getitem__, range(24)),
        *map(samples(8, 9, 11, seed=9).__getitem__, range(8)),
    ]
    return of(model, data=Rows(rows), trainer=SetsApart)


@case("K1")
def neighbours_in_mobilebert() -> Script:
    """A frozen MobileBERT joins each word's embedding with its neighbours'."""
    more = {"intra_bottleneck_size": 16, "true_hidden_size": 16, "num_feedforward_networks": 1}
    sizes = {**SMALL, "num_hidden_layers": 2, "embedding_size": 16, "max_position_embeddings": 32, **more}
    values = {"initializer_range": 0.1, "classifier_activation": False, "num_labels": LABELS}
    model = MobileBertForSequenceClassification(
        MobileBertConfig(vocab_size=VOCABULARY, classifier_dropout=0.0, **sizes, **values, **PLAIN)
    )
    return on(model, model.get_input_embeddings().weight)


@case("K1")
def neighbours_in_canine() -> Script:
    """A frozen CANINE joins pairs of characters; the output that is read has no padding."""
    sizes = {**SMALL, "max_position_embeddings": 64, "local_transformer_stride": 8}
    joining = {"downsampling_rate": 2, "upsampling_kernel_size": 2, "num_hash_functions": 2, "num_hash_buckets": 64}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2, "num_labels": LABELS}
    return on(CanineForSequenceClassification(CanineConfig(**sizes, **joining, **ends, **PLAIN)))


# ---------------------------------------------------------------------------------------------------------
# Padding that no batch has shown yet
# ---------------------------------------------------------------------------------------------------------


class EqualFirst(Sampler[int]):
    """The first epoch's batches have no padding, the longest samples come first; later batches are mixed."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(range(32) if self.epoch == 1 else [row + 8 * part for row in range(8) for part in range(4)])


class Equal:
    """Gives the trainer this order."""

    def _get_train_sampler(self, *_: Any) -> EqualFirst:
        return EqualFirst()


def by_mean(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
    """A loss that reads padding."""
    outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    return nn.functional.cross_entropy(outputs.logits.mean(1), inputs["labels"]), outputs


def padded_with_one(rows: list[Inputs]) -> Inputs:
    batch = pad(rows)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 1)}


@case("K1")
def padding_not_seen_at_first() -> Script:
    """The first epoch has batches of equal lengths; padding is 1, and a loss of the user's reads it."""
    model = BertForTokenClassification(bert_config())
    model.bert.requires_grad_(False)
    rows = [samples(1, length, length, seed=n)[0] for length in (12, 10, 8, 6) for n in range(8)]
    return of(model, data=Rows(rows), trainer=own_loss(by_mean, Equal), collator=padded_with_one, observe=reads)
