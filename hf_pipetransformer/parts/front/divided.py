"""Divides the first dimension of tensors among the rows of a call: samples, or images.

pixel_values [samples, ...]                      each row has one entry
pixel_values [samples * times, ...]              each row has `times` entries: several images, or choices, of a sample
pixel_values [sum of patches, ...]               the patches of all images stand in one dimension;
image_grid_thw [images, 3]                       image i has as many entries as the product of `image_grid_thw[i]`
output [sum of patches / 4, ...]                 four neighbouring patches were merged
"""

from __future__ import annotations

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
        """Whether a tensor can be divided among the rows."""
        return tensor.dim() > 0 and self.patches_per_entry(len(tensor)) is not None

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of a tensor that belong to each row."""
        return tensor.split(self.sizes(len(tensor)))

    def some(self, tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The parts of a tensor that belong to some rows; a tensor that is not divided is returned unchanged."""
        if not self.has(tensor):
            return tensor
        if not self.patches:
            return tensor.unflatten(0, (self.count, -1))[list(rows)].flatten(0, 1)
        return tensor[self._places(len(tensor), rows)]

    def put(self, into: torch.Tensor, rows: Sequence[int], values: torch.Tensor) -> None:
        """Write values into the parts of a tensor that belong to some rows."""
        into[self._places(len(into), rows)] = values.to(into.dtype)

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
