"""The weighted losses of the parts must add up to the loss of the whole, for every kind of loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from model_zoo import ENCODER, MODELS, without_dropout
from transformers import Trainer, TrainingArguments

from hf_pipetransformer.model.loss_scaling import (
    IGNORED,
    LossOf,
    LossReduction,
    find_loss_reduction,
    with_distinct_labels,
)
from hf_pipetransformer.model.micro_batch import Batch, slice_rows, split_batch

SHIFTS = {"llama-tied", "gpt2"}


def loss_function(model: hf.PreTrainedModel) -> LossOf:
    """As the Trainer calls a model: `num_items_in_batch` only where it is taken."""
    takes_count = "kwargs" in model.forward.__code__.co_varnames

    def loss_of(batch: Batch, num_items: int) -> float:
        extra = {"num_items_in_batch": num_items} if takes_count else {}
        with torch.no_grad():
            return model(**batch, **extra).loss.item()

    return loss_of


def assert_parts_give_the_whole(loss_of: LossOf, reduction: LossReduction, batch: Batch, parts: list[Batch]) -> None:
    items = reduction.count(batch)
    assert sum(reduction.count(part) for part in parts) == items
    counted = [(reduction.weight(part, items), part) for part in parts]
    total = sum(weight * loss_of(part, items) for weight, part in counted if weight)
    assert total == pytest.approx(loss_of(batch, items), rel=1e-5)


def unequal_parts(batch: Batch) -> list[Batch]:
    """4 rows as 1 and 3: where a weight is missing, it shows."""
    return [slice_rows(batch, 0, 1), slice_rows(batch, 1, 4)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert-classification", LossReduction("mean", "labels")),
        ("bert-tokens", LossReduction("mean", "labels")),
        ("bert-masked-lm", LossReduction("mean", "labels")),
        ("bert-multiple-choice", LossReduction("mean", "labels")),
        ("bert-question-answering", LossReduction("mean", "labels")),  # it has none, and then rows are counted
        ("t5", LossReduction("mean", "labels")),
        ("bart", LossReduction("mean", "labels")),
        ("llama-tied", LossReduction("sum", "shifted_labels")),
        ("gpt2", LossReduction("sum", "shifted_labels")),
        ("vit", LossReduction("sum", "labels")),
    ],
)
def test_models(name, expected):
    model, batch = MODELS[name].build(), MODELS[name].batch(4)
    loss_of = loss_function(model)
    reduction = find_loss_reduction(loss_of, batch, shifts_labels=name in SHIFTS)
    assert reduction == expected
    for parts in (unequal_parts(batch), split_batch(batch, 2), split_batch(batch, 4)):
        assert_parts_give_the_whole(loss_of, reduction, batch, parts)


@pytest.mark.parametrize("name", ["clip", "bert-pretraining"])
def test_rows_that_belong_together(name):
    """A contrastive loss compares rows; pretraining adds a mean over tokens to one over rows."""
    model, batch = MODELS[name].build(), MODELS[name].batch(4)
    assert find_loss_reduction(loss_function(model), batch, shifts_labels=False).kind == "whole"


@pytest.mark.parametrize(
    ("problem_type", "labels"),
    [
        ("regression", torch.tensor([0.5, -1.0, 2.0, 0.0])),
        ("multi_label_classification", torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 1], [0, 0, 0]])),
    ],
)
def test_labels_that_are_not_classes(problem_type, labels):
    torch.manual_seed(0)
    number = labels.shape[1] if labels.dim() > 1 else 1
    config = hf.BertConfig(**ENCODER, num_labels=number, problem_type=problem_type)
    model = without_dropout(hf.BertForSequenceClassification(config)).eval()
    batch = {**MODELS["bert-classification"].batch(4), "labels": labels}
    loss_of = loss_function(model)
    reduction = find_loss_reduction(loss_of, batch, shifts_labels=False)
    assert reduction.kind == "mean"
    assert_parts_give_the_whole(loss_of, reduction, batch, unequal_parts(batch))


@pytest.mark.parametrize("name", ["bert-classification", "bert-tokens", "llama-tied", "t5"])
def test_label_smoothing_in_the_trainer(name, tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", label_smoothing_factor=0.1)
    trainer = Trainer(MODELS[name].build().eval(), args)

    def loss_of(batch: Batch, num_items: int) -> float:
        with torch.no_grad():
            return trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=num_items).item()

    batch = MODELS[name].batch(4)
    if name == "t5":  # the smoother takes the labels away from the model
        batch["decoder_input_ids"] = trainer.model.prepare_decoder_input_ids_from_labels(batch["labels"])
    reduction = find_loss_reduction(loss_of, batch, shifts_labels=trainer._loss_shifts_labels)
    assert reduction.kind in ("sum", "mean")
    assert_parts_give_the_whole(loss_of, reduction, batch, unequal_parts(batch))


@pytest.mark.parametrize("name", ["llama-tied", "bert-tokens"])
def test_first_rows_without_any_label_tell_the_same(name):
    """Prompts that were cut off: sums give 0 and means NaN, and neither says how losses add up."""
    model, batch = MODELS[name].build(), MODELS[name].batch(4)
    unlabelled = {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}
    arguments: dict[str, Any] = {"shifts_labels": name in SHIFTS}
    found = find_loss_reduction(loss_function(model), with_distinct_labels(unlabelled, model.config), **arguments)
    assert found == find_loss_reduction(loss_function(model), batch, **arguments)


def test_a_row_without_labels_has_no_weight():
    model, batch = MODELS["bert-tokens"].build(), MODELS["bert-tokens"].batch(4)
    batch["labels"][0] = IGNORED  # its own mean is NaN
    loss_of = loss_function(model)
    reduction = find_loss_reduction(loss_of, batch, shifts_labels=False)
    assert reduction == LossReduction("mean", "labels")
    assert reduction.weight(slice_rows(batch, 0, 1), 10) == 0
    assert_parts_give_the_whole(loss_of, reduction, batch, unequal_parts(batch))


def test_half_precision_needs_and_gets_a_larger_tolerance():
    model, batch = MODELS["llama-tied"].build().bfloat16(), MODELS["llama-tied"].batch(4)
    found = find_loss_reduction(loss_function(model), batch, shifts_labels=True, tolerance=3e-2)
    assert found == LossReduction("sum", "shifted_labels")


def test_an_infinite_loss_is_taken_for_a_mean():
    batch = MODELS["bert-classification"].batch(2)
    assert find_loss_reduction(lambda *_: float("inf"), batch, shifts_labels=False).kind == "mean"


def test_what_is_counted():
    labels = torch.tensor([[5, 6, IGNORED], [7, IGNORED, IGNORED]])
    batch = {"input_ids": torch.ones(2, 3), "labels": labels}
    assert LossReduction("mean", "labels").count(batch) == 3
    assert LossReduction("sum", "shifted_labels").count(batch) == 1
    assert LossReduction("mean", "rows").count(batch) == 2
    assert LossReduction("mean", "labels").count({"input_ids": torch.ones(2, 3)}) == 2
    shifted = {**batch, "shift_labels": torch.tensor([[6, IGNORED, IGNORED], [8, 9, IGNORED]])}
    assert LossReduction("sum", "shifted_labels").count(shifted) == 3
    assert LossReduction("mean", "labels").count(shifted) == 3


def test_weights():
    part = {"labels": torch.zeros(2, dtype=torch.long)}
    assert LossReduction("mean", "labels").weight(part, 8) == 2 / 8
    assert LossReduction("sum", "labels").weight(part, 8) == 1


def test_distinct_labels_tell_apart_what_equal_ones_hide():
    """Sorted data: the first rows have one class, or one length, and a weighted mean looks like a plain one."""
    model, batch = MODELS["bert-classification"].build(), MODELS["bert-classification"].batch(4)
    batch["labels"] = torch.zeros_like(batch["labels"])

    def weighted(part: dict[str, Any], items: int) -> float:
        with torch.no_grad():
            logits = model.eval()(**{**part, "labels": None}).logits
        return float(torch.nn.functional.cross_entropy(logits, part["labels"], weight=torch.tensor([1.0, 5.0])))

    assert find_loss_reduction(weighted, batch, shifts_labels=False).kind == "mean"  # wrongly
    assert (
        find_loss_reduction(weighted, with_distinct_labels(batch, model.config), shifts_labels=False).kind == "whole"
    )
