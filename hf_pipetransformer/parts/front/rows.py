"""Divides a batch, and the tensors computed from it, among the samples.

inputs [rows, width, ...]     the first columns belong to the sample, if there is a mask; the rest is padding
arguments, outputs            some entries for each row (`divided`)
keys, digests                 some bytes for each row, from its own values only
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ...model.called_inputs import LABELS_AND_DECODER, NOT_OF_STATES, version_of
from ..prefix_cache.cache.batch_entries import BatchEntries, Tokens, bytes_of
from ..prefix_cache.cache.content_keys import IGNORED_LABEL, MASK, TOKEN_INPUTS, entries_of_parts, own_tokens
from .divided import Rows

DIGEST_BYTES = 32
"""Size of the digest of a row's arguments: 16 bytes for its values, and 16 for its boolean masks."""
NO_MASK = bytes(16)
"""The second half for a row without a mask, or with a mask that keeps all of the row's tokens."""
CAUSAL = b"causal".ljust(16)
"""The second half for a row with a causal mask, which hides the later tokens from each token."""

EITHER = {NO_MASK, CAUSAL}


def leaves_of(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values in mappings and lists, each with the name of the innermost mapping's entry."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from leaves_of(value[key], str(key))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from leaves_of(entry, name)
    else:
        yield name, value


def tokens_of(inputs: Mapping[str, Any]) -> Tokens | None:
    """The samples' tokens; None if padding cannot be recognized, is not on the right, or has labels that count."""
    leaves = [(name, value) for name, value in leaves_of(inputs) if isinstance(value, torch.Tensor)]
    masks = [value for name, value in leaves if name == MASK]
    if len(masks) != 1 or masks[0].dim() != 2:
        return None
    shape = masks[0].shape
    known = TOKEN_INPUTS | LABELS_AND_DECODER
    if any(value.shape[:2] == shape and name not in known for name, value in leaves):
        return None  # the number of features may happen to equal the number of tokens
    tokens = own_tokens({MASK: masks[0]})
    if tokens is None or any(span.start for span in tokens.spans):
        return None
    of_tokens = [value for name, value in leaves if name in LABELS_AND_DECODER and value.shape[:2] == shape]
    is_padding = masks[0] == 0
    if any(bool((labels[is_padding.to(labels.device)] != IGNORED_LABEL).any()) for labels in of_tokens):
        return None
    return tokens


def is_wide(name: str, tensor: torch.Tensor, tokens: Tokens | None) -> bool:
    """Whether an input has the batch's columns, and so some columns of each sample."""
    return tokens is not None and tokens.width > 0 and name in TOKEN_INPUTS and tensor.shape[1:2] == (tokens.width,)


def may_have_padding(inputs: Mapping[str, Any]) -> bool:
    """Whether any mask of a batch hides a position, or the batch has no mask. A mask's name may have a prefix."""
    masks = [value for name, value in leaves_of(inputs) if name.endswith(MASK) and isinstance(value, torch.Tensor)]
    return not masks or any(bool((mask == 0).any()) for mask in masks)


def with_less_columns(inputs: Mapping[str, Any], columns: int, removes: bool) -> Any:
    """Return the batch with its last columns masked as padding, or removed."""

    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        if removes and name in TOKEN_INPUTS:
            return value[:, :-columns].contiguous()
        if name == MASK:
            value = value.clone()
            value[:, -columns:] = 0
        return value

    return _with_changed_columns(inputs, change)


def with_more_columns(inputs: Mapping[str, Any], columns: int, padding: Mapping[str, float]) -> Any:
    """Return the batch with this many more columns of padding; inputs without a value in `padding` get zeros."""

    def change(name: str, value: torch.Tensor) -> torch.Tensor:
        if name not in TOKEN_INPUTS:
            return value
        size = (len(value), columns, *value.shape[2:])
        return torch.cat([value, value.new_full(size, padding.get(name, 0))], dim=1)

    return _with_changed_columns(inputs, change)


def _with_changed_columns(inputs: Mapping[str, Any], change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch with `change` applied to each tensor that has the mask's samples and columns."""
    shape = next(value.shape for name, value in leaves_of(inputs) if name == MASK)

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: changed(key, entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [changed(name, entry) for entry in value]
        return change(name, value) if isinstance(value, torch.Tensor) and value.shape[:2] == shape else value

    return {name: changed(name, value) for name, value in inputs.items()}


def entries_of(leaves: Sequence[tuple[str, Any]], rows: Rows, tokens: Tokens, others: str) -> BatchEntries | None:
    """Return the rows' entries, by a hash of names, types, shapes and values of the front's inputs, and of the mask.

    Args:
        leaves: the inputs of the front, by name; each is divided among the rows.
        rows: the rows.
        tokens: the columns that belong to each sample; none if padding counts.
        others: other values that the front depends on, in words.

    Returns:
        None if the values of an input cannot be read.
    """
    leaves = [(name, leaf) for name, leaf in leaves if name not in NOT_OF_STATES]
    tensors = [(name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]
    plain = [(name, leaf) for name, leaf in leaves if not isinstance(leaf, torch.Tensor)]
    if any(tensor.layout is not torch.strided or tensor.requires_grad for _, tensor in tensors):
        return None

    named = {f"{number} {name}": tensor for number, (name, tensor) in enumerate(tensors)}
    wide = {name for name, tensor in named.items() if is_wide(name.split()[-1], tensor, tokens)}
    by_token, by_row = ({n: t for n, t in named.items() if (n in wide) is kind} for kind in (True, False))
    if rows.patches:
        plain += [(name, tensor.shape[1:]) for name, tensor in by_row.items()]
        by_row = {name: _digests_of_parts(tensor, rows) for name, tensor in by_row.items()}
    elif any(tensor.dim() and len(tensor) > rows.count for tensor in by_row.values()):  # several entries for each row
        by_row = {name: tensor.unflatten(0, (rows.count, -1)) for name, tensor in by_row.items()}
    return entries_of_parts(tokens, by_token, by_row, {}, (plain, others))


def _digests_of_parts(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Digests of type and values of each row's entries, `[rows, 16]` as uint8. Rows may have different numbers."""
    kind = repr(tensor.dtype).encode()
    digests = (xxhash.xxh3_128(kind + bytes(bytes_of(part))).digest() for part in rows.split(tensor))
    return torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).view(rows.count, -1)


@dataclass(frozen=True)
class Divided:
    """How a module's arguments are divided among the rows and their tokens, for each tensor; empty if unknown.

    `rows` tells whether it has entries for each row, and `wide` has its dimensions with the columns of the batch.
    """

    rows: tuple[bool, ...] = ()
    wide: tuple[tuple[int, ...], ...] = ()


class ArgumentDigests:
    """For each row, digests of the modules' arguments in one call of the model.

    Args:
        rows: the rows.
        tokens: the columns that belong to each sample; none if padding counts.
        inputs: id of each tensor in the keys -> its number, and its count of writes when the keys were computed.
    """

    def __init__(self, rows: Rows, tokens: Tokens, inputs: Mapping[int, tuple[int, int]]) -> None:
        self._rows, self._tokens, self._inputs = rows, tokens, inputs
        # cached by tensor, because all layers get the same mask
        self._known: dict[tuple[Any, ...], tuple[torch.Tensor, list[bytes]]] = {}

    def of(
        self, given: Sequence[torch.Tensor], plain: str, of_front: Mapping[int, int], divided: Divided
    ) -> torch.Tensor:
        """Digests of a module's arguments, without outputs of the front itself.

        Boolean masks have a separate digest, because a model may pass no mask if a batch has no padding.

        Args:
            given: the tensors among the arguments.
            plain: the other arguments, in words, without those that are None.
            of_front: id of each tensor that is left out -> its count of writes. If it was written to, it counts.
            divided: how the tensors are divided.

        Returns:
            `[rows, DIGEST_BYTES]`, uint8, on the CPU.
        """
        has_rows: Sequence[bool] = divided.rows
        if len(has_rows) != len(given):
            has_rows = [tensor.dim() > 0 and len(tensor) == self._rows.count for tensor in given]
        wide = divided.wide if len(divided.wide) == len(given) else [None] * len(given)
        found, masks = list[list[bytes]](), list[list[bytes]]()
        for tensor, has, dims in zip(given, has_rows, wide, strict=True):
            if of_front.get(id(tensor)) != version_of(tensor) and tensor.numel():
                (masks if tensor.dtype is torch.bool else found).append(self._of_one(tensor, has, dims))
        content = bytearray()
        for row in range(self._rows.count):
            content += xxhash.xxh3_128(plain.encode() + b"".join(digests[row] for digests in found)).digest()
            of_masks = [digests[row] for digests in masks] or [NO_MASK]
            is_one = len(set(of_masks)) == 1 and of_masks[0] in (NO_MASK, CAUSAL)
            content += of_masks[0] if is_one else xxhash.xxh3_128(b"".join(of_masks)).digest()
        return torch.frombuffer(content, dtype=torch.uint8).view(self._rows.count, DIGEST_BYTES)

    def _of_one(self, tensor: torch.Tensor, has_rows: bool, dims: Collection[int] | None) -> list[bytes]:
        number, version = self._inputs.get(id(tensor), (-1, -1))
        if number >= 0 and version == version_of(tensor):  # its number is enough, because the key has its values
            return [b"input %d" % number] * self._rows.count
        key = id(tensor), version_of(tensor), has_rows, dims  # it may be written to before the next module gets it
        if key not in self._known or tensor.is_inference():
            values, width = tensor.detach().cpu(), self._tokens.width
            rows, has_rows = self._rows.count, has_rows and self._rows.divides(values)
            wide = [dim for dim, size in enumerate(values.shape) if size == width and (dim or not has_rows)]
            wide = [dim for dim in wide if dims is None or dim in dims]  # there may be as many features as tokens
            shape = [size for dim, size in enumerate(values.shape) if dim not in wide and (dim or not has_rows)]
            parts = self._rows.split(values) if has_rows else [values] * (rows if wide else 1)
            digests = []
            for row, part in enumerate(parts):
                for dim in wide:
                    part = part.narrow(dim, 0, self._tokens.lengths[row])
                if part.dtype is torch.bool and (known := _known_mask(part)) is not None:
                    digests.append(known)
                    continue
                digest = xxhash.xxh3_128(repr(shape).encode())
                digest.update(bytes_of(part))
                digests.append(digest.digest())
            self._known[key] = tensor, digests if len(digests) == rows else digests * rows
        return self._known[key][1]


def masks_in(digests: torch.Tensor) -> list[bytes]:
    """The second halves of digests `[rows, DIGEST_BYTES]`."""
    return [row.numpy().tobytes() for row in digests[:, DIGEST_BYTES // 2 :]]


def are_equal(digests: torch.Tensor, stored: torch.Tensor, implies_causal: bool) -> bool:
    """Whether a module has the same arguments as before, apart from masks that are known to have no effect.

    Args:
        digests: digests of its arguments now, `[rows, DIGEST_BYTES]`.
        stored: digests of its arguments before, `[rows, DIGEST_BYTES]`.
        implies_causal: whether it computes the same without a mask as with a causal one.
    """
    if torch.equal(digests, stored):
        return True
    half = DIGEST_BYTES // 2
    pairs = zip(masks_in(digests), masks_in(stored), strict=True)
    are_masks = all(one == other or (implies_causal and {one, other} == EITHER) for one, other in pairs)
    return are_masks and torch.equal(digests[:, :half], stored[:, :half])


class PaddingValues:
    """The padding values of inputs in the first batch with padding. They are not part of the keys."""

    def __init__(self) -> None:
        self.known: dict[str, float] = {}

    def is_same(self, inputs: Mapping[str, Any], names: Collection[str], tokens: Tokens) -> bool:
        """Whether each of the named inputs has a single padding value, the same as before."""
        if not tokens.has_padding:
            return True
        is_padding = torch.arange(tokens.width) >= torch.tensor(tokens.lengths)[:, None]
        for name, tensor in self._wide(inputs, names, tokens):
            values = tensor[is_padding.to(tensor.device)].unique()
            if len(values) != 1 or float(values[0]) != self.known.setdefault(name, float(values[0])):
                return False
        return True

    def are_known(self, inputs: Mapping[str, Any], names: Collection[str], tokens: Tokens) -> bool:
        """Whether the padding values of the named inputs are known. Until a batch has padding, they are not."""
        return all(name in self.known for name, _ in self._wide(inputs, names, tokens))

    def _wide(
        self, inputs: Mapping[str, Any], names: Collection[str], tokens: Tokens
    ) -> Iterator[tuple[str, torch.Tensor]]:
        shape = len(tokens.spans), tokens.width
        for name, tensor in (leaf for of in sorted(names) for leaf in leaves_of(inputs[of], of)):
            if isinstance(tensor, torch.Tensor) and name in TOKEN_INPUTS and tensor.shape[:2] == shape:
                yield name, tensor


def _known_mask(mask: torch.Tensor) -> bytes | None:
    """The digest of a row's mask if it keeps all positions or is causal; None for other masks."""
    if bool(mask.all()):
        return NO_MASK
    is_square = mask.dim() >= 2 and mask.shape[-1] == mask.shape[-2]
    is_causal = is_square and torch.equal(mask, torch.ones_like(mask).tril())
    return CAUSAL if is_causal else None


def differ(one: Any, other: Any) -> bool:
    """Whether two values or tensors differ."""
    return not torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one != other)
