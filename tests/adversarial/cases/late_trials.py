"""Users' models around a frozen module, with a forward that shows each of its calls: in its inputs, or in counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertModel

from ..kit import (
    LABELS,
    WIDTH,
    Inputs,
    Layer,
    LossAndOutputs,
    Network,
    Script,
    bert_config,
    case,
    classified,
    own_loss,
    pad,
    plain_loss,
    pool,
    samples,
)
from .attack_front import OnBert
from .attack_recipes_front import of
from .late_changes import frozen_by_schedule

# ---------------------------------------------------------------------------------------------------------
# Writes into the batch
# ---------------------------------------------------------------------------------------------------------


class SmoothsLabels(OnBert):
    """Smooths soft labels in place before it calls the frozen module."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor, soft: Any
    ) -> dict[str, Tensor]:
        for one in [soft] if isinstance(soft, Tensor) else soft:
            one.mul_(0.5).add_(0.5 / LABELS)
        logits = super().forward(input_ids, attention_mask)["logits"]
        return {"loss": softly(logits, soft), "logits": logits}


def softly(logits: Tensor, soft: Any) -> Tensor:
    soft = soft if isinstance(soft, Tensor) else torch.stack(soft)
    return -(soft * logits.log_softmax(-1)).sum(1).mean()


def softened(rows: list[Inputs]) -> Inputs:
    batch = pad(rows)
    soft = F.one_hot(batch.pop("labels"), LABELS).float()
    return {**batch, "soft": soft}


def reads_smoothed(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
    outputs = model(**inputs)
    return softly(outputs["logits"], inputs["soft"]), outputs


@case("K1")
def labels_smoothed_in_place_of_padded_samples() -> Script:
    """The forward smooths soft labels in place, and computes a loss of them; samples have other lengths."""
    return of(SmoothsLabels(), data=samples(32, 3, 12), collator=softened)


@case("K1", "R2")
def labels_smoothed_in_place_read_by_the_loss() -> Script:
    """The forward smooths soft labels in place, and the loss reads them afterwards."""
    return of(SmoothsLabels(), data=samples(32, 8, 8), collator=softened, trainer=own_loss(reads_smoothed))


@case("K1")
def labels_smoothed_in_the_samples_with_a_policy() -> Script:
    """The collator returns the samples' own soft labels, and the forward smooths them in place in each epoch."""

    class Smooths(Network):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, soft: Any) -> Any:  # type: ignore[override]
            for one in soft:
                one.mul_(0.9).add_(0.1 / LABELS)
            return super().forward(input_ids, attention_mask)

    def own(rows: list[Inputs]) -> Any:
        batch = pad([{name: value for name, value in row.items() if name != "soft"} for row in rows])
        return {**batch, "soft": [row["soft"] for row in rows]}

    data = samples(32, 8, 8)
    for row in data.rows:
        row["soft"] = F.one_hot(row.pop("labels"), LABELS).float()
    return frozen_by_schedule(model=Smooths(4), data=data, collator=own, trainer=own_loss(reads_smoothed))


# ---------------------------------------------------------------------------------------------------------
# State that is no attribute of the model
# ---------------------------------------------------------------------------------------------------------

COUNT = [0]


class Ramp:
    """A schedule: a factor that grows in each call."""

    made = 0

    def __init__(self) -> None:
        self.number = 0

    def step(self) -> float:
        self.number += 1
        return 1 + 0.05 * self.number


class SlottedRamp(Ramp):
    """The same without a dictionary of attributes."""

    __slots__ = ("number",)


class ClassRamp(Ramp):
    """The same, counted by the class."""

    def step(self) -> float:
        type(self).made += 1
        return 1 + 0.05 * type(self).made


class GlobalRamp(Ramp):
    """The same, counted by a global variable."""

    def step(self) -> float:
        COUNT[0] += 1
        return 1 + 0.05 * COUNT[0]


class InnerRamp(Ramp):
    """The same, counted by a variable of a closure."""

    def __init__(self) -> None:
        number = 0

        def step() -> float:
            nonlocal number
            number += 1
            return 1 + 0.05 * number

        self.step = step  # type: ignore[method-assign]


class Ramped(OnBert):
    """Scales the logits by schedules that it holds, and steps them before it calls the frozen module."""

    def __init__(self, kind: type[Ramp], makes_mask: bool = False) -> None:
        super().__init__()
        COUNT[0] = kind.made = 0
        self.ramps, self.makes_mask = {"own": [kind()]}, makes_mask

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scale = self.ramps["own"][0].step()
        mask = (input_ids != 0).long() if self.makes_mask else attention_mask
        return classified(scale * super().forward(input_ids, mask)["logits"], labels)


def stepped(trainer: Any) -> dict[str, int]:
    """The numbers of calls that the schedules have seen."""
    ramp = trainer.model.ramps["own"][0]
    return {"own": getattr(ramp, "number", 0), "global": COUNT[0], "class": type(ramp).made}


def ramped(kind: type[Ramp], makes_mask: bool = False, **fields: Any) -> Script:
    return of(Ramped(kind, makes_mask), **{"data": samples(32, 8, 8), "observe": stepped, **fields})


@case("K1", "R2")
def schedule_object_of_the_model() -> Script:
    """The forward steps a schedule in a container of the model."""
    return ramped(Ramp)


@case("K1")
def schedule_object_and_padded_samples() -> Script:
    """The forward steps a schedule; samples have other lengths, and the loss reads padding."""
    return ramped(Ramp, data=samples(32, 3, 12), trainer=own_loss(plain_loss))


@case("K1")
def schedule_object_and_a_mask_of_the_forward() -> Script:
    """The forward steps a schedule, and makes the mask of samples with other lengths itself."""
    return ramped(Ramp, makes_mask=True, data=samples(32, 3, 12))


@case("K1")
def schedule_in_a_slot() -> Script:
    """The forward steps a schedule without a dictionary, and makes the mask itself."""
    return ramped(SlottedRamp, makes_mask=True, data=samples(32, 3, 12))


@case("K1")
def schedule_of_a_class() -> Script:
    """The forward steps a schedule that its class counts, and makes the mask itself."""
    return ramped(ClassRamp, makes_mask=True, data=samples(32, 3, 12))


@case("K1")
def schedule_in_a_closure() -> Script:
    """The forward steps a schedule that a closure counts, and makes the mask itself."""
    return ramped(InnerRamp, makes_mask=True, data=samples(32, 3, 12))


@case("K1")
def global_schedule() -> Script:
    """The forward steps a global schedule."""
    return ramped(GlobalRamp)


@case("K1", "R2")
def global_schedule_and_padded_samples() -> Script:
    """The forward steps a global schedule; samples have other lengths."""
    return ramped(GlobalRamp, data=samples(32, 3, 12))


@case("K1")
def global_schedule_and_a_mask_of_the_forward() -> Script:
    """The forward steps a global schedule, and makes the mask of samples with other lengths itself."""
    return ramped(GlobalRamp, makes_mask=True, data=samples(32, 3, 12))


@case("K1", "K2", expect="exact", because="when it is called again")
def schedule_object_with_a_policy() -> Script:
    """The forward steps a schedule, and a policy freezes layers."""

    class Steps(Network):
        def __init__(self) -> None:
            super().__init__(4, Layer)
            self.ramp = Ramp()

        def forward(self, *args: Any, labels: Tensor | None = None, **inputs: Any) -> dict[str, Tensor]:
            return classified(self.ramp.step() * super().forward(*args, **inputs)["logits"], labels)

    return frozen_by_schedule(model=Steps(), data=samples(32, 8, 8))


# ---------------------------------------------------------------------------------------------------------
# What the forward sets before it calls the frozen module
# ---------------------------------------------------------------------------------------------------------


class SetsMode(nn.Module):
    """Runs a frozen module with dropout in evaluation mode, and in half precision."""

    def __init__(self) -> None:
        super().__init__()
        config = bert_config(hidden_dropout_prob=0.3)
        self.bert: Any = BertModel(config, add_pooling_layer=False).requires_grad_(False)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.bert.eval()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.bert(input_ids, attention_mask).last_hidden_state
        return classified(self.head(pool(hidden.float(), attention_mask)), labels)


@case("K1")
def mode_and_precision_set_in_the_forward() -> Script:
    """The forward sets the frozen module's mode and precision; samples have other lengths."""
    return of(SetsMode(), data=samples(32, 3, 12), trainer=own_loss(plain_loss))
