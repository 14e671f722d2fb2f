"""Users' losses, in the spirit of what popular projects do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kit import (
    Classifier,
    Job,
    Setting,
    built,
    case,
    own_loss,
    pad,
)

# ---------------------------------------------------------------------------------------------------------
# Sums, ratios, weights
# ---------------------------------------------------------------------------------------------------------


def _sum(self: Any, model: Any, inputs: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


@case("loss", layouts=("K2", "DP2", "K2 acc2", "one acc2"))
def sum_over_rows_without_division(setting: Setting) -> Job:
    """`reduction="sum"`, whatever the number of rows."""
    return Job(trainer=own_loss(_sum))


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
