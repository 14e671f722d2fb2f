"""Samples for a probe, and batches of some of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....model.called_inputs import LABELS_AND_DECODER
from ....model.micro_batch import Batch
from .batch_entries import BatchEntries
from .comparing import aligned
from .content_keys import IGNORED_LABEL, TOKEN_INPUTS, by_sequences, own_tokens

Collator = Callable[[list[Any]], Any]


def varied_samples(samples: Sequence[Any], collate: Collator, count: int = 4) -> list[Any]:
    """Select the shortest, the longest and some intermediate samples, by their number of tokens."""
    lengths = []
    try:
        for sample in samples:
            tokens = own_tokens(collate([copy.copy(sample)]))
            lengths.append(0 if tokens is None else max(tokens.lengths))
    except Exception:  # the collator rejects a single sample; the probe will report it
        return list(samples[:count])
    order = sorted(range(len(samples)), key=lengths.__getitem__)
    count = min(count, len(samples))
    return [samples[order[i * (len(samples) - 1) // max(count - 1, 1)]] for i in range(count)]


@dataclass(frozen=True)
class Rows:
    """A batch of some of the samples, on the model's device."""

    batch: Batch
    indices: Sequence[int]  # each row's (sequence's) index in a batch of all samples
    entries: BatchEntries
    sequences: int = 1  # number of sequences per sample, one after the other
    keeps_padding: bool = False

    @property
    def mask(self) -> torch.Tensor | None:
        """[rows, T], true at real tokens; None if there is no attention mask, or if padding counts as well."""
        mask = None if self.keeps_padding else self.batch.get("attention_mask")
        return None if mask is None else mask.reshape(-1, mask.shape[-1]).bool()

    def fits(self, state: torch.Tensor) -> bool:
        """Whether a tensor has the shape [B, T, ...]. Without a mask any T is accepted."""
        if self.mask is None:
            return state.dim() > 1 and state.shape[0] == len(self.indices)
        return state.shape[:2] == self.mask.shape


def shortened(batch: Batch, rows: Sequence[int], pad_id: int) -> Batch:
    """Turn the last third of some samples into padding, to imitate shorter samples.

    If all samples of a batch are shortened, the batch becomes narrower, unless other inputs may refer to positions.
    """
    mask = batch["attention_mask"].clone()
    tokens = mask.shape[-1]
    mask[rows, ..., tokens - tokens // 3 :] = 0
    padding = mask == 0
    others: Batch = {"attention_mask": mask}
    is_known = True
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.shape[: mask.dim()] != mask.shape or name == "attention_mask":
            continue
        if name in TOKEN_INPUTS:
            others[name] = value.masked_fill(aligned(padding, value), pad_id if name == "input_ids" else 0)
        elif name in LABELS_AND_DECODER and value.shape == mask.shape and not value.is_floating_point():
            others[name] = value.masked_fill(padding, IGNORED_LABEL)
        else:
            is_known = False
    width = int(mask.reshape(-1, tokens).any(0).sum()) if is_known else tokens
    return {**batch, **{name: value.narrow(mask.dim() - 1, 0, width) for name, value in others.items()}}


def with_other_padding(rows: Rows) -> Batch:
    """Return the batch with the sample's first token in place of all padding."""
    if rows.mask is None:
        return rows.batch
    number = torch.arange(len(rows.indices), device=rows.mask.device)
    first = torch.tensor([span.start for span in rows.entries.spans], device=rows.mask.device)
    others = {}
    for name, value in by_sequences(rows.batch).items():
        if name in TOKEN_INPUTS and name != "attention_mask" and value.shape[:2] == rows.mask.shape:
            replaced = torch.where(aligned(rows.mask, value), value, value[number, first].unsqueeze(1))
            others[name] = replaced.view_as(rows.batch[name])
    return {**rows.batch, **others}
