"""Every cut of every model in the zoo gives the loss, the outputs and the gradients of the uncut model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from model_zoo import MODELS, Batch, ZooModel
from selection import few
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_pipetransformer.errors import UnsupportedModelError
from hf_pipetransformer.model.frozen_prefix import FreezableLayers
from hf_pipetransformer.model.layer_range import Carry
from hf_pipetransformer.model.layer_stack import LayerStack, output_tensors
from hf_pipetransformer.model.placeholders import placeholder
from hf_pipetransformer.model.refusals import refuse_overlapping_weights

NAN = float("nan")

TOLERANCE = 1e-5
BFLOAT16_TOLERANCE = 2e-2  # of gradients, relative to the largest: shared weights are added up in another order

ONE_OF_EACH_KIND = ["bert-classification", "albert", "deberta-v2", "gpt2", "llama-tied", "mixtral", "t5", "vit"]


@dataclasses.dataclass
class Step:
    """What one forward and backward left behind."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]

    @classmethod
    def of(cls, model: nn.Module, outputs: dict[str, Tensor]) -> Step:
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return cls({name: tensor.detach() for name, tensor in outputs.items()}, gradients)


def uncut_step(model: PreTrainedModel, batch: Batch) -> Step:
    outputs = output_tensors(model(**batch))
    outputs["loss"].backward()
    return Step.of(model, outputs)


def cut_step(stack: LayerStack, bounds: tuple[int, ...], batch: Batch) -> Step:
    """Runs the stages between `bounds` one after the other and their backwards in reverse.

    Stages share the model here, and so a parameter of two stages sums their gradients by itself. While one stage
    runs, in either direction, the parameters of the others are NaN, and so are carried tensors nobody should read.
    """
    stages = list(itertools.pairwise(bounds))
    received: list[Carry] = [{}]
    handed_on: list[Carry] = []
    for start, stop in stages[:-1]:
        with only_parameters_of(stack, start, stop):
            handed_on.append(stack.runner.run(start, stop, received[-1], batch))
        received.append(as_received(stack, stop, handed_on[-1]))

    start, stop = stages[-1]
    with only_parameters_of(stack, start, stop):
        with stack.runner.to_the_end(start, received[-1]):
            outputs = output_tensors(stack.model(**batch))
        outputs["loss"].backward()

    for (start, stop), sent, received_by_next in reversed(list(zip(stages, handed_on, received[1:], strict=False))):
        arrived = [
            (ours, theirs.grad)
            for stack_index in sent
            for ours, theirs in zip(sent[stack_index], received_by_next[stack_index], strict=True)
            if ours.requires_grad and theirs.grad is not None
        ]
        with only_parameters_of(stack, start, stop):
            torch.autograd.backward([tensor for tensor, _ in arrived], [gradient for _, gradient in arrived])
    return Step.of(stack.model, outputs)


@contextmanager
def only_parameters_of(stack: LayerStack, start: int, stop: int) -> Iterator[None]:
    owned = stack.owned(start, stop)
    absent = {
        name: placeholder(stack.table[name], NAN if stack.table[name].is_floating_point() else 0)
        for name in stack.table.names
        if name not in owned
    }
    with stack.table.replaced(absent):
        yield


def as_received(stack: LayerStack, boundary: int, carry: Carry) -> Carry:
    """The carry as another process has it: cut off from the graph, without what nobody reads."""
    received: dict[int, list[Tensor]] = {index: [] for index in carry}
    for slot in stack.boundaries[boundary]:
        tensor = carry[slot.stack][slot.position].detach()
        if not slot.is_used:
            tensor = torch.full_like(tensor, NAN)
        # What had no gradient must not get one here: attention chooses its kernel by that.
        has_gradient = slot.needs_gradient and carry[slot.stack][slot.position].requires_grad
        received[slot.stack].append(tensor.requires_grad_(has_gradient))
    return {index: tuple(tensors) for index, tensors in received.items()}


def single_cuts(num_units: int) -> list[tuple[int, ...]]:
    return [(0, cut, num_units) for cut in range(1, num_units)]


def all_cuts(num_units: int) -> list[tuple[int, ...]]:
    """Into two stages and into three."""
    pairs = itertools.combinations(range(1, num_units), 2)
    return single_cuts(num_units) + [(0, *pair, num_units) for pair in pairs]


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


def assert_equal_steps(actual: Step, expected: Step, cut: tuple[int, ...]) -> None:
    assert actual.outputs.keys() == expected.outputs.keys()
    for name, tensor in expected.outputs.items():
        assert difference(actual.outputs[name], tensor) <= TOLERANCE, f"{name} with stages {cut}"
    wrong = {
        name: error
        for name, gradient in expected.gradients.items()
        if not (error := difference(actual.gradients[name], gradient)) <= TOLERANCE  # NaN is wrong, too
    }
    assert not wrong, f"gradients with stages {cut}"


def difference(a: Tensor | None, b: Tensor | None) -> float:
    """The largest; no gradient counts as zeros."""
    if a is None or b is None:
        given = [tensor for tensor in (a, b) if tensor is not None]
        return given[0].abs().max().item() if given else 0.0
    return (a.float() - b.float()).abs().max().item()


@pytest.mark.parametrize("name", few(MODELS, *ONE_OF_EACH_KIND))
def test_every_cut_equals_the_uncut_model(name):
    """Found on one batch, and run on another one of other samples, into two and three stages and one for each unit."""
    stack, batch = discover(MODELS[name]), MODELS[name].batch()
    assert stack.owned(0, stack.num_units) == set(stack.table.names) and stack.owners[0]
    expected = uncut_step(stack.model, batch)
    with installed(stack):
        for bounds in (*all_cuts(stack.num_units), tuple(range(stack.num_units + 1))):
            assert_equal_steps(cut_step(stack, bounds, batch), expected, bounds)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_cuts_with_gradient_checkpointing(name):
    stack, batch = discover(MODELS[name]), MODELS[name].batch()
    calls: list[nn.Module] = []
    innermost = next(module for module in stack.units[0].module.modules() if not list(module.children()))
    innermost.register_forward_pre_hook(lambda module, _: calls.append(module))
    expected = uncut_step(stack.model, batch)
    calls_without_checkpointing = len(calls)
    stack.model.gradient_checkpointing_enable({"use_reentrant": False})
    with installed(stack):
        for bounds in single_cuts(stack.num_units):
            calls.clear()
            assert_equal_steps(cut_step(stack, bounds, batch), expected, bounds)
            assert len(calls) == 2 * calls_without_checkpointing  # computed again in the backward


@pytest.mark.parametrize("name", ["deberta-v2", "llama-tied"])
def test_cuts_with_bfloat16_autocast(name):
    stack, batch = discover(MODELS[name]), MODELS[name].batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected = uncut_step(stack.model, batch)
    with installed(stack), torch.autocast("cpu", torch.bfloat16):
        for bounds in single_cuts(stack.num_units):
            actual = cut_step(stack, bounds, batch)
            for output, tensor in expected.outputs.items():
                assert difference(actual.outputs[output], tensor) == 0, f"{output} with stages {bounds}"
            largest = max(g.abs().max().item() for g in expected.gradients.values() if g is not None)
            for parameter, gradient in expected.gradients.items():
                error = difference(actual.gradients[parameter], gradient)
                assert error <= BFLOAT16_TOLERANCE * largest, f"gradient of {parameter} with stages {bounds}"


def unit_names(name: str) -> list[str]:
    return [unit.name for unit in discover(MODELS[name]).units]


def test_a_layer_that_is_called_again_is_a_unit_each_time():
    group = "albert.encoder.albert_layer_groups"
    assert unit_names("albert") == [f"{group}.0"] * 4
    assert unit_names("albert-2-groups") == [f"{group}.0"] * 2 + [f"{group}.1"] * 2


@pytest.mark.parametrize(
    ("name", "parameter", "stages"),
    [
        ("llama-tied", "model.embed_tokens.weight", (0, 2)),  # embedding and head
        ("t5", "shared.weight", (0, 1, 2)),  # encoder's, decoder's, head
        ("deberta-v2", "deberta.encoder.rel_embeddings.weight", (0, 1, 2)),  # read by every layer
        ("mpnet", "mpnet.encoder.relative_attention_bias.weight", (0, 1, 2)),  # precedes the layers
        ("albert", "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.weight", (0, 1, 2)),  # one layer
    ],
)
def test_shared_parameters_and_the_stages_that_need_them(name, parameter, stages):
    stack = discover(MODELS[name])
    bounds = (0, stack.num_units // 3, 2 * stack.num_units // 3, stack.num_units)
    assert stack.shared(bounds)[parameter] == stages
    assert stack.shared((0, stack.num_units)) == {}


def test_what_a_sample_does_not_reach_is_owned_where_it_is():
    """XLNet's segment embeddings are read only with `token_type_ids`, and its mask embedding only with two streams."""
    stack = discover(MODELS["xlnet"])
    for index in range(4):
        name = f"transformer.layer.{index}.rel_attn.seg_embed"
        assert name in stack.unreached
        assert [unit for unit in range(4) if name in stack.owners[unit]] == [index]
    assert "transformer.mask_emb" in stack.unreached
    assert "transformer.mask_emb" in stack.owners[3]


def test_discovery_leaves_the_model_as_it_was():
    zoo_model = MODELS["llama-tied"]
    model = zoo_model.build().train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    model.model.embed_tokens.weight.requires_grad_(False)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    random_state = torch.get_rng_state()

    LayerStack.discover(model, zoo_model.batch(rows=2))

    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert flags == {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert identities == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [module.training for module in model.modules()] == modes
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(random_state, torch.get_rng_state())


def used_before(stack: LayerStack, boundary: int) -> list[str]:
    """The layers whose outputs cross a boundary."""
    name_of = {unit.stack: unit.name for unit in stack.units}
    return [name_of[slot.stack] for slot in stack.boundaries[boundary] if slot.is_used]


def test_a_head_that_reads_every_layer_gets_them_even_where_layers_hardly_matter():
    """In a new model a wrong hidden state moves the outputs by less than rounding, and yet gradients are wrong."""
    zoo_model = MODELS["wav2vec2-weighted-layers"]
    model = zoo_model.make_model()  # with its own small initial weights
    stack = LayerStack.discover(model, zoo_model.batch(rows=2))
    layers = [unit.name for unit in stack.units if ".encoder.layers." in unit.name]
    assert set(layers[:-1]) < set(used_before(stack, stack.num_units - 1))


class RunsLayers(torch.autograd.Function):
    """As Reformer's: it calls layers without a graph, and again in the backward."""

    @staticmethod
    def forward(ctx, x, layers):
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Layers(nn.Module):
    """Three layers in a list; `read` says how the head's result depends on them."""

    def __init__(self, read) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.chooses, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.read = read

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.read(self, x)
        return {"logits": logits, "loss": logits.square().mean()}


def of_an_early_layer(model: Layers, x: Tensor) -> Tensor:
    first = model.layers[0](x).relu()
    return model.head(model.layers[2](model.layers[1](first).relu()) + first)


def by_a_choice(model: Layers, x: Tensor) -> Tensor:
    """As RT-DETR does: a head's scores, without a gradient, choose what the next layers get."""
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


@pytest.mark.parametrize("read", [of_an_early_layer, by_a_choice, changed_in_place, one_after_the_other])
def test_layers_that_are_not_simply_read_one_after_the_other(read):
    torch.manual_seed(0)
    model, batch = Layers(read), {"x": torch.randn(3, 4)}
    expected = uncut_step(model, batch)
    stack = LayerStack.discover(model, batch)
    assert stack.num_units == 3
    with installed(stack):
        for bounds in all_cuts(3):
            assert_equal_steps(cut_step(stack, bounds, batch), expected, bounds)


def test_what_a_layer_reads_without_a_gradient_does_not_freeze_with_it():
    model, batch = Layers(by_a_choice), {"x": torch.randn(3, 4)}
    stack = LayerStack.discover(model, batch)
    assert "chooses.weight" in stack.owners[1]
    assert FreezableLayers.of(stack, batch).frozen(2) == {
        f"layers.{k}.{n}" for k in (0, 1) for n in ("weight", "bias")
    }


def test_a_forward_that_changes_its_weights_is_refused():
    """As RWKV scales its own where it does not train."""

    def read(model: Layers, x: Tensor) -> Tensor:
        with torch.no_grad():
            if not model.is_scaled:
                model.layers[1].weight.mul_(0.5)
        model.is_scaled = True
        return one_after_the_other(model, x)

    model = Layers(read)
    model.layers = nn.ModuleList(Layer() for _ in range(3))
    model.is_scaled = False
    with pytest.raises(UnsupportedModelError, match=r"changes 1 of its own weights \('layers.1.weight'\)"):
        LayerStack.discover(model, {"x": torch.randn(3, 4)})


class Layer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_layers_inside_an_autograd_function_are_refused():
    model = Layers(lambda model, x: model.head(RunsLayers.apply(model.chooses(x), model.layers)))
    model.layers = nn.ModuleList(Layer() for _ in range(3))
    with pytest.raises(UnsupportedModelError, match=r"layer 'layers.0' inside an autograd function .*\(RunsLayers\)"):
        LayerStack.discover(model, {"x": torch.randn(3, 4)})


def test_a_value_that_only_training_reads_with_a_gradient_has_one():
    """As wav2vec 2.0 chooses its codes: by the largest score in eval mode, by a soft choice in training."""

    def read(model: Layers, x: Tensor) -> Tensor:
        first = model.layers[0](x)
        scores = model.chooses(first).softmax(-1)
        if not model.training:
            scores = torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        return model.head(model.layers[2](model.layers[1](first.relu()))) + scores

    stack = LayerStack.discover(Layers(read), {"x": torch.randn(3, 4)})
    assert used_before(stack, 2) == ["layers.0", "layers.1"] and all(
        slot.needs_gradient for slot in stack.boundaries[2]
    )


def test_layers_that_leave_something_behind_for_others_are_refused():
    """As Gemma 3n's keys and values do, in a dictionary that passes by the layers' outputs."""

    class Layer(GradientCheckpointingLayer):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index, self.linear = index, nn.Linear(3, 3)

        def forward(self, hidden: Tensor, left_behind: dict[int, Tensor]) -> Tensor:
            left_behind[self.index] = hidden
            return self.linear(hidden) + left_behind[max(0, self.index - 2)]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(index) for index in range(4))

        def forward(self, x: Tensor) -> Tensor:
            left_behind: dict[int, Tensor] = {}
            for layer in self.layers:
                x = layer(x, left_behind)
            return x

    model = Model()
    with pytest.raises(
        UnsupportedModelError, match=r"it fails .* \(KeyError: 0\), although the whole model runs"
    ) as info:
        LayerStack.discover(model, {"x": torch.ones(2, 3)})
    assert isinstance(info.value.__cause__, KeyError)
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(TypeError, match="unexpected keyword"):  # no finding about the layers
        LayerStack.discover(model, {"y": torch.ones(2, 3)})


def test_layers_that_are_left_out_later_are_noticed():
    """Someone sets layerdrop after the units were found."""
    stack, batch = discover(MODELS["bart"]), MODELS["bart"].batch()
    stack.model.model.encoder.layerdrop = 1.0
    with installed(stack), pytest.raises(UnsupportedModelError, match="BartForConditionalGeneration"):
        cut_step(stack, (0, 4, 6), batch)


def test_refuses_parameters_that_share_elements() -> None:
    fused = torch.zeros(4, 2)
    model = nn.Module()
    model.a, model.b = nn.Parameter(fused[:2]), nn.Parameter(fused[2:])  # neighbours in one storage
    refuse_overlapping_weights(model)
    model.c = nn.Parameter(fused[1:3])
    with pytest.raises(UnsupportedModelError, match="'a' and 'c' are different parameters, but share elements"):
        refuse_overlapping_weights(model)


def test_what_one_process_has_found_is_known_to_others() -> None:
    """Also why batches cannot be divided, which a lazily loaded model's first process alone has seen."""
    found = discover(MODELS["gpt2"])
    found.fails_on_parts = "it counts its calls"
    told = LayerStack.of(MODELS["gpt2"].build(), found.describe())
    assert (told.units, told.owners, told.boundaries) == (found.units, found.owners, found.boundaries)
    assert told.fails_on_parts == found.fails_on_parts
