"""Content keys: a hash of each sample's model inputs identifies its cached activations.

    input_ids       7 8 9 0 0    attention_mask  1 1 1 0 0    labels  1        -> 16 bytes of  7 8 9, 1 1 1
    input_ids       7 8 9        attention_mask  1 1 1        labels  0        -> the same key
    input_ids       7 8 6 0 0    attention_mask  1 1 1 0 0    labels  1        -> another key

A key is computed from the contents, not from an index. A shuffled, streamed or augmented dataset therefore needs no
special treatment, and a sample with changed inputs is a miss. The hash is xxh3: different inputs share one by chance
only (128 bits), but crafted data may collide. Users who may write to a shared folder are trusted as well: entries are
checked for damage, not for forgery. A key leaves out the padding, which no model should read, and the labels. Neither
may affect the frozen layers, and `cache_probe` checks this on the model.

A key does not cover changes to the inputs on their way to the model: `RecordedInputs` checks that the model gets the
same inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch
import xxhash

from ....model.called_inputs import LABELS_AND_DECODER, PLAIN
from ....model.micro_batch import batch_rows
from ....model.tags import TAGS
from .batch_entries import WHOLE, BatchEntries, Tokens, bytes_of

MASK = "attention_mask"
IGNORED_LABEL = -100
"""The label that cross entropy ignores."""

TOKEN_INPUTS: frozenset[str] = frozenset(
    {"attention_mask", "bbox", "input_ids", "inputs_embeds", "position_ids", "token_type_ids"}
)
"""Inputs with one entry per token in every model. Their padding can be removed.

Other tensors of the attention mask's length are ambiguous: five entries may be five features beside five tokens. If
they were truncated, two samples that differ only in their features could get the same key.
"""


def sequences_per_sample(batch: Mapping[str, Any]) -> int:
    """Return the number of sequences per sample: C if mask and tokens are [B, C, T] (choices of an answer), else 1."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 3:
        return 1
    tokens = [batch[name] for name in TOKEN_INPUTS - {"attention_mask"} if isinstance(batch.get(name), torch.Tensor)]
    return int(mask.shape[1]) if any(value.shape[:3] == mask.shape for value in tokens) else 1


def by_sequences(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch with a row for each sequence, as layers see it: inputs [B, C, T] as [B * C, T].

    A sample's inputs without an entry per token are repeated for each of its sequences.
    """
    if (count := sequences_per_sample(batch)) == 1:
        return batch
    mask = batch["attention_mask"]

    def rows_of(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape[:1] != mask.shape[:1]:
            return value
        if name in TOKEN_INPUTS and value.shape[:3] == mask.shape:
            return value.flatten(0, 1)
        return value.repeat_interleave(count, 0)

    return {name: rows_of(name, value) for name, value in batch.items()}


def own_tokens(batch: Mapping[str, Any], ignored: Collection[str] = ()) -> Tokens | None:
    """Return each sample's own tokens, first to last + 1. Without an attention mask, samples have no tokens.

    Args:
        batch: the model's inputs. A mask must be [B, T] or [B, C, T] (`by_sequences`) of zeros and ones, with padding
            on either side.
        ignored: names of inputs that are not part of a key. An ignored mask counts as absent.

    Returns:
        Tokens of B (or B * C) rows, or None if samples and padding cannot be separated: a mask of another shape (4-D,
        packed) or with other values, a sample with gaps or without tokens; without a mask, tensors of several sizes.
    """
    mask = batch.get(MASK) if MASK not in ignored else None
    if mask is None:
        batch = {name: value for name, value in batch.items() if name not in ignored}
        rows = {value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor) and value.dim() > 0}
        return Tokens((WHOLE,) * batch_rows(batch), 0) if len(rows) == 1 else None
    if sequences_per_sample(batch) > 1:
        mask = mask.flatten(0, 1)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[1] == 0:
        return None
    valid = mask.bool()
    if not torch.equal(valid.to(mask.dtype), mask):
        return None
    ones = valid.int()
    counts = ones.sum(1)
    starts = ones.argmax(1)  # position of the first one
    stops = ones.shape[1] - ones.flip(1).argmax(1)
    if not torch.equal(stops - starts, counts):  # also unequal for a sample without tokens
        return None
    return Tokens(tuple(map(slice, starts.tolist(), stops.tolist())), mask.shape[1])


def padded_length(batch: Mapping[str, Any], ignored: Collection[str] = ()) -> int:
    """Return the padded length of a batch with keys; 0 if there is no attention mask, or it is ignored."""
    mask = batch.get(MASK) if MASK not in ignored else None
    return int(mask.shape[-1]) if isinstance(mask, torch.Tensor) and mask.dim() else 0


def entries_of(
    batch: Mapping[str, Any], ignored: Collection[str] = LABELS_AND_DECODER, keeps_padding: bool = False
) -> BatchEntries | None:
    """Return the samples' entries. A key is a hash of names, dtypes, shapes and values of the inputs it depends on.

    1. `TOKEN_INPUTS` count without padding, if the padding repeats one value; otherwise they count unchanged.
    2. A sample also has its own entry in a tensor [B] or in integers [B, T], and its own part of the only other
       input, if there is just one. The latter two bind the key to the padded length.
    3. Any other tensor counts as a whole for each sample, and so do plain values: two images beside two texts may both
       belong to the first text.

    Args:
        batch: the model's inputs.
        ignored: names of inputs that are not part of the key.
        keeps_padding: whether the padding counts as well, because the loss reads its states.

    Returns:
        An entry for each sample (each sequence, `by_sequences`); None if `own_tokens` returns None, or if an input
        is neither a tensor nor None, a bool, a number or a string.
    """
    tokens = own_tokens(batch, ignored)
    if tokens is None:
        return None
    rows = len(tokens.spans)
    if keeps_padding:
        tokens = Tokens((WHOLE,) * rows, tokens.width)
    batch = by_sequences(batch)
    inputs = {name: batch[name] for name in sorted(batch) if name not in ignored and name != TAGS}
    if not all(isinstance(value, (torch.Tensor, *PLAIN)) for value in inputs.values()):
        return None
    tensors = {name: value.to_dense() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    plain = {name: value for name, value in inputs.items() if name not in tensors}
    length = next((t.shape[1] for name, t in tensors.items() if name in TOKEN_INPUTS and t.dim() > 1), 0)
    large = [name for name, tensor in tensors.items() if tensor.dim() > 1 and name != MASK]

    def belongs_to_rows(name: str, tensor: torch.Tensor) -> bool:
        is_of_tokens = tensor.shape == (rows, length) and not tensor.is_floating_point()
        return tensor.shape[:1] == (rows,) and (tensor.dim() == 1 or is_of_tokens or large == [name])

    by_token = {n: t for n, t in tensors.items() if n in TOKEN_INPUTS and t.shape[:2] == (rows, length)}
    by_row = {n: t for n, t in tensors.items() if n not in by_token and belongs_to_rows(n, t)}
    whole = {n: t for n, t in tensors.items() if n not in by_token and n not in by_row}
    return entries_of_parts(tokens, by_token, by_row, whole, plain)


def entries_of_parts(
    tokens: Tokens,
    by_token: Mapping[str, torch.Tensor],
    by_row: Mapping[str, torch.Tensor],
    whole: Mapping[str, torch.Tensor],
    plain: Any,
) -> BatchEntries:
    """Return an entry for each row, with a hash of the values that belong to it.

    Args:
        tokens: each row's own tokens.
        by_token: tensors `[rows, tokens, ...]`. Their padding counts unless it repeats one value.
        by_row: tensors `[rows, ...]`.
        whole: tensors that count for each row.
        plain: plain values that count for each row.
    """
    rows, length = len(tokens.spans), next((tensor.shape[1] for tensor in by_token.values()), 0)
    described = [
        [(name, tensor.dtype, tensor.shape[dim:]) for name, tensor in group.items()]
        for group, dim in ((by_token, 2), (by_row, 1), (whole, 0))
    ]
    shared = xxhash.xxh3_128(repr((plain, described)).encode())
    for tensor in whole.values():
        shared.update(bytes_of(tensor))
    of_tokens = [_Parts(tensor, rows * length) for tensor in by_token.values()]
    of_rows = [_Parts(tensor, rows) for tensor in by_row.values()]
    digests = []
    for row, span in enumerate(tokens.spans):
        first = row * length
        start, stop, _ = span.indices(length)
        if not all(parts.repeat_outside(first, first + start, first + stop, first + length) for parts in of_tokens):
            start, stop = 0, length
        # the other tensors may refer to a token by its position in the padded sample
        offset = start if by_row or whole else 0
        key = shared.copy()
        key.update(b"%d,%d;" % (stop - start, offset))
        for parts in of_tokens:
            key.update(parts.between(first + start, first + stop))
        for parts in of_rows:
            key.update(parts.between(row, row + 1))
        digests.append(key.digest())
    return BatchEntries(tokens.spans, tokens.width, tuple(digests))


class KeyingCollator:
    """Calls the user's collator and adds keys to its batch.

    It is picklable, for a loader's workers, if `inner` is.

    Args:
        inner: the user's collator.
        ignored: names of inputs that are not part of a key.
        keeps_padding: as for `entries_of`.
    """

    def __init__(
        self,
        inner: Callable[[list[Any]], Any],
        ignored: Collection[str] = LABELS_AND_DECODER,
        keeps_padding: bool = False,
    ) -> None:
        self.inner = inner
        self.ignored = ignored
        self.keeps_padding = keeps_padding

    def __call__(self, samples: list[Any]) -> Any:
        """Return the user's batch, with its keys if it is a mapping and keys can be computed.

        Raises:
            ValueError: the user's batch has an input with the reserved name.
        """
        batch = self.inner(samples)
        if not isinstance(batch, Mapping):
            return batch
        if TAGS in batch:
            raise ValueError(
                f"The data collator returns an input named {TAGS!r}, which is reserved for the activation cache."
                " Rename this input."
            )
        entries = entries_of(batch, self.ignored, self.keeps_padding)
        if entries is None:
            return batch
        tensor = entries.as_tags()
        if (count := sequences_per_sample(batch)) > 1:
            tensor = tensor.view(-1, count, tensor.shape[1])  # split along the samples, as the inputs are
        if not isinstance(batch, MutableMapping):
            return {**batch, TAGS: tensor}
        keyed = copy.copy(batch)  # a dataset of whole batches returns the same object in each epoch
        keyed[TAGS] = tensor
        return keyed


class _Parts:
    """The bytes of a tensor as `count` equal parts: its samples or its tokens."""

    def __init__(self, tensor: torch.Tensor, count: int) -> None:
        self._data = bytes_of(tensor)
        self._size = len(self._data) // max(count, 1)

    def between(self, start: int, stop: int) -> memoryview:
        return self._data[start * self._size : stop * self._size]

    def repeat_outside(self, first: int, start: int, stop: int, last: int) -> bool:
        """Whether the parts in [first, start) and [stop, last) are all equal, like padding."""
        outside = bytes(self.between(first, start)) + bytes(self.between(stop, last))
        return outside == outside[: self._size] * (start - first + last - stop)
