from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from model_zoo import MODELS
from selection import few
from torch import nn

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.planning import unit_times
from hf_pipetransformer.planning.unit_times import ModelTimes, PartTimes, Seconds, _Clock, measure_times, slowest


class Hands:
    """A clock that only the model below moves on."""

    now = 0.0


class _Slow(torch.autograd.Function):
    """Takes so long in its forward, and twice as long in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, hands: Hands) -> torch.Tensor:
        ctx.seconds, ctx.hands = seconds, hands
        hands.now += seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.hands.now += 2 * ctx.seconds
        return gradients[0], None, None


class Slow(nn.Module):
    """Takes so many milliseconds a row."""

    def __init__(self, milliseconds: float, hands: Hands) -> None:
        super().__init__()
        self.milliseconds, self.hands = milliseconds, hands
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seconds = self.milliseconds / 1e3 * len(x)
        return _Slow.apply(self.linear(x), seconds, self.hands)  # type: ignore[no-any-return,no-untyped-call]


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
    monkeypatch.setattr(unit_times, "UPDATE_SAMPLE_ELEMENTS", 16)
    hands = Hands()
    monkeypatch.setattr(time, "perf_counter", lambda: hands.now)
    model, batch = SlowModel(hands), {"x": torch.randn(8, 4)}
    times = measure_times(LayerStack.discover(model, {"x": batch["x"][:2]}), batch, 0.5)
    for part, milliseconds in [(times.prologue, 1.0), *((unit, 2.0) for unit in times.units), (times.head, 1.5)]:
        assert part.forward.of(8) == pytest.approx(8e-3 * milliseconds)
        assert part.backward.of(8) == pytest.approx(16e-3 * milliseconds)
    assert len(set(times.units)) == 1  # alike
    assert times.reduce_seconds_per_byte == 0.5


@pytest.mark.parametrize("name", few(MODELS, "bert-classification", "gpt2", "t5", "vit", "mixtral"))
def test_nothing_is_left_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_times, "UPDATE_SAMPLE_ELEMENTS", 16)
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


def test_a_line_through_two_measurements() -> None:
    assert Seconds.through((1, 4), (2.0, 8.0)) == Seconds(0.0, 2.0)
    assert Seconds.through((1, 4), (5.0, 8.0)) == Seconds(4.0, 1.0)
    assert Seconds.through((1, 4), (9.0, 8.0)) == Seconds(8.0, 0.0)  # noise
    assert Seconds.through((1, 4), (1.0, 8.0)) == Seconds(0.0, 2.0)
    assert Seconds.through((2, 2), (3.0, 3.0)) == Seconds(0.0, 1.5)


def test_all_go_by_the_slowest() -> None:
    def times(of_row: float) -> ModelTimes:
        part = PartTimes(Seconds(1.0, of_row), Seconds(0.0, 2 * of_row))
        return ModelTimes(part, (part, part), part, 1.0 / of_row)

    everyone = [times(of_row) for of_row in (1.0, 3.0, 2.0)]
    assert slowest(everyone) is everyone[1]


class TimedEvent:
    """An event of an accelerator, a millisecond after the one before."""

    number = 0

    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        TimedEvent.number += 1
        self.at_ms = TimedEvent.number

    def elapsed_time(self, other: TimedEvent) -> float:
        return other.at_ms - self.at_ms


def no_event(device: torch.device, enable_timing: bool = False) -> None:
    raise NotImplementedError


def test_any_accelerator_is_timed_by_events_or_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch, "Event", TimedEvent)
    clock = _Clock(torch.device("xpu"))
    waited.clear()
    assert clock.gaps([clock.mark() for _ in range(3)]) == [1e-3, 1e-3] and len(waited) == 1
    monkeypatch.setattr(torch, "Event", no_event)
    clock = _Clock(torch.device("xpu"))
    waited.clear()
    gaps = clock.gaps([clock.mark() for _ in range(3)])
    assert len(waited) == 3 and all(0 <= gap < 1 for gap in gaps)
