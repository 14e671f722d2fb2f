"""What AutoCache needs of a store of activations.

    a generation: the outputs of the first `num_frozen` layers, frozen with the weights of this `fingerprint`

    store.writer(3, fingerprint, ...).put(keys, rows)         one writer in each process that computes
    store.reader(3, fingerprint).read_into(keys, rows)        anywhere, also in a loader's workers

All processes of a node use one store at the same time. Whoever loses a race or finds damage gets a miss, never wrong
bytes. A store handles bytes only: keys and fingerprints are computed elsewhere. `sharing.open_store` says which class
it is; its objects are pickled for the loaders' workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Row: TypeAlias = npt.NDArray[np.uint8] | memoryview
"""The bytes of one sample's activations, contiguous and not empty."""


class StoreFull(OSError):
    """Raised if the store has reached its maximum size. Its entries can still be read."""


class GenerationReader(Protocol):
    """Looks up samples in one generation, which may be created and deleted at any time.

    Anything that cannot be read, for whatever reason, is a miss.

    Attributes:
        num_damaged: number of entries that `read_into` found damaged.
    """

    num_damaged: int

    @property
    def facts(self) -> dict[str, Any] | None:
        """Facts about the generation, recorded by the process that created it; None if there is no generation."""

    def read_into(self, keys: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        """Read payloads into buffers.

        Args:
            keys: 16 bytes each.
            rows: writable buffers; a payload whose length differs from its buffer's is a miss.

        Returns:
            For each key whether its buffer now holds the payload. If not, the buffer's bytes are undefined.
        """

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Have the entries brought near, if that is possible. Does not block."""

    def close(self) -> None:
        """Release what is open. The next call opens it again."""


class GenerationWriter(Protocol):
    """Adds samples to one generation. It remains usable after an error, because there may be space again.

    Attributes:
        num_present: number of samples given to `put` that were in the store already.
    """

    num_present: int

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the generation, recorded by the process that created it."""

    def put(self, keys: Sequence[bytes], rows: Sequence[Row]) -> int:
        """Store samples, so that the readers of all processes find them. Returns how many were not there before.

        Raises:
            StoreFull: nothing was written.
            OSError: the disk is full or fails, or the generation has been deleted (`errno.ESTALE`).
        """

    def close(self) -> None:
        """Release what is open. A later `put` fails."""


class ActivationStore(Protocol):
    """The generations of a node's trainings. A generation's name is (number of frozen layers, fingerprint)."""

    def why_refused(self) -> str | None:
        """Why the store must not be used, in words; None if it may."""

    def why_unwritable(self) -> str | None:
        """Try to write to the store; why that fails, in words, or None."""

    def usable_bytes(self) -> int | None:
        """Size that the disk allows for all generations together; None if that cannot be found out."""

    def limit(self, max_gib: float | None) -> None:
        """Bound the size of all generations together; None: by what there is space for."""

    def reader(self, num_frozen: int, fingerprint: str) -> GenerationReader:
        """Return a reader of a generation, whether or not the generation exists yet."""

    def writer(
        self, num_frozen: int, fingerprint: str, *, writer: int, capacity: int, facts: Mapping[str, Any] | None = None
    ) -> GenerationWriter:
        """Open a generation for adding to it, and mark it as used. It is created if it is missing or unreadable.

        Args:
            num_frozen: f, the number of frozen layers.
            fingerprint: identifies everything that the activations depend on besides the sample; it may contain
                letters, digits, `-` and `_`.
            writer: the number of this process, its global rank.
            capacity: expected number of samples; used, like `facts`, only if the generation is created.
            facts: facts to record about the generation, as for JSON.

        Raises:
            OSError: the store cannot be written to.
        """

    def generations(self) -> list[tuple[int, str]]:
        """The names of all generations, including those of other trainings, sorted."""

    def nbytes(self) -> int:
        """Size of all generations."""

    def mark_used(self, num_frozen: int, fingerprint: str) -> None:
        """Mark a generation as needed by this training. One that is missing is ignored."""

    def mark_superseded(self, num_frozen: int, fingerprint: str) -> None:
        """Remove this training's mark: the generation is then evicted first, unless others have marked it."""

    def evict(self, unused_since: float) -> bool:
        """Delete the least recently used generation. Returns whether space has been freed.

        Args:
            unused_since: seconds since the epoch. A generation that was marked or created later is not deleted, unless
                its training has removed the mark.

        Raises:
            OSError: the store cannot be written to.
        """

    def delete(self, num_frozen: int, fingerprint: str) -> None:
        """Delete a generation, if it exists. Its readers then get misses, and its writers an `OSError`.

        Raises:
            OSError: the store cannot be written to.
        """

    def remove(self) -> None:
        """Delete everything, of a store that no other training uses."""
