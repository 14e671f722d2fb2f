"""Every cut of every model in the zoo gives the loss, the outputs and the gradients of the uncut model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from model_zoo import MODELS, Batch, ZooModel
from selection import few
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_pipetransformer.errors import UnsupportedModelError
from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.model.refusals import refuse_overlapping_weights
from tests.supported_models.trial import cut_step, difference_of, whole_step

NAN = float("nan")
TOLERANCE = 1e-5

ONE_OF_EACH_KIND = ["bert-classification", "albert", "deberta-v2", "gpt2", "llama-tied", "mixtral", "t5", "vit"]


def single_cuts(num_units: int) -> list[tuple[int, ...]]:
    return [(0, cut, num_units) for cut in range(1, num_units)]


def all_cuts(num_units: int) -> list[tuple[int, ...]]:
    """Into two stages and into three, and one for each unit."""
    pairs = itertools.combinations(range(1, num_units), 2)
    return [*single_cuts(num_units), *((0, *pair, num_units) for pair in pairs), tuple(range(num_units + 1))]


def discover(zoo_model: ZooModel) -> LayerStack:
    """The units are found on one batch and run on others."""
    return LayerStack.discover(zoo_model.build(), zoo_model.batch(rows=2, seed=2))


@contextmanager
def installed(stack: LayerStack) -> Iterator[None]:
    stack.runner.install()
    try:
        yield
    finally:
        stack.runner.remove()


def assert_cuts_equal_the_whole(stack: LayerStack, batch: Batch, cuts: Callable[[int], list[tuple[int, ...]]]) -> None:
    expected = whole_step(stack.model, batch)
    with installed(stack):
        for bounds in cuts(stack.num_units):
            assert difference_of(expected, cut_step(stack, bounds, batch, NAN), TOLERANCE) == "", bounds


@pytest.mark.parametrize("name", few(MODELS, *ONE_OF_EACH_KIND))
def test_every_cut_equals_the_uncut_model(name: str) -> None:
    """Found on one batch, and run on another one of other samples, into two and three stages and one for each unit."""
    stack = discover(MODELS[name])
    assert stack.owned(0, stack.num_units) == set(stack.table.names) and stack.owners[0]
    assert_cuts_equal_the_whole(stack, MODELS[name].batch(), all_cuts)


def test_discovery_leaves_the_model_as_it_was() -> None:
    zoo_model = MODELS["llama-tied"]
    model = zoo_model.build().train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    model.model.embed_tokens.weight.requires_grad_(False)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()}
    random_state = torch.get_rng_state()

    LayerStack.discover(model, zoo_model.batch(rows=2))

    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert flags == {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(random_state, torch.get_rng_state())


# ------------------------------------------------------------------------------------ models that are made for a test
class RunsLayers(torch.autograd.Function):
    """A function as Reformer's: it calls layers without a graph, and again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Layer(GradientCheckpointingLayer):
    """Gives what `returns` makes of its result."""

    def __init__(self, returns: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.weight, self.returns = nn.Parameter(torch.eye(4)), returns

    def forward(self, x: Tensor) -> Any:
        return self.returns(x @ self.weight)


class Halving(GradientCheckpointingLayer):
    """A layer as Donut's: it also returns the size of its image, and the next layer needs it."""

    def forward(self, hidden: Tensor, size: int) -> tuple[Tensor, int]:
        return hidden.view(-1, size // 2, 2).sum(-1), size // 2


class KeepsHidden(Layer):
    """A layer as Gemma 3n's: it leaves a tensor for later layers that is not in its output."""

    def forward(self, x: Tensor, index: int, left_behind: dict[int, Tensor]) -> Tensor:
        left_behind[index] = x
        return super().forward(x) + left_behind[max(0, index - 2)]


class Layers(nn.Module):
    """Layers in a list; `read` says how the head's result depends on them."""

    def __init__(
        self, read: Callable[[Any, Tensor], Tensor], make: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.chooses, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.read = read

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.read(self, x)
        return {"logits": logits, "loss": logits.square().mean()}


def of_an_early_layer(model: Layers, x: Tensor) -> Tensor:
    first = model.layers[0](x).relu()
    return model.head(model.layers[2](model.layers[1](first).relu()) + first)


def by_a_choice(model: Layers, x: Tensor) -> Tensor:
    """As RT-DETR does: a head's scores, without a gradient, choose the next layers' inputs."""
    x = model.layers[0](x)
    scores = model.chooses(x)
    x = model.layers[1](x.gather(-1, scores.argsort(-1)))
    return model.head(model.layers[2](x)) + scores


def changed_in_place(model: Layers, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x.tanh())
        x *= 0.5
    return model.head(x)


def one_after_the_other(model: Layers, x: Tensor) -> Tensor:
    """Each depends on the previous one, but not on its output alone."""
    for layer in model.layers:
        x = x + layer(model.chooses(x))
    return model.head(x)


def by_halves(model: Layers, x: Tensor) -> Tensor:
    x, size = model.chooses(x).repeat(1, 8), 32
    for layer in model.layers:
        x, size = layer(x, size)
    return model.head(x)


class Pair(NamedTuple):
    """One of the structures that a layer may give."""

    first: Any
    second: Any


def through(take: Callable[[Any], Tensor]) -> Callable[[Layers, Tensor], Tensor]:
    """A forward that takes each layer's result out of the structure that the layer returns."""

    def read(model: Layers, x: Tensor) -> Tensor:
        x = model.chooses(x)
        for layer in model.layers:
            x = take(layer(x)).tanh()
        return model.head(x)

    return read


SHAPES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda x: {"size": 3, "options": {"x": [x, "text"]}}, lambda given: given["options"]["x"][0]),
    "named tuple": (lambda x: Pair([x], Pair(2, x + 1)), lambda given: given.first[0] + given.second.second),
    "output": (lambda x: BaseModelOutputWithPast(x, hidden_states=(x,)), lambda given: given.last_hidden_state),
}
READ = {
    **{read.__name__: lambda read=read: Layers(read) for read in (of_an_early_layer, by_a_choice, changed_in_place)},
    "one after the other": lambda: Layers(one_after_the_other),
    "halving": lambda: Layers(by_halves, Halving),
    **{name: lambda pair=pair: Layers(through(pair[1]), lambda: Layer(pair[0])) for name, pair in SHAPES.items()},
}


@pytest.mark.parametrize("name", READ)
def test_layers_that_are_not_simply_read_one_after_the_other(name: str) -> None:
    torch.manual_seed(0)
    model, batch = READ[name](), {"x": torch.randn(3, 4)}
    stack = LayerStack.discover(model, batch)
    assert stack.num_units == 3
    assert_cuts_equal_the_whole(stack, batch, all_cuts)


# ------------------------------------------------------------------------------------ refusals
def scaling_its_weights(model: Layers, x: Tensor) -> Tensor:
    """As RWKV scales its own where it does not train."""
    if not hasattr(model, "is_scaled"):
        model.is_scaled = True
        with torch.no_grad():
            model.layers[1].weight.mul_(0.5)
    return one_after_the_other(model, x)


def inside_a_function(model: Layers, x: Tensor) -> Tensor:
    return model.head(RunsLayers.apply(model.chooses(x), model.layers))


def with_keys_left_behind(model: Layers, x: Tensor) -> Tensor:
    left_behind: dict[int, Tensor] = {}
    for index, layer in enumerate(model.layers):
        x = layer(x, index, left_behind)
    return model.head(x)


@pytest.mark.parametrize(
    ("read", "make", "why"),
    [
        (scaling_its_weights, Layer, r"changes 1 of its own weights \('layers.1.weight'\)"),
        (inside_a_function, Layer, r"layer 'layers.0' inside an autograd function .*\(RunsLayers\)"),
        (with_keys_left_behind, KeepsHidden, r"it fails .* \(KeyError: 0\), although the whole model runs"),
    ],
)
def test_refused(read: Any, make: Any, why: str) -> None:
    model = Layers(read, make)
    with pytest.raises(UnsupportedModelError, match=why):
        LayerStack.discover(model, {"x": torch.randn(3, 4)})
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(TypeError, match="unexpected keyword"):  # no finding about the layers
        LayerStack.discover(model, {"y": torch.ones(2, 3)})


def test_refuses_parameters_that_share_elements() -> None:
    fused = torch.zeros(4, 2)
    model = nn.Module()
    model.a, model.b = nn.Parameter(fused[:2]), nn.Parameter(fused[2:])  # neighbours in one storage
    refuse_overlapping_weights(model)
    model.c = nn.Parameter(fused[1:3])
    with pytest.raises(UnsupportedModelError, match="'a' and 'c' are different parameters, but share elements"):
        refuse_overlapping_weights(model)


def test_what_one_process_has_found_is_known_to_others() -> None:
    """Only the first process of a lazily loaded model has seen why batches cannot be divided; it tells the others."""
    found = replace(discover(MODELS["gpt2"]), whole_because="it counts its calls")
    told = LayerStack.of(MODELS["gpt2"].build(), found.describe())
    assert (told.units, told.owners, told.boundaries) == (found.units, found.owners, found.boundaries)
    assert told.whole_because == found.whole_because
