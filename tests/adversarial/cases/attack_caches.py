"""Frozen parts with cached outputs, and changes to them by means that are easy to overlook.

The backbone is declared (`cached_modules`): the values that its code reads are watched. With K = 2 the frozen parts
are the lowest layers of a BERT.
"""

from __future__ import annotations

import contextvars
import os
import types
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from transformers import BertForTokenClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kit import (
    VOCABULARY,
    WIDTH,
    At,
    Backbone,
    FrozenBackbone,
    Rows,
    Script,
    bert,
    bert_config,
    case,
    classified,
    pool,
)
from ..kit import samples as words
from .attack_front import frozen_bert, norm_of_all, ragged

MIDDLE = (6,)
"""In the middle of the second epoch."""
SMALLER = 0.3

# ---------------------------------------------------------------------------------------------------------
# Values that the code of a frozen backbone reads
# ---------------------------------------------------------------------------------------------------------


class Setting:
    """A class as a namespace of settings."""

    scale = 1.0


@dataclass(slots=True)
class Slots:
    scale: float = 1.0


class Helper:
    """An object with a method, called as a function as well."""

    def __init__(self) -> None:
        self.factor = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
outer: Any = types.ModuleType("outer")
outer.inner = types.ModuleType("inner")


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by * vars(scaled)["factor"]


class Reading(Backbone):
    """The output is multiplied by settings of many kinds. All are 1 at first."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        Setting.scale = outer.inner.scale = Reading.factor = 1.0
        vars(scaled)["factor"], scaled.__defaults__ = 1.0, (1.0,)
        SCALE.set(1.0)
        self.slots, self.helper, self.numbers = Slots(), Helper(), deque([1.0])
        self.of_words = dict.fromkeys(range(2000), 1.0)
        self.table = np.ones((VOCABULARY, WIDTH))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = (
            super().forward(input_ids)
            * self.slots.scale
            * self.numbers[0]
            * self.of_words[7]
            * float(self.table[5, 0])
        )
        x = x * Setting.scale * outer.inner.scale * SCALE.get() * self.factor
        return scaled(self.helper(self.helper.scaled(x)))


CHANGES: dict[str, Any] = {
    "attribute of a class of settings": lambda _: setattr(Setting, "scale", SMALLER),
    "attribute of the backbone's class": lambda _: setattr(Reading, "factor", SMALLER),
    "object with slots": lambda backbone: setattr(backbone.slots, "scale", SMALLER),
    "callable object": lambda backbone: setattr(backbone.helper, "factor", SMALLER),
    "deque": lambda backbone: backbone.numbers.__setitem__(0, SMALLER),
    "large dict": lambda backbone: backbone.of_words.__setitem__(7, SMALLER),
    "large array": lambda backbone: backbone.table.__setitem__(5, SMALLER),
    "value of a module in a module": lambda _: setattr(outer.inner, "scale", SMALLER),
    "context variable": lambda _: SCALE.set(SMALLER),
    "attribute of a function": lambda _: vars(scaled).__setitem__("factor", SMALLER),
    "default of a function": lambda _: setattr(scaled, "__defaults__", (SMALLER,)),
}


def reading(change: str) -> Script:
    script = Script(model=FrozenBackbone(Reading()))
    script.callbacks = [At(lambda model, step: CHANGES[change](model.backbone), MIDDLE)]
    return script


for _change in CHANGES:
    _make: Any = partial(reading, _change)
    _make.__name__, _make.__doc__, _make.__module__ = _change.replace(" ", "_").replace("'", ""), _change, __name__
    case("K1")(_make)


@case("K1")
def method_of_an_object_patched() -> Script:
    """The method of a helper's class is replaced."""
    before = Helper.scaled

    def change(model: Any, step: int) -> None:
        Helper.scaled = lambda self, x: x * SMALLER  # type: ignore[method-assign]

    def drive(trainer: Any) -> Any:
        try:
            return trainer.train()
        finally:
            Helper.scaled = before  # type: ignore[method-assign]

    return Script(model=FrozenBackbone(Reading()), callbacks=[At(change, MIDDLE)], drive=drive)


@case("K1")
def code_reloaded() -> Script:
    """A function gets other code, as by the autoreload of a notebook."""

    class Plain(Backbone):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return Backbone.forward(self, input_ids)

    def other(self: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return Backbone.forward(self, input_ids) * SMALLER

    def change(model: Any, step: int) -> None:
        Plain.forward.__code__ = other.__code__

    return Script(model=FrozenBackbone(Plain()), callbacks=[At(change, MIDDLE)])


# ---------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------


class Flagged(Backbone):
    """A flag changes the outputs for samples with a rare word."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, flag: bool = False) -> Tensor:
        x = super().forward(input_ids)
        return torch.where((input_ids == VOCABULARY - 1).any(1)[:, None, None], x * SMALLER, x) if flag else x


class WithFlag(FrozenBackbone):
    flag = False

    def __init__(self) -> None:
        super().__init__(Flagged())

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.backbone(input_ids, attention_mask, self.flag)
        return classified(self.head(pool(hidden, attention_mask)), labels)


def flagged(is_on: Any) -> Script:
    """The first sample alone has the rare word."""
    rows = list(words())
    for row in rows:
        row["input_ids"] = row["input_ids"].clamp(max=VOCABULARY - 2)
    rows[0]["input_ids"][0] = VOCABULARY - 1
    callbacks = [At(lambda model, step: setattr(model, "flag", is_on(step)), range(99))]
    return Script(model=WithFlag(), data=Rows(rows), callbacks=callbacks, options={"num_train_epochs": 4})


@case("K1")
def flag_from_second_epoch() -> Script:
    """A boolean argument of the backbone that few samples show, from the second epoch on."""
    return flagged(lambda step: step >= 4)


@case("K1")
def flag_in_every_second_step() -> Script:
    """A boolean argument of the backbone in every second step: outputs with and without it are stored."""
    return flagged(lambda step: step % 2 == 1)


# ---------------------------------------------------------------------------------------------------------
# Memory that something else holds
# ---------------------------------------------------------------------------------------------------------


def held(take: Any, model: nn.Module | None = None) -> Script:
    """Rows of the embedding are written through what `take(embedding's weight)` has returned before the first step."""
    kept: list[Any] = []

    def change(model: Any, step: int) -> None:
        if not step:
            kept.append(take(model))
        else:
            kept[0][5:12] += 1

    return Script(model=model or FrozenBackbone(), callbacks=[At(change, (0, *MIDDLE))])


@case("K1")
def data_kept_from_the_start() -> Script:
    """A result of `.data`."""
    return held(lambda model: model.backbone.embedding.weight.data)


@case("K1")
def array_kept_from_the_start() -> Script:
    """A NumPy array."""
    return held(lambda model: model.backbone.embedding.weight.detach().numpy())


@case("K1")
def state_dict_kept_from_the_start() -> Script:
    """A state dict that was not copied, written through `.data`."""
    return held(lambda model: model.state_dict()["backbone.embedding.weight"].data)


@case("K1")
def flat_parameters() -> Script:
    """All weights of the backbone are views of one tensor, as flat optimizers make them."""
    model = FrozenBackbone()
    parameters = list(model.backbone.parameters())
    flat = torch.cat([parameter.data.flatten() for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return held(lambda _: flat.view(-1, WIDTH), model)


# ---------------------------------------------------------------------------------------------------------
# What torch and transformers have for all modules
# ---------------------------------------------------------------------------------------------------------


def undone(change: Any, undo: Any, steps: Any = MIDDLE, **fields: Any) -> Script:
    """`change()` in the middle of the second epoch, and `undo()` at the end."""

    def drive(trainer: Any) -> Any:
        try:
            return trainer.train()
        finally:
            undo()

    return Script(model=frozen_bert(), callbacks=[At(lambda *_: change(), steps)], drive=drive, **fields)


@case("K1")
def hook_for_all_modules() -> Script:
    """A hook for all modules halves what normalisations return."""
    handles: list[Any] = []

    def hook(module: nn.Module, _: Any, output: Any) -> Any:
        return output * 0.5 if isinstance(module, nn.LayerNorm) else None

    change = lambda: handles.append(torch_module.register_module_forward_hook(hook))  # noqa: E731
    return undone(change, lambda: handles[0].remove())


@case("K1")
def recorder_for_all_modules() -> Script:
    """A hook for all modules counts their calls, from the start."""
    counts = [0]

    def count(module: nn.Module, *_: Any) -> None:
        counts[0] += isinstance(module, nn.LayerNorm)

    handle = torch_module.register_module_forward_pre_hook(count)

    def drive(trainer: Any) -> int:
        try:
            trainer.train()
        finally:
            handle.remove()
        return counts[0]

    return Script(model=frozen_bert(), drive=drive)


@case("K1")
def attention_registered_anew() -> Script:
    """The attention function is replaced in the table of transformers."""
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def smaller(*args: Any, **kwargs: Any) -> Any:
        output, weights = before(*args, **kwargs)
        return -output, weights

    register = ALL_ATTENTION_FUNCTIONS.register
    return undone(lambda: register("sdpa", smaller), lambda: register("sdpa", before))


@case("K1")
def attention_of_torch_replaced() -> Script:
    """`scaled_dot_product_attention` is replaced by another function."""
    before = F.scaled_dot_product_attention
    name = "scaled_dot_product_attention"
    negative = lambda *args, **kwargs: -before(*args, **kwargs)  # noqa: E731
    return undone(lambda: setattr(F, name, negative), lambda: setattr(F, name, before))


# ---------------------------------------------------------------------------------------------------------
# The lowest layers, with one or two stages
# ---------------------------------------------------------------------------------------------------------


def freeze_lowest(model: Any, layers: int = 3) -> Any:
    """Freeze the embeddings and the first layers of a BERT."""
    model.bert.embeddings.requires_grad_(False)
    for layer in model.bert.encoder.layer[:layers]:
        layer.requires_grad_(False)
    return model


@case("K1", "K2")
def metric_of_padding_over_frozen_layers() -> Script:
    """A metric over the logits of all positions; the lowest layers are frozen."""
    return Script(
        model=freeze_lowest(BertForTokenClassification(bert_config())),
        data=ragged(by_word=True),
        keywords={"eval_dataset": ragged(12, seed=9, by_word=True), "compute_metrics": norm_of_all},
        options={"eval_strategy": "epoch", "num_train_epochs": 4},
        drive=lambda trainer: (
            trainer.train(),
            [e["eval_norm"] for e in trainer.state.log_history if "eval_norm" in e],
        )[1],
    )


@case("K1", "K2")
def rows_written_below_frozen_layers() -> Script:
    """Rows of the frozen embeddings are written through `.data`, on the process that has them."""

    def change(model: Any, step: int) -> None:
        weight = model.bert.embeddings.word_embeddings.weight
        if not getattr(weight, "is_elsewhere", False):
            weight.data[5:12] += 1

    return Script(model=freeze_lowest(bert()), callbacks=[At(change, MIDDLE)], options={"num_train_epochs": 4})


@case("K1", "K2")
def full_disk() -> Script:
    """From some write on, the disk is full."""
    write, count = os.pwrite, [0]

    def fails(*args: Any) -> int:
        count[0] += 1
        if count[0] > 12:
            raise OSError(28, os.strerror(28))
        return write(*args)

    def drive(trainer: Any) -> None:
        os.pwrite = fails
        try:
            trainer.train()
        finally:
            os.pwrite = write

    return Script(model=freeze_lowest(bert()), drive=drive, options={"num_train_epochs": 4})
