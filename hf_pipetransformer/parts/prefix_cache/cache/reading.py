"""Finds the samples of a batch in the store, and reads the next batch's samples during the computation.

    main      step n ........................  find(n + 1)   step n + 1 ................
    thread    read(n + 1)  copy to device      read(n + 2)   copy to device

One thread reads all files. A batch that was not read ahead, or differs from the expected one, takes the same path;
`find` then waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch

from .activation_files import FileReader
from .background import BackgroundThread
from .batch_entries import BatchEntries
from .entry_format import EntryFormat, clear_padding
from .side_stream import Copied, SideStream

KEPT_BATCHES = 2
"""Number of batches in memory: the current one, found micro-batch by micro-batch, and the next one."""

States: TypeAlias = dict[int, tuple[list[int], torch.Tensor]]
"""Boundary (number of units) -> the samples found there, and their states on the device."""


@dataclass(frozen=True)
class Generation:
    """A generation of the store: the output of the first `num_frozen` units, for one set of weights."""

    num_frozen: int
    fingerprint: str
    reader: FileReader

    @property
    def name(self) -> tuple[int, str]:
        return self.num_frozen, self.fingerprint


@dataclass
class _Request:
    """A batch that is being read.

    Attributes:
        samples: samples that were not returned yet. Each is returned once, because a model may write into its inputs.
        width: number of columns of the batch.
        stop: as for `StoreReading.find`.
        places: found sample -> its boundary (number of units), and its index there.
        states: boundary -> the found states.
        damaged: number of damaged entries that were not reported yet.
        done: resolved when the fields above are complete.
    """

    samples: set[tuple[Any, ...]]
    width: int
    stop: int
    places: dict[tuple[Any, ...], tuple[int, int]] = field(default_factory=dict)
    states: dict[int, Copied] = field(default_factory=dict)
    damaged: int = 0
    done: Future[None] = field(default_factory=Future)

    def covers(self, entries: BatchEntries, stop: int) -> bool:
        return (self.width, self.stop) == (entries.width, stop) and self.samples.issuperset(entries.places)


@dataclass(frozen=True)
class Found:
    """The found samples of a batch.

    Attributes:
        states: their states.
        damaged: number of damaged entries.
        seconds: time that the program has waited for the states.
    """

    states: States
    damaged: int = 0
    seconds: float = 0.0


class StoreReading:
    """Reads batches from the current generations.

    Args:
        copies: copies to the device.
    """

    def __init__(self, copies: SideStream) -> None:
        self.generations: tuple[Generation, ...] = ()
        """Generations to look up, newest first. Change them by `use`."""
        self.unread: set[tuple[int, str]] = set()
        """Names of generations that are not looked up yet."""
        self._copies = copies
        self._requests: deque[_Request] = deque(maxlen=KEPT_BATCHES)
        self._thread = BackgroundThread("activation-cache-reader")

    def use(self, generations: Iterable[Generation]) -> None:
        """Look up these generations from now on. Close the files of other generations."""
        self._requests.clear()
        before, self.generations = self.generations, tuple(generations)
        for generation in before:
            if generation not in self.generations:
                self._thread.run(generation.reader.close).result()

    def read_ahead(self, entries: BatchEntries, stop: int) -> None:
        """Begin to read a batch. Arguments as for `find`."""
        if self.generations:
            self._request(entries, stop)

    def find(self, entries: BatchEntries, stop: int) -> Found:
        """Return the states of the samples that are in the store.

        Args:
            entries: the samples' entries.
            stop: generations of more units than this are not looked up.
        """
        if not self.generations:
            return Found({})
        began = time.perf_counter()
        request = next((r for r in self._requests if r.covers(entries, stop)), None)
        request = request or self._request(entries, stop)
        request.samples.difference_update(entries.places)
        request.done.result()
        places: dict[int, list[tuple[int, int]]] = {}  # indices in the batch, and in the read states
        for row, sample in enumerate(entries.places):
            if (place := request.places.get(sample)) is not None:
                places.setdefault(place[0], []).append((row, place[1]))
        states = {}
        for f, found in places.items():
            tensor = request.states[f].on_compute_stream()
            states[f] = [row for row, _ in found], joined([(tensor, index) for _, index in found])
        damaged, request.damaged = request.damaged, 0
        return Found(states, damaged, time.perf_counter() - began)

    def close(self) -> None:
        """Close all files and end the thread."""
        self.use(())
        self._thread.close()

    def _request(self, entries: BatchEntries, stop: int) -> _Request:
        read = [g for g in self.generations if g.name not in self.unread and g.num_frozen <= stop]
        request = _Request(set(entries.places), entries.width, stop)
        request.done = self._thread.run(partial(self._read, request, read, entries))
        self._requests.append(request)
        return request

    def _read(self, request: _Request, generations: Sequence[Generation], missing: BatchEntries) -> None:
        """Runs in the thread: look for the samples in one generation after another."""
        for generation in generations:
            reader = generation.reader
            layout = EntryFormat.from_facts(reader.facts) if missing.digests else None
            if layout is None or layout.has_mask != (missing.width > 0):
                continue
            on_host, buffers = layout.empty(missing, self._copies)
            before = reader.num_damaged
            hits = reader.read_into(missing.digests, buffers)
            request.damaged += reader.num_damaged - before
            if any(hits):
                clear_padding(on_host, missing.spans)
                request.states[generation.num_frozen] = self._copies.to_device(on_host, layout.computed_dtype)
                found = [(sample, index) for index, sample in enumerate(missing.places) if hits[index]]
                request.places.update((sample, (generation.num_frozen, index)) for sample, index in found)
                missing = missing.chosen([index for index, hit in enumerate(hits) if not hit])


def joined(rows: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Return the given rows of tensors as one tensor: a view if they are consecutive rows of one tensor.

    Indexing by a list would copy the indices to the device and wait.
    """
    runs: list[tuple[torch.Tensor, int, int]] = []
    for tensor, row in rows:
        if runs and runs[-1][0] is tensor and runs[-1][2] == row:
            runs[-1] = (tensor, runs[-1][1], row + 1)
        else:
            runs.append((tensor, row, row + 1))
    parts = [tensor[start:stop] for tensor, start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
