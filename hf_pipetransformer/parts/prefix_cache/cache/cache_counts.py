"""What a process has done with a cache: numbers of samples, and times."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class CacheCounts:
    """What a process has done with the cache since the counts were last taken."""

    rows: int = 0
    """Number of samples whose hidden states were needed."""
    hits: int = 0
    """Number of them that were found at the current boundary of the frozen layers."""
    older_hits: int = 0
    """Number of them that were found at an earlier, lower boundary."""
    stored: int = 0
    """Number of samples stored at the current boundary."""
    older_stored: int = 0
    present: int = 0
    """Number of samples that were not stored because they were in the store already."""
    dropped: int = 0
    """Number of samples that were not stored because the writer was too slow."""
    damaged: int = 0
    """Number of entries that were damaged in the store, and were therefore recomputed."""
    layers_skipped: int = 0
    """Number of layers that were not run, summed over the samples that were found."""
    load_seconds: float = 0.0
    """Time spent loading the samples that were found."""

    @property
    def found(self) -> int:
        return self.hits + self.older_hits

    def __add__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))
