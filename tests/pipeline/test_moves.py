"""Weights and optimizer state go to the ranks that hold them under another plan, in bounded memory."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import slow
from torch import nn

from hf_pipetransformer.model.placeholders import ParameterTable
from hf_pipetransformer.pipeline import chunks
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.pipeline.moves import exchange, undivided
from hf_pipetransformer.pipeline.optimizer_state import OptimizerState
from hf_pipetransformer.pipeline.shards import Shards
from hf_pipetransformer.pipeline.state import Holders, WeightState

CPU = torch.device("cpu")


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([(), (0,), (1,), (3, 5), (0, 4), (7,), (64,)]), max_size=8),
    st.integers(1, 300),
)
def test_tensors_travel_in_messages_of_a_bounded_size(shapes: list[tuple[int, ...]], limit: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    tensors = [torch.randn(shape).mul(9).to(dtypes[n % len(dtypes)]) for n, shape in enumerate(shapes)]
    tensors = [tensor.t() if tensor.dim() == 2 else tensor for tensor in tensors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", limit)
        sent = [chunk.clone() for chunk in chunks.packed(tensors)]
        assert all(chunk.numel() == limit for chunk in sent[:-1]) and all(0 < chunk.numel() <= limit for chunk in sent)
        arriving = iter(sent)
        received = list(chunks.unpacked([t.to("meta") for t in tensors], lambda buffer: buffer.copy_(next(arriving))))
    assert next(arriving, None) is None
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(received, tensors, strict=True))
    storages = [tensor.untyped_storage() for tensor in received]  # torch.save writes whole storages
    assert [storage.nbytes() for storage in storages] == [tensor.nbytes for tensor in tensors]


class Layers(nn.Module):
    """Parameters of several dtypes and sizes; one is not contiguous, one is empty."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for number, shape in enumerate([(4, 8), (3,), (), (16, 2), (0, 5), (40, 7), (1, 1), (6, 5)]):
            value = torch.randn(shape, generator=generator)
            setattr(
                self,
                f"p{number}",
                nn.Parameter(value.t() if number == 3 else value.double() if number == 5 else value),
            )


def holders_of(*ranks: tuple[int, ...]) -> Holders:
    return {f"p{number}": held for number, held in enumerate(ranks)}


LAYOUTS = (
    holders_of((0,), (0,), (1,), (1,), (1,), (2,), (2,), (2,)),
    holders_of((0, 2), (0, 2), (0, 2), (1,), (1,), (1,), (0, 1), (2,)),
    holders_of((0, 1, 2), (1,), (1, 2), (2,), (0, 2), (0,), (0,), (0, 1, 2)),
    holders_of((2,), (2,), (0, 1, 2), (0,), (0,), (1, 2), (1,), (0,)),
)


def go_round(rank: int, mesh: ProcessMesh, limit: int, fused: bool) -> int:
    chunks.CHUNK_BYTES = limit
    model = Layers()
    table = ParameterTable(model)
    weights = WeightState(table, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = OptimizerState(optimizer, table, weights, mesh)
    expected = {name: (table[name].detach().clone(), state.state_of(name)) for name in table.names}

    def here(holders: Holders) -> set[str]:
        return {name for name in table.names if rank in holders[name]}

    weights.keep_only(here(LAYOUTS[0]), CPU, LAYOUTS[0])
    state.keep_what_is_here()
    received = 0
    for before, after in itertools.pairwise([*LAYOUTS, LAYOUTS[0]]):
        received += exchange(before, after, table, weights, state, mesh, CPU)
        for name in table.names:
            assert weights.is_here(name) == (name in here(after))
            size = table[name].nbytes if weights.is_here(name) else table[name].itemsize
            with torch._C.DisableTorchFunctionSubclass():  # a parameter that is elsewhere cannot be read
                assert table[name].requires_grad == weights.is_here(name)
                assert table[name].untyped_storage().nbytes() == size, "neither a whole buffer, nor what went"
            assert bool(state.state_of(name)) == weights.is_here(name)
        state.keep_what_is_here()
        for name in here(after):
            value, values = expected[name]
            assert torch.equal(table[name], value)
            assert all(torch.equal(state.state_of(name)[key], values[key]) for key in values)
    return received


def optimizer_only(rank: int, mesh: ProcessMesh) -> int:
    """A second training: the weights are everywhere, and the optimizer's state where the first one has left it."""
    model = Layers()
    table = ParameterTable(model)
    weights = WeightState(table, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    names = [name for name in table.names if rank in LAYOUTS[0][name]]
    for name in names:
        table[name].grad = torch.ones_like(table[name])
    optimizer.step()
    state = OptimizerState(optimizer, table, weights, mesh)
    before = state.holders()
    assert before == LAYOUTS[0]
    received = exchange(before, LAYOUTS[1], table, weights, state, mesh, CPU)
    for name in table.names:
        is_here = rank in LAYOUTS[1][name]
        assert bool(state.state_of(name)) == is_here
        assert not is_here or torch.equal(state.state_of(name)["momentum_buffer"], torch.ones_like(table[name]))
    arrived = [table[n] for n in table.names if rank in set(LAYOUTS[1][n]) - set(LAYOUTS[0][n])]
    assert received == sum(value.nbytes for value in arrived if value.dim() > 0), "momentum, and no weights"
    return received


def divided_at(*cuts: int) -> Shards:
    """All elements in a row, cut at these places among the ranks."""
    shards: dict[str, dict[int, tuple[int, int]]] = {}
    position = 0
    for name, parameter in Layers().named_parameters():
        size = parameter.numel()
        shards[name] = {0: (0, 0)} if not size else {}
        for rank, (start, stop) in enumerate(itertools.pairwise((0, *cuts, 1_000))):
            span = max(start - position, 0), min(stop - position, size)
            if span[1] > span[0]:
                shards[name][rank] = span
        position += size
    return shards


SHARES = (divided_at(30, 31), divided_at(100, 300), divided_at(0, 400), divided_at(36, 368))


def divide_and_join(rank: int, mesh: ProcessMesh, limit: int) -> None:
    """States that are divided anew, and saved whole."""
    chunks.CHUNK_BYTES = limit
    model = Layers()
    table = ParameterTable(model)
    weights = WeightState(table, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype)
    optimizer.step()
    state = OptimizerState(optimizer, table, weights, mesh, is_elementwise=True)
    expected = {name: state.state_of(name) for name in table.names}
    everywhere = holders_of(*[(0, 1, 2)] * 8)
    for shards in (*SHARES, undivided(everywhere, table)):
        between = state.shards(everywhere), shards
        exchange(everywhere, everywhere, table, weights, state, mesh, CPU, between)
        in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert in_groups - {id(state._idle_parameter)} == {id(key) for key in optimizer.state}
        for name, values in expected.items():
            span = shards[name].get(rank)
            found = state.state_of(name)
            assert (span is None) == (not found)
            for key, value in found.items():
                whole = values[key]
                if span is not None and whole.dim() and span != (0, whole.numel()):
                    whole = whole.flatten()[slice(*span)]
                assert torch.equal(value, whole) and value.untyped_storage().nbytes() == value.nbytes
        with state.gathered(everywhere):
            saved = optimizer.state_dict()
        if rank == 0:
            for number, name in enumerate(table.names):
                assert all(torch.equal(saved["state"][number][key], expected[name][key]) for key in expected[name])


def move_all(rank: int, world_size: int, limits: list[int]) -> int:
    dist.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(seconds=60))
    for limit in limits:
        assert go_round(rank, mesh, limit, fused=limit == 50)
        divide_and_join(rank, mesh, limit)
    return optimizer_only(rank, mesh)


@pytest.mark.parametrize("limits", [[50], *slow([2**26, 7])])
def test_what_arrives_is_what_was_sent_and_what_is_left_is_freed(limits: list[int]) -> None:
    """Weights and states go round between layouts; parts of states join; what all have is not sent again."""
    assert any(run_ranks(move_all, 3, limits))


def replace_the_parts(part: nn.Parameter, whole: nn.Parameter) -> None:
    part.grad = part.grad.clamp(max=0.5)


def replace_the_wholes_data(part: nn.Parameter, whole: nn.Parameter) -> None:
    whole.grad.data = whole.grad.data.clamp(max=0.5)


def test_gradients_that_are_changed_before_the_step_reach_it() -> None:
    """Whether a callback edits the whole parameter's gradient, or that of the part which the optimizer holds."""
    mesh = ProcessMesh(timedelta(seconds=60))
    for edit in (replace_the_parts, replace_the_wholes_data):
        model = nn.Linear(4, 3, bias=False)
        before = model.weight.detach().flatten().clone()
        table, optimizer = ParameterTable(model), torch.optim.SGD(model.parameters(), lr=1.0)
        state = OptimizerState(optimizer, table, WeightState(table, mesh), mesh, is_elementwise=True)
        state.assign({"weight": {0: (2, 7), 1: (7, 12)}}, {})
        [part] = optimizer.param_groups[0]["params"]
        for step in (1, 2):  # in the second one nothing must be left of the first
            model.weight.grad = torch.ones(3, 4)
            state.show_gradients()
            edit(part, model.weight)
            optimizer.step()
            expected = torch.zeros(12)
            expected[2:7] = 0.5 * step
            assert torch.allclose(before - model.weight.detach().flatten(), expected), edit.__name__
