"""What a loss changes around its calls of a model in stages: hooks and modes, shared weights, settings, generators."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as of_modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from ..kit import (
    VOCABULARY,
    At,
    Backbone,
    Each,
    Inputs,
    Layer,
    LossAndOutputs,
    Network,
    Rows,
    Script,
    case,
    classified,
    own_loss,
    plain_loss,
    pool,
    samples,
    with_loss,
)

# ---------------------------------------------------------------------------------------------------------
# Around the call
# ---------------------------------------------------------------------------------------------------------


def inside(context: Callable[[], Any]) -> Script:
    """The model is called in a context."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        with context():
            outputs = model(**inputs)
        return outputs["loss"], outputs

    return with_loss(loss)


class Halved(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = function(*args, **(kwargs or {}))
        return value * 0.5 if function is torch.tanh else value


class HalvedLater(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = function(*args, **(kwargs or {}))
        return value * 0.5 if function is torch.ops.aten.tanh.default else value


def rounding() -> Any:
    def pack(tensor: Tensor) -> Tensor:
        return (tensor * 4).round() / 4 if tensor.is_floating_point() else tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


@case("K2", "K3", expect="exact", because="hooks of all modules")
def hook_of_all_modules_in_loss() -> Script:
    """A hook for all modules is there during the call."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        handle = of_modules.register_module_forward_hook(
            lambda module, args, output: output * 0.9 if isinstance(module, nn.Linear) else None
        )
        try:
            outputs = model(**inputs)
        finally:
            handle.remove()
        return outputs["loss"], outputs

    return with_loss(loss)


@case("K2", expect="exact", because="hooks of all modules")
def hook_of_all_modules_after_the_call() -> Script:
    """The loss leaves a hook for all modules, which it registers after its call."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        if trainer.state.global_step == 1:
            trainer.handle = of_modules.register_module_forward_hook(
                lambda module, args, output: output * 0.9 if isinstance(module, nn.Linear) else None
            )
        return outputs["loss"], outputs

    def drive(trainer: Any) -> None:
        try:
            trainer.train()
        finally:
            if hasattr(trainer, "handle"):
                trainer.handle.remove()

    return with_loss(loss, drive=drive)


class Keeping(Layer):
    """A layer that keeps its output."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.kept = x.detach()
        return x


@case("K2", "K3")
def kept_outputs_are_tensors_after_the_training() -> Script:
    """They cannot be read in the loss, but the model is whole after each step and after the training."""

    def whole(model: Any) -> int:
        copied = copy.deepcopy(model)
        return sum(type(layer.kept) is Tensor or layer.kept is None for layer in copied.layers)

    def drive(trainer: Any) -> Any:
        trainer.train()
        return whole(trainer.model)

    def look(callback: Any, *_: Any, model: Any = None, **__: Any) -> None:
        assert all(type(layer.kept) is Tensor or layer.kept is None for layer in model.layers)

    return with_loss(model=Network(3, Keeping), callbacks=[Each(look, "on_step_end")], drive=drive, batch=12)


@case("K2", expect="exact", because="modes of torch")
def function_mode_in_loss() -> Script:
    """A torch function mode is entered around the call."""
    return inside(Halved)


@case("K2", expect="exact", because="modes of torch")
def dispatch_mode_in_loss() -> Script:
    """A torch dispatch mode is entered around the call."""
    return inside(HalvedLater)


@case("K2", expect="exact", because="hooks of saved tensors")
def compressed_activations_in_loss() -> Script:
    """Saved activations are rounded."""
    return inside(rounding)


@case("K2")
def saved_on_cpu_in_loss() -> Script:
    """torch's own hooks of saved tensors keep the values."""
    return inside(torch.autograd.graph.save_on_cpu)


@case("K2")
def compressed_activations_around_the_step() -> Script:
    """They are rounded in `training_step`, on all processes."""

    class InStep:
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with rounding():
                return super().training_step(*args, **kwargs)  # type: ignore[misc]

    return with_loss(trainer=own_loss(plain_loss, InStep), product={"num_microbatches": 1})


@case("K2", expect="exact", because="layer_norm")
def functional_patched_in_loss() -> Script:
    """A function that torch's own modules call is replaced during the call."""
    plain = F.layer_norm
    return inside(lambda: mock.patch.object(F, "layer_norm", lambda *a, **k: 0.5 * plain(*a, **k)))


# ---------------------------------------------------------------------------------------------------------
# Weights that several stages hold
# ---------------------------------------------------------------------------------------------------------


class Scaled(Backbone):
    """The scale is used before and after the layers."""

    def __init__(self) -> None:
        super().__init__(4)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(16, 3)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return classified(self.head(pool(x * self.scale, attention_mask)), labels)


def clamped(clamp: Callable[[nn.Parameter], object], is_after: bool = False) -> Script:
    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if not is_after:
            clamp(model.scale)
        outputs = model(**inputs)
        if is_after:
            clamp(model.scale)
        return outputs["loss"], outputs

    return with_loss(loss, Scaled(), batch=12)


@torch.no_grad()
def in_place(scale: nn.Parameter) -> None:
    scale.clamp_(0.2, 0.6)


def through_data(scale: nn.Parameter) -> None:
    scale.data = scale.data.clamp(0.2, 0.6)


def into_data(scale: nn.Parameter) -> None:
    scale.data.clamp_(0.2, 0.6)


@case("K2", "K3", "K2R2")
def scale_clamped_before_the_call() -> Script:
    """CLIP's `logit_scale.clamp_()`, of a scale that two stages hold."""
    return clamped(in_place)


@case("K2", "K3")
def scale_clamped_through_data() -> Script:
    """The same through `.data`."""
    return clamped(through_data)


@case("K2")
def scale_clamped_in_its_data() -> Script:
    """The same in place, through `.data`."""
    return clamped(into_data)


def gpt2() -> GPT2LMHeadModel:
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout))


def words() -> Rows:
    return Rows([{**row, "labels": row["input_ids"].clone()} for row in samples(48)])


@case("K2", "K3")
def tied_head_normalised_in_loss() -> Script:
    """Rows of a tied head are normalised before each call."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        weight = model.lm_head.weight
        with torch.no_grad():
            weight.div_(weight.norm(dim=1, keepdim=True).clamp_min(1e-6)).mul_(0.5)
        outputs = model(**inputs)
        return outputs["loss"], outputs

    return with_loss(loss, gpt2(), data=words(), batch=12)


# ---------------------------------------------------------------------------------------------------------
# Settings by which layers mix samples
# ---------------------------------------------------------------------------------------------------------


class Mixing(Layer):
    share: float | None = None
    order: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.order is not None:
            return 0.7 * x + 0.3 * x[self.order]
        return x if self.share is None else self.share * x + (1 - self.share) * x.flip(0)


@case("K2", "K3")
def manifold_mixup_by_a_flag() -> Script:
    """The loss sets a number by which one layer mixes the batch with its reverse."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        for number, layer in enumerate(model.layers):
            layer.share = 0.7 if number == trainer.state.global_step % 3 else None
        outputs = model(**inputs)
        other = F.cross_entropy(outputs["logits"], inputs["labels"].flip(0))
        return 0.7 * outputs["loss"] + 0.3 * other, outputs

    return with_loss(loss, Network(3, Mixing), batch=12)


@case("K2", "K3")
def manifold_mixup_by_an_order() -> Script:
    """The loss sets the order of the samples that are mixed in."""
    draw = torch.Generator().manual_seed(0)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        order = model.layers[1].order = torch.randperm(len(inputs["labels"]), generator=draw)
        outputs = model(**inputs)
        model.layers[1].order = None
        other = F.cross_entropy(outputs["logits"], inputs["labels"][order])
        return 0.7 * outputs["loss"] + 0.3 * other, outputs

    return with_loss(loss, Network(3, Mixing), batch=12)


@case("K2", "K3")
def manifold_mixup_by_a_callback() -> Script:
    """A callback sets the number, on all processes."""

    def set_share(model: Any, step: int) -> None:
        model.layers[0].share = 0.7

    return with_loss(model=Network(3, Mixing), batch=12, callbacks=[At(set_share, [2])])


# ---------------------------------------------------------------------------------------------------------
# Generators
# ---------------------------------------------------------------------------------------------------------


def drawing(in_loss: Callable[[], float], choose: Callable[[int], int]) -> Script:
    """Mixup in the loss, and a callback that trains one layer drawn by lot (LISA)."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        share = in_loss()
        outputs = model(**inputs)
        other = F.cross_entropy(outputs["logits"], inputs["labels"].flip(0))
        return share * outputs["loss"] + (1 - share) * other, outputs

    def choose_layer(callback: Any, *_: Any, model: Any = None, **__: Any) -> None:
        chosen = choose(len(model.layers))
        for number, layer in enumerate(model.layers):
            layer.requires_grad_(number == chosen)

    return with_loss(loss, batch=12, callbacks=[Each(choose_layer, "on_step_begin")])


@case("K2", "K3")
def loss_and_callback_draw_from_numpy() -> Script:
    """Both draw from NumPy's global generator."""
    return drawing(lambda: float(np.random.beta(2, 2)), lambda number: int(np.random.choice(number)))


@case("K2", "K3")
def loss_and_callback_draw_from_python() -> Script:
    """Both draw from Python's."""
    return drawing(lambda: random.betavariate(2, 2), random.randrange)


@case("K2")
def loss_and_callback_draw_from_torch() -> Script:
    """Both draw from torch's."""
    return drawing(lambda: float(torch.rand(())), lambda number: int(torch.randint(number, ())))
