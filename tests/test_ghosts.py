"""Stand-ins take no memory, ties hold, and everything is put back."""

from __future__ import annotations

import pytest
import torch
from model_zoo import MODELS
from torch import nn

from hf_pipetransformer.model.ghosts import ParameterTable, evaluation_mode, make_ghost, reachable_leaves

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def table() -> ParameterTable:
    """Of a model whose embedding is its head."""
    return ParameterTable(MODELS["llama-tied"].build())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_a_ghost_has_the_shape_and_one_element_of_memory(dtype):
    real = torch.ones(1000, 2000, dtype=dtype)
    ghost = make_ghost(real)
    assert (ghost.shape, ghost.dtype, ghost.requires_grad) == (real.shape, dtype, False)
    assert ghost.untyped_storage().nbytes() == real.element_size()
    assert not ghost[3, 5]


def test_what_a_ghost_is_filled_with():
    assert make_ghost(torch.ones(2, 3), float("nan")).isnan().all()
    assert make_ghost(torch.ones(2, 3), device=torch.device("meta")).is_meta


def test_tied_parameters_are_one_entry(table):
    assert table.aliases[EMBEDDING] == (EMBEDDING, HEAD)
    assert HEAD not in table.names
    assert table.names == tuple(name for name, _ in table.model.named_parameters())


def test_replacing_a_tied_parameter_keeps_the_tie(table):
    new = nn.Parameter(torch.zeros_like(table[EMBEDDING]))
    table[EMBEDDING] = new
    assert table.model.lm_head.weight is new
    assert table.model.model.embed_tokens.weight is new


def test_parameters_of_the_model_itself_and_of_parametrizations():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.many = nn.ParameterList([nn.Parameter(torch.ones(2))])
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))

    model = Model()
    table = ParameterTable(model)
    for name in table.names:
        new = nn.Parameter(torch.zeros_like(table[name]))
        table[name] = new
        assert table[name] is new
    assert model.scale == 0 and model.many[0].sum() == 0


def test_substitutes_are_taken_back_after_an_error_too(table):
    originals = {name: table[name] for name in table.names}
    ghosts = {name: make_ghost(table[name]) for name in table.names}
    with pytest.raises(KeyError), table.replaced(ghosts):
        assert all(table[name] is ghosts[name] for name in table.names)
        raise KeyError
    assert all(table[name] is originals[name] for name in table.names)


def test_all_trainable_puts_the_flags_back(table):
    table[EMBEDDING].requires_grad_(False)
    with pytest.raises(KeyError), table.all_trainable():
        assert all(table[name].requires_grad for name in table.names)
        raise KeyError
    assert [name for name in table.names if not table[name].requires_grad] == [EMBEDDING]


def test_evaluation_mode_puts_every_submodule_back():
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(), nn.Dropout())
    model[1].eval()
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_reachable_leaves():
    first, second, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
    given = torch.ones(2, requires_grad=True)
    assert reachable_leaves([(first * given).sum(), second]) == {first, given, second}
    assert unused not in reachable_leaves([first * given])
    assert reachable_leaves([(first * second).detach(), torch.ones(1)]) == set()
