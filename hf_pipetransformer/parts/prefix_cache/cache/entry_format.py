"""The byte format of a sample's hidden state in the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .batch_entries import BatchEntries, bytes_of
from .side_stream import SideStream


@dataclass(frozen=True)
class EntryFormat:
    """Format of a hidden state in a sample's bytes.

    Attributes:
        features: shape of one token's state; without an attention mask, the shape of a sample's state.
        has_mask: whether only a sample's own tokens are stored.
        stored_dtype: data type of the stored bytes.
        computed_dtype: data type of the state in the model.
    """

    features: tuple[int, ...]
    has_mask: bool
    stored_dtype: torch.dtype
    computed_dtype: torch.dtype

    @classmethod
    def of(cls, state: torch.Tensor, computed_dtype: torch.dtype, has_mask: bool) -> EntryFormat:
        return cls(tuple(state.shape[2 if has_mask else 1 :]), has_mask, state.dtype, computed_dtype)

    def facts(self) -> dict[str, Any]:
        return {
            "features": list(self.features),
            "has_mask": self.has_mask,
            "stored_dtype": str(self.stored_dtype).removeprefix("torch."),
            "computed_dtype": str(self.computed_dtype).removeprefix("torch."),
        }

    @classmethod
    def from_facts(cls, facts: dict[str, Any] | None) -> EntryFormat | None:
        """Create the format from a generation's facts; None if there are no facts, or they are damaged."""
        try:
            dtypes = [getattr(torch, facts[name]) for name in ("stored_dtype", "computed_dtype")]  # type: ignore[index]
            layout = cls(tuple(map(int, facts["features"])), bool(facts["has_mask"]), *dtypes)  # type: ignore[index]
        except (TypeError, KeyError, ValueError, AttributeError):
            return None
        return layout if all(isinstance(dtype, torch.dtype) for dtype in dtypes) else None

    def empty(self, entries: BatchEntries, copies: SideStream) -> tuple[torch.Tensor, list[memoryview]]:
        """Allocate states to read into. Also return the memory of each sample's own tokens."""
        columns = (entries.width,) if self.has_mask else ()
        states = copies.empty_on_host((len(entries.spans), *columns, *self.features), self.stored_dtype)
        return states, [bytes_of(row[span]) for row, span in zip(states, entries.spans, strict=True)]


def clear_padding(states: torch.Tensor, spans: Sequence[slice]) -> None:
    """Set the padding to zero. It is neither stored nor read, but it must be finite."""
    for state, span in zip(states, spans, strict=True):
        if span.start is not None:
            state[: span.start] = 0
            state[span.stop :] = 0
