"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence

MIB = 2**20
"""Unit of memory in tables and messages, in bytes."""


def align(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Return the rows of a table as lines with aligned columns. Numbers are aligned to the right.

    Args:
        rows: Table cells, the header first; all rows have the same number of cells.
        left: Indices of the columns that are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
