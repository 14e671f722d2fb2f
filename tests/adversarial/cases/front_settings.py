"""A frozen backbone's stored outputs are read, and the user changes its buffers, settings, code and hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..kit import VOCABULARY, WIDTH, At, Backbone, FrozenBackbone, Layer, Script, case, samples
from .front_weights import MIDDLE, changed

MODULE_SETTING = {"scale": 1.0}
"""A setting outside the model."""


class Settings(Backbone):
    """A backbone that multiplies its output by a buffer and by settings of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.ones(VOCABULARY, 1))
        self.config = SimpleNamespace(scale=1.0)
        self._scale = self.scale = 1.0
        self.mask = torch.ones(WIDTH)
        self.nested = {"outer": {"inner": [1.0]}}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        factor = self.config.scale * self._scale * self.scale * self.nested["outer"]["inner"][0]
        return super().forward(input_ids) * self.gate[input_ids] * self.mask * factor * MODULE_SETTING["scale"]


def with_settings(change: Any, steps: Any = MIDDLE, **fields: Any) -> Script:
    """`change(backbone, step)` changes one of the settings."""
    model = FrozenBackbone(Settings())
    return changed(lambda model, step: change(model.backbone, step), steps, model, **fields)


@case("K1")
def buffer_in_place() -> Script:
    """A buffer is changed by an in-place operation."""

    def change(backbone: Any, step: int) -> None:
        backbone.gate[5:12] = 0.2

    return with_settings(change)


@case("K1")
def buffer_through_data() -> Script:
    """A buffer is changed through `.data`."""

    def change(backbone: Any, step: int) -> None:
        backbone.gate.data[5:12] = 0.2

    return with_settings(change)


@case("K1")
def attribute() -> Script:
    """A number on the module."""

    def change(backbone: Any, step: int) -> None:
        backbone.scale = 0.3

    return with_settings(change)


@case("K1")
def attribute_private() -> Script:
    """A number on the module; its name begins with an underscore."""

    def change(backbone: Any, step: int) -> None:
        backbone._scale = 0.3

    return with_settings(change)


@case("K1")
def attribute_private_in_warm_up() -> Script:
    """A number with an underscore changes after a warm-up of one step, before all samples are stored."""

    def change(backbone: Any, step: int) -> None:
        backbone._scale = 0.1 if step == 0 else 1.0

    return with_settings(change, (0, 1), data=samples(64), options={"num_train_epochs": 4})


@case("K1")
def attribute_of_object() -> Script:
    """A number on an object of the module, such as its configuration."""

    def change(backbone: Any, step: int) -> None:
        backbone.config.scale = 0.3

    return with_settings(change)


@case("K1")
def attribute_tensor_in_place() -> Script:
    """A tensor of the module that is no buffer is changed in place."""

    def change(backbone: Any, step: int) -> None:
        backbone.mask[:8] = 0

    return with_settings(change)


@case("K1")
def attribute_tensor_replaced() -> Script:
    """A tensor of the module that is no buffer is replaced."""

    def change(backbone: Any, step: int) -> None:
        backbone.mask = torch.arange(float(WIDTH)) / 8

    return with_settings(change)


@case("K1")
def attribute_nested() -> Script:
    """A number in a list in dictionaries."""

    def change(backbone: Any, step: int) -> None:
        backbone.nested["outer"]["inner"][0] = 0.3

    return with_settings(change)


@case("K1")
def global_value() -> Script:
    """A setting in a variable of the script's module."""

    def change(backbone: Any, step: int) -> None:
        MODULE_SETTING["scale"] = 0.3

    return with_settings(change)


@case("K1")
def mode() -> Script:
    """The backbone is put into evaluation mode, and computes something else in it."""

    class ByMode(Backbone):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(input_ids) * (2 if self.training else 1)

    return changed(lambda model, step: model.backbone.eval(), model=FrozenBackbone(ByMode()))


# ---------------------------------------------------------------------------------------------------------
# Code
# ---------------------------------------------------------------------------------------------------------


def halve_forward(model: Any, step: int) -> None:
    """Replace the backbone's forward by a function that calls the class's forward."""
    backbone = model.backbone
    backbone.forward = lambda input_ids, attention_mask=None: type(backbone).forward(backbone, input_ids) * 0.5


EVALUATED: dict[str, Any] = {"eval_strategy": "epoch"}


@case("K1")
def forward_of_inner_layer_patched() -> Script:
    """The forward of one layer is replaced."""

    def change(model: Any, step: int) -> None:
        layer = model.backbone.layers[3]
        layer.forward = lambda x: type(layer).forward(layer, x) * 0.5

    return changed(change)


@case("K1")
def forward_of_class_patched() -> Script:
    """The forward of the layers' class is replaced."""

    class Patched(Layer):
        pass

    def change(model: Any, step: int) -> None:
        Patched.forward = lambda self, x: Layer.forward(self, x) * 0.5  # type: ignore[method-assign]

    return changed(change, model=FrozenBackbone(Backbone(layer=Patched)))


@case("K1")
def forward_of_backbone_patched() -> Script:
    """The forward of the backbone is replaced."""
    return changed(halve_forward)


@case("K1")
def forward_of_backbone_patched_then_evaluation() -> Script:
    """The forward of the backbone is replaced, with an evaluation in each epoch."""
    return changed(halve_forward, options=EVALUATED, keywords={"eval_dataset": samples(8, seed=9)})


@case("K1")
def forward_of_backbone_wrapped() -> Script:
    """The forward that the backbone has at that time is wrapped."""

    def change(model: Any, step: int) -> None:
        inner = model.backbone.forward
        model.backbone.forward = lambda input_ids, attention_mask=None: inner(input_ids, attention_mask) * 0.5

    return changed(change)


@case("K1")
def forward_of_model_wrapped_then_evaluation() -> Script:
    """The forward of the whole model is wrapped, with an evaluation in each epoch."""

    def change(model: Any, step: int) -> None:
        inner = model.forward

        def forward(**inputs: Any) -> Any:
            outputs = inner(**inputs)
            outputs["loss"] = outputs["loss"] * 0.5
            return outputs

        model.forward = forward

    return changed(change, options=EVALUATED, keywords={"eval_dataset": samples(8, seed=9)})


@case("K1")
def function_of_torch_replaced() -> Script:
    """`torch.tanh` is replaced by another function."""
    original = torch.tanh

    class Replaces(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in MIDDLE:
                torch.tanh = lambda x: original(x) * 0.5  # type: ignore[assignment]

    def drive(trainer: Any) -> None:
        try:
            trainer.train()
        finally:
            torch.tanh = original

    return Script(model=FrozenBackbone(), callbacks=[Replaces()], drive=drive)


# ---------------------------------------------------------------------------------------------------------
# Hooks
# ---------------------------------------------------------------------------------------------------------


def scale_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A forward hook."""
    return output * 0.7


@case("K1")
def hook_on_inner_layer() -> Script:
    """A forward hook is registered on a layer."""
    return changed(lambda model, step: model.backbone.layers[2].register_forward_hook(scale_output))


@case("K1")
def hook_on_backbone() -> Script:
    """A forward hook is registered on the backbone."""
    return changed(lambda model, step: model.backbone.register_forward_hook(scale_output))


@case("K1")
def hook_before_backbone() -> Script:
    """A hook that changes the backbone's input is registered."""

    def before(module: nn.Module, inputs: Any) -> Any:
        return (inputs[0] + 1) % VOCABULARY, *inputs[1:]

    return changed(lambda model, step: model.backbone.register_forward_pre_hook(before))


@case("K1")
def hooks_with_state() -> Script:
    """Hooks that are there from the start read a number that changes."""
    strength = {"now": 1.0}

    def scale(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * strength["now"]

    model = FrozenBackbone()
    model.backbone.register_forward_hook(scale)
    model.backbone.layers[2].register_forward_hook(scale)
    return Script(model=model, callbacks=[At(lambda model, step: strength.update(now=0.5), MIDDLE)])


# ---------------------------------------------------------------------------------------------------------
# Values that the code of a module reads
# ---------------------------------------------------------------------------------------------------------


def scaled(x: Tensor) -> Tensor:
    """A function of the script's, which a module calls."""
    return x * MODULE_SETTING["scale"]


class CallsAFunction(Backbone):
    """A backbone that calls a function of the script's."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return scaled(super().forward(input_ids))


@case("K1")
def global_read_by_a_function() -> Script:
    """A function that the module calls reads a variable that changes."""
    MODULE_SETTING["scale"] = 1.0
    return changed(lambda model, step: MODULE_SETTING.update(scale=0.3), model=FrozenBackbone(CallsAFunction()))


@case("K1")
def function_of_the_script_replaced() -> Script:
    """A function that the module calls is replaced."""
    MODULE_SETTING["scale"] = 1.0

    def change(model: Any, step: int) -> None:
        globals()["scaled"] = lambda x: x * 0.4

    def drive(trainer: Any) -> None:
        before = scaled
        try:
            trainer.train()
        finally:
            globals()["scaled"] = before

    return changed(change, model=FrozenBackbone(CallsAFunction()), drive=drive)


@case("K1")
def value_in_a_closure() -> Script:
    """A variable of the function that has made the module's class changes."""
    scale = 1.0

    class ByClosure(Backbone):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(input_ids) * scale

    def change(model: Any, step: int) -> None:
        nonlocal scale
        scale = 0.3

    return changed(change, model=FrozenBackbone(ByClosure()))


@case("K1")
def method_of_class_patched() -> Script:
    """A method that `forward` calls is replaced on the class."""

    class WithMethod(Backbone):
        def scaled(self, x: Tensor) -> Tensor:
            return x

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.scaled(super().forward(input_ids))

    def change(model: Any, step: int) -> None:
        WithMethod.scaled = lambda self, x: x * 0.4  # type: ignore[method-assign]

    return changed(change, model=FrozenBackbone(WithMethod()))


@case("K1")
def setting_of_a_configuration_in_a_list() -> Script:
    """A configuration in a list of the module's changes."""

    class WithList(Backbone):
        def __init__(self) -> None:
            super().__init__()
            self.settings = [SimpleNamespace(scale=1.0)]

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(input_ids) * self.settings[0].scale

    def change(model: Any, step: int) -> None:
        model.backbone.settings[0].scale = 0.3

    return changed(change, model=FrozenBackbone(WithList()))
