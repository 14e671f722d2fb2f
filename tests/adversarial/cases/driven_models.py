"""A loss of the user's over two stages that changes the model, or reads what its layers have left behind."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..kit import (
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
    classified,
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


class Settings:
    """Settings of a class, until an object of it gets its own."""

    scale = 1.0


@case("K2", expect="exact", because="scale")
def sets_first_attribute_of_object() -> Script:
    """A number on an object of each layer that had none before."""
    model: Any = Network(layer=Adjustable)
    for layer in model.layers:
        layer.config = Settings()
    return with_layers_set(lambda layer, step: setattr(layer.config, "scale", annealed(step)), model)


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
    """The loss adds a term that each layer has left in an attribute; it is None until the layer has run."""
    return with_loss(sum_of_terms, Network(layer=LeavesTermLater))


@case("K2", expect="exact", because="layers.0")
def outputs_of_layers_by_hooks() -> Script:
    """Hooks collect each layer's output; the loss takes a term from them."""
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


@case("K2")
def frozen_data_row() -> Script:
    """Rows of the frozen embedding are changed through `.data`, where they are."""

    def change(model: Any, step: int) -> None:
        if not getattr(model.embedding.weight, "is_elsewhere", False):
            model.embedding.weight.data[5:12] += 1

    return with_frozen_layers(change)


@case("K2")
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


# ---------------------------------------------------------------------------------------------------------
# More settings
# ---------------------------------------------------------------------------------------------------------


class Optional(Layer):
    """A layer with an attribute that need not exist, a dictionary, a word, a function and a shared object."""

    shared = SimpleNamespace(scale=1.0)

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"scale": 1.0, "more": [1.0]}
        self.kind = "whole"
        self.activation = torch.tanh
        self.config = self.shared

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(super().forward(x)) * getattr(self, "extra", 1.0) * self.settings["scale"]
        return y * self.settings["more"][0] * (0.5 if self.kind == "half" else 1.0) * self.config.scale


def with_optional(change: Any) -> Script:
    return with_layers_set(change, Network(layer=Optional))


@case("K2", expect="exact", because="extra")
def adds_attribute() -> Script:
    """An attribute that layers do not have at first."""
    return with_optional(lambda layer, step: setattr(layer, "extra", annealed(step)))


@case("K2", expect="exact", because="extra")
def adds_and_deletes_attribute() -> Script:
    """An attribute exists in every other step only."""
    return with_optional(
        lambda layer, step: layer.__dict__.pop("extra", None) if step % 2 else setattr(layer, "extra", 0.5)
    )


@case("K2", expect="exact", because="settings")
def sets_entry_of_dictionary() -> Script:
    """An entry of a dictionary of each layer."""
    return with_optional(lambda layer, step: layer.settings.update(scale=annealed(step)))


@case("K3", expect="exact", because="settings")
def sets_entry_of_list_in_dictionary() -> Script:
    """An entry of a list in a dictionary; three stages."""
    return replace(with_optional(lambda layer, step: layer.settings["more"].__setitem__(0, annealed(step))), batch=6)


@case("K2", expect="exact", because="kind")
def sets_word() -> Script:
    """A string on each layer."""
    return with_optional(lambda layer, step: setattr(layer, "kind", "half" if step % 2 else "whole"))


@case("K2", expect="exact", because="config")
def sets_attribute_of_shared_object() -> Script:
    """A number on one object that all layers refer to."""
    Optional.shared = SimpleNamespace(scale=1.0)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        model.layers[0].config.scale = annealed(trainer.state.global_step)
        return plain_loss(trainer, model, inputs)

    return with_loss(loss, Network(layer=Optional))


@case("K2", expect="exact", because="activation")
def sets_function() -> Script:
    """A function of each layer is replaced."""
    return with_optional(lambda layer, step: setattr(layer, "activation", torch.relu if step else torch.tanh))


@case("K2", expect="exact", because="scale")
def sets_attribute_after_the_call() -> Script:
    """A number on each layer is set after the call, and applies to the backward of nobody and to the next step."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        value, outputs = plain_loss(trainer, model, inputs)
        for layer in model.layers:
            layer.scale = annealed(trainer.state.global_step + 1)
        return value, outputs

    return with_loss(loss, Network(layer=Adjustable))


@case("K2", expect="exact", because="scale")
def sets_attribute_for_one_call() -> Script:
    """A number on the first layer is another one for the second of three calls."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        model.layers[0].scale, before = 0.5, model.layers[0].scale
        second = model(**inputs)
        model.layers[0].scale = before
        return outputs["loss"] + 0.5 * second["loss"] + 0.3 * model(**inputs)["loss"], outputs

    return with_loss(loss, Network(layer=Adjustable))


@case("K2", expect="exact", because="gate")
def sets_buffer_through_data() -> Script:
    """A buffer of each layer is filled through `.data`, which torch does not count."""
    return with_layers_set(lambda layer, step: layer.gate.data.fill_(annealed(step)))


@case("K2", expect="exact", because="gate")
def sets_trained_tensor() -> Script:
    """A tensor that requires a gradient takes the place of a buffer."""

    def wire(trainer: Any) -> None:
        trainer.weight = nn.Parameter(torch.ones(()))

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        for layer in model.layers:
            layer.gate = trainer.weight * 0.9
        return plain_loss(trainer, model, inputs)

    return with_loss(loss, Network(layer=Adjustable), wire=wire)


class Scaled(Network):
    """A classifier that scales its embeddings by a number, and its features by a tensor."""

    scale = 1.0
    weight: Any = 1.0

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return classified(self.head(x.mean(1) * self.weight), labels)


@case("K2", expect="exact", because="scale")
def sets_attributes_of_the_model() -> Script:
    """A number and a tensor on the model itself."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        model.scale = annealed(trainer.state.global_step)
        model.weight = torch.full((WIDTH,), annealed(trainer.state.global_step))
        return plain_loss(trainer, model, inputs)

    return with_loss(loss, Scaled())


@case("K2", expect="exact", because="linear")
def replaces_module() -> Script:
    """The linear part of the first layer is another one for the second call."""
    other = nn.Linear(WIDTH, WIDTH)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        layer = model.layers[0]
        layer.linear, before = other, layer.linear
        second = model(**inputs)
        layer.linear = before
        return outputs["loss"] + second["loss"], outputs

    return with_loss(loss)


@case("K2", expect="exact", because="layers")
def swaps_layers() -> Script:
    """Two layers change places for the second call."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        layers = model.layers
        layers[0], layers[1] = layers[1], layers[0]
        second = model(**inputs)
        layers[0], layers[1] = layers[1], layers[0]
        return outputs["loss"] + second["loss"], outputs

    return with_loss(loss)


@case("K2", expect="exact", because="hook")
def backward_hook_on_layer() -> Script:
    """A backward hook on the first layer, for one call, halves the gradient."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        handle = model.layers[0].register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))
        outputs = model(**inputs)
        handle.remove()
        return outputs["loss"], outputs

    return with_loss(loss)


@case("K2")
def hook_on_the_model() -> Script:
    """A hook on the model during the second call."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        handle = model.register_forward_hook(lambda m, i, output: {**output, "loss": output["loss"] * 0.5})
        second = model(**inputs)
        handle.remove()
        return outputs["loss"] + second["loss"], outputs

    return with_loss(loss)


@case("K2", expect="exact", because="hook")
def hook_on_the_head() -> Script:
    """A hook on the head during the second call."""
    return with_hook(lambda model: model.head)


@case("K2", expect="exact", because="hook")
def hook_that_stays() -> Script:
    """A hook on the first layer is registered after the call of the second step, and stays."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        value, outputs = plain_loss(trainer, model, inputs)
        if trainer.state.global_step == 1:
            model.layers[0].register_forward_hook(lambda module, inputs, output: output * 0.5)
        return value, outputs

    return with_loss(loss)


def with_adapters(loss: Any) -> Script:
    """A model with two adapters; the second one is a reference."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(target_modules=["linear"], r=2, init_lora_weights=False)
    model: Any = get_peft_model(Network(), config)  # type: ignore[arg-type]
    model.add_adapter("ref", config)
    return with_loss(loss, model)


@case("K2")
def reference_adapter() -> Script:
    """The reference's outputs are computed with another adapter, as TRL's `ref_adapter_name` does."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        inner = trainer.accelerator.unwrap_model(model)
        inner.set_adapter("ref")
        with torch.no_grad():
            reference = model(**inputs)
        inner.set_adapter("default")
        outputs = model(**inputs)
        return outputs["loss"] + (outputs["logits"] - reference["logits"]).pow(2).mean(), outputs

    return with_adapters(loss)


@case("K2", expect="exact", because="scaling")
def scale_of_adapters() -> Script:
    """The adapters' scale is set for one call, and then they are disabled."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        inner = trainer.accelerator.unwrap_model(model)
        adapted = [module for module in inner.modules() if "default" in getattr(module, "scaling", ())]
        for module in adapted:
            module.scaling["default"] *= 2
        outputs = model(**inputs)
        for module in adapted:
            module.scaling["default"] /= 2
        with torch.no_grad(), inner.disable_adapter():
            reference = model(**inputs)
        return outputs["loss"] + (outputs["logits"] - reference["logits"]).pow(2).mean(), outputs

    return with_adapters(loss)


# ---------------------------------------------------------------------------------------------------------
# More values that layers leave behind
# ---------------------------------------------------------------------------------------------------------


class LeavesMany(Layer):
    """A layer that leaves its term in a buffer, in lists, in an object, and as a number."""

    collector: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(()), persistent=False)
        self.terms: list[Tensor] = []
        self.size = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        term = y.pow(2).mean()
        self.kept = term.detach()
        self.latest = {"term": term}
        self.terms.append(term)
        self.size = float(term.detach())
        if self.collector is not None:
            self.collector.total = self.collector.total + term
        if not self.training:
            self.seen = term.detach()
        return y


def reading_terms(read: Any, **fields: Any) -> Script:
    """The loss adds `read(model)` after its call, before which lists are emptied."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        for layer in model.layers:
            layer.terms.clear()
        value, outputs = plain_loss(trainer, model, inputs)
        return value + 0.3 * read(model), outputs

    return with_loss(loss, **{"model": Network(layer=LeavesMany), **fields})


@case("K2", expect="exact", because="kept")
def terms_in_buffers() -> Script:
    """A buffer is replaced in each forward."""
    return reading_terms(lambda model: sum(layer.kept for layer in model.layers))


@case("K2", expect="exact", because="terms")
def terms_in_lists() -> Script:
    """Each layer appends to a list of its own."""
    return reading_terms(lambda model: sum(sum(layer.terms) for layer in model.layers))


@case("K3", expect="exact", because="latest")
def terms_in_dictionaries() -> Script:
    """Each layer leaves a dictionary; the loss reads the middle one of three stages'."""
    return reading_terms(lambda model: model.layers[1].latest["term"], batch=6)


@case("K2", expect="exact", because="total")
def terms_in_a_shared_object() -> Script:
    """All layers add to a number of one object, which the loss has as well."""
    collector = SimpleNamespace(total=torch.zeros(()))
    model = Network(layer=LeavesMany)
    for layer in model.layers:
        layer.collector = collector

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        collector.total = torch.zeros(())
        value, outputs = plain_loss(trainer, model, inputs)
        return value + 0.3 * collector.total, outputs

    return with_loss(loss, model)


@case("K2", expect="exact", because="size")
def numbers_of_layers() -> Script:
    """Each layer leaves a number."""
    return reading_terms(lambda model: sum(layer.size for layer in model.layers))


@case("K2", expect="exact", because="size")
def numbers_of_layers_on_whole_batches() -> Script:
    """Likewise, with one micro-batch."""
    product = {"num_microbatches": 1}
    return reading_terms(lambda model: sum(layer.size for layer in model.layers), product=product)


@case("K2", expect="exact", because="micro-batches")
def term_of_the_last_layer() -> Script:
    """The loss reads the last layer's term, which is on its own stage."""
    return reading_terms(lambda model: model.layers[-1].latest["term"] + model.layers[-1].size)


@case("K2", expect="exact", because="term")
def term_of_the_last_layer_on_whole_batches() -> Script:
    """Likewise, with one micro-batch."""
    return reading_terms(lambda model: model.layers[-1].latest["term"], product={"num_microbatches": 1})


@case("K2", expect="exact", because="seen")
def terms_in_evaluation_mode() -> Script:
    """Layers leave a term in evaluation mode only, which the second call is in."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        value, outputs = plain_loss(trainer, model, inputs)
        model.eval()
        with torch.no_grad():
            model(**inputs)
        model.train()
        return value * (1 + sum(layer.seen for layer in model.layers)), outputs

    return with_loss(loss, Network(layer=LeavesMany))


@case("K2", expect="exact", because="latest")
def terms_of_the_last_step() -> Script:
    """The loss reads what the last step's call has left, before its own call."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        left = [layer.latest["term"].detach() for layer in model.layers if hasattr(layer, "latest")]
        value, outputs = plain_loss(trainer, model, inputs)
        return value * (1 + sum(left) if left else 1), outputs

    return with_loss(loss, Network(layer=LeavesMany))


@case("K2")
def terms_that_nobody_reads() -> Script:
    """Layers leave terms, and the loss does not read them."""
    return with_loss(model=Network(layer=LeavesTerm))


@case("K2", expect="exact", because="term")
def terms_reset_by_the_loss() -> Script:
    """The loss sets the terms to None before each of two calls."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        total: Any = 0.0
        for _ in range(2):
            for layer in model.layers:
                layer.term = None
            outputs = model(**inputs)
            total = total + outputs["loss"] + sum(layer.term for layer in model.layers if layer.term is not None)
        return total, outputs

    return with_loss(loss, Network(layer=LeavesTermLater))


class LeavesTermItself(Scaled):
    """A classifier that leaves terms of its embeddings and of its last layer's output."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        self.first = x.pow(2).mean()
        for layer in self.layers:
            x = layer(x)
        self.last = x.pow(2).mean()
        return classified(self.head(x.mean(1)), labels)


@case("K2")
def term_of_the_model() -> Script:
    """The model leaves a term of the last layer's output."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        value, outputs = plain_loss(trainer, model, inputs)
        return value + 0.3 * model.last, outputs

    return with_loss(loss, LeavesTermItself())


@case("K2", expect="exact", because="first")
def term_of_the_embeddings() -> Script:
    """The model leaves a term of its embeddings."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        value, outputs = plain_loss(trainer, model, inputs)
        return value + 0.3 * model.first, outputs

    return with_loss(loss, LeavesTermItself())
