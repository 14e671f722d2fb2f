"""Stand-ins take no memory, ties hold, and everything is put back."""

from __future__ import annotations

import pytest
import torch
from model_zoo import MODELS
from torch import nn

from hf_pipetransformer.model.placeholders import ParameterTable, evaluation_mode, placeholder, reachable_leaves

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def table() -> ParameterTable:
    """Of a model whose embedding is its head."""
    return ParameterTable(MODELS["llama-tied"].build())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_a_placeholder_has_the_shape_and_one_element_of_memory(dtype):
    real = torch.ones(1000, 2000, dtype=dtype)
    stands_in = placeholder(real)
    assert (stands_in.shape, stands_in.dtype, stands_in.requires_grad) == (real.shape, dtype, False)
    assert stands_in.untyped_storage().nbytes() == real.element_size()
    assert not stands_in[3, 5]


def test_what_a_placeholder_is_filled_with():
    assert placeholder(torch.ones(2, 3), float("nan")).isnan().all()
    assert placeholder(torch.ones(2, 3), device=torch.device("meta")).is_meta


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
    """And they are seen by whoever has kept a parameter in a list of his own."""
    mine = [table[name] for name in table.names]
    values = {name: table[name].detach().clone() for name in table.names}
    table[EMBEDDING].requires_grad_(False)
    with pytest.raises(KeyError), table.replaced({name: placeholder(table[name], float("nan")) for name in values}):
        assert all(p.isnan().all() and not p.requires_grad for p in mine)
        raise KeyError
    assert all(table[name] is parameter for name, parameter in zip(table.names, mine, strict=True))
    assert all(torch.equal(table[name], value) for name, value in values.items())
    assert [name for name in table.names if not table[name].requires_grad] == [EMBEDDING]


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
    assert list(reachable_leaves([(first * given).sum(), second * 1])) == [second, first, given]
    assert unused not in reachable_leaves([first * given])
    assert reachable_leaves([(first * second).detach(), torch.ones(1)]) == {}
