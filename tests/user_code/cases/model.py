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
    Setting,
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
def auxiliary_loss_kept_in_layers(setting: Setting) -> Job:
    """Each layer leaves `self.term`, and the model adds them up."""
    return Job(model=built(AuxiliaryInLayers))


class AnnealedByStep(Classifier):
    step = 0

    def loss(self, logits: Tensor, labels: Tensor, features: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) * (1.0 + self.step / 4)


class TellsStep(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        model.step = state.global_step


@case("callback", layouts=("K2", "DP2", "K2 freeze"), expect="equal")
def step_told_to_the_model_by_a_callback(setting: Setting) -> Job:
    """`model.step = state.global_step`."""
    return Job(model=built(AnnealedByStep), callbacks=[TellsStep()])


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
def ema_teacher_updated_in_forward(setting: Setting) -> Job:
    """BYOL, MoCo: parameters without gradient, which each forward moves."""
    return Job(model=built(EMATeacher))


class NormalisesInputs(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.bert.embeddings.register_buffer("mean", torch.zeros(WIDTH))
        self.bert.embeddings.register_forward_hook(_normalise)


def _normalise(module: Any, _: Any, output: Tensor) -> Tensor:
    if module.training:
        with torch.no_grad():
            module.mean.lerp_(output.detach().mean((0, 1)), 0.1)
    return output - module.mean


@case("model with state", layouts=("one", "K2", "one freeze"))
def running_mean_of_the_inputs(setting: Setting) -> Job:
    """A buffer in the embeddings is updated by each forward."""
    return Job(model=built(NormalisesInputs))


class SkipsByInput(Classifier):
    """Short batches skip a layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.bert.encoder.layer[2]
        whole = layer.forward

        def forward(hidden: Tensor, *positional: Any, **keywords: Any) -> Any:
            output = whole(hidden, *positional, **keywords)
            return output if hidden.shape[1] >= 9 else (hidden,) if isinstance(output, tuple) else hidden

        layer.forward = forward


@case("model with state", layouts=("K2", "one"))
def layer_that_does_nothing_for_short_batches(setting: Setting) -> Job:
    """`forward` set on an instance; what it does depends on the padded length."""
    return Job(model=built(SkipsByInput))


class Plain(nn.Module):
    """A transformer of PyTorch's own layers."""

    keep = 1.0

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
        return (
            {"loss": F.cross_entropy(logits, labels), "logits": logits} if labels is not None else {"logits": logits}
        )


@case("model with state", layouts=("K2", "DP2", "K2 freeze", "K2 acc2"), expect="equal")
def plain_pytorch_layers(setting: Setting) -> Job:
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
def layers_left_out_at_first(setting: Setting) -> Job:
    """Progressive stacking: a callback says how many layers run."""
    return Job(model=built(SkipsInEpochs), callbacks=[Grows()])


def _hooked_modules() -> Any:
    model = bert_classifier()
    for layer in (model.bert.encoder.layer[0], model.bert.encoder.layer[3]):
        layer.output.dense.register_full_backward_hook(_scale)
    return model


def _scale(module: Any, inputs: Any, outputs: Any) -> Any:
    return tuple(None if gradient is None else 0.1 * gradient for gradient in inputs)


@case("model with state", layouts=("K2", "K2 freeze", "DP2"), expect="equal")
def backward_hooks_on_modules(setting: Setting) -> Job:
    """`register_full_backward_hook` scales what flows back."""
    return Job(model=_hooked_modules(), options={"optim": "sgd", "learning_rate": 0.05})


def _after_accumulation() -> Any:
    model = bert_classifier()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_clamp_finished)
    return model


def _clamp_finished(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.02, 0.02)


@case("model with state", layouts=("one", "K2", "DP2"))
def post_accumulate_hooks(setting: Setting) -> Job:
    """`register_post_accumulate_grad_hook` clamps the gradient of a parameter."""
    return Job(model=_after_accumulation())


class Mutates(Classifier):
    """Changes its inputs in place."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        input_ids[:, 1] = (input_ids[:, 1] + 1) % 48
        return super().forward(input_ids, attention_mask, labels)


@case("model with state", layouts=("one", "K2", "DP2", "one freeze"))
def inputs_changed_in_place(setting: Setting) -> Job:
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
def attribute_left_by_forward_and_read_by_the_loss(setting: Setting) -> Job:
    """`model.penalty`, of the last forward."""
    return Job(model=built(KeepsAttribute), trainer=ReadsAttribute)


class Tuples(Plain):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        output = super().forward(input_ids, attention_mask, labels)
        return tuple(output.values())


@case("model with state", layouts=("K2", "one"), expect="equal")
def forward_that_returns_a_tuple(setting: Setting) -> Job:
    """(loss, logits)."""
    return Job(model=built(Tuples), evaluated=texts(6, seed=9), options={"eval_strategy": "epoch"})


@case("model with state", layouts=("K2", "DP2"), expect="equal")
def model_init(setting: Setting) -> Job:
    """`model_init=` in place of a model."""
    return Job(trainer=InitialisesItself, keywords={"model_init": lambda: bert_classifier()})


class InitialisesItself:
    def __init__(self, model: Any = None, *positional: Any, **keywords: Any) -> None:
        super().__init__(None, *positional, **keywords)


class LearnsLater(Classifier):
    """A part of the model takes part from a step on."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, LABELS)
        self.step = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        features = self.features(input_ids, attention_mask)
        logits = self.head(features) + (self.extra(features) if self.step >= 3 else 0)
        return (
            {"loss": F.cross_entropy(logits, labels), "logits": logits} if labels is not None else {"logits": logits}
        )


@case("callback", layouts=("K2", "DP2", "K2 freeze"))
def part_that_takes_part_from_step_three(setting: Setting) -> Job:
    """Parameters that get no gradient in the first steps."""
    return Job(model=built(LearnsLater), callbacks=[TellsStep()])


@case("model with state", layouts=("K2", "one freeze"), expect="equal")
def noisy_embeddings_of_no_noise(setting: Setting) -> Job:
    """`neftune_noise_alpha=1e-12`: its hook is set and removed, and draws."""
    return Job(options={"neftune_noise_alpha": 1e-12})
