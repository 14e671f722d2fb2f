"""A tiny model, its data and a runner of scripts with both classes, for `test_stock_behaviour.py`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

DIGITS = 5
STOCK_FIELDS = {one.name for one in fields(TrainingArguments)}
FIELDS = {one.name for one in fields(PipeTransformerTrainingArguments)}


# ------------------------------------------------------------------------------------------ a model, and its data
class Line(nn.Module):
    """y = slope x + offset; the loss is a mean, although the signature has `**kwargs`."""

    accepts_loss_kwargs = False

    def __init__(self, slope: float = 0.0) -> None:
        super().__init__()
        self.slope, self.offset = nn.Parameter(torch.tensor(slope)), nn.Parameter(torch.tensor(0.0))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> Any:
        y = self.slope * x + self.offset
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


class LineConfig(PreTrainedConfig):
    model_type = "line"


class PretrainedLine(PreTrainedModel):
    config_class = LineConfig
    accepts_loss_kwargs = False

    def __init__(self, config: LineConfig) -> None:
        super().__init__(config)
        self.line = Line()
        self.post_init()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> Any:
        return self.line(x, labels)


class NoisyLine(Line):
    """A model that draws from all three global generators."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> Any:
        return super().forward(x + 0.1 * torch.randn(1) + 0.1 * numpy.random.rand() + 0.1 * random.random(), labels)


class Points:
    """Points near a line; each of `labels` has values of its own."""

    def __init__(self, size: int = 24, labels: tuple[str, ...] = ("labels",), seed: int = 0) -> None:
        draw = numpy.random.RandomState(seed)
        self.x = draw.normal(size=size).astype(numpy.float32)
        self.y = {name: (2 * self.x + draw.normal(size=size)).astype(numpy.float32) for name in labels}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], **{name: values[index] for name, values in self.y.items()}}


class PointStream(IterableDataset):
    def __init__(self, size: int = 24) -> None:
        self.points = Points(size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.points[index] for index in range(len(self.points)))


class PointsThatEnd(PointStream):
    """A stream that gives each sample once, as a socket does."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rest = super().__iter__()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.rest


# ------------------------------------------------------------------------------------------ scripts
@dataclass(frozen=True)
class Classes:
    """The two classes, and an empty folder."""

    trainer: Any
    arguments: Any
    folder: Path

    def args(self, **options: Any) -> Any:
        common = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "learning_rate": 0.1}
        return self.arguments(**{"output_dir": str(self.folder), "save_strategy": "no", **common, **options})

    def make(self, model: nn.Module | None = None, mixin: type | None = None, **given: Any) -> Any:
        """A trainer. Fields of the arguments class go to the arguments, all other keywords to the trainer."""
        options = {name: given.pop(name) for name in FIELDS & set(given)}
        if model is None and "model_init" not in given:
            model = Line()
        data = {"train_dataset": Points(), "eval_dataset": Points(10, seed=1)}
        cls = self.trainer if mixin is None else type("Own", (mixin, self.trainer), {})
        return cls(model=model, args=self.args(**options), **{**data, **given})

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("checkpoint-*"))


def rounded(value: Any) -> Any:
    """The values without times, rounded, as plain Python values."""
    if isinstance(value, dict):
        timed = ("runtime", "per_second", "preparation_time")
        return {key: rounded(inner) for key, inner in value.items() if not any(name in key for name in timed)}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        return rounded(value.tolist())
    return round(value, DIGITS) if isinstance(value, float) else value


def outcome(trainer: Any, *more: Any, **options: Any) -> Any:
    """The log history, weights and epoch after a training."""
    trainer.train(**options)
    weights = {name: value.float() for name, value in trainer.model.state_dict().items()}
    return [rounded(trainer.state.log_history), rounded(weights), trainer.state.epoch, *more]


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def names_of(callbacks: list[Any]) -> list[str]:
    return [type(callback).__name__ for callback in callbacks]


Scenario = Callable[[Classes], Any]
SCENARIOS: list[Scenario] = []
SAVES = {"save_strategy": "steps", "save_steps": 2}


def scenario(script: Scenario) -> Scenario:
    SCENARIOS.append(script)
    return script


def run(script: Scenario, folder: Path, is_ours: bool) -> Any:
    set_seed(0)
    classes = (PipeTransformerTrainer, PipeTransformerTrainingArguments) if is_ours else (Trainer, TrainingArguments)
    return script(Classes(*classes, folder / ("ours" if is_ours else "stock")))
