"""Frozen modules that torch transforms, and settings of frozen modules that are no plain attributes."""

from __future__ import annotations

import array
import ctypes
import multiprocessing
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from transformers.models.bert import modeling_bert

from ..kit import (
    LABELS,
    VOCABULARY,
    WIDTH,
    At,
    Backbone,
    FrozenBackbone,
    Inputs,
    LossAndOutputs,
    Script,
    bert,
    case,
    classified,
    samples,
    with_loss,
)
from .attack_front import OnBert, again, with_rare_words
from .attack_recipes_front import of

# ---------------------------------------------------------------------------------------------------------
# Forward-mode differentiation, and function transforms
# ---------------------------------------------------------------------------------------------------------

Transformed = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def differentiable() -> Any:
    """Inside, attention has a derivative in forward mode."""
    return nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)


def by_dual(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The output and its derivative, by forward-mode differentiation."""
    with differentiable(), forward_ad.dual_level():
        made, tangent = forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x))))
        return made + tangent if tangent is not None else made.clone()


def by_jvp(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with differentiable():
        made, tangent = torch.func.jvp(module, (x,), (torch.ones_like(x),))
    return made + tangent  # type: ignore[no-any-return]


def by_vjp(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    made, back = torch.func.vjp(module, x)
    return made + back(torch.ones_like(made))[0].mean()  # type: ignore[no-any-return]


def by_vmap(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: module(row[None])[0])(x) * 2


def traced(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The module's function of any input, of which another input is computed."""
    return torch.jit.trace(module, (x,))(x + 1)  # type: ignore[no-any-return]


class Transforming(nn.Module):
    """A head on a frozen encoder, which is called as it is, or through a transform."""

    def __init__(self, how: Transformed | None, later: Transformed | None = None) -> None:
        super().__init__()
        self.how, self.later = how, later
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).requires_grad_(False)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        hidden = self.encoder(x) if self.how is None else self.how(self.encoder, x)
        return classified(self.head(hidden.mean(1)), labels)


def transforming(how: Transformed, is_later: bool = False) -> Script:
    def change(model: Any, step: int) -> None:
        model.how = model.later

    model = Transforming(None, how) if is_later else Transforming(how)
    callbacks = [At(change, [6])] if is_later else []
    return Script(model=model, data=samples(32), callbacks=callbacks, options={"num_train_epochs": 3})


def with_teacher(how: Transformed, first: int = 0) -> Script:
    """The student matches what a transform makes of a frozen teacher, from a step on."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        x = F.one_hot(inputs["input_ids"], VOCABULARY).float().flatten(1)
        made = how(trainer.teacher, x) if trainer.state.global_step >= first else trainer.teacher(x)
        return outputs.loss + F.mse_loss(outputs.logits, made.detach()), outputs

    def wire(trainer: Any) -> None:
        torch.manual_seed(3)
        parts = nn.Linear(8 * VOCABULARY, WIDTH), nn.Tanh(), nn.Linear(WIDTH, LABELS)
        trainer.teacher = nn.Sequential(*parts).requires_grad_(False)

    data, options = samples(32), {"num_train_epochs": 3}
    return with_loss(loss, bert(num_hidden_layers=1), wire=wire, data=data, options=options)


@case("K1")
def forward_mode_of_a_frozen_encoder() -> Script:
    """The model differentiates a frozen encoder by forward_ad."""
    return transforming(by_dual)


@case("K1")
def forward_mode_of_a_frozen_encoder_later() -> Script:
    """The model differentiates a frozen encoder by forward_ad, from the second epoch on."""
    return transforming(by_dual, is_later=True)


@case("K1")
def jvp_of_a_frozen_encoder() -> Script:
    """The model calls torch.func.jvp of a frozen encoder."""
    return transforming(by_jvp)


@case("K1")
def jvp_of_a_frozen_encoder_later() -> Script:
    """The model calls torch.func.jvp of a frozen encoder, from the second epoch on."""
    return transforming(by_jvp, is_later=True)


@case("K1")
def vjp_of_a_frozen_encoder_later() -> Script:
    """The model calls torch.func.vjp of a frozen encoder, from the second epoch on."""
    return transforming(by_vjp, is_later=True)


@case("K1")
def vmap_of_a_frozen_encoder_later() -> Script:
    """The model calls torch.func.vmap of a frozen encoder, from the second epoch on."""
    return transforming(by_vmap, is_later=True)


@case("K1", "R2")
def forward_mode_of_a_teacher() -> Script:
    """The loss differentiates a frozen teacher by forward_ad."""
    return with_teacher(by_dual)


@case("K1")
def jvp_of_a_teacher() -> Script:
    """The loss calls torch.func.jvp of a frozen teacher."""
    return with_teacher(by_jvp)


@case("K1")
def vmap_of_a_teacher_later() -> Script:
    """The loss calls torch.func.vmap of a frozen teacher, in the middle of the second epoch."""
    return with_teacher(by_vmap, first=6)


@case("K1")
def traced_teacher_later() -> Script:
    """The loss calls what torch.jit.trace makes of a frozen teacher, from the middle of the second epoch on."""
    return with_teacher(traced, first=6)


# ---------------------------------------------------------------------------------------------------------
# Objects of Python's library and of C as attributes
# ---------------------------------------------------------------------------------------------------------


class Scaled(Backbone):
    """Scales its output by a number in an object."""

    def __init__(self, holder: Any, get: Callable[[Any], float]) -> None:
        super().__init__()
        self.holder, self.get = holder, get

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids) * self.get(self.holder)


def scaled(holder: Any, get: Callable[[Any], float], change: Callable[[Any], object]) -> Script:
    """The number changes in the middle of the third epoch."""
    model, product = FrozenBackbone(Scaled(holder, get)), {"cached_modules": ["backbone"]}
    return Script(
        model=model, product=product, callbacks=[At(lambda model, step: change(model.backbone.holder), [10])]
    )


@case("K1", "R2")
def shared_value_changes() -> Script:
    """A frozen module reads a number that is shared with the loader's workers (multiprocessing.Value)."""
    return scaled(multiprocessing.Value("d", 1.0), lambda h: h.value, lambda h: setattr(h, "value", 3.0))


@case("K1")
def ctypes_value_changes() -> Script:
    """A frozen module reads a number of ctypes."""
    return scaled(ctypes.c_double(1.0), lambda h: h.value, lambda h: setattr(h, "value", 3.0))


@case("K1")
def bytes_change() -> Script:
    """A frozen module reads a bytearray."""
    return scaled(bytearray(b"1"), lambda h: float(h[0] - 48), lambda h: operator.setitem(h, 0, 51))


@case("K1")
def array_changes() -> Script:
    """A frozen module reads an array of Python's library."""
    return scaled(array.array("d", [1.0]), lambda h: h[0], lambda h: operator.setitem(h, 0, 3.0))


@case("K1")
def one_of_many_lists_changes() -> Script:
    """A frozen module reads a list in a dictionary of 1,500 lists."""
    many = {number: [1.0] for number in range(1500)}
    return scaled(many, lambda h: h[7][0], lambda h: operator.setitem(h[7], 0, 3.0))


class Silent(Backbone):
    """Returns zeros for some words."""

    def __init__(self, words: Any, get: Callable[[Any], list[int]]) -> None:
        super().__init__()
        self.words, self.get = words, get

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        is_silent = torch.isin(input_ids, torch.tensor(self.get(self.words)))
        return super().forward(input_ids) * ~is_silent[..., None]


def two(words: Any, others: Any, get: Callable[[Any], list[int]]) -> Script:
    """Two trainings over one folder, with other words."""

    def change(model: Any) -> Any:
        model.backbone.words = others
        return model

    model, product = FrozenBackbone(Silent(words, get)), {"cached_modules": ["backbone"]}
    return again(change, model, product, data=with_rare_words())


@case("K1")
def numpy_number_of_another_training() -> Script:
    """The second training has another number of NumPy."""
    return two(np.int64(6), np.int64(7), lambda words: [int(words)])


@case("K1")
def range_of_another_training() -> Script:
    """The second training has another range."""
    return two(range(5, 7), range(5, 8), list)


@case("K1")
def pattern_of_another_training() -> Script:
    """The second training has another regular expression."""
    return two(re.compile("6"), re.compile("[67]"), lambda p: [word for word in (6, 7) if p.match(str(word))])


@case("K1")
def deep_number_of_another_training() -> Script:
    """The second training has another number, deep inside of dictionaries."""
    deep = [{"a": {"b": {"c": {"d": {"e": number}}}}} for number in (6, 7)]
    return two(deep[0], deep[1], lambda words: [words["a"]["b"]["c"]["d"]["e"]])


@case("K1")
def getter_of_another_training() -> Script:
    """The second training has another getter of an entry."""
    return two(operator.itemgetter(0), operator.itemgetter(1), lambda get: [get((6, 7))])


@case("K1")
def function_of_a_library_is_replaced() -> Script:
    """A function of transformers' module is replaced in the middle of the third epoch."""
    kept = getattr(modeling_bert.apply_chunking_to_forward, "kept", modeling_bert.apply_chunking_to_forward)
    modeling_bert.apply_chunking_to_forward = kept

    def halved(*args: Any) -> Any:
        return kept(*args) * 0.5

    halved.kept = kept  # type: ignore[attr-defined]

    def change(model: Any, step: int) -> None:
        modeling_bert.apply_chunking_to_forward = halved

    return of(OnBert(), data=samples(32), callbacks=[At(change, [10])])
