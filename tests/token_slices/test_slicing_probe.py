"""What can be cut along its tokens is found by trying, and what cannot is refused before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks_expecting_error
from model_zoo import MODELS
from selection import slow
from sliced_models import batch_for, build, loss_of
from torch import nn
from training_runs import Run, pipeline_trainer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from hf_pipetransformer import UnsupportedModelError
from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.token_slices import kv_slices
from hf_pipetransformer.token_slices.slices import SlicedSequence
from hf_pipetransformer.token_slices.slicing_probe import probe_slicing

SMALL: dict[str, Any] = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2}


def study(model: nn.Module, batch: dict[str, torch.Tensor], loss: Any = None) -> Any:
    stack = LayerStack.discover(model, batch)
    return probe_slicing(
        stack, batch, loss or (lambda part: loss_of(model, part, batch)), loss_tolerance=1e-3, gradient_tolerance=1e-3
    )


def sum_over_tokens(model: nn.Module) -> Any:
    """A loss for any model, without a shift. Its parts add up: a difference between slices is the model's fault."""

    def loss(part: dict[str, Any]) -> torch.Tensor:
        inputs = {key: value for key, value in part.items() if key not in ("labels", "shift_labels")}
        logits = model(**inputs).logits.flatten(0, 1)
        return nn.functional.cross_entropy(logits, part["labels"].flatten(), reduction="sum") / 64

    return loss


@pytest.mark.parametrize("name", ["llama", "gpt2", *slow("opt", "llama4_text")])
def test_families_are_accepted_and_left_as_they_were(name: str) -> None:
    model, batch = build(name), batch_for("left padding")
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    windows = study(model, batch)
    assert len(windows.layers) == model.config.num_hidden_layers
    assert windows.separates_documents == (name != "opt")  # it gives its masks no positions
    assert model.training and torch.equal(parameter.grad, torch.ones_like(parameter))
    assert sum(p.grad is not None for p in model.parameters()) == 1
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_experts_in_bfloat16_are_not_taken_to_look_ahead() -> None:
    """Other words give the experts other numbers of tokens, which may then round otherwise."""
    model, batch = build("mixtral"), batch_for("none")

    def loss(part: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, part, batch) * (1 + 1e-3 * float(part["input_ids"].sum() % 97) / 97)

    stack = LayerStack.discover(model, batch)
    windows = probe_slicing(stack, batch, loss, loss_tolerance=1e-2, gradient_tolerance=1e-1)
    assert windows.separates_documents


def test_what_shows_nothing_is_an_error() -> None:
    model, batch = build("llama"), batch_for("none")
    with pytest.raises(ValueError, match="loss of the first samples is nan"):
        study(model, batch, lambda part: loss_of(model, part, batch) * float("nan"))
    unlabelled = {**batch, "labels": torch.full((2, 37), -100)}
    with pytest.raises(ValueError, match="no label that counts"):
        study(model, unlabelled, lambda part: model(**part, num_items_in_batch=1).loss)
    with pytest.raises(ValueError, match="1 token"):
        study(model, {key: value[:, :1] for key, value in batch.items()})


def of_type(name: str, **more: Any) -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL, **more))


def lfm2() -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return of_type("lfm2", intermediate_size=48, **heads, layer_types=["conv", "full_attention"])


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SMALL, num_attention_heads=4, intermediate_size=48))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: of_type("mamba", state_size=4), "linear_attention keep a state"),
        (lfm2, "conv keep a state"),
        (bert, "not causal"),
        (MODELS["t5"].build, "only decoders"),
        (lambda: build("llama", num_kv_shared_layers=1), "share keys and values"),
        (lambda: build("mixtral", output_router_logits=True), "output_router_logits"),
    ],
    ids=["recurrent", "convolutional", "encoder", "encoder-decoder", "shared keys", "router loss"],
)
def test_what_keeps_another_state_or_looks_ahead_is_refused(make: Any, why: str) -> None:
    model = make().eval()
    batch = batch_for("none")
    if why == "only decoders":
        batch = {key: value % 60 for key, value in batch.items()}
    with pytest.raises(UnsupportedModelError, match=why):
        study(model, batch, sum_over_tokens(model))


def test_a_loss_that_shifts_labels_itself_is_refused() -> None:
    """Two labels of 512 are lost in the study, and many more in slices of a few tokens."""
    model, batch = build("llama", max_position_embeddings=512), batch_for("none", tokens=512)

    def own_loss(part: dict[str, Any]) -> torch.Tensor:
        inputs = {key: value for key, value in part.items() if key not in ("labels", "shift_labels")}
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, part["labels"][:, 1:].flatten(), reduction="sum") / 1000

    stack = LayerStack.discover(model, batch)
    with pytest.raises(UnsupportedModelError, match="shifts labels itself"):
        probe_slicing(stack, batch, own_loss, loss_tolerance=1e-1, gradient_tolerance=1e-1)


def losing_small_gradients(rank: int, world_size: int, **options: Any) -> None:
    """What later tokens say of the keys and values of earlier ones is lost.

    Attention matters so little in this model that the tolerance of half precision would let it pass.
    """
    kv_slices._LayerStates.take_up = lambda self, i, g, visible, start, stop: g[:, :, start - visible :]
    run = Run("causal-lm", per_device=32, accumulation=1)
    model = run.build_model()
    for name, parameter in model.named_parameters():
        if "o_proj" in name:
            parameter.data *= 1e-3
    pipeline_trainer(run, "auto", model=model, token_slices=3, max_steps=1, **options).train()


def test_a_small_gradient_that_is_lost_is_refused_in_mixed_precision_too() -> None:
    (error,) = run_ranks_expecting_error(losing_small_gradients, 1, bf16=True)
    assert isinstance(error, UnsupportedModelError) and "gradient of" in str(error)


def test_positions_by_padding_refuse_rows_that_are_padded_before_a_slice() -> None:
    """The sample has no padding: only the trial with padding finds the difference."""
    config = RobertaConfig(
        **SMALL,
        is_decoder=True,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = RobertaForCausalLM(config)
    words = torch.arange(3, 35).reshape(2, 16)
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words.clone()}
    windows = study(model, batch, lambda part: loss_of(model, part, batch))
    assert not windows.allows_left_padding
    SlicedSequence(model, batch, [8, 8], windows)
    words[1, :3] = config.pad_token_id
    with pytest.raises(UnsupportedModelError, match="padding before its tokens"):
        SlicedSequence(model, batch, [8, 8], windows)


def checkpointed(name: str) -> nn.Module:
    model = build(name)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def test_what_checkpointing_computes_again_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values that come out otherwise the second time are refused."""
    put = kv_slices._LayerStates.put
    times: dict[tuple[Any, int, int], int] = {}

    def put_again(self: Any, which: int, new: torch.Tensor, visible: int, start: int, stop: int) -> torch.Tensor:
        key = (self, which, start)
        times[key] = times.get(key, 0) + 1
        return put(self, which, new * 1.5 if times[key] == 2 else new, visible, start, stop)

    monkeypatch.setattr(kv_slices._LayerStates, "put", put_again)
    with pytest.raises(UnsupportedModelError, match="gradient of"):
        study(checkpointed("llama"), batch_for("none"))
