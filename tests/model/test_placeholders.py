"""Stand-ins take no memory, ties hold, and everything is put back."""

from __future__ import annotations

import pytest
import torch
from model_zoo import MODELS
from torch import nn

from hf_pipetransformer.model.placeholders import ParameterTable, placeholder

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def table() -> ParameterTable:
    """Of a model whose embedding is its head."""
    return ParameterTable(MODELS["llama-tied"].build())


def test_tied_parameters_are_one_entry(table):
    assert table.aliases[EMBEDDING] == (EMBEDDING, HEAD)
    assert HEAD not in table.names
    assert table.names == tuple(name for name, _ in table.model.named_parameters())


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
