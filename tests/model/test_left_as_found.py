"""What is tried before training leaves no trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_pipetransformer.model.left_as_found import left_as_found


class Counting(nn.Module):
    """Counts its calls, and keeps statistics, in all the ways that users do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("late", None)
        self.calls, self.seen, self.sums = 0, [], {"total": 0.0}
        self.plain = torch.zeros(2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(float(inputs.sum()))
        self.sums["total"] += 1.0
        self.mean.lerp_(inputs.mean(0), 0.5)
        self.plain.data += 1
        self.late = inputs.detach().clone()
        self.added = True
        return self.linear(inputs)


def test_counters_buffers_and_lists_are_as_before() -> None:
    model = Counting()
    seen, mean = model.seen, model.mean
    with left_as_found(model):
        model(torch.ones(3, 2))
    assert (model.calls, model.sums, model.late) == (0, {"total": 0.0}, None) and not hasattr(model, "added")
    assert model.seen is seen and not seen and model.mean is mean
    assert not model.mean.any() and not model.plain.any()


def test_what_an_object_has_and_calls_is_left_too() -> None:
    """A trainer's dictionaries, its criterion, and the object whose method it calls."""

    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centres", torch.zeros(2))

    class Weighing:
        calls = 0

        def weigh(self) -> None:
            self.calls += 1

    class Trainer:
        def __init__(self) -> None:
            self.metrics: dict[str, Any] = {"train": {"loss": [1.0]}}
            self.criterion, self.weighing = Criterion(), Weighing()
            self.weigh = self.weighing.weigh

    trainer = Trainer()
    with left_as_found(trainer):
        trainer.metrics["train"]["loss"].append(2.0)
        trainer.count = 1  # type: ignore[attr-defined]
        trainer.criterion.centres.add_(1)
        trainer.weigh()
    assert trainer.metrics == {"train": {"loss": [1.0]}} and not hasattr(trainer, "count")
    assert not trainer.criterion.centres.any() and trainer.weighing.calls == 0
