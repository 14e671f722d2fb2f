"""Outputs of frozen modules that are kept, and read once the call of the model is over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kit import Each, Inputs, LossAndOutputs, Script, case, classified, own_loss, samples
from .attack_front import OnBert
from .attack_recipes_front import of


class KeepsOutput(OnBert):
    """Keeps the whole output of the frozen module, and uses its last hidden state."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.last = self.bert(input_ids, attention_mask, output_hidden_states=True)
        return classified(self.head(self.last.last_hidden_state.mean(1)), labels)


def of_hidden_states(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
    outputs = model(**inputs)
    return outputs["loss"] * (1 + model.last.hidden_states[1].abs().mean()), outputs


@case("K1")
def kept_output_read_by_the_loss() -> Script:
    """The loss reads hidden states in the output that the model has kept."""
    return of(KeepsOutput(), trainer=own_loss(of_hidden_states), data=samples(32, 8, 8))


@case("K1")
def kept_output_read_under_autocast() -> Script:
    """The same with `bf16=True`."""
    options = {"bf16": True}
    return of(KeepsOutput(), trainer=own_loss(of_hidden_states), data=samples(32, 8, 8), options=options)


def read_by(act: Any) -> Script:
    """A callback appends to a list what it sees of the kept output, after `act(model, step)`."""
    seen: list[float] = []

    def read(each: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        with torch.no_grad():
            act(model, state.global_step)
        seen.append(model.last.hidden_states[1].abs().mean().item())

    return of(
        KeepsOutput(),
        callbacks=[Each(read)],
        data=samples(32, 8, 8),
        observe=lambda trainer: {"seen": torch.tensor(seen)},
    )


@case("K1")
def kept_output_read_by_a_callback() -> Script:
    """A callback reads the hidden states after the step."""
    return read_by(lambda model, step: None)


@case("K1", expect="exact", because="is not kept")
def kept_output_read_after_a_write() -> Script:
    """A callback writes into the frozen weights, and then reads what was computed before."""
    return read_by(lambda model, step: model.bert.encoder.layer[0].output.dense.weight.data[0].add_(0.1))


@case("K1", expect="exact", because="is not kept")
def kept_output_read_after_a_write_later() -> Script:
    """The same from the seventh step on."""

    def write(model: Any, step: int) -> None:
        if step > 6:
            model.bert.encoder.layer[0].output.dense.weight.data[0].add_(0.1)

    return read_by(write)


@case("K1", expect="exact", because="is not kept")
def kept_outputs_of_many_steps() -> Script:
    """The model keeps outputs of earlier steps; a callback reads them after a write, when none is cached."""

    def keep(model: Any, step: int) -> None:
        model.kept = [*getattr(model, "kept", []), model.last][-8:]
        if step == 12:
            model.bert.encoder.layer[0].output.dense.weight.data[0].add_(0.1)
        model.last = model.kept[0] if step > 12 else model.last

    return read_by(keep)
