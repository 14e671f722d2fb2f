"""A loss of the user's over several stages that fails, or catches an error of the model."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..kit import CAUGHT_ERROR, Inputs, Layer, LossAndOutputs, Network, Script, case, plain_loss, samples, with_loss

FAILING_STEP = 3
OWN_ERROR = "the user's own error"


def failing(attempt: Any, catch: type[Exception] = Exception) -> Script:
    """In one step the loss first runs `attempt(model, inputs)`, and catches its error."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if trainer.state.global_step == FAILING_STEP:
            with suppress(catch):
                attempt(model, inputs)
        return plain_loss(trainer, model, inputs)

    return with_loss(loss)


@case("K2", expect="exact", because="A call of the model has failed")
def catches_error_of_the_loss_in_the_model() -> Script:
    """A call with too few labels, whose error is caught."""
    return failing(lambda model, inputs: model(input_ids=inputs["input_ids"], labels=inputs["labels"][:3]))


@case("K2", expect="exact", because="A call of the model has failed", fails=CAUGHT_ERROR)
def catches_wrong_keyword() -> Script:
    """A call with a keyword that the model does not have, whose error is caught."""
    return failing(lambda model, inputs: model(nonsense=1, **inputs), TypeError)


@case("K2", expect="exact", because="A call of the model has failed", fails=CAUGHT_ERROR)
def catches_bad_index() -> Script:
    """A call with words out of range, which fails on the first stage; its error is caught."""
    return failing(lambda model, inputs: model(**{**inputs, "input_ids": inputs["input_ids"] + 1000}))


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
