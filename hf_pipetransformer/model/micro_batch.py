"""Splits a batch into micro-batches along the batch dimension.

row: one entry along the batch dimension of a batch, i.e. one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import PeerFailedError, is_out_of_memory
from .nested import tensors_of

Batch = dict[str, Any]

MOST_UNUSED_POSITIONS = 2
"""Positions at the start of an embedding table beyond `max_position_embeddings`, as in OPT and BART."""


UNNAMED = "(unnamed inputs)"
"""Name of the single entry of a batch that the user's collator returns as a tuple or list instead of a dict."""


def with_name(batch: Any) -> Mapping[str, Any]:
    """Return a batch as a mapping, even if the user's collator returns a tuple or list."""
    return batch if isinstance(batch, Mapping) else {UNNAMED: batch}


def as_the_user_made_it(batch: Batch) -> Any:
    """Return the batch that was passed to `with_name`."""
    return batch.get(UNNAMED, batch)


def refuse_unnamed(batch: Batch) -> None:
    """Refuse a batch that the user's collator does not return as a dict.

    Raises:
        ValueError: `with_name` has given the batch its name.
    """
    if UNNAMED in batch:
        raise ValueError(
            f"The data collator returns a {type(batch[UNNAMED]).__name__}, but pipeline stages need the model's inputs"
            " by name. Return a dict of them, or set pipeline_parallel_size=1."
        )


def refuse_without_tensors(batch: Batch) -> None:
    """Refuse a batch without visible shapes, because stages must know them.

    Raises:
        ValueError: no tensor in it has a batch dimension.
    """
    if not any(tensor.dim() for tensor in tensors_of(batch)):
        raise ValueError(
            f"The batch has no tensor with a batch dimension, but only {sorted(batch)}, and pipeline stages need to"
            " know the shapes. Let the data collator tokenize, or set pipeline_parallel_size=1."
        )


def batch_rows(batch: Mapping[str, Any], default: int | None = None) -> int:
    """Number of samples: the first dimension of the batch's first tensor, or the length of its first list.

    Args:
        batch: the batch.
        default: returned if the batch has neither.

    Raises:
        ValueError: if the batch has neither, and there is no default.
    """
    for tensor in tensors_of(batch):
        if tensor.dim() > 0:
            return int(tensor.shape[0])
    lists = (value for value in batch.values() if isinstance(value, (list, tuple)))
    rows = next(map(len, lists), default)
    if rows is not None:
        return rows
    raise ValueError(
        f"The batch has no tensor with a batch dimension, but only {sorted(batch)}. Check the data collator."
    )


def numbers_of_rows(value: Any) -> set[int]:
    """The first dimensions of the tensors in a nested value. If there are several, not every row is a sample."""
    return {int(tensor.shape[0]) for tensor in tensors_of(value) if tensor.dim() > 0}


def slice_rows(batch: Mapping[str, Any], start: int, stop: int) -> Batch:
    """Samples [start, stop) of every tensor, list or tuple that has one entry per sample; other values unchanged.

    Includes those inside dicts, lists and tuples.

    Args:
        batch: the whole batch.
        start: the first sample.
        stop: the sample after the last one.
    """
    part: Batch = _cut(batch, batch_rows(batch), lambda value: value[start:stop])
    return part


def select_rows(batch: Mapping[str, Any], rows: list[int]) -> Batch:
    """Some samples of every tensor, list or tuple that has one entry per sample; other values unchanged."""
    return _cut(batch, batch_rows(batch), partial(_chosen, rows))


def _chosen(rows: list[int], value: Any) -> Any:
    return value[rows] if isinstance(value, torch.Tensor) else type(value)(value[row] for row in rows)


def _cut(value: Any, rows: int, part: Callable[[Any], Any]) -> Any:
    """Apply `part` to all values that have one entry per sample."""
    if isinstance(value, torch.Tensor):
        return part(value) if value.dim() > 0 and value.shape[0] == rows else value
    if isinstance(value, Mapping):
        return {key: _cut(inner, rows, part) for key, inner in value.items()}
    if _is_one_per_row(value, rows):
        return part(value)
    if type(value) in (list, tuple) and tensors_of(value):
        return type(value)(_cut(inner, rows, part) for inner in value)
    return value


def _is_one_per_row(value: Any, rows: int) -> bool:
    """Whether a list or tuple has one entry per sample; False if each entry is a tensor of all samples."""
    if not isinstance(value, (list, tuple)) or len(value) != rows:
        return False
    return not all(isinstance(one, torch.Tensor) and one.shape[:1] == (rows,) for one in value)


@contextmanager
def naming_long_rows(model: nn.Module, batch: Any) -> Iterator[None]:
    """Inside, an error of the model is replaced if a sample has more tokens than the model has positions.

    Raises:
        ValueError: if the model raised an error, and the batch's samples are longer than its table of positions.
    """
    try:
        yield
    except (RuntimeError, IndexError) as error:
        most, tokens = _most_tokens(model), _most_tokens_in(batch)
        if isinstance(error, PeerFailedError) or is_out_of_memory(error) or most is None or tokens <= most:
            raise
        raise ValueError(
            f"The batch has samples of {tokens} tokens, but {type(model).__name__} supports at most {most}"
            " (max_position_embeddings). Truncate them, for example with tokenizer(..., truncation=True,"
            f" max_length={most}). The original error was {type(error).__name__}: {error}"
        ) from error


def _most_tokens(model: nn.Module) -> int | None:
    """Maximum number of tokens of a sample by the position table; None without a table, as with rotary positions."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    for module in model.modules():
        if isinstance(module, nn.Embedding) and 0 <= module.num_embeddings - most <= MOST_UNUSED_POSITIONS:
            # RoBERTa counts positions from the padding id + 1 on, within the table
            is_within = module.num_embeddings == most and module.padding_idx is not None
            return most - (module.padding_idx or 0) - 1 if is_within else most
    return None


def _most_tokens_in(batch: Any) -> int:
    """Number of tokens of a sample; 0 without tokens, or with given positions, which restart in each document.

    It reads only shapes, because a device may not respond after a kernel has failed.
    """
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) and batch.get("position_ids") is None else None
    return tokens.shape[1] if isinstance(tokens, torch.Tensor) and tokens.dim() >= 2 else 0


@dataclass(frozen=True)
class SampleBounds:
    """The first row of each sample in the tensors of a batch, if some have other numbers of rows than samples.

    pixel_values  [patches of sample 0 | of sample 1 | ...]      bounds 0, 16, 16, 24: sample 1 has no image

    Attributes:
        of: for each tensor, the first row of each sample, and then the number of rows; without tensors that are the
            same for any samples, such as a prompt.
        count: number of samples.
    """

    of: Mapping[str, tuple[int, ...]]
    count: int

    @classmethod
    def found(cls, batch: Batch, first: Sequence[Mapping[str, Any]]) -> SampleBounds | None:
        """Find the bounds from the batches that a collator makes of the first sample, the first two, and so on.

        Args:
            batch: the batch of all samples.
            first: the batches of the first samples.

        Returns:
            The bounds; None if a tensor of `batch` does not begin with the smaller batches' tensor, or has no rows for
            samples.
        """
        of, count = dict[str, tuple[int, ...]](), len(first) + 1
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor):
                if tensors_of(value) or isinstance(value, (list, tuple)):
                    return None
                continue
            parts = [one.get(name) for one in first]
            if not value.dim() or not all(part is None or isinstance(part, torch.Tensor) for part in parts):
                return None
            bounds = (0, *(0 if part is None else len(part) for part in parts), len(value))
            is_by_sample = bounds == tuple(range(count + 1))
            if not is_by_sample and not all(part is None or torch.equal(part, value[: len(part)]) for part in parts):
                return None
            if len(set(bounds[1:])) > 1:
                of[name] = bounds
        return cls(of, count)

    def cut(self, batch: Batch, start: int, stop: int) -> Batch:
        """Samples [start, stop) of the batch; without tensors that have no rows for them."""
        spans = {name: slice(bounds[start], bounds[stop]) for name, bounds in self.of.items()}
        return {
            name: value[spans[name]] if name in spans else value
            for name, value in batch.items()
            if name not in spans or spans[name].start < spans[name].stop
        }


def split_batch(batch: Mapping[str, Any], count: int) -> list[Batch]:
    """Split a batch into `count` micro-batches of equal size; `count` must divide the number of samples."""
    rows = batch_rows(batch)
    assert rows % count == 0, f"{rows} samples are not divisible into {count} micro-batches"
    size = rows // count
    return [slice_rows(batch, i * size, (i + 1) * size) for i in range(count)]


def shape_signature(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """Everything that determines the shapes inside the model, except the number of samples."""
    rows = batch_rows(batch)

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            return (shape[1:] if shape[:1] == (rows,) else ("whole", *shape)), value.dtype
        if isinstance(value, Mapping):
            return tuple((key, of(inner)) for key, inner in sorted(value.items()))
        if type(value) in (list, tuple) and not _is_one_per_row(value, rows):
            return tuple(of(inner) for inner in value)
        return value if isinstance(value, (bool, int, float, str)) else type(value).__name__

    return tuple((key, of(value)) for key, value in sorted(batch.items()))
