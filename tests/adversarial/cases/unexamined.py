"""Losses are never run before the first step: the inputs of the model must be found elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertForTokenClassification

from ..kit import (
    FIRST_WORD,
    VOCABULARY,
    Inputs,
    LossAndOutputs,
    Network,
    Script,
    bert,
    bert_config,
    case,
    own_loss,
    pad,
    plain_loss,
    samples,
    with_loss,
)

MEAN = {"loss_reduction": "mean"}
NEVER = {"freeze_policy": "schedule", "freeze_schedule": {100: 1}}
"""A freeze policy that never freezes a layer: the model is examined for freezing all the same."""


def shifted(batch: Inputs) -> Inputs:
    """Other words."""
    words = FIRST_WORD + (batch["input_ids"] + 7) % (VOCABULARY - FIRST_WORD)
    return {"input_ids": words, "attention_mask": batch["attention_mask"]}


def contrast(model: Any, one: Inputs, other: Inputs) -> LossAndOutputs:
    """Each sample is to be nearest to its counterpart."""
    first, second = (F.normalize(model(**side)["logits"], dim=-1) for side in (one, other))
    scores = first @ second.T / 0.3
    return F.cross_entropy(scores, torch.arange(len(scores))), {"logits": scores}


# ---------------------------------------------------------------------------------------------------------
# Inputs under other names than the model's
# ---------------------------------------------------------------------------------------------------------


@case("K1", "K2")
def pairs_with_prefixes() -> Script:
    """The batch has `anchor_input_ids`, `positive_input_ids`, and their masks."""

    def collate(rows: list[dict[str, Any]]) -> Inputs:
        anchor = pad([{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows])
        sides = {"anchor": anchor, "positive": shifted(anchor)}
        return {f"{side}_{name}": value for side, batch in sides.items() for name, value in batch.items()}

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        sides = [
            {name: inputs[f"{side}_{name}"] for name in ("input_ids", "attention_mask")}
            for side in ("anchor", "positive")
        ]
        return contrast(model, *sides)

    return with_loss(loss, collator=collate)


@case("K1", "K2")
def pairs_in_dicts() -> Script:
    """The batch has a dict of inputs for each side."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = pad(rows)
        labels = batch.pop("labels")
        return {"labels": labels, "left": batch, "right": shifted(batch)}

    return with_loss(lambda trainer, model, inputs: contrast(model, inputs["left"], inputs["right"]), collator=collate)


@case("K1", "K2")
def pairs_in_a_list() -> Script:
    """The batch has a list of two dicts."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = pad(rows)
        labels = batch.pop("labels")
        return {"labels": labels, "sides": [batch, shifted(batch)]}

    return with_loss(lambda trainer, model, inputs: contrast(model, *inputs["sides"]), collator=collate)


class WithDummies(Network):
    """Has `dummy_inputs`."""

    @property
    def dummy_inputs(self) -> Inputs:
        words = torch.arange(FIRST_WORD, FIRST_WORD + 12).view(2, 6)
        return {"input_ids": words, "attention_mask": torch.ones_like(words)}


def of_words(model: nn.Module, **fields: Any) -> Script:
    """The batch has lists of words; the loss makes tensors of them."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "labels": torch.stack([row["labels"] for row in rows]),
            "text": [r["input_ids"].tolist() for r in rows],
        }

    def loss(trainer: Any, model: Any, inputs: Any) -> LossAndOutputs:
        words = torch.tensor(inputs["text"])
        outputs = model(input_ids=words, attention_mask=torch.ones_like(words))
        return F.cross_entropy(outputs["logits"], inputs["labels"]), outputs

    return with_loss(loss, model, collator=collate, **fields)


@case("K1", "K2")
def words_and_dummy_inputs() -> Script:
    """The batch has no input of the model; the model has `dummy_inputs`."""
    return of_words(WithDummies())


@case("K1", "K2")
def words_and_a_configuration() -> Script:
    """The batch has no input of the model; the model's configuration tells its inputs."""
    return of_words(bert())


@case("K2", expect="refused", because="dummy_inputs")
def words_alone() -> Script:
    """The batch has no input of the model, and the model has neither `dummy_inputs` nor a configuration."""
    return of_words(Network())


class TakesAnything(nn.Module):
    """A wrapper; its forward takes `**inputs`."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def forward(self, **inputs: Any) -> dict[str, Tensor]:
        return self.network(**inputs)


def without_weight(trainer: Any, model: Any, inputs: Any) -> LossAndOutputs:
    """The samples have weights, which the loss keeps for itself."""
    weight, labels = inputs.pop("weight"), inputs.pop("labels")
    outputs = model(**inputs)
    return (F.cross_entropy(outputs["logits"], labels, reduction="none") * weight).mean(), outputs


def with_weight(rows: list[dict[str, Any]]) -> Inputs:
    batch = pad(rows)
    return {**batch, "weight": 0.5 + batch["input_ids"][:, 0] / VOCABULARY}


@case("K1", "K2", "R2")
def wrapper_that_takes_anything() -> Script:
    """The model inside names the inputs; the loss keeps weights for itself, and is declared a mean."""
    return with_loss(without_weight, TakesAnything(), collator=with_weight, product=MEAN)


@case("K1", "K2")
def labels_that_the_model_refuses() -> Script:
    """The model's own loss fails on the batch's labels, which are no classes."""

    def collate(rows: list[dict[str, Any]]) -> Inputs:
        batch = pad(rows)
        return {**batch, "labels": batch["labels"].float() / 3 + 0.1}

    def loss(trainer: Any, model: Any, inputs: Any) -> LossAndOutputs:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        return F.mse_loss(outputs["logits"].mean(-1), labels), outputs

    return with_loss(loss, collator=collate, product=NEVER)


# ---------------------------------------------------------------------------------------------------------
# Losses that are declared to add up, on other inputs than the batch's
# ---------------------------------------------------------------------------------------------------------


class Segments(Network):
    """Takes a second kind of embeddings, and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.segments = nn.Embedding(2, self.embedding.embedding_dim)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        segments: Tensor | None = None,
        factor: float = 1.0,
    ) -> dict[str, Tensor]:
        x = factor * self.embedding(input_ids)
        if segments is not None:
            x = x + self.segments(segments)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x.mean(1))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def with_segments(rows: list[dict[str, Any]]) -> Inputs:
    batch = pad(rows)
    return {**batch, "segments": batch["input_ids"] % 2}


@case("K1", "K2", expect="exact", because="(segments)")
def declared_loss_keeps_an_input_back() -> Script:
    """A declared loss does not pass on an input that the model's forward takes."""

    def loss(trainer: Any, model: Any, inputs: Any) -> LossAndOutputs:
        inputs.pop("segments")
        return plain_loss(trainer, model, inputs)

    return with_loss(loss, Segments(), collator=with_segments, product=MEAN)


@case("K1", "K2", expect="exact", because="(factor)")
def declared_loss_adds_a_setting() -> Script:
    """A declared loss calls the model with a setting that the batch does not have."""

    def loss(trainer: Any, model: Any, inputs: Any) -> LossAndOutputs:
        return plain_loss(trainer, model, {**inputs, "factor": 0.5})

    return with_loss(loss, Segments(), collator=with_segments, product=MEAN)


@case("K2", expect="equal")
def declared_loss_says_the_default() -> Script:
    """A declared loss calls the model with a setting that has the default's value."""

    def loss(trainer: Any, model: Any, inputs: Any) -> LossAndOutputs:
        return plain_loss(trainer, model, {**inputs, "factor": 1.0})

    return with_loss(loss, Segments(), collator=with_segments, product=MEAN)


@case("K2", expect="refused", because="loss_reduction")
def declared_loss_of_pairs() -> Script:
    """A declared loss of inputs that the batch has under other names."""
    return with_product(pairs_with_prefixes(), MEAN)


def with_product(script: Script, product: dict[str, Any]) -> Script:
    script.product = product
    return script


# ---------------------------------------------------------------------------------------------------------
# State, beside a freeze policy
# ---------------------------------------------------------------------------------------------------------


@case("K1", "K2", "R2")
def iterator_beside_a_policy() -> Script:
    """The loss takes a weight from an iterator; a freeze policy has the layers and the cache examined."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs["loss"] * next(trainer.weights), outputs

    def wire(trainer: Any) -> None:
        trainer.weights = iter([1 + 0.1 * k for k in range(1000)])

    return with_loss(loss, wire=wire, product=NEVER)


class StepsOwnOptimizer:
    """A mixin: a step trains a second model as well."""

    seen = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen += 1
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        with torch.no_grad():
            self.second.weight.mul_(0.9)  # type: ignore[attr-defined]
        return loss


@case("K1", "K2", "R2")
def second_model_in_training_step() -> Script:
    """`training_step` counts, and changes a model of its own."""

    def wire(trainer: Any) -> None:
        torch.manual_seed(1)
        trainer.second = nn.Linear(2, 2)

    return Script(
        model=Network(),
        data=samples(48),
        trainer=StepsOwnOptimizer,
        wire=wire,
        product=NEVER,
        observe=lambda trainer: {"seen": trainer.seen, "second": trainer.second.weight.detach()},
    )


@case("K1", "R2")
def loss_func_reads_padding_later() -> Script:
    """A `compute_loss_func` counts its runs, and adds a term over all positions from the ninth on."""
    runs = 0

    def loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        nonlocal runs
        runs += 1
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return loss + (0.5 * outputs.logits.pow(2).mean() if runs > 8 else 0.0)

    model = BertForTokenClassification(bert_config())
    model.bert.requires_grad_(False)
    data = samples(32, shortest=8, longest=8, by_word=True)
    return Script(model=model, data=data, keywords={"compute_loss_func": loss_func}, options={"num_train_epochs": 4})


@case("K1")
def logits_of_a_classifier_cut_padding() -> Script:
    """A frozen BERT, samples of other lengths, and a loss of the user's that has a state."""

    def wire(trainer: Any) -> None:
        trainer.runs = 0

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        trainer.runs += 1
        outputs = model(**inputs)
        return outputs.loss * (1 + trainer.runs / 50), outputs

    model = bert()
    model.bert.requires_grad_(False)
    options = {"num_train_epochs": 4}
    return Script(
        model=model,
        data=samples(32, 4, 14),
        trainer=own_loss(loss),
        wire=wire,
        options=options,
        observe=lambda trainer: {"runs": trainer.runs},
    )


@case("K1", "K2")
def setting_beside_a_policy() -> Script:
    """The loss calls the model with a setting; a freeze policy has the layers and the cache examined."""

    def loss(trainer: Any, model: Any, inputs: Any) -> LossAndOutputs:
        return plain_loss(trainer, model, {**inputs, "factor": 0.5})

    return with_loss(loss, Segments(), collator=with_segments, product=NEVER)
