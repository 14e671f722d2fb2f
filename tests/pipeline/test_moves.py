"""Weights and optimizer state go to the ranks that hold them under another plan, in bounded memory."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import slow
from torch import nn

from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.model.mapped_weights import FileMappings
from hf_pipetransformer.model.placeholders import ParameterTable
from hf_pipetransformer.pipeline import transfer
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.pipeline.moves import Distribution, move
from hf_pipetransformer.pipeline.optimizer_state import OptimizerState
from hf_pipetransformer.pipeline.state import Holders, WeightState
from hf_pipetransformer.pipeline.transfer import in_proportion, rounds_of, routes_between

CPU = torch.device("cpu")


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


def trained(rank: int, mesh: ProcessMesh, fused: bool = False) -> tuple[Layers, WeightState, OptimizerState]:
    model = Layers()
    weights = WeightState(ParameterTable(model), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype)
    optimizer.step()
    optimizer.zero_grad()
    return model, weights, OptimizerState(optimizer, weights.table, weights, mesh)


def go_round(rank: int, mesh: ProcessMesh, fused: bool) -> int:
    """Parameters move, and their states to the same ranks or to one of them, or to others."""
    _, weights, state = trained(rank, mesh, fused)
    table = weights.table
    expected = {name: (table[name].detach().clone(), state.state_of(name)) for name in table.names}

    def here(holders: Holders) -> set[str]:
        return {name for name in table.names if rank in holders[name]}

    weights.keep_held(LAYOUTS[0])
    state.keep_what_is_here()
    received = 0
    ways = [Distribution(layout, layout) for layout in LAYOUTS]
    ways += [Distribution(layout, {name: ranks[-1:] for name, ranks in layout.items()}) for layout in LAYOUTS]
    for after in [*ways[1:], ways[0]]:
        received += move(after, weights, state)
        for name in table.names:
            assert weights.is_here(name) == (name in here(after.weights))
            size = table[name].nbytes if weights.is_here(name) else table[name].itemsize
            with torch._C.DisableTorchFunctionSubclass():  # a parameter that is elsewhere cannot be read
                assert table[name].requires_grad == weights.is_here(name)
                assert table[name].untyped_storage().nbytes() == size, "neither a whole buffer, nor what went"
            assert bool(state.state_of(name)) == (name in here(after.states))
        for name in here(after.weights):
            assert torch.equal(table[name], expected[name][0])
        for name in here(after.states):
            values = expected[name][1]
            assert all(torch.equal(state.state_of(name)[key], values[key]) for key in values)
        with state.gathered(), weights.gathered():
            saved, model = state.optimizer.state_dict()["state"], table.model.state_dict()
        for number, name in enumerate(table.names if rank == 0 else ()):
            assert torch.equal(model[name], expected[name][0])
            assert model[name].untyped_storage().nbytes() == model[name].nbytes, "torch.save writes whole storages"
            assert all(torch.equal(saved[number][key], expected[name][1][key]) for key in expected[name][1])
    return received


def in_a_file(rank: int, mesh: ProcessMesh, folder: Path) -> None:
    """Rank 0 has no memory for what it saves."""
    _, weights, state = trained(rank, mesh)
    expected = {name: value.clone() for name, value in weights.table.model.state_dict().items()}
    weights.keep_held(LAYOUTS[0])
    with state.gathered(folder), weights.gathered(folder):
        model = weights.table.model.state_dict()
        if rank == 0:
            assert all(torch.equal(model[name], value) for name, value in expected.items())
            mapped = FileMappings().places_in(model)
            assert {name for name in model if LAYOUTS[0][name][0] and model[name].nbytes} - {"p2"} == mapped.keys()
            assert {place.file.parent for place in mapped.values()} == {folder}
    if rank == 0:
        assert not any(folder.iterdir()), "it has no name that could be left behind"
        (folder / "file").touch()
    with (
        pytest.raises(FileExistsError if rank == 0 else PeerFailedError),
        weights.gathered(folder / "file"),
    ):
        raise AssertionError("there is no folder")


def states_alone(rank: int, mesh: ProcessMesh) -> None:
    """A second training: the weights are everywhere, and the optimizer's state where the first one has left it."""
    model = Layers()
    table = ParameterTable(model)
    weights = WeightState(table, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for name in (name for name in table.names if rank in LAYOUTS[0][name]):
        table[name].grad = torch.ones_like(table[name])
    optimizer.step()
    state = OptimizerState(optimizer, table, weights, mesh)
    before = state.holders()
    assert before == LAYOUTS[0]
    received = move(Distribution(weights.holders, LAYOUTS[1]), weights, state)
    for name in table.names:
        is_here = rank in LAYOUTS[1][name]
        assert bool(state.state_of(name)) == is_here
        assert not is_here or torch.equal(state.state_of(name)["momentum_buffer"], torch.ones_like(table[name]))
    arrived = [table[n] for n in table.names if rank in set(LAYOUTS[1][n]) - set(LAYOUTS[0][n])]
    assert received == sum(value.nbytes for value in arrived if value.dim() > 0), "momentum, and no weights"


def move_all(rank: int, world_size: int, limits: list[int], folder: Path) -> None:
    dist.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(seconds=60))
    for limit in limits:
        transfer.CHUNK_BYTES = limit
        assert go_round(rank, mesh, fused=limit == 50)
    states_alone(rank, mesh)
    in_a_file(rank, mesh, folder)


@pytest.mark.parametrize("limits", [[50], *slow([2**26, 7])])
def test_what_arrives_is_what_was_sent_and_what_is_left_is_freed(limits: list[int], tmp_path: Path) -> None:
    """Weights and states go round between layouts, and to rank 0; what all have is not sent again."""
    run_ranks(move_all, 3, limits, tmp_path)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 20),
        st.tuples(*2 * [st.sets(st.integers(0, 3), min_size=1).map(lambda ranks: tuple(sorted(ranks)))]),
        max_size=12,
    ),
    st.integers(1, 300),
    st.data(),
)
def test_every_byte_travels_once_in_rounds_of_a_bounded_size(ranks: Any, limit: int, data: st.DataObject) -> None:
    before, after = ({item: both[i] for item, both in ranks.items()} for i in (0, 1))
    routes = routes_between(before, after)
    sizes = {item: data.draw(st.sampled_from([0, 1, 50, 700])) for item in routes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "CHUNK_BYTES", limit)
        rounds = list(rounds_of(in_proportion(before, after, sizes), routes, sizes))
    for pieces in rounds:
        for rank in range(4):
            sent = [p for p in pieces if any(rank in (route.source, *route.destinations) for route in routes[p.name])]
            assert sum(piece.stop - piece.start for piece in sent) <= limit
    for item, size in sizes.items():
        pieces = [piece for pieces in rounds for piece in pieces if piece.name == item]
        assert [0, *(piece.stop for piece in pieces)] == [*(piece.start for piece in pieces), size]
        receivers = [rank for route in routes[item] for rank in route.destinations]
        assert sorted(receivers) == [rank for rank in after[item] if rank not in before[item]]
        assert all(route.source in before[item] for route in routes[item])
