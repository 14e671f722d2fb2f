"""The entries of a batch in the store: their names, and the tokens of each sample that they hold.

    input_ids  7 8 9 0 0    span  0:3    digest  a      an entry is found by its digest, and holds
               0 7 8 6 0          1:4            b      the outputs for the columns of its span

`content_keys` makes them of a batch for layers, in a loader's worker, and tags carry them to the stages; `front.rows`
makes them for modules when the model is called. All that reads, writes or counts entries takes one `BatchEntries`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ....model.tags import BLANK

WHOLE = slice(None)
"""The span of a sample whose padding counts, or that has no tokens."""
_WHOLE_ROW = -1  # stands for it in tags


@dataclass(frozen=True)
class Tokens:
    """The columns that belong to each sample, as spans. The other columns of `width` are padding.

    `width` is 0, and all spans are `WHOLE`, if outputs do not have the batch's columns.
    """

    spans: tuple[slice, ...]
    width: int

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of columns of each sample."""
        return tuple(len(range(self.width)[span]) for span in self.spans)

    @property
    def has_padding(self) -> bool:
        return min(self.lengths) < self.width


@dataclass(frozen=True)
class BatchEntries(Tokens):
    """The entries of a batch, one for each sample, image or sequence.

    Attributes:
        digests: their names: 16 bytes each, a hash of all that the outputs depend on.
    """

    digests: tuple[bytes, ...]

    @property
    def places(self) -> list[tuple[Any, ...]]:
        """Names and positions: the same tokens may be padded on the left or on the right."""
        return [(digest, span.start, span.stop) for digest, span in zip(self.digests, self.spans, strict=True)]

    def chosen(self, rows: Sequence[int]) -> BatchEntries:
        """Some of the entries."""
        return BatchEntries(
            tuple(self.spans[row] for row in rows), self.width, tuple(self.digests[row] for row in rows)
        )

    def as_tags(self) -> torch.Tensor:
        """`[entries, 4]`, int64: the halves of the digest, start and stop of the span."""
        digests = torch.frombuffer(bytearray(b"".join(self.digests)), dtype=torch.int64).view(-1, 2)
        spans = [(_WHOLE_ROW, _WHOLE_ROW) if s.start is None else (s.start, s.stop) for s in self.spans]
        return torch.cat([digests, torch.tensor(spans, dtype=torch.int64)], dim=1)

    @classmethod
    def of_tags(cls, tags: torch.Tensor | None, width: int) -> BatchEntries | None:
        """The entries in tags, for samples or for several sequences of each; None without tags, or with blank ones."""
        if tags is None:
            return None
        numbers = tags.cpu().reshape(-1, tags.shape[-1])
        digests, spans = numbers[:, :2].numpy().tobytes(), numbers[:, 2:].tolist()
        if spans and spans[0][0] == BLANK:
            return None
        columns = tuple(WHOLE if start == _WHOLE_ROW else slice(start, stop) for start, stop in spans)
        return cls(columns, width, tuple(digests[16 * row : 16 * row + 16] for row in range(len(spans))))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor's values: its own memory, if it is contiguous and on the CPU, else a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
