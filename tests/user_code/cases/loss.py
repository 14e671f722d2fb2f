"""Users' losses, in the spirit of what popular projects do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from ..kit import (
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
    texts,
)


def _job(loss: Any, **keywords: Any) -> Job:
    return Job(trainer=own_loss(loss), **keywords)


# ---------------------------------------------------------------------------------------------------------
# Means over rows
# ---------------------------------------------------------------------------------------------------------


@case("loss", layouts=("K2", "DP2", "K2 acc2"), expect="equal")
def regression(setting: Setting) -> Job:
    """`num_labels=1`: a mean of squares."""
    rows = [{**row, "labels": row["input_ids"][0] / 10} for row in texts().rows]
    return Job(model=bert_classifier(num_labels=1), data=Rows(rows))


# ---------------------------------------------------------------------------------------------------------
# Sums, ratios, weights
# ---------------------------------------------------------------------------------------------------------


def _sum(self: Any, model: Any, inputs: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


@case("loss", layouts=("K2", "DP2", "K2 acc2", "one acc2"))
def sum_over_rows_without_division(setting: Setting) -> Job:
    """`reduction="sum"`, whatever the number of rows."""
    return _job(_sum)


class WhenGiven:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        if num_items_in_batch is None:
            loss = F.cross_entropy(outputs.logits, labels)
        else:
            loss = F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("K2", "DP2", "K2 acc2", "one acc2"), expect="equal")
def divided_by_num_items_when_given(setting: Setting) -> Job:
    """As transformers' own `ForCausalLMLoss`."""
    return Job(trainer=WhenGiven)


class WhenGivenWithRegulariser(WhenGiven):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0.05 * model.classifier.weight.pow(2).sum()
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("K2", "DP2", "K2 acc2"))
def divided_by_num_items_plus_a_constant_term(setting: Setting) -> Job:
    """A sum over the items of the global batch, and a penalty of the head."""
    return Job(trainer=WhenGivenWithRegulariser)


def _func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch


def tiny_llama(**changes: Any) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=2,
        pad_token_id=0,
        use_cache=False,
        **changes,
    )
    return large_weights(LlamaForCausalLM(config))


def causal_texts() -> Rows:
    return Rows([{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in texts().rows])


@case("loss", layouts=("K2", "DP2", "K2 acc2"), expect="equal")
def compute_loss_func_with_num_items(setting: Setting) -> Job:
    """`compute_loss_func=` of a causal language model, a sum over tokens."""
    return Job(model=tiny_llama(), data=causal_texts(), keywords={"compute_loss_func": _func})


@case("loss", layouts=("K2", "DP2", "K2 acc2"), expect="equal")
def label_smoothing_factor_of_a_language_model(setting: Setting) -> Job:
    """`label_smoothing_factor=0.1`, ragged rows."""
    return Job(model=tiny_llama(), data=causal_texts(), options={"label_smoothing_factor": 0.1})


class SampleWeights:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        labels, weights = inputs.pop("labels"), inputs.pop("weight")
        outputs = model(**inputs)
        loss = (F.cross_entropy(outputs.logits, labels, reduction="none") * weights).sum() / weights.sum()
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("K2", "K2 acc2", "one"))
def sample_weights_by_their_sum(setting: Setting) -> Job:
    """A column of weights; the mean is divided by the sum of the weights."""
    data = texts(weight=lambda generator, *_: generator.uniform(0.1, 4.0))
    return Job(data=data, trainer=SampleWeights, options={"remove_unused_columns": False})


# ---------------------------------------------------------------------------------------------------------
# Rows that belong together
# ---------------------------------------------------------------------------------------------------------


class SupCon(Classifier):
    def loss(self, logits: Tensor, labels: Tensor, features: Tensor) -> Tensor:
        unit = F.normalize(features, dim=-1)
        scores = unit @ unit.T / 0.5 - 1e9 * torch.eye(len(unit))
        same = (labels[:, None] == labels).float() - torch.eye(len(unit))
        logs = scores.log_softmax(-1)
        return -((logs * same).sum(1) / same.sum(1).clamp(min=1)).mean()


@case("loss")
def supervised_contrastive(setting: Setting) -> Job:
    """SupCon on normalised features; the head has no gradient."""
    return Job(model=built(SupCon))


class TwoTowers(Classifier):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, pair_ids: Tensor, pair_mask: Tensor) -> Any:
        a = F.normalize(self.features(input_ids, attention_mask), dim=-1)
        b = F.normalize(self.features(pair_ids, pair_mask), dim=-1)
        scores = a @ b.T * 5.0
        target = torch.arange(len(a))
        return {"loss": F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target), "logits": scores}


def pairs(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = pad([{"input_ids": row["input_ids"]} for row in rows])
    other = pad([{"input_ids": [*row["input_ids"][::-1], row["labels"] + 5]} for row in rows])
    return {**batch, "pair_ids": other["input_ids"], "pair_mask": other["attention_mask"]}


@case("loss", layouts=("K2", "one"))
def info_nce_of_two_towers(setting: Setting) -> Job:
    """Queries and documents through one encoder, in-batch negatives."""
    return Job(model=built(TwoTowers), collator=pairs, options={"remove_unused_columns": False})


class VICReg(Classifier):
    def loss(self, logits: Tensor, labels: Tensor, features: Tensor) -> Tensor:
        spread = F.relu(1 - features.var(0, unbiased=False).add(1e-4).sqrt()).mean()
        return F.cross_entropy(logits, labels) + spread


@case("loss", layouts=("K2", "DP2"))
def variance_over_the_batch(setting: Setting) -> Job:
    """VICReg's variance term beside a cross entropy; on DP2 as under DDP."""
    return Job(model=built(VICReg))


class Preferences(Classifier):
    """Chosen rows come first in a batch, rejected ones behind them."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        rewards = self.head(self.features(input_ids, attention_mask))[:, 0]
        half = len(rewards) // 2
        return {"loss": -F.logsigmoid(rewards[:half] - rewards[half:]).mean(), "logits": rewards}


def chosen_then_rejected(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    worse = [{**row, "input_ids": row["input_ids"][::-1]} for row in rows]
    return pad([*rows, *worse])


@case("loss", layouts=("K2", "one", "DP2", "K2 acc2"))
def chosen_and_rejected_in_one_batch(setting: Setting) -> Job:
    """A reward model as in TRL's: twice as many rows as samples, the first half against the second."""
    return Job(model=built(Preferences), collator=chosen_then_rejected)
