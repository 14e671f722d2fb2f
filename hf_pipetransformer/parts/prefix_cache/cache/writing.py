"""Writes states to the store in a thread, during the next step."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from .activation_files import FileWriter
from .background import BackgroundThread
from .batch_entries import BatchEntries, bytes_of
from .entry_format import EntryFormat
from .file_store import FileStore
from .side_stream import Copied, SideStream

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors that may disappear when space is freed."""

MOST_RETRIES = 8
"""Maximum number of retries for a batch if its generation was deleted or the store was full."""

PENDING_BATCHES = 2
"""Maximum number of pending batches."""
SECONDS_TO_WAIT = 5.0
"""Time that the training may wait for the writer in total, in seconds, besides `SHARE_TO_WAIT` of its duration.

Beyond that, batches are dropped and become misses in the next epoch: on a slow disk the cache must not slow down the
training. A fast disk has slow moments, too, and the stored samples should not depend on them.
"""
SHARE_TO_WAIT = 0.1


class StoreWriting:
    """Writes batches to the current generation.

    Args:
        store: the store of this node.
        copies: copies from the device.
        unused_since: if there is no space, generations that no training has used since this time are evicted. In
            seconds since the epoch.
    """

    def __init__(self, store: FileStore, copies: SideStream, unused_since: float) -> None:
        self.failure: OSError | None = None
        """The error that stopped writing, if any. Reset it to None to resume."""
        self.last: BatchEntries | None = None
        """The last batch written to the open generation."""
        self._store, self._copies, self._unused_since = store, copies, unused_since
        self._thread = BackgroundThread("activation-cache-writer")
        self._room = threading.Semaphore(PENDING_BATCHES)
        self._began, self._waited = time.monotonic(), 0.0
        self._open: tuple[tuple[int, str], FileWriter] | None = None

    def put(
        self,
        generation: tuple[int, str],
        entries: BatchEntries,
        state: torch.Tensor,
        stored_dtype: torch.dtype,
        done: Callable[[int, int], None],
    ) -> bool:
        """Write states. Returns False if the disk is too slow: they are then not stored.

        Args:
            generation: number of units, and fingerprint.
            entries: the samples' entries.
            state: the samples' states on the device.
            stored_dtype: data type of the stored states.
            done: called with the number of stored samples, and of samples that were already in the store.
        """
        if not self._wait_for_room():
            return False
        copied = self._copies.to_host(state, stored_dtype)
        layout = EntryFormat.of(copied.tensor, state.dtype, entries.width > 0)
        self._thread.run(partial(self._work, partial(self._write, generation, entries, copied, layout, done)))
        return True

    def flush(self) -> None:
        """Wait until all pending batches are written."""
        self._thread.flush()

    def close_generation(self) -> None:
        """Close the open generation. No writes may be pending."""
        self.last = None
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def close(self) -> None:
        """Write all pending batches, close the files and end the thread."""
        self._thread.close()
        self.close_generation()

    def _wait_for_room(self) -> bool:
        """Wait until one more batch may be put, within the time limit. Returns False if time is up."""
        if self._room.acquire(blocking=False):
            return True
        began = time.monotonic()
        spare = SECONDS_TO_WAIT + SHARE_TO_WAIT * (began - self._began) - self._waited
        has_room = self._room.acquire(timeout=max(spare, 0.0))
        self._waited += time.monotonic() - began
        return has_room

    def _work(self, write: Callable[[], None]) -> None:
        try:
            if self.failure is None:
                self._write_somehow(write)
        except OSError as error:
            self.failure = error
        except Exception as error:  # a bug in the cache must not stop the training
            logger.exception("Writing to the activation cache failed.")
            self.failure = OSError(str(error))
        finally:
            self._room.release()

    def _write_somehow(self, write: Callable[[], None]) -> None:
        """Call `write`. Reopen a generation that another process has deleted; evict others if the store is full."""
        for is_last in (*[False] * MOST_RETRIES, True):
            try:
                return write()
            except OSError as error:
                if error.errno == errno.ESTALE and not is_last:
                    self.close_generation()
                elif error.errno not in FULL or is_last or not self._store.evict(self._unused_since):
                    raise

    def _write(
        self,
        generation: tuple[int, str],
        entries: BatchEntries,
        copied: Copied,
        layout: EntryFormat,
        done: Callable[[int, int], None],
    ) -> None:
        states = copied.on_host()
        if self._open is None or self._open[0] != generation:
            self.close_generation()
            # the first process to write determines the generation's facts
            self._open = generation, self._store.writer(*generation, layout.facts())
        writer = self._open[1]
        if EntryFormat.from_facts(writer.facts) != layout:
            return  # this batch has another format (for example no mask); a generation has a single format
        present = writer.num_present
        rows = [bytes_of(state[span]) for state, span in zip(states, entries.spans, strict=True)]
        done(writer.put(entries.digests, rows), writer.num_present - present)
        self.last = entries
