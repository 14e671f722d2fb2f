from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hf_pipetransformer.forecast.placeholder_model import build_placeholder_model, model_class
from hf_pipetransformer.forecast.workload import measure_workload
from hf_pipetransformer.model.dummy_inputs import dummy_batch
from hf_pipetransformer.model.frozen_prefix import FreezableLayers
from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.planning.costs import measure_costs

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}


def tiny(model_type: str, **changes: Any) -> Any:
    changes = {"num_key_value_heads": 2, **changes} if model_type == "qwen2" else changes
    config = AutoConfig.for_model(model_type, **{**TINY, **changes})
    return build_placeholder_model(config, model_class(config))


@pytest.mark.parametrize("model_type", ["bert", "llama", "gpt_neox", "qwen2"])
@pytest.mark.parametrize("tokens", [7, 64, 200])
def test_long_rows_cost_what_they_are_measured_to_cost(model_type: str, tokens: int) -> None:
    model = tiny(model_type)
    batch = dummy_batch(model, 1, tokens=tokens)
    stack = LayerStack.discover(model, batch)
    measured = measure_costs(stack, batch, FreezableLayers.of(stack, batch).never_frozen)
    assert measure_workload(model, tokens).unit_costs == measured


@pytest.mark.parametrize("tokens", [7, 200])
def test_the_head_of_a_row(tokens: int) -> None:
    """BERT's pooler and classifier read one token, however long the row is."""
    head = measure_workload(tiny("bert"), tokens).unit_costs[-1].head
    assert head.forward_flops == 2 * (32 * 32 + 32 * 2)
    assert head.trainable_bytes == 4 * (32 * 32 + 32 + 32 * 2 + 2)


def test_attention_is_counted() -> None:
    """4 products of 32 x 32 and 2 of 32 x 48 with each token, and two of T x T x 32: 2 FLOPs each."""
    for tokens in (50, 100):
        unit = measure_workload(tiny("bert"), tokens).unit_costs[0]
        assert unit.forward_flops == 2 * (tokens * (4 * 32 * 32 + 2 * 32 * 48) + 2 * tokens**2 * 32)


def test_what_can_be_frozen_and_kept() -> None:
    bert = measure_workload(tiny("bert", num_hidden_layers=4), 16)
    assert (bert.max_frozen, bert.cacheable) == (4, frozenset({1, 2, 3, 4}))
    assert bert.cache_row_bytes(1) == bert.cache_row_bytes(4) == 16 * 32 * 4
    tied = measure_workload(tiny("llama", num_hidden_layers=3, tie_word_embeddings=True), 16)
    assert tied.max_frozen == 3  # the last norm is left
    config = AutoConfig.for_model("t5", d_model=32, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=2, d_kv=16)
    t5 = measure_workload(build_placeholder_model(config, model_class(config)), 16)
    assert 1 not in t5.cacheable  # the relative bias travels along


def test_images_have_one_size() -> None:
    config = AutoConfig.for_model(
        "vit", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=32
    )
    model = build_placeholder_model(config, model_class(config))
    short, long = measure_workload(model, 8), measure_workload(model, 4096)
    assert short == long and short.tokens is None
    assert torch.Size([1, 3, 32, 32]) == dummy_batch(model, 1)["pixel_values"].shape
