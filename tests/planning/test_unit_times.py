from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.planning.unit_times import measure_times


class Hands:
    """A clock that only the model below moves on."""

    now = 0.0


class Slow(nn.Module):
    """Takes so many milliseconds a row in its forward."""

    def __init__(self, milliseconds: float, hands: Hands) -> None:
        super().__init__()
        self.milliseconds, self.hands = milliseconds, hands
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hands.now += self.milliseconds / 1e3 * len(x)
        return self.linear(x)  # type: ignore[no-any-return]


class SlowModel(nn.Module):
    def __init__(self, hands: Hands) -> None:
        super().__init__()
        self.embedding = Slow(1.0, hands)
        self.layers = nn.ModuleList([Slow(2.0, hands) for _ in range(3)])
        self.head = Slow(1.5, hands)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x)}


def test_times_are_those_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands()
    monkeypatch.setattr(time, "perf_counter", lambda: hands.now)
    model, batch = SlowModel(hands), {"x": torch.randn(8, 4)}
    times = measure_times(LayerStack.discover(model, {"x": batch["x"][:2]}), batch)
    for part, milliseconds in [(times.prologue, 1.0), *((unit, 2.0) for unit in times.units), (times.head, 1.5)]:
        assert part.forward.of(8) == pytest.approx(8e-3 * milliseconds)
        assert part.backward.of(8) == pytest.approx(16e-3 * milliseconds)
