"""How the loss of a transformers model adds up, read off from head and loss: right for parts of unequal size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_zoo import MODELS
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

SHIFTS = ("llama-tied", "gpt2")


def loss_of(model: nn.Module, batch: Batch, items: NumItems) -> torch.Tensor:
    """Call a model as the Trainer does: with `num_items_in_batch` only if the model takes it."""
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
    "bert-question-answering": LossReduction("mean", "positions", "start_positions"),
    "t5": LossReduction("mean"),
    "gpt2": LossReduction("sum", "shifted_labels"),
    "llama-tied": LossReduction("sum", "shifted_labels"),
    "vit": LossReduction("sum"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_sums_and_means(name: str) -> None:
    """The reduction holds for parts of 1 and 3 samples with unequal numbers of labels: a wrong one would show."""
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


def test_samples_without_labels_do_not_hide_it() -> None:
    """Sums give 0 and means NaN for the first samples; those with labels say how losses add up."""
    for name in ("llama-tied", "bert-tokens"):
        model, batch = MODELS[name].build(), MODELS[name].batch(4)
        batch["labels"] = torch.full_like(batch["labels"], IGNORED)
        assert read(model, batch, name in SHIFTS).reduction.kind == EXPECTED[name].kind
