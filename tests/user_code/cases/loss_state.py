"""Users' losses that have teachers, parameters, state, or several forwards."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kit import (
    IGNORED,
    LABELS,
    WIDTH,
    Classifier,
    Job,
    Setting,
    bert_classifier,
    built,
    case,
    large_weights,
    tags_of,
    texts,
)
from .issue_later import CRF, pad_tags_with_zero, tag_rows
from .loss import _job

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


class DistilsLayers:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        if not hasattr(self, "teacher"):
            self.teacher = large_weights(bert_classifier(), seed=7).eval()
        outputs = model(**inputs, output_hidden_states=True)
        kept = {k: inputs[k] for k in ("input_ids", "attention_mask")}
        with torch.no_grad():
            wanted = self.teacher(**kept, output_hidden_states=True).hidden_states
        near = [(a - b)[:, 0].pow(2).mean() for a, b in zip(outputs.hidden_states, wanted, strict=True)]
        loss = outputs.loss + torch.stack(near).mean()
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("K2", "one"))
def distillation_of_all_hidden_states(setting: Setting) -> Job:
    """TinyBERT: MSE at each layer."""
    return Job(trainer=DistilsLayers)


# ---------------------------------------------------------------------------------------------------------
# Parameters and state in the loss
# ---------------------------------------------------------------------------------------------------------


class Uncertain(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, 2)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def loss(self, logits: Tensor, labels: Tensor, features: Tensor) -> Tensor:
        both = torch.stack([F.cross_entropy(logits, labels), F.cross_entropy(self.second(features), labels % 2)])
        return (both * (-self.log_variance).exp() + self.log_variance).sum()


@case("loss", layouts=("K2", "DP2", "K2 acc2", "K2 freeze"))
def uncertainty_weights_in_the_model(setting: Setting) -> Job:
    """Kendall and Gal: losses of two tasks, weighted by parameters; a term is constant in the rows."""
    return Job(model=built(Uncertain))


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


class NearTheStart:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        if not hasattr(self, "first"):
            self.first = {name: p.detach().clone() for name, p in bert_classifier().named_parameters()}
        outputs = model(**inputs)
        away = sum((p - self.first[n.removeprefix("module.")]).pow(2).sum() for n, p in model.named_parameters())
        loss = outputs.loss + 0.5 * away
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("K2", "DP2", "K2 freeze"))
def l2_distance_to_the_initial_weights(setting: Setting) -> Job:
    """L2-SP: reads all parameters, and is 0 at the start."""
    return Job(trainer=NearTheStart)


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


class MixesInLoss:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        labels = inputs.pop("labels")
        embedded = getattr(model, "module", model).bert.embeddings.word_embeddings(inputs.pop("input_ids"))
        embedded = 0.7 * embedded + 0.3 * embedded.flip(0)
        outputs = model(inputs_embeds=embedded, **inputs)
        logs = outputs.logits.log_softmax(-1)
        loss = 0.7 * F.nll_loss(logs, labels) + 0.3 * F.nll_loss(logs, labels.flip(0))
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("one", "K2"))
def mixup_in_compute_loss(setting: Setting) -> Job:
    """Each row with the one at the other end of the batch."""
    return Job(trainer=MixesInLoss)


class TaggerCRFWithSmoothing(nn.Module):
    """Label-smoothed: a share of the loss is the mean over all tags."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert_classifier().bert
        self.head, self.crf = nn.Linear(WIDTH, LABELS), CRF()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.head(self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)
        if labels is None:
            return {"logits": scores}
        words = attention_mask.sum()
        smooth = -(scores.log_softmax(-1).mean(-1) * attention_mask).sum() / words
        return {"loss": 0.9 * self.crf(scores, labels, attention_mask).sum() / words + 0.1 * smooth, "logits": scores}


@case("loss", layouts=("K2", "one", "DP2"))
def smoothed_crf_divided_by_words(setting: Setting) -> Job:
    """A CRF over the words of ragged rows, divided by the attention mask's sum; labels are never -100."""
    return Job(model=built(TaggerCRFWithSmoothing), data=tag_rows(), collator=pad_tags_with_zero)


class TwoKinds(Classifier):
    """Tags of words and a class of the row, a mean of each."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        tags: Tensor | None = None,
    ) -> dict[str, Tensor]:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.head(hidden[:, 0])
        if labels is None or tags is None:
            return {"logits": logits}
        words = F.cross_entropy(self.head(hidden).flatten(0, 1), tags.flatten(), ignore_index=IGNORED)
        return {"loss": F.cross_entropy(logits, labels) + words, "logits": logits}


@case("loss", layouts=("K2", "DP2", "K2 acc2"))
def mean_over_words_plus_mean_over_rows(setting: Setting) -> Job:
    """Two label keys with different items, as in BERT's pretraining."""
    options = {"label_names": ["labels", "tags"], "remove_unused_columns": False}
    return Job(model=built(TwoKinds), data=texts(tags=tags_of), options=options)


def _scaled_by_rows(self: Any, model: Any, inputs: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum") / math.sqrt(len(labels))


@case("loss", layouts=("K2", "one acc2"))
def sum_divided_by_the_root_of_rows(setting: Setting) -> Job:
    """Neither a sum nor a mean."""
    return _job(_scaled_by_rows)


def _by_words(self: Any, model: Any, inputs: Any, logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    lengths = inputs["attention_mask"].sum(1)
    return (losses * lengths).sum() / lengths.sum()


@case("loss", layouts=("K2", "K2 acc2"))
def rows_weighted_by_their_length(setting: Setting) -> Job:
    """A mean over rows in which each counts by its words."""
    return _job(_by_words)
