"""Cut a batch into micro-batches along its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from ..errors import PeerFailedError, is_out_of_memory

Batch = dict[str, Any]

MOST_UNUSED_POSITIONS = 2
"""At the begin of a table of positions, beyond `max_position_embeddings`: OPT's and BART's."""


def batch_rows(batch: Mapping[str, Any]) -> int:
    """Number of rows: the first dimension of the batch's first tensor.

    Raises:
        ValueError: there is no tensor with a dimension in it.
    """
    for tensor in tensors_in(batch):
        if tensor.dim() > 0:
            return int(tensor.shape[0])
    raise ValueError(f"the batch has no tensor with rows, but only {sorted(batch)}: check the data collator.")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, also those inside of mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(inner)


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch whose tensors are on a device, also those inside of mappings, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: on_device(value, device) for name, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(on_device(value, device) for value in batch)
    return batch


def slice_rows(batch: Mapping[str, Any], start: int, stop: int) -> Batch:
    """Rows [start, stop) of every tensor, list or tuple that has one entry per row; the rest as it is.

    Also of those inside of dicts, lists and tuples.
    """
    return _cut(batch, batch_rows(batch), lambda value: value[start:stop])


def select_rows(batch: Mapping[str, Any], rows: list[int]) -> Batch:
    """Some rows of every tensor, list or tuple that has one entry per row; the rest as it is."""

    def chosen(value: Any) -> Any:
        return value[rows] if isinstance(value, torch.Tensor) else type(value)(value[row] for row in rows)

    return _cut(batch, batch_rows(batch), chosen)


def _cut(value: Any, rows: int, part: Callable[[Any], Any]) -> Any:
    """`part` of all that has one entry per row."""
    if isinstance(value, torch.Tensor):
        return part(value) if value.dim() > 0 and value.shape[0] == rows else value
    if isinstance(value, Mapping):
        return {key: _cut(inner, rows, part) for key, inner in value.items()}
    if _is_one_per_row(value, rows):
        return part(value)
    if type(value) in (list, tuple) and any(True for _ in tensors_in(value)):
        return type(value)(_cut(inner, rows, part) for inner in value)
    return value


def _is_one_per_row(value: Any, rows: int) -> bool:
    """Whether a list or tuple has one entry for each row; not tensors that have all rows each."""
    if not isinstance(value, (list, tuple)) or len(value) != rows:
        return False
    return not all(isinstance(one, torch.Tensor) and one.shape[:1] == (rows,) for one in value)


@contextmanager
def naming_long_rows(model: nn.Module, batch: Mapping[str, Any]) -> Iterator[None]:
    """Inside, what a model raises for more tokens than it has positions says so.

    Raises:
        ValueError: the model raised an error, and the batch's rows are longer than its table of positions.
    """
    try:
        yield
    except (RuntimeError, IndexError) as error:
        most, tokens = _most_tokens(model), _most_tokens_in(batch)
        if isinstance(error, PeerFailedError) or is_out_of_memory(error) or most is None or tokens <= most:
            raise
        raise ValueError(
            f"The batch has rows of {tokens} tokens, and {type(model).__name__} takes {most}"
            " (max_position_embeddings): cut them, e.g. tokenizer(..., truncation=True,"
            f" max_length={most}). It failed with {type(error).__name__}: {error}"
        ) from error


def _most_tokens(model: nn.Module) -> int | None:
    """Of a row, by the table of positions; None where there is none: rotary positions are computed for any number."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    for module in model.modules():
        if isinstance(module, nn.Embedding) and 0 <= module.num_embeddings - most <= MOST_UNUSED_POSITIONS:
            # RoBERTa counts from behind the id of padding on, within the table
            is_within = module.num_embeddings == most and module.padding_idx is not None
            return most - (module.padding_idx or 0) - 1 if is_within else most
    return None


def _most_tokens_in(batch: Mapping[str, Any]) -> int:
    """Of a row's documents, where its positions tell them apart."""
    tokens, positions = batch.get("input_ids"), batch.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.numel():
        with suppress(RuntimeError):  # a device on which a kernel has failed answers nothing more
            return int(positions.max()) + 1
        return 0
    return tokens.shape[1] if isinstance(tokens, torch.Tensor) and tokens.dim() >= 2 else 0


def split_batch(batch: Mapping[str, Any], count: int) -> list[Batch]:
    """`count` micro-batches of equal size; `count` must divide the rows."""
    rows = batch_rows(batch)
    assert rows % count == 0, f"{rows} rows are not divisible into {count} micro-batches"
    size = rows // count
    return [slice_rows(batch, i * size, (i + 1) * size) for i in range(count)]


def shape_signature(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides the shapes inside the model, but for the number of rows."""
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
