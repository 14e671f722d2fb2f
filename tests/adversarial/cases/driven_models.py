"""A loss of the user's over two stages that changes the model, or reads what its layers have left behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..kit import (
    UNSEEN_CHANGE,
    VOCABULARY,
    WIDTH,
    At,
    Each,
    Inputs,
    Layer,
    LossAndOutputs,
    Network,
    Script,
    case,
    own_loss,
    plain_loss,
    samples,
    with_loss,
)


class Adjustable(Layer):
    """A layer with settings of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.register_buffer("gate", torch.ones(()))
        self.dropout = nn.Dropout(0.0)
        self.config = SimpleNamespace(scale=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x)) * self.scale * self.gate * self.config.scale


def annealed(step: int) -> float:
    """A setting that falls from step to step."""
    return 1 - 0.1 * step


def with_layers_set(change: Any, model: nn.Module | None = None) -> Script:
    """The loss calls `change(layer, step)` for each layer, then the model."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        for layer in model.layers:
            change(layer, trainer.state.global_step)
        return plain_loss(trainer, model, inputs)

    return with_loss(loss, model or Network(layer=Adjustable))


# ---------------------------------------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------------------------------------


@case("K2", expect="exact", because="scale")
def sets_attribute() -> Script:
    """A number on each layer."""
    return with_layers_set(lambda layer, step: setattr(layer, "scale", annealed(step)))


@case("K2", expect="exact", because="scale")
def sets_attribute_of_object() -> Script:
    """A number on an object of each layer."""
    return with_layers_set(lambda layer, step: setattr(layer.config, "scale", annealed(step)))


@case("K2", expect="exact", because="gate")
def sets_buffer() -> Script:
    """A buffer of each layer is filled."""
    return with_layers_set(lambda layer, step: layer.gate.fill_(annealed(step)))


@case("K2", expect="exact", because="gate")
def replaces_buffer() -> Script:
    """A buffer of each layer is replaced."""
    return with_layers_set(lambda layer, step: setattr(layer, "gate", torch.tensor(annealed(step))))


@case("K2", expect="exact", because="dropout")
def sets_dropout_to_zero() -> Script:
    """Dropout is switched off by its rate."""
    model: Any = Network(layer=Adjustable)
    for layer in model.layers:
        layer.dropout.p = 0.5
    return with_layers_set(lambda layer, step: setattr(layer.dropout, "p", 0.0), model)


@case("K2")
def sets_attribute_in_training_step() -> Script:
    """A number on each layer, in an override of `training_step`."""

    class Sets:
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            for layer in self.accelerator.unwrap_model(model).layers:  # type: ignore[attr-defined]
                layer.scale = annealed(self.state.global_step)  # type: ignore[attr-defined]
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]

    return with_loss(model=Network(layer=Adjustable), trainer=own_loss(plain_loss, Sets))


class HalvedInEvaluation(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.training else 0.5)


@case("K2")
def modes_per_call() -> Script:
    """The model, then one layer of it, is in evaluation mode for one call."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        model.eval()
        with torch.no_grad():
            target = model(**inputs)
        model.train()
        model.layers[0].eval()
        other = model(**inputs)
        model.train()
        return outputs["loss"] + (other["logits"] - target["logits"]).pow(2).mean(), outputs

    return with_loss(loss, Network(layer=HalvedInEvaluation))


@case("K2", expect="exact", because="requires_grad")
def freezes_every_other_step() -> Script:
    """The first layer is frozen in every other step."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        model.layers[0].requires_grad_(trainer.state.global_step % 2 == 0)
        return plain_loss(trainer, model, inputs)

    return with_loss(loss)


@case("K2", expect="exact", because="requires_grad")
def freezes_for_one_call() -> Script:
    """The first layer is frozen for one call, and trained by the next."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        model.layers[0].requires_grad_(False)
        outputs = model(**inputs)
        model.layers[0].requires_grad_(True)
        return outputs["loss"] + 0.5 * model(**inputs)["loss"], outputs

    return with_loss(loss)


class Stops(Layer):
    """A layer that may keep gradients from the layers below it."""

    stop = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach() if self.stop else x)


@case("K2", expect="exact", because="stop")
def flag_that_detaches() -> Script:
    """A flag of a layer stops gradients for one call."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        model.layers[1].stop = True
        outputs = model(**inputs)
        model.layers[1].stop = False
        return outputs["loss"] + model(**inputs)["loss"], outputs

    return with_loss(loss, Network(layer=Stops))


# ---------------------------------------------------------------------------------------------------------
# Hooks and replaced code
# ---------------------------------------------------------------------------------------------------------


def with_hook(part: Any) -> Script:
    """A second call with a hook on a part of the model that halves its output."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        handle = part(model).register_forward_hook(lambda module, inputs, output: output * 0.5)
        second = model(**inputs)
        handle.remove()
        return outputs["loss"] + second["loss"], outputs

    return with_loss(loss)


@case("K2", expect="exact", because="hook")
def hook_on_embeddings() -> Script:
    """A hook on the embeddings during the second call, as adversarial training writes it."""
    return with_hook(lambda model: model.embedding)


@case("K2", expect="exact", because="hook")
def hook_on_layer() -> Script:
    """A hook on the first layer during the second call."""
    return with_hook(lambda model: model.layers[0])


@case("K2", expect="exact", because="layers.0")
def layer_skipped_by_patch() -> Script:
    """The first layer's forward is replaced during the second call."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        layer = model.layers[0]
        original = layer.forward
        layer.forward = lambda x: x * 0.5
        second = model(**inputs)
        layer.forward = original
        return outputs["loss"] + second["loss"], outputs

    return with_loss(loss)


# ---------------------------------------------------------------------------------------------------------
# Values that layers leave behind
# ---------------------------------------------------------------------------------------------------------


class LeavesTerm(Layer):
    """A layer with a term of the loss, as a mixture of experts has."""

    def __init__(self) -> None:
        super().__init__()
        self.term: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.term = y.pow(2).mean()
        return y


class LeavesTermLater(LeavesTerm):
    def __init__(self) -> None:
        super().__init__()
        self.term = None


def sum_of_terms(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
    """The model's loss and the terms of all layers that have one."""
    outputs = model(**inputs)
    terms = [module.term for module in model.modules() if getattr(module, "term", None) is not None]
    return outputs["loss"] + 0.3 * sum(terms), outputs


@case("K2", expect="exact", because="term")
def terms_of_layers() -> Script:
    """The loss adds a term that each layer has left in an attribute."""
    return with_loss(sum_of_terms, Network(layer=LeavesTerm))


@case("K2", expect="exact", because="term")
def terms_of_layers_that_begin_as_none() -> Script:
    """Likewise; layers that have not run yet have None."""
    return with_loss(sum_of_terms, Network(layer=LeavesTermLater))


@case("K2", expect="exact", because="layers.0")
def outputs_of_layers_by_hooks() -> Script:
    """Hooks collect each layer's output, from which the loss takes a term."""
    taken: list[Tensor] = []

    def wire(trainer: Any) -> None:
        for layer in trainer.model.layers:
            layer.register_forward_hook(lambda module, inputs, output: taken.append(output))

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        taken.clear()
        outputs = model(**inputs)
        return outputs["loss"] + 0.3 * sum(output.pow(2).mean() for output in taken), outputs

    return with_loss(loss, wire=wire)


class RunningMean(Layer):
    """A layer that changes a buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))
        return y - 0.1 * self.mean


@case("K2", expect="exact", because="mean")
def running_means_in_the_loss() -> Script:
    """The loss reads a buffer that each layer's forward changes."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs["loss"] * (1 + 10 * sum(layer.mean.abs().mean() for layer in model.layers)), outputs

    return with_loss(loss, Network(layer=RunningMean))


# ---------------------------------------------------------------------------------------------------------
# Frozen layers below
# ---------------------------------------------------------------------------------------------------------


def with_frozen_layers(change: Any = None, loss: Any = plain_loss) -> Script:
    """Three epochs with the lower half frozen, which `change(model, step)` changes in the second."""
    model = Network(4, layer=Adjustable)
    for part in (model.embedding, model.layers[0], model.layers[1]):
        part.requires_grad_(False)
    callbacks = [At(change, (6,))] if change else []
    return with_loss(loss, model, data=samples(32), callbacks=callbacks, options={"num_train_epochs": 3})


@case("K2")
def frozen_layers_below_a_loss() -> Script:
    """Frozen layers, as they are."""
    return with_frozen_layers()


@case("K2", fails=UNSEEN_CHANGE)
def frozen_data_row() -> Script:
    """Rows of the frozen embedding are changed through `.data`, where they are."""

    def change(model: Any, step: int) -> None:
        if not getattr(model.embedding.weight, "is_elsewhere", False):
            model.embedding.weight.data[5:12] += 1

    return with_frozen_layers(change)


@case("K2", fails=UNSEEN_CHANGE)
def frozen_attribute_of_object() -> Script:
    """A number on an object of a frozen layer."""
    return with_frozen_layers(lambda model, step: setattr(model.layers[0].config, "scale", 0.5))


@case("K2")
def frozen_attribute() -> Script:
    """A number on a frozen layer."""
    return with_frozen_layers(lambda model, step: setattr(model.layers[0], "scale", 0.5))


@case("K2")
def frozen_layers_on_other_inputs() -> Script:
    """A second call on inputs that the loss has changed."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        other = model(**{**inputs, "input_ids": (inputs["input_ids"] + 1) % VOCABULARY})
        return outputs["loss"] + other["loss"], outputs

    return with_frozen_layers(loss=loss)


@case("K2")
def layers_frozen_by_schedule() -> Script:
    """The schedule freezes a layer after the first epoch; the stock Trainer's user does so by hand."""

    def freeze(callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not hasattr(callback.trainer.args, "freeze_policy") and state.epoch and state.epoch > 0.5:
            model.embedding.requires_grad_(False)
            model.layers[0].requires_grad_(False)

    product = {"freeze_policy": "schedule", "freeze_schedule": {"1": 1}}
    fields: dict[str, Any] = {"data": samples(32), "product": product, "options": {"num_train_epochs": 3}}
    return with_loss(model=Network(4), callbacks=[Each(freeze, "on_epoch_begin")], **fields)
