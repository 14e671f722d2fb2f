"""What a stage computes in training mode is checked before the model is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_zoo import ENCODER, MODELS
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from hf_pipetransformer.errors import UnsupportedModelError
from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.model.training_check import check_training


def checked(model: nn.Module, batch: dict[str, Any]) -> str:
    return check_training(LayerStack.discover(model, batch), batch)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Own(nn.Module):
    """A user's model of three layers; subclasses do more in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
        return self.end(x, labels, kept)

    def end(self, x: Tensor, labels: Tensor, kept: list[Tensor]) -> dict[str, Tensor]:
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Mixup(Own):
    """Mixes samples before the layers, and their losses after them."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if not self.training:
            return super().forward(x, labels)
        share = torch.rand(())
        mixed = super().forward(share * x + (1 - share) * x.flip(0), labels)
        logits = mixed["logits"]
        of_both = (share * nn.functional.cross_entropy(logits, to, reduction="sum") for to in (labels, 1 - labels))
        return {**mixed, "loss": sum(of_both, torch.zeros(()))}


class DeepSupervision(Own):
    """Reads all layers, in training mode only."""

    def end(self, x: Tensor, labels: Tensor, kept: list[Tensor]) -> dict[str, Tensor]:
        outputs = super().end(x, labels, kept)
        if self.training:
            outputs["loss"] = outputs["loss"] + self.head(kept[0]).pow(2).mean()
        return outputs


class Teacher(Own):
    """A teacher follows the model in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 2).requires_grad_(False)

    def end(self, x: Tensor, labels: Tensor, kept: list[Tensor]) -> dict[str, Tensor]:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.head.weight, 0.1)
        outputs = super().end(x, labels, kept)
        outputs["loss"] = outputs["loss"] + nn.functional.mse_loss(outputs["logits"], self.teacher(x))
        return outputs


BATCH = {"x": torch.linspace(-1, 1, 8).view(2, 4), "labels": torch.tensor([0, 1])}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Mixup, "random numbers before its layers"),
        (DeepSupervision, "reads what other layers return or leave behind"),
        (Teacher, "changes the parameter teacher.weight"),
    ],
)
def test_what_no_stage_can_compute_is_refused(model: type[Own], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as refusal:
        checked(model(), BATCH)
    assert "pipeline_parallel_size=1" in str(refusal.value)


def test_dropout_does_not_count_as_a_difference() -> None:
    dropping = BertForSequenceClassification(BertConfig(**ENCODER, hidden_dropout_prob=0.5, num_labels=3))
    assert checked(dropping, MODELS["bert-classification"].batch(2)) == ""
