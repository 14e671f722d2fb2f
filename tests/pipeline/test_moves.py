"""Weights and optimizer state go to the ranks that hold them under another plan, in bounded memory."""

from __future__ import annotations

import itertools
from collections import Counter
from datetime import timedelta
from typing import Any

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
from hf_pipetransformer.pipeline.moves import Route, exchange, in_proportion, rounds_of, routes_between, undivided
from hf_pipetransformer.pipeline.optimizer_state import OptimizerState
from hf_pipetransformer.pipeline.shards import Shards
from hf_pipetransformer.pipeline.state import Holders, WeightState

CPU = torch.device("cpu")


def test_the_holders_of_a_parameter_take_turns_in_sending_it():
    before = {"a": (0,), "b": (0, 1), "c": (0, 1, 2, 3), "d": (2,)}
    after = {"a": (0, 1, 2), "b": (0, 1, 2, 3, 4), "c": (1,), "d": (3,)}
    assert routes_between(before, after) == {
        "a": (Route(0, (1, 2)),),
        "b": (Route(0, (2, 4)), Route(1, (3,))),
        "d": (Route(2, (3,)),),
    }


# ---------------------------------------------------------------------------------------------------------
# The bound on memory, of the pure functions
# ---------------------------------------------------------------------------------------------------------
@st.composite
def layouts(draw: st.DrawFn) -> tuple[Holders, Holders, dict[str, int]]:
    """Two ways to divide layers among eight ranks, with the sizes of the layers' parameters."""
    sizes = draw(st.lists(st.integers(0, 500), min_size=8, max_size=100))
    names = [f"p{number}" for number in range(len(sizes))]

    def divided(stages: int) -> Holders:
        inner = draw(st.lists(st.integers(0, len(sizes)), min_size=stages - 1, max_size=stages - 1))
        bounds = [0, *sorted(inner), len(sizes)]
        stage_of = [next(s for s in range(stages) if p < bounds[s + 1]) for p in range(len(sizes))]
        return {name: tuple(range(stage_of[p], 8, stages)) for p, name in enumerate(names)}

    stages = st.sampled_from([1, 2, 4, 8])
    return divided(draw(stages)), divided(draw(stages)), dict(zip(names, sizes, strict=True))


def peaks(before: Holders, after: Holders, sizes: dict[str, int]) -> Counter[int]:
    """The most bytes that each rank needs at any time, if memory is freed as `exchange` does."""
    routes = routes_between(before, after)
    moving = {name: sizes[name] for name in routes}
    senders = {name: {route.source for route in routes[name]} for name in routes}
    held: Counter[int] = Counter()
    for name, size in sizes.items():
        for rank in before[name]:
            if rank in after[name] or rank in senders.get(name, ()):
                held[rank] += size
    most = Counter(held)
    begun = set()
    for pieces in rounds_of(in_proportion(before, after, moving), routes, moving):
        buffers: Counter[int] = Counter()
        for name, start, stop in pieces:
            for route in routes[name]:
                for rank in (route.source, *route.destinations):
                    buffers[rank] += stop - start
                for rank in route.destinations:
                    held[rank] += sizes[name] if (rank, name) not in begun else 0
                    begun.add((rank, name))
        assert max(buffers.values()) <= chunks.CHUNK_BYTES
        for rank in range(8):
            most[rank] = max(most[rank], held[rank] + buffers[rank])
        for name, _, stop in pieces:
            if stop == sizes[name]:
                for rank in senders[name] - set(after[name]):
                    held[rank] -= sizes[name]
    assert all(held[rank] == sum(sizes[n] for n in sizes if rank in after[n]) for rank in range(8)), "all has arrived"
    return most


def bound(before: Holders, after: Holders, sizes: dict[str, int], rank: int) -> int:
    """As the module's docstring has it."""
    most = max(sum(size for name, size in sizes.items() if rank in holders[name]) for holders in (before, after))
    largest: dict[Any, int] = {}
    for name in routes_between(before, after):
        flow = before[name], after[name]
        if (rank in before[name]) != (rank in after[name]):
            largest[flow] = max(largest.get(flow, 0), sizes[name])
    return most + 2 * chunks.CHUNK_BYTES + sum(largest.values())


@settings(deadline=None)
@given(layouts(), st.sampled_from([100, 700, 5_000]))
def test_memory_has_the_stated_bound(layout, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", limit)
        most = peaks(*layout)
        for rank in range(8):
            assert most[rank] <= bound(*layout, rank)


@pytest.mark.parametrize(("stages", "then"), list(itertools.permutations((1, 2, 4, 8), 2)))
def test_memory_has_the_stated_bound_between_even_stages(stages, then, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1_000)
    names = [f"p{number}" for number in range(96)]
    before, after = (
        {name: tuple(range(number * count // 96, 8, count)) for number, name in enumerate(names)}
        for count in (stages, then)
    )
    sizes = dict.fromkeys(names, 100)
    most = peaks(before, after, sizes)
    for rank in range(8):
        assert most[rank] <= bound(before, after, sizes, rank)


def test_a_process_sends_while_it_receives(monkeypatch):
    """Two ranks exchange all they have, a hundred parameters of 100 bytes each way."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1_000)
    names = [f"p{number}" for number in range(200)]
    before = {name: (0,) if number < 100 else (1,) for number, name in enumerate(names)}
    after = {name: (1 - before[name][0],) for name in names}
    sizes = dict.fromkeys(names, 100)
    assert max(peaks(before, after, sizes).values()) <= 10_000 + 2 * 1_000 + 2 * 100


# ---------------------------------------------------------------------------------------------------------
# Between processes
# ---------------------------------------------------------------------------------------------------------
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


def go_round(rank: int, world_size: int, limit: int, fused: bool) -> int:
    chunks.CHUNK_BYTES = limit
    dist.init_process_group("gloo")
    model, mesh = Layers(), ProcessMesh(timedelta(seconds=60))
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


@pytest.mark.parametrize(("limit", "fused"), [(50, False), *slow((2**26, False), (50, True), (7, False))])
def test_what_arrives_is_what_was_sent_and_what_is_left_is_freed(limit, fused):
    received = run_ranks(go_round, 3, limit, fused)
    assert all(received)


def optimizer_only(rank: int, world_size: int) -> int:
    """A second training: the weights are everywhere, and the optimizer's state where the first one has left it."""
    dist.init_process_group("gloo")
    model, mesh = Layers(), ProcessMesh(timedelta(seconds=60))
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


def test_weights_that_all_have_are_not_sent_with_the_optimizers_state():
    assert any(run_ranks(optimizer_only, 3))


# ---------------------------------------------------------------------------------------------------------
# States that are divided
# ---------------------------------------------------------------------------------------------------------
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


def divide_and_join(rank: int, world_size: int, limit: int) -> None:
    chunks.CHUNK_BYTES = limit
    dist.init_process_group("gloo")
    model, mesh = Layers(), ProcessMesh(timedelta(seconds=60))
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


def edit_in_place(part: nn.Parameter, whole: nn.Parameter) -> None:
    part.grad.clamp_(max=0.5)


def replace_the_parts(part: nn.Parameter, whole: nn.Parameter) -> None:
    part.grad = part.grad.clamp(max=0.5)


def replace_the_wholes(part: nn.Parameter, whole: nn.Parameter) -> None:
    whole.grad = whole.grad.clamp(max=0.5)


def replace_the_wholes_data(part: nn.Parameter, whole: nn.Parameter) -> None:
    whole.grad.data = whole.grad.data.clamp(max=0.5)


EDITS = (edit_in_place, replace_the_parts, replace_the_wholes, replace_the_wholes_data)


def edit_gradients(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(seconds=60))
    for edit in EDITS:
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
            changes = before - model.weight.detach().flatten()
            expected = torch.zeros(12)
            expected[2:7] = 0.5 * step
            assert torch.allclose(changes, expected), edit.__name__


def test_gradients_that_are_changed_before_the_step_reach_it():
    run_ranks(edit_gradients, 1)


@pytest.mark.parametrize("limit", [50, *slow(2**26, 7)])
def test_states_are_divided_anew_and_saved_whole(limit):
    run_ranks(divide_and_join, 3, limit)
