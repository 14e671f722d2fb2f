"""Ranges of layers run through the model's own forward; what goes wrong is said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_pipetransformer.errors import UnsupportedModelError
from hf_pipetransformer.model.layer_range import LayerRangeRunner
from hf_pipetransformer.model.units import ModelLayers

NAMES = [f"layers.{i}" for i in range(4)]


class Layer(GradientCheckpointingLayer):
    """Returns a tuple, as many layers do, and counts its calls."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> tuple:
        self.calls += 1
        return (torch.sin(hidden * self.factor), None, hidden.long())


class Model(nn.Module):
    """(x + 1) -> four layers -> sum. The order of the layers and the number of passes can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(float(i)) for i in range(1, 5)])
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + 1
        for index in self.order:
            hidden = self.layers[index](hidden)[0]
        return hidden.sum()

    @property
    def calls(self) -> list[int]:
        return [layer.calls for layer in self.layers]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def batch() -> dict:
    return {"x": torch.linspace(0, 1, 5)}


@pytest.fixture
def runner(model, batch) -> Iterator[LayerRangeRunner]:
    """Installed, and knows the order of the units; nothing has been counted."""
    runner = LayerRangeRunner(model, ModelLayers((tuple(NAMES),)))
    runner.install()
    runner.trace(batch)
    for layer in model.layers:
        layer.calls = 0
    yield runner
    runner.remove()


def test_a_skipped_layer_returns_the_constants_of_its_own_output():
    """Not of the last layer's: Donut halves its image in each and returns the size, which the next layer needs."""

    class Halving(GradientCheckpointingLayer):
        def forward(self, hidden: torch.Tensor, size: int) -> tuple[torch.Tensor, int]:
            return hidden.view(size // 2, 2).sum(1), size // 2

    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Halving() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size = 16
            for layer in self.layers:
                x, size = layer(x, size)
            return x

    model, batch = Pyramid(), {"x": torch.arange(16.0)}
    runner = LayerRangeRunner(model, ModelLayers((tuple(NAMES),)))
    runner.install()
    expected = runner.trace(batch)
    for start in range(1, 4):
        with runner.to_the_end(start, runner.run(0, start, None, batch)):
            assert torch.equal(model(**batch), expected)


def test_another_order_is_an_error(model, batch, runner):
    model.order = [0, 2, 1, 3]
    with pytest.raises(UnsupportedModelError, match=r"layer 'layers\.\d' at position \d, where 'layers\.\d' was"):
        runner.run(0, 3, None, batch)


def test_a_forward_that_ends_early_is_an_error(model, batch, runner):
    model.order = [0, 1]
    with pytest.raises(UnsupportedModelError, match="ended after 2 of 4 layer calls"):
        runner.run(0, 3, None, batch)
    with pytest.raises(UnsupportedModelError, match="made 2 layer calls where 4 were"), runner.to_the_end(0, None):
        model(**batch)


def test_a_direct_call_of_a_model_that_is_not_all_here_is_refused(model, batch, runner):
    runner.restrict_to(range(1, 3))
    with pytest.raises(ValueError, match=r"layers 1 to 2 of 4, and 'layers\.0' is not among them.*evaluate\(\)"):
        model(**batch)
    runner.restrict_to(None)
    model(**batch)


def test_remove_gives_the_layers_their_own_forward_back(model, batch):
    own = [layer.forward for layer in model.layers]
    override = model.layers[2].forward = lambda hidden: (hidden + 1,)  # as hooks of other libraries do
    runner = LayerRangeRunner(model, ModelLayers((tuple(NAMES),)))
    for _ in range(2):
        runner.install()
        runner.install()  # the second time does nothing
        assert runner.installed
        runner.remove()
    assert not runner.installed
    assert ["forward" in vars(layer) for layer in model.layers] == [False, False, True, False]
    assert model.layers[2].forward is override
    assert [model.layers[i].forward for i in (0, 1, 3)] == [own[i] for i in (0, 1, 3)]


def test_an_override_made_before_is_called(model, batch):
    model.layers[2].forward = lambda hidden: (hidden * 0 + 5.0, None, hidden.long())
    expected = model(**batch)
    runner = LayerRangeRunner(model, ModelLayers((tuple(NAMES),)))
    runner.install()
    runner.trace(batch)
    with runner.to_the_end(1, runner.run(0, 1, None, batch)):
        assert model(**batch) == expected
