"""Users' losses that have teachers, parameters, state, or several forwards."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kit import (
    Classifier,
    Job,
    Setting,
    bert_classifier,
    built,
    case,
    large_weights,
)

# ---------------------------------------------------------------------------------------------------------
# Teachers
# ---------------------------------------------------------------------------------------------------------


class Distils:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        if not hasattr(self, "teacher"):
            self.teacher = large_weights(bert_classifier(), seed=7).eval()
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        kl = F.kl_div((outputs.logits / 2).log_softmax(-1), (wanted / 2).softmax(-1), reduction="batchmean")
        loss = 0.5 * outputs.loss + 0.5 * 4 * kl
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("K2", "DP2", "K2 acc2", "K2 freeze"), expect="equal")
def distillation_by_a_teacher_of_the_trainer(setting: Setting) -> Job:
    """KL with temperature 2, and the student's own loss."""
    return Job(trainer=Distils)


class HasTeacher(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.bert).requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        with torch.no_grad():
            wanted = self.teacher(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.head(hidden[:, 0])
        mask = attention_mask[..., None]
        near = ((hidden - wanted).pow(2) * mask).mean((1, 2)).mean()
        return {"loss": near + (F.cross_entropy(logits, labels) if labels is not None else 0), "logits": logits}


@case("loss", layouts=("K2", "one", "DP2", "one freeze"))
def distillation_by_a_teacher_in_the_model(setting: Setting) -> Job:
    """A frozen second encoder in the same module; MSE of the last hidden states."""
    return Job(model=built(HasTeacher))


# ---------------------------------------------------------------------------------------------------------
# Parameters and state in the loss
# ---------------------------------------------------------------------------------------------------------


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
def uncertainty_weight_in_the_trainer(setting: Setting) -> Job:
    """A parameter of the trainer, added to the optimizer."""
    return Job(trainer=UncertainTrainer, observe=lambda t: {"log variance": t.log_variance.detach()})


class RunningScale:
    scale = 1.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        outputs = model(**inputs)
        if model.training:
            self.scale = 0.9 * self.scale + 0.1 * float(outputs.loss.detach())
        loss = outputs.loss / self.scale
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("one", "K2", "DP2"))
def running_mean_of_the_loss_in_the_trainer(setting: Setting) -> Job:
    """The loss is divided by its own running mean."""
    return Job(trainer=RunningScale, observe=lambda t: {"scale": t.scale})


# ---------------------------------------------------------------------------------------------------------
# Gradients and several forwards inside the loss
# ---------------------------------------------------------------------------------------------------------


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
def gradient_penalty(setting: Setting) -> Job:
    """Double backward to the embeddings, which `compute_loss` makes itself."""
    return Job(model=bert_classifier(attn_implementation="eager"), trainer=GradientPenalty)
