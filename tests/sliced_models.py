"""Tiny causal models for tests of token slices, and one training step of them with and without slices.

model = build("llama", attention="sdpa")
batch = batch_for("right padding")
expected = step(model, batch)
assert_same_step(step_in_slices(model, batch, (16, 9, 7, 4, 1)), expected)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from model_zoo import without_dropout
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_pipetransformer.token_slices.kv_slices import attention_windows
from hf_pipetransformer.token_slices.slices import SlicedSequence, running_slices

ROWS, TOKENS, VOCABULARY, WIDTH, LAYERS = 2, 37, 101, 32, 3
SLICES = (16, 9, 7, 4, 1)
Padding = Literal["none", "right padding", "left padding", "packed"]

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _rotary(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more}}


# Model type (up to the first "/") and the options of its configuration.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": _BASE,
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64},
    "mistral": {**_BASE, "sliding_window": 9},
    "opt": {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "ffn_dim": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": WIDTH,
    },
    "gemma2": {**_BASE, "sliding_window": 9, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        **_BASE,
        "head_dim": 8,
        "sliding_window": 9,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mixtral": {**_BASE, **_EXPERTS, "sliding_window": None},
    "llama4_text": {**_BASE, **_EXPERTS, "head_dim": 8, "attention_chunk_size": 8, "intermediate_size_mlp": 48},
    "llama/dynamic": {**_BASE, "max_position_embeddings": 24, **_rotary("dynamic")},
    "llama/longrope": {
        **_BASE,
        **_rotary("longrope", original_max_position_embeddings=24, short_factor=[1.0] * 4, long_factor=[4.0] * 4),
    },
}


NO_SDPA = ("gemma2",)
"""Models without SDPA: a fused kernel cannot cap scores."""


def build(name: str, attention: str | None = None, **overrides: Any) -> nn.Module:
    """A model in training mode without dropout; the same weights each time."""
    config = AutoConfig.for_model(name.split("/")[0], **{**CONFIGURATIONS[name], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for parameter in model.parameters():
            if parameter.dim() >= 2:  # large enough for every layer to matter
                parameter.data = torch.randn_like(parameter) * 0.15
    model.config.use_cache = False  # as a Trainer does
    return without_dropout(model).train()


def batch_for(padding: Padding, rows: int = ROWS, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """Rows of random words; some labels do not count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[0, 3:6] = -100
    if padding == "none":
        return {"input_ids": ids, "labels": labels}
    if padding == "packed":  # two documents in a row
        first = tokens * 2 // 5
        positions = torch.cat([torch.arange(first), torch.arange(tokens - first)]).expand(rows, -1)
        labels[:, first] = -100
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
    mask = torch.ones_like(ids)
    padded = slice(tokens - 8, tokens) if padding == "right padding" else slice(0, 20)  # more than a slice
    mask[-1, padded], ids[-1, padded], labels[-1, padded] = 0, 0, -100
    if padding == "left padding":
        labels[-1, 20] = -100  # no token precedes it
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@dataclass
class Step:
    """The results of one step."""

    loss: float
    gradients: dict[str, torch.Tensor]


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> Step:
    return _step(model, lambda: [loss_of(model, batch, batch)])


def step_in_slices(model: nn.Module, batch: dict[str, torch.Tensor], lengths: Sequence[int]) -> Step:
    def losses() -> list[torch.Tensor]:
        sequence = SlicedSequence(model, batch, lengths, attention_windows(model))
        return [loss_of(model, sequence.slice(number), batch) for number in range(len(lengths))]

    with running_slices(model, batch):
        return _step(model, losses)


def loss_of(model: nn.Module, part: dict[str, Any], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch, or of a slice as its part of the batch's mean over tokens."""
    count = int(batch["labels"][:, 1:].ne(-100).sum())
    return model(**part, num_items_in_batch=count).loss


def _step(model: nn.Module, losses_of: Callable[[], list[torch.Tensor]]) -> Step:
    model.zero_grad()
    losses = losses_of()
    for loss in reversed(losses):
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(sum(float(loss.detach()) for loss in losses), gradients)


def assert_same_step(found: Step, expected: Step, tolerance: float = 1e-5) -> None:
    """Each gradient relative to its own largest value, or to 1% of the largest of all where that is more."""
    assert abs(found.loss - expected.loss) <= tolerance
    assert found.gradients.keys() == expected.gradients.keys()
    floor = 1e-2 * max(float(g.abs().max()) for g in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        error = float((found.gradients[name] - gradient).abs().max()) / max(float(gradient.abs().max()), floor)
        assert error <= tolerance, f"{name}: {error:.1e}"
