"""The kit of the cases: tiny models and data, layouts, and the registry of cases.

    @case("loss", layouts=("K2", "DP2"))
    def focal_loss() -> Job:
        '''A focal loss that is a mean over rows.'''
        return Job(trainer=FocalLoss)

A case is a function that returns a `Job`: a user's arguments of a Trainer. It is called in each process anew.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, BertModel, TrainerCallback

VOCABULARY, WIDTH, LAYERS, LABELS = 48, 16, 4, 3
FIRST_WORD = 5
SHORTEST, LONGEST = 3, 9
GLOBAL_BATCH = 8
SAMPLES = 22
"""Three batches of 8, 8 and 6 rows."""

GROUPS = ("loss", "collator", "model with state", "callback", "sampler", "optimizer", "trainer override")


# ---------------------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    """Collects lines of the log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass(frozen=True)
class Layout:
    """How a case is distributed. The global batch is always `GLOBAL_BATCH` rows.

    Attributes:
        name: Of the layout, in the table.
        world: Number of processes.
        stages: K.
        accumulation: Micro-steps for each optimizer step.
        frozen: Optimizer step -> number of frozen layers; the reference freezes the same layers at the same steps.
        frozen_at_epochs: Epoch -> number of frozen layers.
        options: Of `PipeTransformerTrainingArguments`, besides.
    """

    name: str
    world: int
    stages: int
    accumulation: int = 1
    frozen: dict[int, int] | None = None
    frozen_at_epochs: dict[int, int] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def per_device(self) -> int:
        return GLOBAL_BATCH // (self.world * self.accumulation)

    @property
    def freezes(self) -> bool:
        return self.frozen is not None or self.frozen_at_epochs is not None

    def pipeline_options(self) -> dict[str, Any]:
        """Arguments of the pipeline. The case has the arguments of a plain Trainer."""
        options: dict[str, Any] = {"pipeline_parallel_size": self.stages, "activation_cache": "off"}
        if self.stages > 1:
            options["num_microbatches"] = 2
        if self.frozen is not None:
            options |= {
                "freeze_policy": "schedule",
                "freeze_strategy": "steps",
                "freeze_steps": 1,
                "freeze_schedule": self.frozen,
            }
        if self.frozen_at_epochs is not None:
            options |= {"freeze_policy": "schedule", "freeze_schedule": self.frozen_at_epochs}
        return options | self.options


_CACHED: dict[str, Any] = {"activation_cache": "on"}
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("K2", world=2, stages=2),
        Layout("K2 acc2", world=2, stages=2, accumulation=2),
        Layout("DP2", world=2, stages=1),
        Layout("one", world=1, stages=1),
        Layout("one acc2", world=1, stages=1, accumulation=2),
        Layout("K2 freeze", world=2, stages=2, frozen={2: 1, 4: 2}),
        Layout("one freeze", world=1, stages=1, frozen={2: 1, 4: 2}),
        Layout("K2 cache", world=2, stages=2, frozen_at_epochs={1: 1, 2: 2}, options=_CACHED),
        Layout("one cache", world=1, stages=1, frozen_at_epochs={1: 1, 2: 2}, options=_CACHED),
        Layout("K2 zbv", world=2, stages=2, options={"pipeline_schedule": "zbv"}),
    )
}
"""K2: two stages, two micro-batches. DP2: two replicas of one stage. acc2: accumulation. freeze: by a schedule,
without the cache. cache: a schedule by epochs, the cache on. zbv: backwards in two parts, with two parts of the model
in each stage."""


# ---------------------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A user's arguments of a Trainer; None stands for the tiny default.

    Attributes:
        trainer: A mixin with the user's overrides.
        options: Of the training arguments.
        drive: In place of `trainer.train()`.
        observe: Returns further values that must be equal when training has ended.
    """

    model: nn.Module | None = None
    data: Any = None
    collator: Callable[[list[Any]], Any] | None = None
    trainer: type | None = None
    callbacks: list[TrainerCallback] = field(default_factory=list)
    keywords: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    drive: Callable[[Any], Any] = lambda trainer: trainer.train()
    observe: Callable[[Any], dict[str, Any]] = lambda trainer: {}


@dataclass(frozen=True)
class Case:
    """One piece of users' code.

    Attributes:
        name: Of the function, with spaces.
        what: First line of its docstring.
        group: One of `GROUPS`.
        make: Returns the job.
        layouts: Names in `LAYOUTS`.
        expect: "equal", "refused" (on all processes before the first step), "stopped" (refused in a step) or "exact"
            (one of them).
        because: Part of the message of a refusal.
    """

    name: str
    what: str
    group: str
    make: Callable[[], Job]
    layouts: tuple[str, ...]
    expect: str
    because: str


CASES: dict[str, Case] = {}


def case(
    group: str,
    *,
    layouts: tuple[str, ...] = ("K2",),
    expect: str = "exact",
    because: str = "",
) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
    """Enters a function into `CASES`."""
    assert group in GROUPS and set(layouts) <= set(LAYOUTS)

    def enter(make: Callable[[], Job]) -> Callable[[], Job]:
        name = make.__name__.strip("_").replace("_", " ")
        assert name not in CASES, name
        what = (make.__doc__ or "").strip().partition("\n")[0]
        CASES[name] = Case(name, what, group, make, layouts, expect, because)
        return make

    return enter


# ---------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------


def seed_all(seed: int) -> None:
    """The three generators that users draw from."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def large_weights(model: nn.Module) -> Any:
    """New weights, so large that every layer moves the loss; in place."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.add_(0.1 * noise)
    return model.train()


def sizes(**changes: Any) -> dict[str, Any]:
    """A tiny Bert's configuration, without dropout."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": 2 * WIDTH,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": LABELS,
        **changes,
    }


def bert_classifier(**changes: Any) -> BertForSequenceClassification:
    return large_weights(BertForSequenceClassification(BertConfig(**sizes(**changes))))


class Classifier(nn.Module):
    """A model as people write it around a Bert: own head, own loss, a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel(BertConfig(**sizes()), add_pooling_layer=False)
        self.head = nn.Linear(WIDTH, LABELS)

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, H]: the mean over a row's words."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1)

    def score(self, features: Tensor) -> Tensor:
        return self.head(features)

    def loss(self, logits: Tensor, labels: Tensor, features: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        features = self.features(input_ids, attention_mask)
        logits = self.score(features)
        output = {"logits": logits}
        if labels is not None:
            output = {"loss": self.loss(logits, labels, features), **output}
        return output


def built(cls: type[nn.Module]) -> Any:
    """An instance with large weights, in training mode."""
    return large_weights(cls())


# ---------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------


class Rows(Dataset):
    """A list as a data set."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.rows[index])


def texts(**columns: Callable[[random.Random, list[int], int], Any]) -> Rows:
    """Ragged rows of words; the classes are unbalanced, and follow from the first word.

    Args:
        **columns: Name -> function of a generator, the words and the label.
    """
    generator = random.Random(0)
    rows = []
    for _ in range(SAMPLES):
        words = [generator.randrange(FIRST_WORD, VOCABULARY) for _ in range(generator.randint(SHORTEST, LONGEST))]
        label = 0 if words[0] % 10 < 7 else 1 + words[0] % 2
        row = {"input_ids": words, "labels": label}
        rows.append(row | {name: make(generator, words, label) for name, make in columns.items()})
    return Rows(rows)


def pad(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The collator that most people write: lists of numbers are padded on the right with 0, numbers are stacked."""
    rows = [{"input_ids": r["input_ids"], "attention_mask": [1] * len(r["input_ids"]), **r} for r in rows]
    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if isinstance(values[0], list):
            longest = max(map(len, values))
            values = [[*value, *[0] * (longest - len(value))] for value in values]
        batch[name] = torch.tensor(values)
    return batch


# ---------------------------------------------------------------------------------------------------------
# Trainers
# ---------------------------------------------------------------------------------------------------------


class OwnLoss:
    """A mixin: `loss_of(model, inputs, outputs, labels)` in place of the model's own loss."""

    def loss_of(self, model: nn.Module, inputs: dict[str, Any], logits: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
        loss = self.loss_of(model, inputs, logits, labels)
        return (loss, outputs) if return_outputs else loss


def own_loss(function: Callable[..., Tensor], **attributes: Any) -> type:
    """A mixin with the given function as `loss_of(self, model, inputs, logits, labels)`."""
    return type("OwnLossTrainer", (OwnLoss,), {"loss_of": function, **attributes})
