"""Sequences in slices: the same loss and gradients as in one piece, for every family, padding and attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from selection import few, slow
from sliced_models import (
    CONFIGURATIONS,
    LAYERS,
    NO_SDPA,
    SLICES,
    TOKENS,
    Padding,
    assert_same_step,
    batch_for,
    build,
    step,
    step_in_slices,
)

from hf_pipetransformer import UnsupportedModelError
from hf_pipetransformer.token_slices import kv_slices
from hf_pipetransformer.token_slices.kv_slices import attention_windows
from hf_pipetransformer.token_slices.slices import SlicedSequence, running_slices

ATTENTIONS = ("sdpa", "eager")
PADDINGS: tuple[Padding, ...] = ("none", "right padding", "left padding", "packed")
NOT_PACKED = ("opt", "llama4_text")  # OPT gives its masks no positions; chunks have no mask of a whole row
EAGER_TOO = ("llama", "gpt2", "mistral")
WITH_ATTENTION = [(n, a) for n in CONFIGURATIONS for a in ATTENTIONS[n in NO_SDPA :][: 1 + (n in EAGER_TOO)]]
IN_SHORT = (("llama", "sdpa"), ("gpt2", "eager"), ("gemma2", "eager"))
"""The models of `make test`."""


def paddings_of(name: str) -> tuple[Padding, ...]:
    return PADDINGS[:3] if name in NOT_PACKED else PADDINGS


@pytest.mark.parametrize(("name", "attention"), few(WITH_ATTENTION, *IN_SHORT))
def test_slices_give_the_loss_and_gradients_of_the_whole(name: str, attention: str) -> None:
    """Documents packed into a row do not see each other."""
    model = build(name, attention)
    expected = {padding: step(model, batch_for(padding)) for padding in paddings_of(name)}
    for padding, wanted in expected.items():
        assert_same_step(step_in_slices(model, batch_for(padding), SLICES), wanted)
    for lengths in ((19, 18), (TOKENS,), *([(1,) * TOKENS] if name == "llama" else [])):
        assert_same_step(step_in_slices(model, batch_for("right padding"), lengths), expected["right padding"])
    if "packed" in expected and name != "gpt2":  # else the test would not notice a mask that is missing
        apart = step(model, {key: value for key, value in batch_for("packed").items() if key != "position_ids"})
        assert abs(expected["packed"].loss - apart.loss) > 1e-4


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the layers that have given keys and values, in order."""
    calls: list[int] = []
    update = kv_slices._SliceLayer.update

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self._index)
        return update(self, *args, **kwargs)

    monkeypatch.setattr(kv_slices._SliceLayer, "update", noting)
    return calls


@pytest.mark.parametrize(
    ("name", "attention", "reentrant"),
    [
        *(("llama", "sdpa", True), ("gpt2", "eager", False)),
        *slow(("gemma3_text", "sdpa", False), ("llama4_text", "sdpa", False)),
    ],
)
def test_gradient_checkpointing_keeps_the_states(
    name: str, attention: str, reentrant: bool, updates: list[int]
) -> None:
    model = build(name, attention)
    expected = {padding: step(model, batch_for(padding)) for padding in paddings_of(name)}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for padding, wanted in expected.items():
        lengths = SLICES if padding == "right padding" else (16, TOKENS - 16)
        updates.clear()
        assert_same_step(step_in_slices(model, batch_for(padding), lengths), wanted)
        assert len(updates) == 2 * LAYERS * len(lengths)  # each slice was computed again
    # without a cache: layers that are computed again would append to it twice
    assert_same_step(step_in_slices(model, batch_for("none"), (TOKENS,)), expected["none"])
    with_flags = {n: m.__dict__.get("gradient_checkpointing") for n, m in model.named_modules()}
    with running_slices(model, batch_for("none")):
        pass
    assert {n: m.__dict__.get("gradient_checkpointing") for n, m in model.named_modules()} == with_flags


def test_checkpointed_layers_whose_keys_have_no_gradient_see_earlier_tokens(updates: list[int]) -> None:
    """The first layer above frozen ones, where all but its keys and values are trained."""
    model, batch = build("llama"), batch_for("none")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(trained in name for trained in ("q_proj", "o_proj", "mlp")))
    model.model.layers[0].register_forward_hook(lambda _module, _inputs, output: output.detach())
    expected = step(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_step(step_in_slices(model, batch, SLICES), expected)
    assert [updates.count(layer) for layer in range(LAYERS)] == [len(SLICES), 2 * len(SLICES), 2 * len(SLICES)]


def test_a_mask_of_the_users_in_place_of_a_sliding_window() -> None:
    """The mask shows all earlier tokens; the window would drop some."""
    model = build("mistral")
    batch = {**batch_for("none"), "attention_mask": torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril()}
    assert_same_step(step_in_slices(model, batch, (30, 7)), step(model, batch))


def test_what_packs_rows_without_a_mask_is_refused() -> None:
    model = build("llama")
    batch = {**batch_for("packed"), "cu_seq_lens_q": torch.tensor([0, 15, 37])}
    with pytest.raises(UnsupportedModelError, match="cu_seq_lens_q"):
        SlicedSequence(model, batch, (20, 17), attention_windows(model))
    windows = replace(attention_windows(model), separates_documents=False)
    with pytest.raises(UnsupportedModelError, match="does not separate documents"):
        SlicedSequence(model, batch_for("packed"), (20, 17), windows)
    chunked = build("llama4_text")
    with pytest.raises(UnsupportedModelError, match="chunked attention"):
        SlicedSequence(chunked, batch_for("packed"), (20, 17), attention_windows(chunked))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="sdpa or eager"):
        SlicedSequence(model, batch_for("packed"), (20, 17), attention_windows(model))
