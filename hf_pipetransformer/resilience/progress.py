"""What this process is doing, where others can read it: also when the process is dead.

    with phase("move"):
        ...

A record of a few hundred bytes: process id, step, phase, when something was last finished, where the main thread is.
The main thread writes it without any call to the system; a `Watchdog` puts it into a file that its peers map as well.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MAIN = struct.Struct("<iqdd32s")
"""Written by the main thread: pid, step, when something was last finished, patience, phase."""
WATCHDOG = struct.Struct("<ddd160s")
"""Written by the watchdog's thread: when it last did so, since when the main thread waits for nobody, when that last
used the processor, where it is."""
SIZE = MAIN.size + WATCHDOG.size

PACED = frozenset({"step", "all-reduce", "update", "prediction"})
"""Phases that come again and again, each about as long as the last time."""
UNEVEN = frozenset({"data", "freeze", "move", "drop", "build"})
"""Phases that take longer at times: data from a network, weights that move."""
LONGER_THAN_EVER = 5
"""A paced phase counts as stuck after so many times the longest pause so far."""
UNKNOWN_PACE = 10
"""Timeouts that a phase may take whose usual length is not known."""

DOING = "_hf_pipetransformer_doing"
"""Attribute of an error: what the process was doing."""
LEFT = "left"
"""The phase of a process that takes part no more: whatever becomes of it is no fault."""


@dataclass(frozen=True)
class Record:
    """What a process was doing when it last wrote it down. Times are of `time.monotonic`, the same for all of a host.

    Attributes:
        pid: of the process.
        step: number of optimizer steps done.
        since: when something was last finished.
        patience: seconds that this phase may take with nothing finished.
        phase: its name.
        beat: when the watchdog's thread was last here.
        own_since: since when the main thread was never seen waiting for other processes.
        busy_at: when it last used the processor.
        place: where the main thread was last seen.
    """

    pid: int
    step: int
    since: float
    patience: float
    phase: str
    beat: float
    own_since: float
    busy_at: float
    place: str

    @classmethod
    def read(cls, buffer: bytearray | mmap.mmap) -> Record:
        """Two readings that agree: the other process may be writing."""
        seen = bytes(buffer[:SIZE])
        while (again := bytes(buffer[:SIZE])) != seen:
            seen = again
        pid, step, since, patience, phase = MAIN.unpack_from(seen)
        beat, own_since, busy_at, place = WATCHDOG.unpack_from(seen, MAIN.size)
        return cls(pid, step, since, patience, _text(phase), beat, own_since, busy_at, _text(place))

    @property
    def is_paced(self) -> bool:
        return self.phase in PACED

    @property
    def doing(self) -> str:
        return f"in phase {self.phase!r} at step {self.step}"


class Progress:
    """This process's record. All methods but `note_watch` are the main thread's.

    A phase has a patience: the seconds that may pass with nothing finished (`tick`) before the process counts as
    stuck. Where the training loop is paced by its own steps it is short; where data comes or weights move, longer; all
    else, where files are written or the user's code runs, has as long as the peers would wait for it anyway.

    Attributes:
        timeout: seconds, of the paced phases.
        limit: seconds, of the phases of which nothing is known.
        on_enter: told each phase that begins, and the step: for tests that let something happen there.
    """

    def __init__(self) -> None:
        self.timeout = self.limit = math.inf
        self.on_enter: Callable[[str, int], None] | None = None
        self._buffer: bytearray | mmap.mmap = bytearray(SIZE)
        self._step = 0
        self._phase = LEFT
        self._since = 0.0
        self._longest: dict[str, float] = {}  # of each paced phase: the longest pause in it so far
        self._pause = 0.0  # the longest in the present one

    @property
    def phase(self) -> str:
        return self._phase

    def enter(self, phase: str, step: int | None = None) -> None:
        """What comes now."""
        self._finish()
        if self._phase in PACED:
            self._longest[self._phase] = max(self._longest.get(self._phase, 0.0), self._pause)
        self._phase, self._pause = phase, 0.0
        if step is not None:
            self._step = step
        self._write()
        if self.on_enter is not None:
            self.on_enter(phase, self._step)

    def tick(self) -> None:
        """Something is finished, and the next thing begins."""
        self._finish()
        self._write()

    def forget_pace(self) -> None:
        """The next steps may take longer than those before."""
        self._longest.clear()

    def _finish(self) -> None:
        now = time.monotonic()
        self._pause = max(self._pause, now - self._since)
        self._since = now

    def _patience(self) -> float:
        if self._phase in self._longest:
            return min(max(self.timeout, LONGER_THAN_EVER * self._longest[self._phase]), self.limit)
        if self._phase in PACED | UNEVEN:
            return min(UNKNOWN_PACE * self.timeout, self.limit)
        return self.limit

    def _write(self) -> None:
        name = self._phase.encode()[:32]
        record = MAIN.pack(os.getpid(), self._step, self._since, self._patience(), name)
        self._buffer[: MAIN.size] = record  # at once: pack_into would write zeros first

    def share(self, file: Path) -> None:
        """Keep the record in a file from now on."""
        with file.open("wb+") as opened:
            opened.write(bytes(SIZE))  # there is room for it, or an error now
            opened.flush()
            self._buffer = mmap.mmap(opened.fileno(), SIZE)
        self.tick()

    def note_watch(self, own_since: float, busy_at: float, place: str) -> None:
        """By the watchdog's thread: it is alive, and this is where the main thread is."""
        name = place.encode(errors="replace")[:160]
        self._buffer[MAIN.size : SIZE] = WATCHDOG.pack(time.monotonic(), own_since, busy_at, name)

    def read(self) -> Record:
        return Record.read(self._buffer)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


PROGRESS = Progress()
"""Of this process."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside, this process is in that phase. An error that leaves it remembers it: see `doing_when`."""
    before = PROGRESS.phase
    try:
        PROGRESS.enter(name)
        yield
    except BaseException as error:
        setattr(error, DOING, doing_when(error))
        raise
    finally:
        PROGRESS.enter(before)  # somebody may go on after the error


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from or while that was handled, and so on.

    Whoever raises an error's own cause in its place makes a ring of the two.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def doing_when(error: BaseException) -> str:
    """What this process was doing when the error came, or the one that it was made of."""
    for one in chain_of(error):
        doing: str | None = getattr(one, DOING, None)
        if doing is not None:
            return doing
    return PROGRESS.read().doing
