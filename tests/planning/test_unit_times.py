from __future__ import annotations

import time

import pytest
import torch
from model_zoo import MODELS
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


@pytest.mark.parametrize("name", ["bert-classification", "mixtral"])
def test_nothing_is_left_behind(name: str) -> None:
    model, batch = MODELS[name].build(), MODELS[name].batch(rows=2)
    stack = LayerStack.discover(model, batch)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    times = measure_times(stack, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert not stack.runner.installed
    assert len(times.units) == stack.num_units
    assert all(unit.forward.of(2) > 0 for unit in times.units)
