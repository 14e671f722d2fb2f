"""How the loss of a transformers model adds up, read off from head and loss: right for parts of unequal size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from model_zoo import ENCODER, MODELS, without_dropout
from selection import few
from torch import nn

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.model.loss_reading import LossReading, read_reduction
from hf_pipetransformer.model.loss_scaling import (
    EXACT,
    IGNORED,
    LossReduction,
    NumItems,
)
from hf_pipetransformer.model.micro_batch import Batch, slice_rows
from hf_pipetransformer.model.refusals import configs_of, has_router_loss

SHIFTS = ("llama-tied", "gpt2")


def loss_of(model: nn.Module, batch: Batch, items: NumItems) -> torch.Tensor:
    """As the Trainer calls a model: `num_items_in_batch` only where it is taken."""
    takes_count = "kwargs" in model.forward.__code__.co_varnames
    loss: torch.Tensor = model(**batch, **({"num_items_in_batch": items} if takes_count and items else {})).loss
    return loss


def read(model: nn.Module, batch: Batch, shifts: bool = False, **options: Any) -> LossReading:
    stack = LayerStack.discover(model, slice_rows(batch, 0, 2))
    return read_reduction(
        stack,
        batch,
        lambda rows, items: loss_of(model, rows, items),
        **{
            "shifts_labels": shifts,
            "label_names": ("labels",),
            "passes_items": "labels" in batch,
            "tolerance": EXACT,
            **options,
        },
    )


EXPECTED = {
    "bert-classification": LossReduction("mean"),
    "bert-tokens": LossReduction("mean"),
    "bert-question-answering": LossReduction("mean"),  # without labels, samples are counted
    "t5": LossReduction("mean"),
    "gpt2": LossReduction("sum", "shifted_labels"),
    "llama-tied": LossReduction("sum", "shifted_labels"),
    "vit": LossReduction("sum"),
    "bert-multiple-choice": LossReduction("mean"),
}


@pytest.mark.parametrize("name", few(EXPECTED, *list(EXPECTED)[:6]))
def test_sums_and_means(name: str) -> None:
    """What is read holds for parts of 1 and 3 samples with unequal numbers of labels, in which a wrong one shows."""
    model, batch = MODELS[name].build().eval(), MODELS[name].batch(4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    reading = read(model, batch, name in SHIFTS)
    reduction = reading.reduction
    assert reduction == EXPECTED[name], reduction.reason
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert reading.reached == {name for name, _ in model.named_parameters()}
    items = reduction.count(batch)
    with torch.no_grad():
        parts = [slice_rows(batch, 0, 1), slice_rows(batch, 1, 4)]
        total = sum(reduction.weight(part, items) * float(loss_of(model, part, items)) for part in parts)
        assert total == pytest.approx(float(loss_of(model, batch, items)), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("clip", "the whole batch gives"),  # compares samples
        ("bert-pretraining", "the whole batch gives"),  # a mean over tokens and one over samples
        ("mixtral-router-loss", "output_router_logits=True"),
        ("resnet", "normal"),  # batch normalisation
    ],
)
def test_whole_batches(name: str, reason: str) -> None:
    reduction = read(MODELS[name].build(), MODELS[name].batch(4), name in SHIFTS).reduction
    assert reduction.kind == "whole" and reason in reduction.reason


@pytest.mark.parametrize(
    ("problem", "labels"),
    [
        ("regression", torch.tensor([0.5, -1.0, 2.0, 0.0])),
        ("multi_label_classification", torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 1], [0, 0, 0]])),
    ],
)
def test_labels_that_are_not_classes(problem: str, labels: torch.Tensor) -> None:
    number = labels.shape[1] if labels.dim() > 1 else 1
    config = hf.BertConfig(**ENCODER, num_labels=number, problem_type=problem)
    model = without_dropout(hf.BertForSequenceClassification(config)).eval()
    assert read(model, {**MODELS["bert-classification"].batch(4), "labels": labels}).reduction.kind == "mean"


def test_samples_without_labels_do_not_hide_it() -> None:
    """Sums give 0 and means NaN for the first samples; those with labels say how losses add up."""
    for name in ("llama-tied", "bert-tokens"):
        model, batch = MODELS[name].build(), MODELS[name].batch(4)
        batch["labels"] = torch.full_like(batch["labels"], IGNORED)
        assert read(model, batch, name in SHIFTS).reduction.kind == EXPECTED[name].kind


def test_a_router_loss_of_a_part_of_the_model_is_one_of_the_whole_batch() -> None:
    """Of a text model inside of another one, with a coefficient that half precision hides."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 37}
    text = {
        **sizes,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 100,
        "output_router_logits": True,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = hf.Qwen3VLMoeConfig(text_config=text, vision_config={**vision, "num_position_embeddings": 16})
    assert has_router_loss(hf.Qwen3VLMoeForConditionalGeneration(config))
    assert len(configs_of(hf.Qwen3VLMoeForConditionalGeneration(config))) == 3
