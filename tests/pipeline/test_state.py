"""Weights and optimizer state that are spread over processes: what is loaded, made equal, and kept in its place.

That they are, put together, those of one process is what `test_moves.py` and saved and resumed trainings show.
"""

from __future__ import annotations

import copy
import zlib
from datetime import timedelta

import pytest
import torch
from distributed import run_ranks
from model_zoo import MODELS
from torch import nn

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.pipeline.optimizer_state import OptimizerState
from hf_pipetransformer.pipeline.state import WeightState, synchronise

NAME = "llama-tied"  # embedding and head are one parameter, needed by the first and the last stage
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Spread:
    """The model as K stages, of which this process holds the first one."""

    def __init__(self, stages: int = 2) -> None:
        self.model = MODELS[NAME].build()
        self.stack = LayerStack.discover(self.model, MODELS[NAME].batch(2))
        self.table = self.stack.table
        self.mesh = ProcessMesh(timedelta(seconds=60))
        self.weights = WeightState(self.table, self.mesh)
        size = self.stack.num_units // stages
        self.parts = [self.stack.owned(stage * size, (stage + 1) * size) for stage in range(stages)]
        self.mine = self.parts[0]
        self.holders = {n: tuple(r for r in range(stages) if n in self.parts[r]) for n in self.table.names}

    def keep_mine(self) -> None:
        self.weights.keep_held(self.holders)

    def groups(self) -> list[dict]:
        """As the Trainer makes them: vectors without weight decay."""
        return [
            {"params": [p for p in self.model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]

    def step(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """With gradients that depend on the parameter's name and the step only."""
        for name in self.table.names:
            seed = zlib.crc32(f"{name} {number}".encode())
            self.table[name].grad = torch.randn(self.table[name].shape, generator=torch.Generator().manual_seed(seed))
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


def differ(rank, world_size):
    torch.distributed.init_process_group("gloo")
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


def test_weights_that_differ_become_those_of_rank_0():
    run_ranks(differ, 2)


def test_an_optimizer_of_another_model_is_named():
    spread = Spread()
    optimizer = torch.optim.AdamW(MODELS[NAME].build().parameters(), lr=0.1)
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
    reference, optimizer, fresh = (torch.optim.AdamW(s.groups(), lr=0.1) for s in (alone, spread, stock))
    alone.step(reference, 0)
    spread.step(optimizer, 0)
    state = OptimizerState(optimizer, spread.table, spread.weights, spread.mesh)
    spread.keep_mine()
    with state.gathered():
        saved = optimizer.state_dict()
    assert_equal_optimizer_states(saved, reference.state_dict())
    fresh.load_state_dict(copy.deepcopy(saved))  # as the stock Trainer would resume

    resumed = WithOwn()
    second = torch.optim.AdamW(resumed.groups(), lr=0.1)
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
