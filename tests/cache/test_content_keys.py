"""Samples have equal keys exactly if the frozen layers compute the same from them."""

from __future__ import annotations

import itertools
from collections import UserDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding

from hf_pipetransformer.model.called_inputs import LABELS_AND_DECODER
from hf_pipetransformer.model.micro_batch import slice_rows
from hf_pipetransformer.model.tags import TAGS
from hf_pipetransformer.parts.prefix_cache.cache.batch_entries import BatchEntries
from hf_pipetransformer.parts.prefix_cache.cache.content_keys import (
    KeyingCollator,
    entries_of,
)

WORDS = [[7, 8, 9], [5, 6], [7, 8, 9, 4, 5], [8]]


def padded(rows: list[list[int]], *, length: int = 0, pad: int = 0, side: str = "right") -> dict[str, torch.Tensor]:
    """Tokens, mask, types and class labels."""
    width = max(length, *map(len, rows))

    def place(row: list[int], fill: int) -> list[int]:
        padding = [fill] * (width - len(row))
        return row + padding if side == "right" else padding + row

    return {
        "input_ids": torch.tensor([place(row, pad) for row in rows]),
        "attention_mask": torch.tensor([place([1] * len(row), 0) for row in rows]),
        "token_type_ids": torch.tensor([place([0] * len(row), 0) for row in rows]),
        "labels": torch.arange(len(rows)) % 2,
    }


def content_keys(batch, ignored=LABELS_AND_DECODER) -> list[bytes] | None:
    entries = entries_of(batch, ignored)
    return None if entries is None else list(entries.digests)


def keys_of(*arguments, **options) -> list[bytes]:
    keys = content_keys(*arguments, **options)
    assert keys is not None
    return keys


def popped(batch) -> list[bytes]:
    entries = BatchEntries.of_tags(batch.pop(TAGS, None), width=0)
    assert entries is not None
    return list(entries.digests)


class FixedCollator:
    """Returns always the same batch."""

    def __init__(self, batch):
        self.batch = batch

    def __call__(self, samples):
        return self.batch


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[1, 1, 1], [1, 0, 1]]),
        torch.tensor([[1, 1, 1], [0, 0, 0]]),
        torch.ones(2),
        torch.tensor([[1, 1, 2, 2]]),
        torch.tensor([[0.0, 0.0, -1e4]]),
    ],
    ids=["hole", "empty row", "1-D", "packed", "additive"],
)
def test_masks_that_say_no_spans(mask):
    assert content_keys({"input_ids": torch.zeros(2, 3), "attention_mask": mask}) is None


# ---------------------------------------------------------------------------------------------------------
# Equal keys
# ---------------------------------------------------------------------------------------------------------

Rows = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(Rows, Rows, st.integers(0, 6), st.integers(0, 6), st.integers(0, 3), st.sampled_from(["left", "right"]))
def test_keys_are_equal_exactly_if_tokens_are(rows, others, length, other_length, pad, side):
    """A row has one key beside any other rows, with any length, side and token of padding, also a real token."""
    ours = keys_of(padded(rows, length=length))
    theirs = keys_of(padded(others, length=other_length, pad=pad, side=side))
    assert all(len(key) == 16 for key in ours + theirs)
    for (row, key), (other, other_key) in itertools.product(
        zip(rows, ours, strict=True), zip(others, theirs, strict=True)
    ):
        assert (key == other_key) == (row == other)


# ---------------------------------------------------------------------------------------------------------
# Different keys
# ---------------------------------------------------------------------------------------------------------


def with_one_bit_flipped(tensor: torch.Tensor, row: int) -> torch.Tensor:
    changed = tensor.clone().contiguous()
    changed[row].view(torch.uint8).view(-1)[0] ^= 1
    return changed


VALUES = torch.arange(16, dtype=torch.int32).view(2, 8)
OTHERS = {
    "the same bytes": [
        {"pixel_values": values}
        for values in (VALUES, VALUES.view(torch.float32), VALUES.view(2, 2, 4), VALUES.view(2, 4, 2))
    ],
    "plain values, with their type": [
        {**padded(WORDS), "option": value} for value in (None, False, 0, 0.0, "0", "", 1, True)
    ],
    "names, dtypes and other inputs": [
        batch := padded(WORDS),
        {**batch, "input_ids": batch["input_ids"].int()},
        {("ids" if name == "input_ids" else name): value for name, value in batch.items()},
        {name: value for name, value in batch.items() if name != "token_type_ids"},
        {**batch, "constants": torch.zeros(2, 2)},  # shared by the rows
        {**batch, "task": torch.zeros(4)},
    ],
}


def test_labels_are_no_part_of_a_key_and_other_answers_are():
    batch, places = padded(WORDS), {"start_positions": torch.ones(4)}
    expected = keys_of(batch)
    assert keys_of({**batch, "labels": torch.ones(4, 9), "decoder_input_ids": torch.ones(4, 2)}) == expected
    del batch["labels"]
    assert keys_of(batch) == expected != keys_of({**batch, **places})
    assert keys_of({**batch, **places}, ignored={"start_positions"}) == expected
    assert content_keys({**batch, "cannot be hashed": object()}) is None


@pytest.mark.parametrize("kind", OTHERS)
def test_another_input_has_other_keys(kind):
    keys = [set(keys_of(batch)) for batch in OTHERS[kind]]
    assert len(set().union(*keys)) == sum(map(len, keys))


def test_another_input_as_long_as_the_mask_is_not_cut():
    """Beside two tokens, padded to five: cut to two entries, both would be the same."""
    batch, features = padded([WORDS[1]], length=5), torch.tensor([[1.0, 2, 0, 0, 0]])
    assert keys_of({**batch, "features": features}) != keys_of({**batch, "features": features.roll(1)})


def test_masked_tokens_that_are_no_padding_count():
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 1, 0, 0]])
    batches = [
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids, "attention_mask": mask.flip(1)},
        {"input_ids": torch.tensor([[5, 6, 9, 8]]), "attention_mask": mask},
        {"input_ids": torch.tensor([[5, 6, 0, 0]]), "attention_mask": mask},
    ]
    assert len({keys_of(batch)[0] for batch in batches}) == len(batches)


@pytest.mark.parametrize("images", [torch.zeros(2, 3, 4, 4), torch.zeros(5, 7)])
def test_images_beside_text_belong_to_no_row_alone(images):
    """Even if they are as many as the rows: both may be the first row's."""
    batch = {**padded(WORDS[:2]), "pixel_values": images}
    changed = {**batch, "pixel_values": with_one_bit_flipped(images, -1)}
    assert not set(keys_of(batch)) & set(keys_of(changed))


# ---------------------------------------------------------------------------------------------------------
# The collator
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [dict, UserDict, BatchEncoding])
def test_the_collator_adds_keys_to_any_mapping_and_leaves_the_users_alone(make):
    theirs = make(padded(WORDS))
    for _ in range(2):  # a dataset of whole batches gives the same object again
        batch = KeyingCollator(FixedCollator(theirs))([])
        assert type(batch) is type(theirs)
        assert TAGS not in theirs
        assert all(batch[name] is value for name, value in theirs.items())
        assert batch[TAGS].shape == (4, 4)
        assert popped(batch) == content_keys(theirs)
        assert batch.keys() == theirs.keys()


def test_what_has_no_keys_passes_and_the_reserved_name_is_refused():
    theirs = [1, 2]
    assert KeyingCollator(FixedCollator(theirs))([]) is theirs
    with pytest.raises(ValueError, match=rf"'{TAGS}'.*Rename"):
        KeyingCollator(FixedCollator({**padded(WORDS), TAGS: torch.ones(4)}))([])


def test_each_sequence_of_a_sample_has_a_key_and_they_are_cut_with_the_sample():
    """Inputs [samples, choices, tokens]."""
    flat = {name: value for name, value in padded(WORDS).items() if name != "labels"}
    choices = {name: value.view(2, 2, -1) for name, value in flat.items()} | {"labels": torch.tensor([0, 1])}
    assert keys_of(choices) == keys_of(flat)
    batch = KeyingCollator(FixedCollator(choices))([])
    assert popped(slice_rows(batch, 1, 2)) == keys_of(flat)[2:]
    topics = torch.tensor([3, 4])  # of the samples
    assert keys_of({**choices, "topic": topics}) == keys_of({**flat, "topic": topics.repeat_interleave(2)})
