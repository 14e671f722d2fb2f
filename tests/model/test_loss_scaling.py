"""The weighted losses of the parts must add up to the loss of the whole, for every kind of loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from model_zoo import ENCODER, MODELS, without_dropout
from transformers import Trainer, TrainingArguments

from hf_pipetransformer.model.loss_scaling import (
    HALF_PRECISION,
    IGNORED,
    LossOf,
    LossOutcome,
    LossReduction,
    find_loss_reduction,
    label_variants,
)
from hf_pipetransformer.model.micro_batch import Batch, batch_rows, slice_rows, split_batch

SHIFTS = {"llama-tied", "gpt2"}


def loss_function(model: hf.PreTrainedModel) -> LossOf:
    """As the Trainer calls a model: `num_items_in_batch` only where it is taken."""
    takes_count = "kwargs" in model.forward.__code__.co_varnames

    def loss_of(batch: Batch, num_items: Any) -> LossOutcome:
        extra = {"num_items_in_batch": num_items} if takes_count else {}
        with torch.no_grad():
            return LossOutcome(model(**batch, **extra).loss.item())

    return loss_of


def found(loss_of: LossOf, batch: Batch, shifts_labels: bool = False, **options: Any) -> LossReduction:
    """On the rows as they are, and with unequal numbers of labels."""
    variants = label_variants(batch, ("labels",), (), may_ignore=True)
    return find_loss_reduction(loss_of, variants, shifts_labels=shifts_labels, **options)


def assert_parts_give_the_whole(loss_of: LossOf, reduction: LossReduction, batch: Batch, parts: list[Batch]) -> None:
    items = reduction.count(batch)
    assert sum(reduction.count(part) for part in parts) == items
    rows = batch_rows(batch)
    asked = [(part, *reduction.part(part, items, batch_rows(part) / rows)) for part in parts]
    total = sum(weight * loss_of(part, number).value for part, number, weight in asked if weight)
    assert total == pytest.approx(loss_of(batch, items).value, rel=1e-5)


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
    reduction = found(loss_of, batch, name in SHIFTS)
    assert reduction == expected
    for parts in (unequal_parts(batch), split_batch(batch, 2), split_batch(batch, 4)):
        assert_parts_give_the_whole(loss_of, reduction, batch, parts)


@pytest.mark.parametrize("name", ["clip", "bert-pretraining"])
def test_rows_that_belong_together(name):
    """A contrastive loss compares rows; pretraining adds a mean over tokens to one over rows."""
    model, batch = MODELS[name].build(), MODELS[name].batch(4)
    assert found(loss_function(model), batch).kind == "whole"


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
    reduction = found(loss_of, batch)
    assert reduction.kind == "mean"
    assert_parts_give_the_whole(loss_of, reduction, batch, unequal_parts(batch))


@pytest.mark.parametrize("name", ["bert-classification", "bert-tokens", "llama-tied", "t5"])
def test_label_smoothing_in_the_trainer(name, tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", label_smoothing_factor=0.1)
    trainer = Trainer(MODELS[name].build().eval(), args)

    def loss_of(batch: Batch, num_items: Any) -> LossOutcome:
        with torch.no_grad():
            return LossOutcome(trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=num_items).item())

    batch = MODELS[name].batch(4)
    if name == "t5":  # the smoother takes the labels away from the model
        batch["decoder_input_ids"] = trainer.model.prepare_decoder_input_ids_from_labels(batch["labels"])
    reduction = found(loss_of, batch, trainer._loss_shifts_labels)
    assert reduction.kind in ("sum", "mean")
    assert_parts_give_the_whole(loss_of, reduction, batch, unequal_parts(batch))


@pytest.mark.parametrize("name", ["llama-tied", "bert-tokens"])
def test_first_rows_without_any_label_tell_the_same(name):
    """Prompts that were cut off: sums give 0 and means NaN, and neither says how losses add up."""
    model, batch = MODELS[name].build(), MODELS[name].batch(4)
    unlabelled = {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}
    *_, labelled = label_variants(unlabelled, ("labels",), (), may_ignore=True)
    loss_of = loss_function(model)
    assert found(loss_of, labelled, name in SHIFTS) == found(loss_of, batch, name in SHIFTS)


def test_a_row_without_labels_has_no_weight():
    model, batch = MODELS["bert-tokens"].build(), MODELS["bert-tokens"].batch(4)
    batch["labels"][0] = IGNORED  # its own mean is NaN
    loss_of = loss_function(model)
    reduction = found(loss_of, batch)
    assert reduction == LossReduction("mean", "labels")
    assert reduction.part(slice_rows(batch, 0, 1), 10, 0.25) == (10, 0)
    assert_parts_give_the_whole(loss_of, reduction, batch, unequal_parts(batch))


def test_half_precision_needs_and_gets_a_larger_tolerance():
    model, batch = MODELS["llama-tied"].build().bfloat16(), MODELS["llama-tied"].batch(4)
    reduction = found(loss_function(model), batch, True, tolerance=HALF_PRECISION)
    assert reduction == LossReduction("sum", "shifted_labels")


def test_an_infinite_loss_is_taken_for_a_mean():
    batch = MODELS["bert-classification"].batch(2)
    assert found(lambda *_: LossOutcome(float("inf")), batch).kind == "mean"


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


def test_parts():
    part = {"labels": torch.zeros(2, dtype=torch.long)}
    assert LossReduction("mean", "labels").part(part, 8, 0.5) == (8, 2 / 8)
    assert LossReduction("sum", "labels").part(part, 8, 0.5) == (8, 1)
    assert LossReduction("sum_and_constant", "labels").part(part, 8, 0.5) == (4, 0.5)
    assert LossReduction("whole", "labels").part(part, 8, 1.0) == (8, 1.0)
    weighted = {"labels": torch.zeros(2), "weights": torch.tensor([0.5, 2.0])}
    assert LossReduction("mean", "total", "weights").part(weighted, 10.0, 0.5) == (10.0, 0.25)


def test_a_term_of_constant_size_counts_once():
    """A penalty on the weights, or a mean over rows, beside a sum over items that is divided by their number."""
    model, batch = MODELS["llama-tied"].build(), MODELS["llama-tied"].batch(4)
    plain = loss_function(model)

    def penalised(part: Batch, num_items: Any) -> LossOutcome:
        return LossOutcome(plain(part, num_items).value + 0.125)

    reduction = found(penalised, batch, True)
    assert reduction == LossReduction("sum_and_constant", "shifted_labels")
    for parts in (unequal_parts(batch), split_batch(batch, 4)):
        assert_parts_give_the_whole(penalised, reduction, batch, parts)


def weighted_by(name: str) -> LossOf:
    def loss_of(batch: Batch, num_items: Any) -> LossOutcome:
        weights = batch[name].float()
        return LossOutcome(float((weights * batch["values"]).sum() / weights.sum()))

    return loss_of


def test_a_mean_by_weights_that_are_an_input():
    batch = {"values": torch.tensor([1.0, 2, 3, 5]), "weights": torch.tensor([0.5, 1.0, 2.0, 1.5])}
    assert found(weighted_by("weights"), batch) == LossReduction("mean", "total", "weights")


def test_labels_of_another_name():
    """Rows of full length: nothing but other labels tells a mean over tokens from one over rows."""
    torch.manual_seed(0)
    batch = {"logits": torch.randn(4, 6, 3), "tags": torch.randint(0, 3, (4, 6))}

    def loss_of(part: Batch, num_items: Any) -> LossOutcome:
        return LossOutcome(
            float(torch.nn.functional.cross_entropy(part["logits"].flatten(0, 1), part["tags"].flatten()))
        )

    names = ("labels", "tags")
    variants = label_variants(batch, names, (), may_ignore=True)
    reduction = find_loss_reduction(loss_of, variants, shifts_labels=False, label_names=names)
    assert reduction == LossReduction("mean", "labels", "tags")


def test_means_over_rows_of_one_great_length():
    """Each row's mean, then the mean over rows: no mean over tokens, though all rows tried have one length."""
    torch.manual_seed(0)
    batch = {"logits": torch.randn(4, 400, 3), "labels": torch.randint(0, 3, (4, 400))}

    def loss_of(part: Batch, num_items: Any) -> LossOutcome:
        rows = [
            torch.nn.functional.cross_entropy(logits, labels)
            for logits, labels in zip(part["logits"], part["labels"], strict=True)
        ]
        return LossOutcome(float(torch.stack(rows).mean()))

    assert found(loss_of, batch) == LossReduction("mean", "rows")


@pytest.mark.parametrize("is_new", [False, True])
def test_class_weights_are_seen_in_all_classes_and_with_a_new_head(is_new):
    """With a head of zeros all rows have the loss ln C, so that only the gradients tell."""
    torch.manual_seed(0)
    head = torch.zeros(5, 3) if is_new else torch.randn(5, 3)
    head.requires_grad_()
    batch = {"inputs": torch.randn(4, 5), "labels": torch.zeros(4, dtype=torch.long)}

    def loss_of(part: Batch, num_items: Any) -> LossOutcome:
        logits = part["inputs"] @ head
        weight = torch.tensor([1.0, 1.0, 10.0])
        loss = torch.nn.functional.cross_entropy(logits, part["labels"], weight=weight)
        return LossOutcome(float(loss.detach()), torch.autograd.grad(loss, head)[0].flatten())

    variants = label_variants(batch, ("labels",), range(3), may_ignore=False)
    reduction = find_loss_reduction(loss_of, variants, shifts_labels=False)
    assert reduction.kind == "whole" and "whole batch" in reduction.reason
    assert find_loss_reduction(loss_of, variants[:1], shifts_labels=False).kind == "mean"  # of one class


def test_a_sum_over_rows():
    def loss_of(batch, num_items):
        return LossOutcome(float((batch["x"] ** 2).sum()))

    batch = {"x": torch.arange(1.0, 9.0), "labels": torch.arange(8) % 3}
    reduction = found(loss_of, batch, passes_items=False)
    assert reduction.kind == "plain_sum"
    assert_parts_give_the_whole(loss_of, reduction, batch, [slice_rows(batch, 0, 3), slice_rows(batch, 3, 8)])


def padded(lengths, width):
    rows = [[n] * n + [0] * (width - n) for n in lengths]
    return {"x": torch.tensor(rows, dtype=torch.float32), "labels": torch.tensor(rows)}


APART = (padded([1, 2, 4, 5], 5), padded([1, 2], 2), padded([4, 5], 5))


def test_parts_that_are_padded_apart_tell_rows_from_labels():
    """Padded with label 0, a mean over rows looks like one over tokens in every batch cut from one."""

    def mean_over_rows(batch, num_items):
        return LossOutcome(float(batch["x"].sum(dim=1).mean()))

    variants = [APART[0]]
    plain = find_loss_reduction(mean_over_rows, variants, shifts_labels=False, passes_items=False)
    assert plain.items == "labels"
    reduction = find_loss_reduction(mean_over_rows, variants, shifts_labels=False, passes_items=False, apart=APART)
    assert (reduction.kind, reduction.items, reduction.depends_on_padding) == ("mean", "rows", False)


def test_a_loss_that_counts_padding_is_found():
    def mean_over_all(batch, num_items):
        return LossOutcome(float(batch["x"].exp().mean()) + 1.0)

    def batches():
        return [{**APART[0], "labels": torch.arange(4)}]

    apart = [{**batch, "labels": torch.arange(len(batch["x"]))} for batch in APART]
    reduction = find_loss_reduction(mean_over_all, batches(), shifts_labels=False, passes_items=False, apart=apart)
    assert reduction.kind == "mean" and reduction.depends_on_padding


def test_parts_of_a_whole_are_as_under_ddp() -> None:
    items, weight = LossReduction("whole").part({}, num_items=8, share=0.25)
    of_part = 6.0  # the sum over its items
    assert (of_part / items) * weight == of_part / 8
    assert LossReduction("whole").part({}, num_items=None, share=0.25) == (None, 0.25)
