"""Users' losses: sums and weights, rows that belong together, teachers, state, gradients inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kit import Classifier, Job, bert_classifier, built, case, own_loss


def _sum(self: Any, model: Any, inputs: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


@case("loss", layouts=("K2", "DP2", "K2 acc2", "one acc2"))
def sum_over_rows_without_division() -> Job:
    """`reduction="sum"`, not divided by the number of rows."""
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
def divided_by_num_items_when_given() -> Job:
    """As transformers' own `ForCausalLMLoss`."""
    return Job(trainer=WhenGiven)


class SupCon(Classifier):
    def loss(self, logits: Tensor, labels: Tensor, features: Tensor) -> Tensor:
        unit = F.normalize(features, dim=-1)
        scores = unit @ unit.T / 0.5 - 1e9 * torch.eye(len(unit))
        same = (labels[:, None] == labels).float() - torch.eye(len(unit))
        logs = scores.log_softmax(-1)
        return -((logs * same).sum(1) / same.sum(1).clamp(min=1)).mean()


@case("loss")
def supervised_contrastive() -> Job:
    """SupCon on normalised features; the head has no gradient."""
    return Job(model=built(SupCon))


class VICReg(Classifier):
    def loss(self, logits: Tensor, labels: Tensor, features: Tensor) -> Tensor:
        spread = F.relu(1 - features.var(0, unbiased=False).add(1e-4).sqrt()).mean()
        return F.cross_entropy(logits, labels) + spread


@case("loss", layouts=("K2", "DP2"))
def variance_over_the_batch() -> Job:
    """VICReg's variance term beside a cross entropy; on DP2 as under DDP."""
    return Job(model=built(VICReg))


def _with_regulariser(self: Any, model: Any, inputs: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels) + 0.05 * model.classifier.weight.pow(2).sum()


@case("loss", layouts=("K2", "DP2", "K2 acc2", "one acc2"))
def mean_over_rows_plus_a_constant_term() -> Job:
    """Cross entropy and the square of the head's weights."""
    return Job(trainer=own_loss(_with_regulariser))


CLASS_WEIGHTS = torch.tensor([1.0, 1.0, 10.0])


def _weighted_in_training(self: Any, model: Any, inputs: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, weight=CLASS_WEIGHTS if model.training else None)


@case("loss")
def class_weights_in_training_only() -> Job:
    """Class weights where `model.training`."""
    return Job(trainer=own_loss(_weighted_in_training))


class RunningScale:
    scale = 1.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        outputs = model(**inputs)
        if model.training:
            self.scale = 0.9 * self.scale + 0.1 * float(outputs.loss.detach())
        loss = outputs.loss / self.scale
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("one", "K2", "DP2"))
def running_mean_of_the_loss_in_the_trainer() -> Job:
    """The loss is divided by its own running mean."""
    return Job(trainer=RunningScale, observe=lambda t: {"scale": t.scale})


class GradientPenalty:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        labels = inputs.pop("labels")
        words = inputs.pop("input_ids")
        table = getattr(model, "module", model).bert.embeddings.word_embeddings
        embedded = table(words)
        if not embedded.requires_grad:
            embedded.requires_grad_(True)
        outputs = model(inputs_embeds=embedded, **inputs)
        loss = F.cross_entropy(outputs.logits, labels)
        if torch.is_grad_enabled():
            (slope,) = torch.autograd.grad(loss, embedded, create_graph=True)
            loss = loss + 0.1 * slope.pow(2).sum()
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("one", "K2"))
def gradient_penalty() -> Job:
    """Double backward to the embeddings, which `compute_loss` makes itself."""
    return Job(model=bert_classifier(attn_implementation="eager"), trainer=GradientPenalty)


class PenalisesWhatIsTrained:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters() if p.requires_grad)
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("K2", "K2 acc2", "DP2", "one acc2"))
def l2_of_trainable_parameters() -> Job:
    """`sum(p.pow(2).sum() for p in model.parameters() if p.requires_grad)`."""
    return Job(trainer=PenalisesWhatIsTrained)


def _counting_loss() -> type:
    calls = 0

    class Counts:
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
            nonlocal calls
            calls += torch.is_grad_enabled()
            outputs = model(**inputs)
            loss = outputs.loss * (1 + calls / 100)
            return (loss, outputs) if return_outputs else loss

    return Counts


@case("loss", layouts=("K2",), expect="equal")
def counter_in_a_closure() -> Job:
    """The loss is scaled by a counter in a closure, which grows with each call."""
    return Job(trainer=_counting_loss())


class UncertainTrainer:
    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self.log_variance = nn.Parameter(torch.full((1,), 0.3))

    def create_optimizer(self, *positional: Any) -> Any:
        optimizer = super().create_optimizer(*positional)  # type: ignore[misc]
        optimizer.add_param_group({"params": [self.log_variance], "weight_decay": 0.0})
        return optimizer

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        outputs = model(**inputs)
        loss = (outputs.loss * (-self.log_variance).exp() + self.log_variance).sum()
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("K2", "one", "DP2"))
def uncertainty_weight_in_the_trainer() -> Job:
    """A parameter of the trainer, added to the optimizer."""
    return Job(trainer=UncertainTrainer, observe=lambda t: {"log variance": t.log_variance.detach()})
