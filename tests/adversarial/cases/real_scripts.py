"""A frozen BERT: copies of the model in callbacks, and losses that begin to read padding."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn
from transformers import BertForTokenClassification, TrainerCallback

from ..kit import (
    Inputs,
    LossAndOutputs,
    Script,
    bert,
    bert_config,
    case,
    own_loss,
    pad,
    samples,
)
from .processes import ADAMW

LONG: dict[str, Any] = {**ADAMW, "max_steps": 16}
"""Four epochs."""
RAGGED: dict[str, Any] = {"shortest": 6, "longest": 15}

# ---------------------------------------------------------------------------------------------------------
# Copies of the model
# ---------------------------------------------------------------------------------------------------------


def predictions(model: nn.Module) -> list[float]:
    """Some logits of a model on samples that it has not seen."""
    batch = pad([samples(8, **RAGGED, seed=99)[index] for index in range(8)])
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    model.train(was_training)
    return logits.flatten()[:9].tolist()


class Copies(TrainerCallback):
    """Makes a copy of the model, and collects the predictions of the copy and of the model.

    Attributes:
        seen: The predictions.
        copy: The copy.
    """

    def __init__(self) -> None:
        self.seen: list[list[float]] = []
        self.copy: Any = None


def with_copies(copies: Copies, is_kept: bool = True) -> Script:
    """A frozen BERT. If the copy is kept, it predicts again when the model has got other weights."""

    def drive(trainer: Any) -> list[list[float]]:
        trainer.train()
        if is_kept:
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.mul_(0.5)
            copies.seen.append(predictions(copies.copy))
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.mul_(2.0)
        return copies.seen

    model = bert()
    model.bert.requires_grad_(False)
    return Script(model=model, data=samples(32, **RAGGED), callbacks=[copies], options=LONG, drive=drive)


@case("K1")
def average_of_weights() -> Script:
    """A deep copy from the start follows the weights, and predicts in each epoch."""

    class Averages(Copies):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.copy = copy.deepcopy(model)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            with torch.no_grad():
                for mine, new in zip(self.copy.parameters(), model.parameters(), strict=True):
                    mine.lerp_(new, 0.3)

        def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.seen += [predictions(self.copy), predictions(model)]

    return with_copies(Averages())


@case("K1")
def deep_copy_in_each_epoch() -> Script:
    """A deep copy at the end of each epoch; the last copy predicts after the training."""

    class CopiesInEachEpoch(Copies):
        def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.copy = copy.deepcopy(model)
            self.seen.append(predictions(self.copy))

    return with_copies(CopiesInEachEpoch())


@case("K1")
def pickled_in_each_epoch() -> Script:
    """The whole model is saved by `torch.save` at the end of each epoch, and loaded again."""

    class Pickles(Copies):
        def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            self.copy = torch.load(file, weights_only=False)
            self.seen.append(predictions(self.copy))

    return with_copies(Pickles())


@case("K1")
def averaged_model_of_torch() -> Script:
    """An `AveragedModel` from the third epoch on."""

    class StochasticAverage(Copies):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step >= 8:
                self.copy = self.copy or torch.optim.swa_utils.AveragedModel(model)
                self.copy.update_parameters(model)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen.append(predictions(self.copy.module))

    return with_copies(StochasticAverage(), is_kept=False)


@case("K1")
def earlier_weights_loaded() -> Script:
    """The first weights are loaded at the ends of the later epochs."""

    class LoadsEarlier(Copies):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.copy = copy.deepcopy(model.state_dict())

        def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.epoch > 1.5:
                model.load_state_dict(self.copy)
                self.seen.append(predictions(model))

    return with_copies(LoadsEarlier(), is_kept=False)


# ---------------------------------------------------------------------------------------------------------
# A loss that begins to read padding
# ---------------------------------------------------------------------------------------------------------

LATE = 8
"""The first step of the third epoch."""


def with_term(term: Any) -> Script:
    """A frozen BERT that labels words; the loss adds `term(logits, step)`, over all positions, in some steps."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs.loss + term(outputs.logits, trainer.state.global_step), outputs

    model = BertForTokenClassification(bert_config())
    model.bert.requires_grad_(False)
    data = samples(32, **RAGGED, by_word=True)
    return Script(model=model, data=data, trainer=own_loss(loss), options=LONG)


@case("K1")
def penalty_from_third_epoch() -> Script:
    """A penalty on the size of all logits, from the third epoch on."""
    return with_term(lambda logits, step: 0.5 * logits.pow(2).mean() if step >= LATE else 0.0)


@case("K1")
def penalty_in_some_steps() -> Script:
    """A penalty on the size of all logits, in every fourth step."""
    return with_term(lambda logits, step: 0.5 * logits.pow(2).mean() if step % 4 == 3 else 0.0)


@case("K1")
def smoothing_from_third_epoch() -> Script:
    """Label smoothing over all positions, from the third epoch on."""
    return with_term(lambda logits, step: -0.1 * logits.log_softmax(-1).mean() if step >= LATE else 0.0)
