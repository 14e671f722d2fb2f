"""Frozen modules whose rows belong together, and what the forward around a frozen module sets before it calls it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..kit import LABELS, WIDTH, At, Inputs, Network, Script, case, classified, pool, samples
from .attack_front import OnBert
from .attack_recipes_front import of
from .late_changes import Later, counted, frozen_by_schedule

PARTS = 4

# ---------------------------------------------------------------------------------------------------------
# Several rows of the batch dimension for each sample
# ---------------------------------------------------------------------------------------------------------


class OnBags(nn.Module):
    """A head on a frozen encoder that mixes the instances of a bag; all instances stand in the batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        mixing = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        parts = nn.Linear(WIDTH, WIDTH), nn.Unflatten(0, (-1, PARTS)), mixing, nn.Flatten(0, 1)
        self.encoder = nn.Sequential(*parts).requires_grad_(False)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return classified(self.head(self.encoder(x).unflatten(0, (-1, PARTS)).mean(1)), labels)


def bags(number: int = 32) -> list[Inputs]:
    """Random bags with labels; some end with instances of zeros."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(number, PARTS, WIDTH, generator=generator)
    x[5::8, 2:] = 0
    return [{"labels": torch.tensor(row % LABELS), "x": x[row]} for row in range(number)]


def flattened(rows: list[Inputs]) -> Inputs:
    return {"labels": torch.stack([row["labels"] for row in rows]), "x": torch.cat([row["x"] for row in rows])}


@case("K1")
def padded_bags_in_the_batch_dimension() -> Script:
    """A frozen encoder mixes the instances of a bag, which are rows of the batch; several bags have the same ones."""
    return of(OnBags(), data=bags(), collator=flattened)


class OnPairs(Network):
    """A classifier of pairs of texts; the texts stand in the batch dimension."""

    def __init__(self) -> None:
        super().__init__(4)
        self.head = nn.Linear(2 * WIDTH, LABELS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return classified(self.head(pool(x, attention_mask).reshape(-1, 2 * WIDTH)), labels)


def paired(rows: list[Inputs]) -> Inputs:
    """Two texts of each sample: its own, and the same words backwards."""
    texts = {
        name: torch.stack([part for row in rows for part in (row[name], row[name].flip(0))])
        for name in ("input_ids", "attention_mask")
    }
    return {**texts, "labels": torch.tensor([int(row["labels"]) for row in rows])}


@case("K1")
def pairs_in_the_batch_dimension_with_a_policy() -> Script:
    """The texts of pairs are rows of the batch, and a policy freezes layers."""
    product = {"freeze_policy": "schedule", "freeze_schedule": {"1": 2}, "activation_cache": "auto"}
    return frozen_by_schedule(model=OnPairs(), data=samples(32, 8, 8), collator=paired, product=product)


# ---------------------------------------------------------------------------------------------------------
# What the forward around a frozen module does
# ---------------------------------------------------------------------------------------------------------


class SetsInside(OnBert):
    """Runs the frozen module with settings of its own, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.is_half = 1e-12, False

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        norm = self.bert.encoder.layer[-1].output.LayerNorm
        norm.eps = self.eps
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_half):
            hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.float()
        norm.eps = 1e-12
        return classified(self.head(pool(hidden, attention_mask)), labels)


def changed_in_the_third_epoch(**values: Any) -> Script:
    def change(model: Any, step: int) -> None:
        vars(model).update(values)

    return of(SetsInside(), data=samples(32, 8, 8), callbacks=[At(change, [10])])


@case("K1")
def constant_set_in_the_forward_around() -> Script:
    """The model sets a constant of the frozen module in its forward, another one from the third epoch on."""
    return changed_in_the_third_epoch(eps=1.0)


@case("K1")
def precision_set_in_the_forward_around() -> Script:
    """The model runs the frozen module in half precision, from the third epoch on."""
    return changed_in_the_third_epoch(is_half=True)


class ReadsMoreLater(Later):
    """Reads the first token's output as well after a while, behind a normalisation that counts its batches."""

    def __init__(self, begin: int) -> None:
        super().__init__(begin)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = self.bert(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        x = self.norm(pool(outputs.last_hidden_state, attention_mask))
        if self.has_begun:
            x = x + outputs.hidden_states[2][:, 0]
        return classified(self.head(x), labels)


@case("K1")
def more_of_an_output_from_the_third_epoch() -> Script:
    """More of a frozen module's output is read in the middle of the third epoch, behind batch normalisation."""
    return of(ReadsMoreLater(begin=10), data=samples(32, 8, 8), observe=counted)
