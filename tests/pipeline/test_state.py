"""Weights and optimizer state that are spread over processes are, put together, those of one process."""

from __future__ import annotations

import copy
import zlib
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from distributed import run_ranks
from model_zoo import MODELS
from torch import nn
from transformers.optimization import Adafactor

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.pipeline.optimizer_state import OptimizerState
from hf_pipetransformer.pipeline.state import WeightState, synchronise

CPU = torch.device("cpu")
NAME = "llama-tied"  # embedding and head are one parameter, needed by the first and the last stage
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adafactor": lambda groups: Adafactor(groups, lr=0.1, relative_step=False, beta1=0.9),
}


class Spread:
    """The model as K stages, of which this process holds the one of its rank."""

    def __init__(
        self, rank: int = 0, stages: int = 2, dtype: torch.dtype = torch.float32, frozen: bool = False
    ) -> None:
        self.model = MODELS[NAME].build().to(dtype)
        self.stack = LayerStack.discover(self.model, MODELS[NAME].batch(2))
        self.table = self.stack.table
        self.model.model.layers[0].self_attn.q_proj.weight.requires_grad_(not frozen)
        self.model.model.norm.requires_grad_(not frozen)
        self.mesh = ProcessMesh(timedelta(seconds=60))
        self.weights = WeightState(self.table, self.mesh)
        size = self.stack.num_units // stages
        self.parts = [self.stack.owned(stage * size, (stage + 1) * size) for stage in range(stages)]
        self.mine = self.parts[rank]
        self.holders = {n: tuple(r for r in range(stages) if n in self.parts[r]) for n in self.table.names}

    def keep_mine(self) -> None:
        self.weights.keep_held(self.holders)

    def groups(self) -> list[dict]:
        """As the Trainer makes them: vectors without weight decay, frozen parameters left out."""
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trainable if p.dim() == 1], "weight_decay": 0.0},
        ]

    def step(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """With gradients that depend on the parameter's name and the step only."""
        for name in self.table.names:
            if self.weights.is_here(name) and self.table[name].requires_grad:
                seed = zlib.crc32(f"{name} {number}".encode())
                gradient = torch.randn(self.table[name].shape, generator=torch.Generator().manual_seed(seed))
                self.table[name].grad = gradient.to(self.table[name].dtype)
        optimizer.step()


def bytes_of(parameter: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # a parameter that is elsewhere cannot be read
        return parameter.untyped_storage().nbytes()


def copy_of(state_dict: dict) -> dict:
    return {name: tensor.clone() for name, tensor in state_dict.items()}


def assert_equal_states(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def assert_equal_optimizer_states(a: dict, b: dict) -> None:
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for number, state in a["state"].items():
        assert state.keys() == b["state"][number].keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["state"][number][key])), (number, key)


def test_saving_a_part_is_refused_but_its_keys_may_be_listed():
    spread = Spread()
    keys = list(spread.model.state_dict())
    spread.keep_mine()
    with pytest.raises(ValueError, match=r"split over the pipeline stages.*trainer\.save_model\(\)"):
        spread.model.state_dict()
    with spread.weights.listing_placeholders():
        assert list(spread.model.state_dict()) == keys


@pytest.mark.parametrize("as_submodule", [False, True])
def test_loading_takes_what_is_here_and_skips_the_rest(as_submodule):
    spread = Spread()
    spread.keep_mine()
    other = MODELS[NAME].build(seed=1)
    prefix, target = ("inner.", nn.ModuleDict({"inner": spread.model})) if as_submodule else ("", spread.model)
    given = {prefix + name: tensor for name, tensor in other.state_dict().items()}
    keys = list(given)
    result = target.load_state_dict(given, strict=not as_submodule)
    assert not result.unexpected_keys and list(given) == keys, "the caller's dict stays as it is"
    for name, parameter in other.named_parameters():
        assert name not in spread.mine or torch.equal(spread.table[name], parameter)
        assert bytes_of(spread.table[name]) == (parameter.nbytes if name in spread.mine else 4)


def gather_and_restore(rank, world_size, dtype, frozen):
    """Gathered weights are the original ones bit for bit."""
    spread = Spread(rank, world_size, dtype, frozen)
    original = copy_of(spread.model.state_dict())
    flags = {name: spread.table[name].requires_grad for name in spread.table.names}
    spread.keep_mine()
    kept = {name: spread.table[name] for name in spread.table.names}
    with spread.weights.gathered():
        state_dict = spread.model.state_dict()
        if rank == 0:
            assert_equal_states(state_dict, original)
            assert state_dict[EMBEDDING].data_ptr() == state_dict[HEAD].data_ptr(), "saved once"
    with pytest.raises(ValueError, match="split over the pipeline stages"):
        spread.model.state_dict()

    spread.weights.restore(CPU)
    assert spread.weights.is_whole
    assert_equal_states(spread.model.state_dict(), original)
    assert spread.model.lm_head.weight is spread.model.model.embed_tokens.weight
    assert flags == {name: spread.table[name].requires_grad for name in spread.table.names}
    assert all(spread.table[name] is kept[name] for name in kept)
    spread.keep_mine()  # and the next round
    assert not spread.weights.is_whole


def differ(rank):
    """Weights that differ become those of rank 0."""
    spread = Spread(stages=2)
    expected = copy_of(spread.model.state_dict())
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.3.self_attn.q_proj.weight"]
    if rank == 1:
        with torch.no_grad():
            for name in names:
                spread.table[name].add_(1)
    parameters = dict(spread.model.named_parameters())
    assert synchronise(parameters, spread.mesh) == names
    assert synchronise(parameters, spread.mesh) == []
    assert_equal_states(spread.model.state_dict(), expected)
    # buffers of other shapes and dtypes, by a rank of each name; what some process lacks stays
    mine = {name: torch.full((rank + 1,), rank, dtype=(torch.bool, torch.int64)[rank]) for name in ("a", "b")}
    own = {"c": torch.ones(1)} if rank else {}
    assert synchronise(mine | own, spread.mesh, lambda name: int(name == "b")) == ["a", "b"]
    assert mine["a"].tolist() == [False] and mine["b"].tolist() == [1, 1]


@contextmanager
def gathered(spread: Spread, state: OptimizerState):
    with state.gathered(), spread.weights.gathered():
        yield


def train_spread(rank, world_size, kind, cut_first):
    """Three steps as one process and spread; then what was saved is loaded by another spread model."""
    alone, stock = Spread(frozen=True), Spread(frozen=True)
    reference = OPTIMIZERS[kind](alone.groups())
    for number in range(3):
        alone.step(reference, number)

    spread = Spread(rank, world_size, frozen=True)
    if cut_first:
        spread.keep_mine()
        with spread.weights.as_on_one_process():
            optimizer = OPTIMIZERS[kind](spread.groups())
        state = OptimizerState(optimizer, spread.table, spread.weights, spread.mesh)
    else:  # an optimizer that has trained the whole model
        optimizer = OPTIMIZERS[kind](spread.groups())
        spread.step(optimizer, 0)
        state = OptimizerState(optimizer, spread.table, spread.weights, spread.mesh)
        spread.keep_mine()
        state.keep_what_is_here()
    here = {id(spread.table[name]) for name in spread.mine}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} <= here
    assert {id(p) for p in optimizer.state} <= here
    for number in range(0 if cut_first else 1, 3):
        spread.step(optimizer, number)

    with gathered(spread, state):
        saved, weights = optimizer.state_dict(), spread.model.state_dict()
        if rank == 0:
            assert_equal_optimizer_states(saved, reference.state_dict())
            assert_equal_states(weights, alone.model.state_dict())
            fresh = OPTIMIZERS[kind](stock.groups())  # as the stock Trainer would resume
            fresh.load_state_dict(saved)
            assert_equal_optimizer_states(fresh.state_dict(), saved)

    # from a file of one process on, spread once more
    resumed = Spread(rank, world_size, frozen=True)
    resumed.keep_mine()
    with resumed.weights.as_on_one_process():
        second = OPTIMIZERS[kind](resumed.groups())
    second_state = OptimizerState(second, resumed.table, resumed.weights, resumed.mesh)
    second.load_state_dict(copy.deepcopy(reference.state_dict()))  # torch would share the tensors
    resumed.model.load_state_dict(alone.model.state_dict())
    alone.step(reference, 3)
    resumed.step(second, 3)
    with gathered(resumed, second_state):
        if rank == 0:
            assert_equal_optimizer_states(second.state_dict(), reference.state_dict())
            assert_equal_states(resumed.model.state_dict(), alone.model.state_dict())


def all_of_it(rank, world_size):
    torch.distributed.init_process_group("gloo")
    for dtype, frozen in ((torch.float32, True), (torch.bfloat16, False)):
        gather_and_restore(rank, world_size, dtype, frozen)
    differ(rank)
    for kind in OPTIMIZERS:
        for cut_first in (True, False):  # made for the stage, or for the whole model
            train_spread(rank, world_size, kind, cut_first)


def test_what_is_spread_is_what_one_process_has():
    run_ranks(all_of_it, 2)


def test_an_optimizer_of_another_model_is_named():
    spread = Spread()
    optimizer = OPTIMIZERS["adamw"](MODELS[NAME].build().parameters())
    with pytest.raises(ValueError, match=r"parameters do not belong to the model.*\(64, 16\)"):
        OptimizerState(optimizer, spread.table, spread.weights, spread.mesh)


def test_parameters_outside_of_the_model_keep_their_places():
    """A loss's own, before and behind the model's in a group: the state is the stock optimizer's."""

    class WithOwn(Spread):
        def __init__(self) -> None:
            super().__init__(stages=1)
            self.own = [nn.Parameter(torch.full((3, 2), 0.5)), nn.Parameter(torch.full((2, 2), 0.25))]

        def groups(self) -> list[dict]:
            weights, others = super().groups()
            return [{**weights, "params": [self.own[0], *weights["params"], self.own[1]]}, others]

        def step(self, optimizer: torch.optim.Optimizer, number: int) -> None:
            for scale, parameter in enumerate(self.own, start=1):
                parameter.grad = torch.full_like(parameter, 0.1 * scale + number)
            super().step(optimizer, number)

    alone, spread, stock = WithOwn(), WithOwn(), WithOwn()
    reference, optimizer, fresh = (OPTIMIZERS["adamw"](s.groups()) for s in (alone, spread, stock))
    alone.step(reference, 0)
    spread.step(optimizer, 0)
    state = OptimizerState(optimizer, spread.table, spread.weights, spread.mesh)
    spread.keep_mine()
    with state.gathered():
        saved = optimizer.state_dict()
    assert_equal_optimizer_states(saved, reference.state_dict())
    fresh.load_state_dict(copy.deepcopy(saved))  # as the stock Trainer would resume

    resumed = WithOwn()
    second = OPTIMIZERS["adamw"](resumed.groups())
    before = [list(map(id, group["params"])) for group in second.param_groups]
    attached = OptimizerState(second, resumed.table, resumed.weights, resumed.mesh)
    resumed.weights.freeze([EMBEDDING])
    attached.keep_what_is_here()
    second.load_state_dict(copy.deepcopy(reference.state_dict()))
    for one, other in zip(resumed.own, alone.own, strict=True):
        assert torch.equal(second.state[one]["exp_avg"], reference.state[other]["exp_avg"])
    attached.release()
    assert [list(map(id, group["params"])) for group in second.param_groups] == before


def test_parked_weights_come_back_when_they_are_saved_or_used() -> None:
    model = MODELS[NAME].build()
    stack = LayerStack.discover(model, MODELS[NAME].batch(2))
    weights = WeightState(stack.table, ProcessMesh(timedelta(seconds=60)))
    names = stack.owned(0, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    layer = model.model.layers[0]

    def parked_bytes() -> int:
        return sum(parameter.untyped_storage().nbytes() for parameter in layer.parameters())

    for use in (model.model.state_dict, lambda: model(**MODELS[NAME].batch(2))):
        whole = parked_bytes()
        weights.offload(names, needs_them=lambda: True)
        assert parked_bytes() < whole / 10
        use()
        assert parked_bytes() == whole
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def equalised(rank: int, world_size: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """Weights that differ between the processes, and are not in row-major order."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(rank)
    weight = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last).weight
    synchronise({"weight": weight}, ProcessMesh(timedelta(seconds=60)))
    return weight.stride(), weight.detach().clone()


def test_weights_keep_their_strides_when_they_become_those_of_rank_0() -> None:
    """Replicas average gradients in the order in which weights lie in memory."""
    (strides, values), (others, theirs) = run_ranks(equalised, 2)
    assert strides == others == torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last).stride()
    assert torch.equal(values, theirs)
