"""A loss of the user's over several stages that fails, or catches an error of the model."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..kit import Inputs, Layer, LossAndOutputs, Network, Script, case, plain_loss, samples, with_loss

FAILING_STEP = 3
OWN_ERROR = "the user's own error"


def failing(attempt: Any, catch: type[Exception] = Exception, **fields: Any) -> Script:
    """In one step the loss first runs `attempt(model, inputs)`, and catches its error."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if trainer.state.global_step == FAILING_STEP:
            with suppress(catch):
                attempt(model, inputs)
        return plain_loss(trainer, model, inputs)

    return with_loss(loss, **fields)


@case("K2")
def catches_error_of_the_loss_in_the_model() -> Script:
    """The loss catches the error of a call with too few labels."""
    return failing(lambda model, inputs: model(input_ids=inputs["input_ids"], labels=inputs["labels"][:3]))


@case("K2")
def catches_wrong_keyword() -> Script:
    """The loss catches the error of a call with an unknown keyword."""
    return failing(lambda model, inputs: model(nonsense=1, **inputs), TypeError)


@case("K2")
def catches_bad_index() -> Script:
    """A call with words out of range, which fails on the first stage; its error is caught."""
    return failing(lambda model, inputs: model(**{**inputs, "input_ids": inputs["input_ids"] + 1000}))


@case("K3")
def catches_bad_index_on_three_stages() -> Script:
    """A call with words out of range on three stages: the middle stage passes the error on."""
    return failing(lambda model, inputs: model(**{**inputs, "input_ids": inputs["input_ids"] + 1000}), batch=6)


class Failing(Layer):
    """A layer that fails, if it has been told to, on samples that repeat a word."""

    is_told = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_told and bool((x[:, :4] == x[:, :1]).all(-1).all(-1).any()):
            raise ArithmeticError("some samples cannot be computed")
        return super().forward(x)


def with_a_failing_layer(index: int) -> Script:
    """A layer fails on the last sample in the loss's first two calls; the loss catches both errors."""
    model: Any = Network(layer=Failing)
    model.layers[index].is_told = True

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        caught = 0
        words = inputs["input_ids"].clone()
        words[-1] = 7
        for _ in range(2):
            try:
                model(input_ids=words)
            except ArithmeticError:
                caught += 1
        outputs = model(**inputs)
        return outputs["loss"] * (1 + caught), outputs

    return with_loss(loss, model, batch=6)


@case("K3")
def catches_error_of_the_first_layer() -> Script:
    """The first layer fails, in the middle of a call that is split; twice in a step."""
    return with_a_failing_layer(0)


@case("K3")
def catches_error_of_a_middle_layer() -> Script:
    """A layer of the second stage fails, while the first one sends the rest of the call."""
    return with_a_failing_layer(1)


@case("K3")
def catches_error_of_the_last_layer() -> Script:
    """The last layer fails, while the stages below send the rest of the call."""
    return with_a_failing_layer(-1)


@case("K2", expect="exact", because="past")
def keeps_a_cache_of_keys() -> Script:
    """The loss calls the model on an object that the model fills, and reads it afterwards."""

    class Caching(Network):
        def forward(self, input_ids: Tensor, labels: Any = None, past: Any = None) -> Any:  # type: ignore[override]
            if past is not None:
                past.seen += 1
            return super().forward(input_ids, labels=labels)

    class Past:
        seen = 0

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        past = Past()
        outputs = model(input_ids=inputs["input_ids"], labels=inputs["labels"], past=past)
        return outputs["loss"] * (1 + past.seen), outputs

    return with_loss(loss, Caching())


@case("K2", expect="crash", because=OWN_ERROR)
def fails_before_the_call() -> Script:
    """The loss fails before it calls the model."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if trainer.state.global_step == FAILING_STEP:
            raise RuntimeError(OWN_ERROR)
        return plain_loss(trainer, model, inputs)

    return with_loss(loss)


@case("K2", expect="crash", because=OWN_ERROR)
def fails_after_the_call() -> Script:
    """The loss fails when it has called the model."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        if trainer.state.global_step == FAILING_STEP:
            raise RuntimeError(OWN_ERROR)
        return outputs["loss"], outputs

    return with_loss(loss)


@case("K2", expect="crash", because="simulated: out of memory in the first layer")
def first_layer_runs_out_of_memory() -> Script:
    """The first layer fails in its fourth call."""

    class Fails(Layer):
        calls = 0
        is_first = False

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.training and self.calls > 3 and self.is_first:
                raise torch.OutOfMemoryError("simulated: out of memory in the first layer")
            return super().forward(x)

    model: Any = Network(layer=Fails)
    model.layers[0].is_first = True
    return with_loss(model=model)


@case("K2", expect="crash", because="index out of range")
def word_out_of_range_in_the_data() -> Script:
    """One sample has words that the model does not know."""
    data = samples(48)
    data.rows[30]["input_ids"] = data.rows[30]["input_ids"] + 100
    return with_loss(data=data)


@case("K2R2", expect="crash", because=OWN_ERROR)
def one_replica_fails() -> Script:
    """The loss fails on one of two replicas."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if trainer.state.global_step == 2 and os.environ.get("RANK") == "2":
            raise RuntimeError(OWN_ERROR)
        return plain_loss(trainer, model, inputs)

    return with_loss(loss)
