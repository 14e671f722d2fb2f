"""How losses of parts add up: which ways are tried, what contradicts one, and what is counted."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_pipetransformer.model.loss_scaling import (
    EXACT,
    IGNORED,
    LossReduction,
    NumItems,
    candidates_for,
    label_variants,
    unexamined,
    why_not,
)
from hf_pipetransformer.model.micro_batch import Batch, batch_rows, slice_rows

ROWS, TOKENS, CLASSES = 4, 6, 3
WEIGHT = torch.tensor([1.0, 1.0, 10.0])


def tokens() -> Batch:
    """Logits for each token, and unequal numbers of labels: 6, 3, 2 and none."""
    labels = torch.randint(0, CLASSES, (ROWS, TOKENS))
    for row, kept in enumerate((6, 3, 2, 0)):
        labels[row, kept:] = IGNORED
    return {"logits": torch.randn(ROWS, TOKENS, CLASSES), "labels": labels}


def samples() -> Batch:
    return {"logits": torch.randn(ROWS, CLASSES), "labels": torch.tensor([0, 1, 0, 1])}


def mean(batch: Batch, items: NumItems) -> float:
    return float(cross_entropy(batch["logits"].flatten(0, -2), batch["labels"].flatten(), ignore_index=IGNORED))


def total(batch: Batch, items: NumItems) -> float:
    assert items is not None
    return (
        mean(batch, None) * LossReduction("mean").count(batch) / items if LossReduction("mean").count(batch) else 0.0
    )


def mean_of_rows(batch: Batch, items: NumItems) -> float:
    return float(batch["logits"].exp().flatten(1).sum(1).mean())


def weighted(batch: Batch, items: NumItems) -> float:
    return float(cross_entropy(batch["logits"], batch["labels"], weight=WEIGHT))


def contrastive(batch: Batch, items: NumItems) -> float:
    return float(cross_entropy(batch["logits"] @ batch["logits"].T, torch.arange(batch_rows(batch))))


def fitting(loss, batches: list[Batch], items: NumItems = None) -> list[LossReduction]:  # type: ignore[no-untyped-def]
    """The ways of adding up that nothing contradicts, on all batches."""
    names, first = ("labels",), batches[0]
    doubled = loss(first, items and 2 * items)
    found = candidates_for(first, loss(first, items), doubled, False, names, EXACT, 1)
    for batch in batches:
        parts = [slice_rows(batch, 0, 1), slice_rows(batch, 1, ROWS)]
        whole = loss(batch, items)
        found = [
            way
            for way in found
            if why_not(way, batch, parts, items, whole, lambda i, n, p=parts: loss(p[i], n), EXACT) is None
        ]
    return found


@pytest.mark.parametrize(
    ("loss", "make", "items", "expected"),
    [
        (mean, tokens, None, ("mean", "labels")),
        (total, tokens, 11, ("sum", "labels")),
        (mean_of_rows, tokens, None, ("mean", "rows")),
        (mean, samples, None, ("mean", "labels")),
        (weighted, samples, None, None),
        (contrastive, samples, None, None),
    ],
)
def test_what_fits_a_loss(loss, make, items, expected) -> None:  # type: ignore[no-untyped-def]
    found = fitting(loss, label_variants(make(), ("labels",), range(CLASSES)), items)
    assert [(way.kind, way.items) for way in found[:1]] == ([expected] if expected else [])


def test_a_contradiction_says_both_numbers() -> None:
    batch = samples()
    parts = [slice_rows(batch, 0, 1), slice_rows(batch, 1, ROWS)]
    why = why_not(LossReduction("mean"), batch, parts, None, 2.0, lambda index, items: 1.0, EXACT)
    assert why == "the parts of a batch add up to 1, but the whole batch gives 2"
    empty = {"labels": torch.full((ROWS, TOKENS), IGNORED)}
    assert why_not(LossReduction("mean"), empty, [], None, 0.0, lambda *_: 0.0, EXACT) == "it has no labels to count"
    assert unexamined(True, why) == LossReduction("whole", "shifted_labels") and unexamined(True, why).reason == why


def test_variants_show_each_class_unequal_counts_and_scaled_targets() -> None:
    *_, classes = label_variants(samples(), ("labels",), range(CLASSES))
    assert set(classes["labels"].tolist()) == set(range(CLASSES))
    full = {"input_ids": torch.ones(ROWS, 12), "labels": torch.ones(ROWS, 12, dtype=torch.long)}
    _, counted = label_variants(full, ("labels",), (), model_inputs=["input_ids"])
    assert len(set(counted["labels"].ne(IGNORED).sum(1).tolist())) == ROWS
    unlabelled = {"labels": torch.full((ROWS, 5), IGNORED)}
    assert bool(label_variants(unlabelled, ("labels",), ())[1]["labels"].ne(IGNORED).any())
    _, scaled = label_variants({"labels": torch.ones(ROWS)}, ("labels",), ())
    assert scaled["labels"].tolist() == [1, 0.875, 0.75, 0.625]
