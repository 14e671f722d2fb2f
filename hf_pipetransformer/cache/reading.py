"""Finds the samples of a batch in the store, and reads those of the next batch while this one is computed.

    main      step n ........................  find(n + 1)   step n + 1 ................
    thread    read(n + 1)  copy to device      read(n + 2)   copy to device

All files are read in one thread. So a batch that was not read ahead, or another one than was expected, is read by the
same code; `find` then waits for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from .activation_store import GenerationReader
from .content_keys import RowKey
from .entry_format import EntryFormat, clear_padding
from .side_stream import Copied, SideStream

T = TypeVar("T")

KEPT_BATCHES = 2
"""The batch that is trained on, whose micro-batches are found one after another, and the next one."""


@dataclass(frozen=True)
class Generation:
    """A generation of the store: the output of the first `num_frozen` units, for one set of weights."""

    num_frozen: int
    fingerprint: str
    reader: GenerationReader


@dataclass(frozen=True)
class _Read:
    """What was found of a batch.

    Attributes:
        places: for each sample that was found, the number of units behind which, and its index among those.
        states: by number of units, the states that were found.
        damaged: number of entries that were damaged.
    """

    places: dict[tuple[Any, ...], tuple[int, int]]
    states: dict[int, Copied]
    damaged: int


@dataclass
class _Request:
    """A batch that is being read.

    Attributes:
        samples: those that were not given out yet. Each is given out once, because a model may write into its inputs.
        tokens: as for `StoreReading.find`.
        stop: likewise.
        result: what will be found.
        is_counted: whether its damaged entries were reported; they are reported once.
    """

    samples: set[tuple[Any, ...]]
    tokens: int | None
    stop: int
    result: Future[_Read]
    is_counted: bool = False

    def covers(self, keys: Sequence[RowKey], tokens: int | None, stop: int) -> bool:
        return (self.tokens, self.stop) == (tokens, stop) and self.samples.issuperset(map(_identity, keys))


@dataclass(frozen=True)
class Found:
    """The samples of a batch that were found.

    Attributes:
        states: number of units -> the samples found behind them, and their states on the device.
        damaged: number of entries that were damaged.
        seconds: how long the program has waited for them.
    """

    states: dict[int, tuple[list[int], torch.Tensor]]
    damaged: int = 0
    seconds: float = 0.0


class StoreReading:
    """Reads batches from the generations that are looked up.

    Args:
        copies: copies to the device.
    """

    def __init__(self, copies: SideStream) -> None:
        self.generations: tuple[Generation, ...] = ()
        """Those that are looked up, newest first. Change them by `use`."""
        self.unread: set[tuple[int, str]] = set()
        """Number of units and fingerprint of those that are not looked up yet."""
        self._copies = copies
        self._requests: deque[_Request] = deque(maxlen=KEPT_BATCHES)
        self._thread = _Thread("activation-cache-reader")

    def use(self, generations: Iterable[Generation]) -> None:
        """Look up these generations from now on. Close the files of the others."""
        self._requests.clear()
        before, self.generations = self.generations, tuple(generations)
        for generation in before:
            if generation not in self.generations:
                self._thread.run(generation.reader.close).result()

    def read_ahead(self, keys: Sequence[RowKey], tokens: int | None, stop: int) -> None:
        """Begin to read a batch. Arguments as for `find`."""
        if self.generations:
            self._request(keys, tokens, stop)

    def find(self, keys: Sequence[RowKey], tokens: int | None, stop: int) -> Found:
        """Return the states of the samples that are in the store.

        Args:
            keys: one key per sample.
            tokens: padded length of the samples; None if they have no attention mask.
            stop: generations of more units than this are not looked up.
        """
        if not self.generations:
            return Found({})
        began = time.perf_counter()
        request = next((r for r in self._requests if r.covers(keys, tokens, stop)), None)
        request = request or self._request(keys, tokens, stop)
        request.samples.difference_update(map(_identity, keys))
        read = request.result.result()
        samples: dict[int, list[int]] = {}
        indices: dict[int, list[int]] = {}
        for row, key in enumerate(keys):
            if (place := read.places.get(_identity(key))) is not None:
                samples.setdefault(place[0], []).append(row)
                indices.setdefault(place[0], []).append(place[1])
        states = {}
        for f, rows in samples.items():
            tensor = read.states[f].on_compute_stream()
            states[f] = rows, joined([(tensor, index) for index in indices[f]])
        damaged = 0 if request.is_counted else read.damaged
        request.is_counted = True
        return Found(states, damaged, time.perf_counter() - began)

    def seconds_to_read(
        self, keys: Sequence[bytes], spans: Sequence[slice], tokens: int, layout: EntryFormat
    ) -> float:
        """Read samples of the newest generation, and return how long it took."""

        def read() -> float:
            began = time.perf_counter()
            states, places = layout.empty(spans, tokens, self._copies)
            self.generations[0].reader.read_into(keys, places)
            states.to(layout.computed_dtype)
            return time.perf_counter() - began

        return self._thread.run(read).result()

    def close(self) -> None:
        """Close all files and end the thread."""
        self.use(())
        self._thread.close()

    # ------------------------------------------------------------------------------------ inside
    def _request(self, keys: Sequence[RowKey], tokens: int | None, stop: int) -> _Request:
        read = [g for g in self.generations if (g.num_frozen, g.fingerprint) not in self.unread]
        result = self._thread.run(lambda: self._read(read, keys, tokens, stop))
        request = _Request(set(map(_identity, keys)), tokens, stop, result)
        self._requests.append(request)
        return request

    def _read(self, generations: Sequence[Generation], keys: Sequence[RowKey], tokens: int | None, stop: int) -> _Read:
        """In the thread: look for the samples in one generation after another."""
        places: dict[tuple[Any, ...], tuple[int, int]] = {}
        states: dict[int, Copied] = {}
        damaged = 0
        missing = list(keys)
        for generation in generations:
            layout = EntryFormat.from_facts(generation.reader.facts)
            if not missing or generation.num_frozen > stop:
                continue
            if layout is None or layout.has_mask != (tokens is not None):
                continue
            on_host, buffers = layout.empty([key.span for key in missing], tokens, self._copies)
            before = generation.reader.num_damaged
            hits = generation.reader.read_into([key.digest for key in missing], buffers)
            damaged += generation.reader.num_damaged - before
            here = [index for index, hit in enumerate(hits) if hit]
            if not here:
                continue
            found = [missing[index] for index in here]
            if len(here) < len(missing):
                kept, _ = layout.empty([key.span for key in found], tokens, self._copies)
                on_host = torch.index_select(on_host, 0, torch.tensor(here), out=kept)
            clear_padding(on_host, [key.span for key in found])
            states[generation.num_frozen] = self._copies.to_device(on_host, layout.computed_dtype)
            places.update((_identity(key), (generation.num_frozen, index)) for index, key in enumerate(found))
            missing = [key for key, hit in zip(missing, hits, strict=True) if not hit]
        return _Read(places, states, damaged)


def joined(rows: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """The given rows of tensors as one tensor, a view where they follow one another in one tensor.

    Indexing by a list would copy the indices to the device, and wait.
    """
    runs: list[tuple[torch.Tensor, int, int]] = []
    for tensor, row in rows:
        if runs and runs[-1][0] is tensor and runs[-1][2] == row:
            runs[-1] = (tensor, runs[-1][1], row + 1)
        else:
            runs.append((tensor, row, row + 1))
    parts = [tensor[start:stop] for tensor, start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _identity(key: RowKey) -> tuple[Any, ...]:
    """What tells samples of a batch apart: the same tokens may be padded on the left or on the right."""
    return key.digest, key.span.start, key.span.stop


class _Thread:
    """Runs functions one after another in a thread, which ends with the process.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, function: Callable[[], T]) -> Future[T]:
        """Run a function after those that were given before."""
        if self._thread is None:
            # not an executor's: at exit the interpreter would wait for a read that never ends
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._queue.put((future, function))
        return future

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            future, function = task
            try:
                future.set_result(function())
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)
            del task, future, function  # the latest result must not live until the next task
