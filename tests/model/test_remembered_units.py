"""What units have returned for the same arguments is recalled, and only where that cannot be seen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from model_zoo import MODELS
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_pipetransformer import UnsupportedModelError
from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.model.loss_probe import LossProbe, probe_loss
from hf_pipetransformer.model.loss_scaling import EXACT, label_variants
from hf_pipetransformer.model.remembered_units import RememberedUnits

TOKENS = 4


class Layer(nn.Module):
    def __init__(self, changes_input: bool = False) -> None:
        super().__init__()
        self.linear, self.changes_input, self.calls = nn.Linear(4, 4), changes_input, 0

    def forward(self, states: torch.Tensor, scale: float = 1.0, **_: Any) -> tuple[torch.Tensor]:
        self.calls += 1
        return (self.linear(states.mul_(2) if self.changes_input else states) * scale,)


@torch.no_grad()
def test_an_output_is_recalled_for_equal_arguments_only() -> None:
    torch.manual_seed(0)
    layer = Layer()
    remembered = RememberedUnits([layer])
    states = torch.ones(1, 4)
    expected = layer(states)[0].clone()
    with remembered.recalling():
        layer(states)[0].zero_()  # the model may change it
        torch.testing.assert_close(layer(states.clone(), num_items_in_batch=7)[0], expected, rtol=0, atol=0)
        assert layer.calls == 2
        for others in (
            {"states": 2 * states},
            {"states": states, "scale": 2.0},
            {"states": states, "other": object()},
            {"states": states, "other": torch.ones(1, dtype=torch.complex64).conj()},
        ):
            before = layer.calls
            layer(**others)
            assert layer.calls == before + 1, others
    before = layer.calls
    layer(states)
    assert layer.calls == before + 1


@torch.no_grad()
@pytest.mark.parametrize("changes_input, size", [(True, 1), (False, 100)])
def test_what_changes_its_input_or_is_large_is_computed_again(changes_input: bool, size: int) -> None:
    layer = Layer(changes_input)
    with RememberedUnits([layer]).recalling():
        for _ in range(2):
            layer(torch.ones(size, 4))
    assert layer.calls == 2


def probed(reads_below: bool, recalls: bool) -> tuple[LossProbe, Counter[int]]:
    """Probe the loss of a small Llama; also returns for how many samples each layer was computed."""
    model = MODELS["llama"].build()
    model.config.use_cache = False  # as the Trainer sets it
    tokens = torch.randint(model.config.vocab_size, (4, TOKENS), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    stack = LayerStack.discover(model, {name: value[:2] for name, value in batch.items()})
    calls: Counter[int] = Counter()
    seen: list[torch.Tensor] = []
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda _, args, n=number: calls.update({n: len(args[0])}))
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: seen.append(output.detach()))

    def compute_loss(inputs: dict[str, Any], num_items: Any, seed: int) -> torch.Tensor:
        seen.clear()
        loss = model(**inputs, num_items_in_batch=num_items).loss
        return loss + sum(states.square().mean() for states in seen) if reads_below else loss

    variants = label_variants(batch, ("labels",), (), may_ignore=True)
    found = probe_loss(
        stack, variants, compute_loss, shifts_labels=True, is_cut=True, tolerance=EXACT, recalls=recalls
    )
    return found, calls


def test_a_loss_is_probed_with_the_same_result_and_fewer_computations() -> None:
    found, calls = probed(reads_below=False, recalls=False)
    recalled, fewer = probed(reads_below=False, recalls=True)
    assert recalled == found
    last = max(calls)
    assert fewer[last] == calls[last]
    for number in range(last):
        assert fewer[number] <= calls[number] * 2 / 3, (calls, fewer)


def test_a_loss_that_reads_layers_below_is_refused_as_before() -> None:
    for recalls in (False, True):
        with pytest.raises(UnsupportedModelError, match="when only the last layer runs"):
            probed(reads_below=True, recalls=recalls)


def test_units_inside_which_hooks_are_called_are_computed() -> None:
    """The router loss reads the routers of all layers through hooks; the last layer has none."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[2],
        output_router_logits=True,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config)
    tokens = torch.arange(4 * TOKENS).view(4, TOKENS)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    stack = LayerStack.discover(model, {name: value[:2] for name, value in batch.items()})

    def compute_loss(inputs: dict[str, Any], num_items: Any, seed: int) -> torch.Tensor:
        return model(**inputs, num_items_in_batch=num_items).loss

    one, other = (
        probe_loss(stack, [batch], compute_loss, shifts_labels=True, is_cut=True, tolerance=EXACT, recalls=recalls)
        for recalls in (False, True)
    )
    assert one == other
