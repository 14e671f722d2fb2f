"""Sequences in slices: the same loss and gradients as in one piece, for every family, padding and attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from selection import few
from sliced_models import (
    CONFIGURATIONS,
    LAYERS,
    NO_SDPA,
    SLICES,
    TOKENS,
    assert_same_step,
    batch_for,
    build,
    step,
    step_in_slices,
)

from hf_pipetransformer import UnsupportedModelError
from hf_pipetransformer.token_slices import kv_slices
from hf_pipetransformer.token_slices.kv_slices import SequenceStates, _LayerStates, attention_windows
from hf_pipetransformer.token_slices.slices import SlicedSequence, check_updates, first_tokens, running_slices

ATTENTIONS = ("sdpa", "eager")
PADDINGS = ("none", "right padding", "left padding")
NOT_PACKED = ("opt", "llama4_text")  # OPT gives its masks no positions; chunks have no mask of a whole row
REENTRANT = ("llama", "gemma2")  # these with both kinds of gradient checkpointing
WITH_ATTENTION = [(n, a) for n in CONFIGURATIONS for a in ATTENTIONS[n in NO_SDPA :]]
IN_SHORT = (("llama", "sdpa"), ("gpt2", "eager"), ("gemma2", "eager"))
"""Those of `make test`."""


@pytest.mark.parametrize(("name", "attention"), few(WITH_ATTENTION, *IN_SHORT))
def test_slices_give_the_loss_and_gradients_of_the_whole(name: str, attention: str) -> None:
    model = build(name, attention)
    for padding in PADDINGS:
        batch = batch_for(padding)
        expected = step(model, batch)
        for lengths in (SLICES, (19, 18), (TOKENS,)):
            assert_same_step(step_in_slices(model, batch, lengths), expected)


@pytest.mark.parametrize("name", few(("llama", "gpt2", "gemma2", "mistral"), "llama"))
def test_slices_of_one_token_each(name: str) -> None:
    model, batch = build(name), batch_for("right padding")
    assert_same_step(step_in_slices(model, batch, (1,) * TOKENS), step(model, batch))


@pytest.mark.parametrize(
    ("name", "attention"), few([pair for pair in WITH_ATTENTION if pair[0] not in NOT_PACKED], *IN_SHORT)
)
def test_documents_packed_into_a_row_do_not_see_each_other(name: str, attention: str) -> None:
    model, batch = build(name, attention), batch_for("packed")
    expected = step(model, batch)
    apart = step(model, {key: value for key, value in batch.items() if key != "position_ids"})
    if "gpt2" not in name:  # else the test would not notice a mask that is missing
        assert abs(expected.loss - apart.loss) > 1e-4
    assert_same_step(step_in_slices(model, batch, SLICES), expected)


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
    few(
        [
            (name, attention, reentrant)
            for name, attention in WITH_ATTENTION
            for reentrant in ((False, True) if name in REENTRANT else (False,))
        ],
        ("llama", "sdpa", True),
        ("gpt2", "eager", False),
    ),
)
def test_gradient_checkpointing_keeps_the_states(
    name: str, attention: str, reentrant: bool, updates: list[int]
) -> None:
    model = build(name, attention)
    paddings = [padding for padding in (*PADDINGS, "packed") if padding != "packed" or name not in NOT_PACKED]
    expected = {padding: step(model, batch_for(padding)) for padding in paddings}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for padding in paddings:
        batch, lengths = batch_for(padding), SLICES if padding == "right padding" else (16, TOKENS - 16)
        updates.clear()
        assert_same_step(step_in_slices(model, batch, lengths), expected[padding])
        assert len(updates) == 2 * LAYERS * len(lengths)  # each slice was computed again
    with_flags = {n: m.__dict__.get("gradient_checkpointing") for n, m in model.named_modules()}
    with running_slices(model, batch):
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


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_is_no_further_from_float32_than_without_slices(name: str) -> None:
    model, batch = build(name), batch_for("right padding")
    exact = step(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole, sliced = step(model, batch), step_in_slices(model, batch, SLICES)

    def distance(gradients: dict[str, torch.Tensor]) -> float:
        return sum(float((g - exact.gradients[n]).square().sum()) for n, g in gradients.items()) ** 0.5

    assert distance(sliced.gradients) <= 1.5 * distance(whole.gradients)


def test_a_gradient_that_is_not_parked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other tests compare does depend on the gradients of earlier tokens' keys and values."""
    model, batch = build("llama"), batch_for("none")
    expected = step(model, batch)
    monkeypatch.setattr(_LayerStates, "take_up", lambda self, i, g, visible, start, stop: g[:, :, start - visible :])
    with pytest.raises(AssertionError, match="e-0"):
        assert_same_step(step_in_slices(model, batch, SLICES), expected)


def test_backwards_in_the_wrong_order_are_refused() -> None:
    model, batch = build("llama"), batch_for("none")
    sequence = SlicedSequence(model, batch, (20, 17), attention_windows(model))
    losses = [model(**sequence.slice(number)).loss for number in range(2)]
    with pytest.raises(RuntimeError, match="from the last to the first"):
        losses[0].backward()


def test_a_batch_is_cut_along_its_tokens() -> None:
    model, batch = build("llama"), {**batch_for("right padding"), "weights": torch.ones(2), "name": "x"}
    part = SlicedSequence(model, batch, (20, 10, 7), attention_windows(model)).slice(1)
    assert torch.equal(part["input_ids"], batch["input_ids"][:, 20:30])
    assert torch.equal(part["shift_labels"], batch["labels"][:, 21:31])
    assert torch.equal(part["attention_mask"], batch["attention_mask"][:, :30])
    assert part["weights"].shape == (2,) and part["name"] == "x" and part["use_cache"] is False
    assert first_tokens(batch, 5)["labels"].shape == (2, 5)


def test_one_slice_is_the_batch_itself() -> None:
    """Without a cache, to which layers that are computed again would append twice."""
    model, batch = build("llama"), batch_for("none")
    part = SlicedSequence(model, batch, (TOKENS,), attention_windows(model)).slice(0)
    assert part.pop("use_cache") is False
    assert part.keys() == batch.keys() and all(part[name] is batch[name] for name in batch)


def test_keys_are_as_many_as_columns_of_a_mask_of_the_users() -> None:
    """A sliding window drops keys where the model makes the mask by itself."""
    model, batch = build("mistral"), batch_for("none")
    windows = attention_windows(model)
    own = torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    for mask in (own, {"full_attention": own, "sliding_attention": own}):
        states = SlicedSequence(model, {**batch, "attention_mask": mask}, (30, 7), windows)._states
        assert states is not None and states.first_visible(0, 30) == 0
    of_rows = {**batch, "attention_mask": torch.ones(2, TOKENS, dtype=torch.long)}
    states = SlicedSequence(model, of_rows, (30, 7), windows)._states
    assert states is not None and states.first_visible(0, 30) > 0


def test_states_of_frozen_layers_go_with_the_last_slice() -> None:
    """No backward comes to free them; but layer 1, whose keys have no gradient either, may be computed again."""
    model, batch = build("llama"), batch_for("none")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.mlp" in name or "layers.2" in name)
    states = SequenceStates(attention_windows(model), TOKENS, num_frozen=1)
    with running_slices(model, batch):
        for start, stop in ((0, 20), (20, TOKENS)):
            ids = batch["input_ids"][:, start:stop]
            model(input_ids=ids, past_key_values=states.slice(start, stop), use_cache=False)
    assert [states.of_layer(index)._values[0] is None for index in range(3)] == [True, False, False]
    states.forget()
    assert states.of_layer(1)._values[0] is None


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


def test_a_layer_that_gives_no_keys_and_values_is_noticed() -> None:
    model, batch = build("llama"), batch_for("none")
    part = SlicedSequence(model, batch, (20, 17), attention_windows(model)).slice(0)
    with pytest.raises(UnsupportedModelError, match="0 of 3 layers"):
        check_updates(model, part["past_key_values"], 3)
