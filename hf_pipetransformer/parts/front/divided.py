"""Divides the first dimension of tensors among the rows of a call: samples, or images.

pixel_values [samples, ...]                      each row has one entry
pixel_values [samples * times, ...]              each row has `times` entries: several images, or choices, of a sample
pixel_values [sum of patches, ...]               the patches of all images stand in one dimension;
image_grid_thw [images, 3]                       image i has as many entries as the product of `image_grid_thw[i]`
output [sum of patches / 4, ...]                 four neighbouring patches were merged
cu_seqlens [parts + 1]                           cumulative lengths: where images, or windows in them, begin and end
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ..prefix_cache.cache.origins import tensors_in

GRIDS = "grid_thw"
"""Suffix of the names of inputs with each image's number of patches in time, height and width."""
EACH = 0
"""In place of a number of patches: all rows have the same number of entries."""


@dataclass(frozen=True)
class Rows:
    """The rows of a call.

    Attributes:
        count: their number.
        patches: the number of patches of each image, if all patches stand in one dimension; else empty.
    """

    count: int
    patches: tuple[int, ...] = ()

    def patches_per_entry(self, length: int) -> int | None:
        """Number of patches for each entry of a dimension of this length.

        Returns:
            `EACH` if all rows have the same number of entries; None if the dimension cannot be divided among the rows.
        """
        if self.patches and length > 0 and sum(self.patches) % length == 0:
            per = sum(self.patches) // length
            if per and all(patches % per == 0 for patches in self.patches):
                return per
        is_of_rows = length > 0 and (length == self.count if self.patches else length % self.count == 0)
        return EACH if is_of_rows else None

    def sizes(self, length: int) -> list[int]:
        """Number of entries of each row in a dimension of this length, which must be divisible among the rows."""
        per = self.patches_per_entry(length)
        assert per is not None, "patches_per_entry() has been asked"
        return [patches // per for patches in self.patches] if per else [length // self.count] * self.count

    def chosen(self, rows: Sequence[int]) -> Rows:
        """Some of the rows."""
        return Rows(len(rows), tuple(self.patches[row] for row in rows) if self.patches else ())

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the entries of a tensor can be divided among the rows."""
        return tensor.dim() > 0 and self.patches_per_entry(len(tensor)) is not None

    def divides(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can be divided among the rows: its entries, or the lengths that it adds up."""
        return self._lengths_of(tensor) is not None or self.has(tensor)

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of a tensor that belong to each row; lengths that it adds up start from 0 in each row."""
        lengths = self._lengths_of(tensor)
        return tensor.split(self.sizes(len(tensor))) if lengths is None else [of.cumsum(0) for of in lengths]

    def some(self, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The parts of a tensor that belong to some rows; a tensor that is not divided is returned unchanged."""
        if (lengths := self._lengths_of(tensor)) is not None:
            chosen = torch.cat([tensor[:1], *(lengths[row] for row in rows)])
            return chosen.cumsum(0, dtype=tensor.dtype)
        if not self.has(tensor):
            return tensor
        if not self.patches:
            return tensor.unflatten(0, (self.count, -1))[list(rows)].flatten(0, 1)
        return tensor[self._places(len(tensor), rows)]

    def put(self, into: torch.Tensor, rows: Sequence[int], values: torch.Tensor) -> None:
        """Write values into the parts of a tensor that belong to some rows."""
        into[self._places(len(into), rows)] = values.to(into.dtype)

    def _lengths_of(self, tensor: torch.Tensor) -> Sequence[torch.Tensor] | None:
        """The lengths in each row, if a tensor `[lengths + 1]` adds up lengths, from 0 to the number of patches.

        Each row must end where a length ends.
        """
        if not self.patches or tensor.dim() != 1 or tensor.is_floating_point() or tensor.dtype is torch.bool:
            return None
        if not len(tensor) or int(tensor[0]) != 0 or int(tensor[-1]) != sum(self.patches):
            return None
        ends, values = list(accumulate(self.patches)), tensor.tolist()
        if values != sorted(values) or not set(ends) <= set(values):
            return None
        counts = [bisect_right(values, end) - 1 for end in ends]
        return tensor.diff().split([count - before for count, before in zip(counts, [0, *counts], strict=False)])

    def _places(self, length: int, rows: Sequence[int]) -> list[int]:
        sizes = self.sizes(length)
        starts = [0, *accumulate(sizes)]
        return [place for row in rows for place in range(starts[row], starts[row] + sizes[row])]


def rows_of(names: Collection[str], inputs: Mapping[str, Any]) -> Rows | None:
    """The rows of the named inputs; None if their numbers of entries differ and no grid explains it."""
    lengths = {len(tensor) if tensor.dim() else 1 for name in names for tensor in tensors_in(inputs[name])}
    grids = [grid for name in names if name.endswith(GRIDS) for grid in tensors_in(inputs[name])]
    if len(grids) == 1 and grids[0].dim() == 2 and not grids[0].is_floating_point() and lengths != {len(grids[0])}:
        patches = tuple(grids[0].prod(1).tolist())
        return Rows(len(patches), patches) if lengths == {len(patches), sum(patches)} else None
    return Rows(length) if len(lengths) == 1 and (length := lengths.pop()) else None
