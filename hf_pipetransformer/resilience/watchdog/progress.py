"""A record of what this process is doing, which other processes can read even after this process has died.

    with phase("move"):
        ...

The record has a few hundred bytes: process id, step, phase, the time at which something was last finished, and the
position of the main thread. The main thread writes it without a system call. A `Watchdog` places it in a file that the
other processes of the host map into memory as well.
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
from typing import NamedTuple

from ...errors import chain_of

MAIN = struct.Struct("<iqdd32s")
"""Fields written by the main thread: process id, step, time at which something was last finished, patience, phase."""
WATCHDOG = struct.Struct("<ddd160s")
"""Fields written by the watchdog's thread: the time of the last write, the time since when the main thread has not
waited for other processes, the time at which it last used the CPU, and its position in the code."""
SIZE = MAIN.size + WATCHDOG.size

PACED = frozenset({"step", "all-reduce", "update", "prediction"})
"""Phases that repeat, and take about as long each time."""
UNEVEN = frozenset({"data", "freeze", "move", "drop", "build"})
"""Phases that sometimes take longer, for example while data comes from a network or weights are moved."""
WRITING = frozenset({"save", "publish"})
"""Phases in which a checkpoint is written."""
DEFAULT_TIMEOUT = 30.0
"""Seconds, in place of `Progress.timeout` where processes do not watch one another."""
LONGER_THAN_EVER = 5
"""A paced phase counts as stuck after this many times its longest pause so far."""
UNKNOWN_PACE = 10
"""Number of timeouts that a phase may take if its usual duration is unknown."""

DOING = "_hf_pipetransformer_doing"
"""Attribute of an error that describes what the process was doing."""
LEFT = "left"
"""Phase of a process that no longer takes part; whatever happens to it is not reported as a failure."""


class Round(NamedTuple):
    """Something that all processes of a training do together, such as a step or an evaluation.

    All processes have the same sequence of rounds. A process that has begun a later round than the one in which
    another process waits has not met it there, and never will.

    Attributes:
        number: of the round, counted from the start of the training.
        doing: what this process does in it, as the predicate of a sentence.
        meeting: number of the latest round that this process has begun by a `Watchdog.meet`.
    """

    number: int
    doing: str
    meeting: int


@dataclass(frozen=True)
class Record:
    """What a process was doing when it last wrote its record.

    Times are those of `time.monotonic`, which all processes of a host share.

    Attributes:
        pid: process id.
        step: number of optimizer steps done.
        since: time at which something was last finished.
        patience: seconds that this phase may take without finishing anything.
        phase: name of the phase.
        beat: time of the last write by the watchdog's thread.
        own_since: time since when the main thread was never seen waiting for other processes.
        busy_at: time at which the main thread last used the CPU.
        place: position of the main thread when it was last seen.
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
        """Read until two readings agree, because the other process may be writing."""
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
    """This process's record. All methods but `note_watch` are called by the main thread only.

    Each phase has a patience: the seconds that may pass without finishing anything (`tick`) before the process counts
    as stuck. It is short in the training loop, whose steps take about the same time, and longer while data is loaded
    or weights are moved. In all other phases, in which files are written or the user's code runs, it is as long as the
    other processes' collectives would wait anyway.

    Attributes:
        timeout: seconds, for the paced phases.
        limit: seconds, for the phases whose duration is unknown.
        on_enter: called with each phase that begins, and the step; tests use it to inject faults.
        round: the latest round that this process has begun. It is replaced as a whole, so another thread may read it.
    """

    def __init__(self) -> None:
        self.timeout = self.limit = math.inf
        self.on_enter: Callable[[str, int], None] | None = None
        self.round = Round(0, "is at the start of train()", 0)
        self._buffer: bytearray | mmap.mmap = bytearray(SIZE)
        self._step = 0
        self._phase = LEFT
        self._since = 0.0
        self._longest: dict[str, float] = {}  # the longest pause so far, of each paced phase
        self._pause = 0.0  # the longest pause in the current phase

    @property
    def phase(self) -> str:
        return self._phase

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begin a phase."""
        self._finish()
        if self._phase in PACED:
            self._longest[self._phase] = max(self._longest.get(self._phase, 0.0), self._pause)
        self._phase, self._pause = phase, 0.0
        if step is not None:
            self._step = step
        self._write()
        if self.on_enter is not None:
            self.on_enter(phase, self._step)

    def begin_round(self, doing: str, is_meeting: bool = False) -> Round:
        """Begin the next round."""
        number = self.round.number + 1
        self.round = Round(number, doing, number if is_meeting else self.round.meeting)
        return self.round

    def tick(self) -> None:
        """Record that something was finished, so that the phase's patience starts anew."""
        self._finish()
        self._write()

    def forget_pace(self) -> None:
        """Discard the longest pauses so far, because the next steps may take longer."""
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

    @property
    def patience_when_stopping(self) -> float:
        """Seconds after SIGTERM that may pass without finishing or computing anything, before the process is ended.

        They are infinite only while a single process writes a checkpoint.
        """
        timeout = self.timeout if math.isfinite(self.timeout) else DEFAULT_TIMEOUT
        if self._phase in WRITING:
            return self.limit
        if self._phase in self._longest:
            return max(timeout, LONGER_THAN_EVER * self._longest[self._phase])
        return UNKNOWN_PACE * timeout

    def _write(self) -> None:
        name = self._phase.encode()[:32]
        record = MAIN.pack(os.getpid(), self._step, self._since, self._patience(), name)
        self._buffer[: MAIN.size] = record  # one assignment, because pack_into would first write zeros

    def share(self, file: Path) -> None:
        """Keep the record in a memory-mapped file from now on."""
        with file.open("wb+") as opened:
            opened.write(bytes(SIZE))  # allocate the space, so that a full disk is an error now
            opened.flush()
            self._buffer = mmap.mmap(opened.fileno(), SIZE)
        self.tick()

    def note_watch(self, own_since: float, busy_at: float, place: str) -> None:
        """Record, from the watchdog's thread, that it is alive and where the main thread is."""
        name = place.encode(errors="replace")[:160]
        self._buffer[MAIN.size : SIZE] = WATCHDOG.pack(time.monotonic(), own_since, busy_at, name)

    def read(self) -> Record:
        return Record.read(self._buffer)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


PROGRESS = Progress()
"""The record of this process."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Context manager: this process is in that phase inside it. An error that leaves it carries `doing_when`."""
    before = PROGRESS.phase
    try:
        PROGRESS.enter(name)
        yield
    except BaseException as error:
        setattr(error, DOING, doing_when(error))
        raise
    finally:
        PROGRESS.enter(before)  # the caller may handle the error and continue


def doing_when(error: BaseException) -> str:
    """Describe what this process was doing when the error, or the one that caused it, was raised."""
    for one in chain_of(error):
        doing: str | None = getattr(one, DOING, None)
        if doing is not None:
            return doing
    return PROGRESS.read().doing
