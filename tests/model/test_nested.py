"""Tensors inside mappings, lists, tuples and outputs are found in order, and containers keep their types."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_pipetransformer.model.layer_range import LayerRangeRunner
from hf_pipetransformer.model.nested import tensors_of
from hf_pipetransformer.model.units import ModelLayers


class Pair(NamedTuple):
    first: Any
    second: Any


A, B, C = (torch.full((2,), float(number)) for number in range(3))
VALUES = {
    "tensor": (A, (A,)),
    "none": ("text", ()),
    "batch": ({"b": B, "options": {"c": [C, "text"], "size": 3}, "a": (A,)}, (B, C, A)),
    "named tuple": (Pair([A], Pair(2, B)), (A, B)),
    "output": (BaseModelOutputWithPast(last_hidden_state=A, hidden_states=(B, C)), (A, B, C)),
}


@pytest.mark.parametrize("name", ["tensor", "batch", "named tuple", "output"])
def test_a_skipped_layer_returns_an_output_of_the_same_structure(name: str) -> None:
    given, tensors = VALUES[name]

    class Layer(GradientCheckpointingLayer):
        def forward(self, value: Any) -> Any:
            return value

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            value = given
            for layer in self.layers:
                value = layer(value)
            return value

    runner = LayerRangeRunner(Chain(), ModelLayers((tuple(f"layers.{layer}" for layer in range(3)),)))
    runner.install()
    runner.trace({"x": A})
    carry = runner.run(0, 2, None, {"x": A})
    with runner.to_the_end(2, {stack: tuple(tensor + 1 for tensor in carry[stack]) for stack in carry}):
        returned = runner.model(x=A)
    assert type(returned) is type(given)
    assert all(torch.equal(new, old + 1) for new, old in zip(tensors_of(returned), tensors, strict=True))
