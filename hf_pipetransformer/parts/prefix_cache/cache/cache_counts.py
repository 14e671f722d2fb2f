"""Counts of a process's use of the cache: numbers of samples, and times."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class CacheCounts:
    """A process's use of the cache since the counts were last taken."""

    rows: int = 0
    """Number of samples that needed hidden states."""
    hits: int = 0
    """Number of samples found at the current boundary of the frozen layers."""
    older_hits: int = 0
    """Number of samples found at an earlier, lower boundary."""
    stored: int = 0
    """Number of samples stored at the current boundary."""
    older_stored: int = 0
    present: int = 0
    """Number of samples that were not stored because the store already had them."""
    dropped: int = 0
    """Number of samples that were not stored because the writer was too slow."""
    damaged: int = 0
    """Number of damaged entries in the store, which were recomputed."""
    layers_skipped: int = 0
    """Number of skipped layers, summed over the found samples."""
    load_seconds: float = 0.0
    """Time spent loading the found samples, in seconds."""

    @property
    def found(self) -> int:
        return self.hits + self.older_hits

    def __add__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))
