"""Users' models: state, hooks, layers that are called in other ways."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback

from ..kit import (
    LABELS,
    LAYERS,
    WIDTH,
    Classifier,
    Job,
    Rows,
    bert_classifier,
    built,
    case,
    texts,
)


class AuxiliaryInLayers(Classifier):
    """Layers keep a term of the loss in an attribute, as many mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.bert.encoder.layer:
            layer.register_forward_hook(_keep_term)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        output = super().forward(input_ids, attention_mask, labels)
        if "loss" in output:
            output["loss"] = output["loss"] + 0.1 * sum(layer.term for layer in self.bert.encoder.layer)
        return output


def _keep_term(module: Any, _: Any, output: Any) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    module.term = hidden[:, 0].pow(2).mean()


@case("model with state", layouts=("K2", "one", "one freeze"))
def auxiliary_loss_kept_in_layers() -> Job:
    """Each layer leaves `self.term`, and the model adds them up."""
    return Job(model=built(AuxiliaryInLayers))


class TellsStep(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        model.step = state.global_step


class EMATeacher(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.head).requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        features = self.features(input_ids, attention_mask)
        logits = self.head(features)
        if labels is None:
            return {"logits": logits}
        if self.training:
            with torch.no_grad():
                for mine, theirs in zip(self.average.parameters(), self.head.parameters(), strict=True):
                    mine.lerp_(theirs, 0.2)
        near = (logits - self.average(features.detach())).pow(2).mean()
        return {"loss": F.cross_entropy(logits, labels) + near, "logits": logits}


@case("model with state", layouts=("one", "K2"), because="changes the parameter average")
def ema_teacher_updated_in_forward() -> Job:
    """BYOL, MoCo: parameters without gradient, which each forward moves."""
    return Job(model=built(EMATeacher))


class Plain(nn.Module):
    """A transformer of PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(48, WIDTH)
        make = lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, F.gelu, batch_first=True)  # noqa: E731
        self.layers = nn.ModuleList([make() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, LABELS)

    def run_layer(self, index: int, hidden: Tensor, mask: Tensor) -> Tensor:
        return self.layers[index](hidden, src_key_padding_mask=mask)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.words(input_ids)
        for index in range(LAYERS):
            hidden = self.run_layer(index, hidden, attention_mask.eq(0))
        logits = self.head(hidden[:, 0])
        return {"logits": logits} | ({"loss": F.cross_entropy(logits, labels)} if labels is not None else {})


@case("model with state", layouts=("K2", "DP2", "K2 freeze", "K2 acc2"), expect="equal")
def plain_pytorch_layers() -> Job:
    """`nn.TransformerEncoderLayer`s in a list."""
    return Job(model=built(Plain))


class SkipsInEpochs(Plain):
    """Layers are left out by a callback's plan, as in progressive training."""

    active = LAYERS

    def run_layer(self, index: int, hidden: Tensor, mask: Tensor) -> Tensor:
        return super().run_layer(index, hidden, mask) if index < self.active else hidden


class Grows(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        model.active = 2 if state.global_step < 3 else LAYERS


@case("callback", layouts=("K2", "one"))
def layers_left_out_at_first() -> Job:
    """Progressive stacking: a callback says how many layers run."""
    return Job(model=built(SkipsInEpochs), callbacks=[Grows()])


def _after_accumulation() -> Any:
    model = bert_classifier()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_clamp_finished)
    return model


def _clamp_finished(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.02, 0.02)


@case("model with state", layouts=("one", "K2", "K2 zbv", "DP2"))
def post_accumulate_hooks() -> Job:
    """`register_post_accumulate_grad_hook` clamps the gradient of a parameter."""
    return Job(model=_after_accumulation())


class Mutates(Classifier):
    """Changes its inputs in place."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        input_ids[:, 1] = (input_ids[:, 1] + 1) % 48
        return super().forward(input_ids, attention_mask, labels)


@case("model with state", layouts=("one", "K2", "DP2", "one freeze"))
def inputs_changed_in_place() -> Job:
    """`input_ids[:, 1] = ...` in forward."""
    return Job(model=built(Mutates))


class KeepsAttribute(Classifier):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        features = self.features(input_ids, attention_mask)
        self.penalty = features.pow(2).mean(-1)
        return {"logits": self.head(features)}


class ReadsAttribute:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs["logits"], labels) + 0.1 * getattr(model, "module", model).penalty.mean()
        return (loss, outputs) if return_outputs else loss


@case("model with state", layouts=("K2", "DP2"), expect="equal")
def attribute_left_by_forward_and_read_by_the_loss() -> Job:
    """`model.penalty`, of the last forward."""
    return Job(model=built(KeepsAttribute), trainer=ReadsAttribute)


class LearnsLater(Classifier):
    """A part of the model takes part from a step on."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, LABELS)
        self.step = 0

    def score(self, features: Tensor) -> Tensor:
        return self.head(features) + (self.extra(features) if self.step >= 3 else 0)


@case("callback", layouts=("K2", "DP2", "K2 freeze"))
def part_that_takes_part_from_step_three() -> Job:
    """Parameters that take part from step three on: they get no gradient before."""
    return Job(model=built(LearnsLater), callbacks=[TellsStep()])


class MixesInForward(Classifier):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        embedded = self.bert.embeddings.word_embeddings(input_ids)
        order = torch.arange(len(embedded))
        if self.training:
            order = torch.randperm(len(embedded))
            embedded = 0.7 * embedded + 0.3 * embedded[order]
        hidden = self.bert(inputs_embeds=embedded, attention_mask=attention_mask).last_hidden_state
        logits = self.head(hidden[:, 0])
        if labels is None:
            return {"logits": logits}
        loss = 0.7 * F.cross_entropy(logits, labels) + 0.3 * F.cross_entropy(logits, labels[order])
        return {"loss": loss, "logits": logits}


@case("model with state", expect="refused", because="random numbers before its layers")
def mixup_inside_forward() -> Job:
    """Manifold mixup with `torch.randperm` in the model's own forward."""
    return Job(model=built(MixesInForward))


class LabelsInTheLayers(Classifier):
    """As in a model that embeds its label (CVAE, label-conditioned encoders)."""

    def __init__(self) -> None:
        super().__init__()
        self.bert.embeddings.label = nn.Embedding(LABELS + 1, WIDTH)
        self.given: Tensor | None = None
        self.bert.encoder.layer[0].register_forward_pre_hook(self._add_label)

    def _add_label(self, module: Any, args: Any) -> Any:
        if self.given is None:
            return args
        return (args[0] + self.bert.embeddings.label(self.given)[:, None], *args[1:])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.given = labels
        return super().forward(input_ids, attention_mask, labels)


@case("model with state", layouts=("one cache", "K2", "K2 cache"))
def frozen_layers_that_read_labels() -> Job:
    """The model adds an embedding of the label to the word embeddings; each text occurs with two labels."""
    rows = texts().rows
    relabelled = [{**row, "labels": (row["labels"] + row["input_ids"][-1]) % LABELS} for row in rows]
    return Job(model=built(LabelsInTheLayers), data=Rows([*rows, *relabelled]), options={"num_train_epochs": 4})


class Spectral(Classifier):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        for layer in (self.bert.encoder.layer[0].output, self.bert.encoder.layer[3].output):
            layer.dense = nn.utils.parametrizations.spectral_norm(layer.dense)


@case("model with state", layouts=("K2", "one", "DP2"))
def spectral_norm() -> Job:
    """Power iterations in each forward of two layers."""
    return Job(model=built(Spectral))


def _hooked() -> Any:
    model = bert_classifier()
    for name, parameter in model.named_parameters():
        if "layer.3" in name or "layer.0" in name:
            parameter.register_hook(_halve)
    return model


def _halve(gradient: Tensor) -> Tensor:
    return gradient * 0.1


@case("model with state", layouts=("K2", "K2 freeze", "K2 zbv", "DP2", "one"))
def tensor_hooks_on_parameters() -> Job:
    """Gradients of two layers are scaled by hooks; layers move at a freeze."""
    return Job(model=_hooked(), options={"optim": "sgd", "learning_rate": 0.05})


class Counts(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.training:
            self.calls += 1
            self.seen += 1
        output = super().forward(input_ids, attention_mask, labels)
        if labels is not None:
            output["loss"] = output["loss"] * (1.0 + 0.1 * self.calls)
        return output


@case("model with state", layouts=("one", "DP2", "one freeze", "K2"))
def call_counter_in_forward() -> Job:
    """The loss grows with each call; the checks before training must not count."""
    return Job(model=built(Counts), observe=lambda trainer: {"calls": trainer.model.calls})


class NoisyWithDeepSupervision(Classifier):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = self.bert(input_ids, attention_mask=attention_mask, output_hidden_states=True)
        last = outputs.hidden_states[-1]
        if self.training:
            last = last + 0.1 * torch.randn_like(last)
        found = {"logits": self.head(last[:, 0])}
        if labels is not None:
            found["loss"] = F.cross_entropy(found["logits"], labels)
            if self.training:
                found["loss"] = found["loss"] + 0.1 * outputs.hidden_states[1].pow(2).mean()
        return found


@case("model with state", layouts=("K2",), expect="refused", because="reads what other layers return or leave behind")
def noise_and_deep_supervision_in_training() -> Job:
    """In training mode the model draws noise and also uses an early layer's output in its loss."""
    return Job(model=built(NoisyWithDeepSupervision))
