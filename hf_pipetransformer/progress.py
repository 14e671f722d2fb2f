"""What this process is doing: its phase and step, when it last finished something, and its round of the training.

The main thread writes a few attributes; the thread of a `Watchdog` reads them, and tells the other processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .errors import chain_of

PACED = frozenset({"step", "all-reduce", "update", "prediction"})
"""Phases that repeat, and take about as long each time."""
UNEVEN = frozenset({"data", "freeze", "move", "drop", "build"})
"""Phases that sometimes take longer, for example while data comes from a network or weights are moved."""
LONGER_THAN_EVER = 5
"""A paced phase counts as stuck after this many times its longest pause so far."""
UNKNOWN_PACE = 10
"""Number of timeouts that a phase may take if its usual duration is unknown."""
DOING = "_hf_pipetransformer_doing"
"""Attribute of an error that describes what the process was doing."""
LEFT = "left"
"""Phase of a process that no longer takes part; whatever happens to it is not reported as a failure."""


class Round(NamedTuple):
    """Something that all processes of a training do together; all of them have the same sequence of rounds.

    Attributes:
        number: of the round, counted from the start of the training.
        doing: what this process does in it, as the predicate of a sentence.
        is_meeting: whether the processes wait for each other in it (`Watchdog.meet`).
        num_met: number of times that all processes have met before.
    """

    number: int = 0
    doing: str = "is at the start of train()"
    is_meeting: bool = False
    num_met: int = 0

    def is_past(self, meeting: Round) -> bool:
        """Whether a process in this round will never come to that meeting, in which another one waits.

        All have met equally often. One that has gone on to a later round, and not met more often, has not met there.
        """
        is_elsewhere = not self.is_meeting or self.doing.split()[:2] != meeting.doing.split()[:2]
        is_there = self.number > meeting.number or (self.number == meeting.number and is_elsewhere)
        return is_there and self.num_met == meeting.num_met


class Progress:
    """The state of this process.

    Each phase has a patience: the seconds that may pass without finishing anything (`tick`) before the process counts
    as stuck. It is short in the training loop, whose steps take about the same time, and longer while data is loaded
    or weights are moved. In all other phases, in which files are written or the user's code runs, it is as long as the
    other processes' collectives would wait anyway.

    Attributes:
        timeout: seconds, for the paced phases.
        limit: seconds, for the phases whose duration is unknown.
        on_enter: called with each phase that begins, and the step; tests use it to inject faults.
        phase: the current phase.
        step: number of optimizer steps done.
        since: `time.monotonic` when something was last finished.
        round: the latest round that this process has begun.
    """

    def __init__(self) -> None:
        self.timeout = self.limit = math.inf
        self.on_enter: Callable[[str, int], None] | None = None
        self.phase, self.step, self.since, self.round = LEFT, 0, 0.0, Round()
        self._longest: dict[str, float] = {}  # the longest pause so far, of each paced phase
        self._pause = 0.0  # the longest pause in the current phase

    @property
    def doing(self) -> str:
        return f"in phase {self.phase!r} at step {self.step}"

    @property
    def patience(self) -> float:
        """Seconds that the current phase may take without finishing anything."""
        if self.phase in self._longest:
            return min(max(self.timeout, LONGER_THAN_EVER * self._longest[self.phase]), self.limit)
        return min(UNKNOWN_PACE * self.timeout, self.limit) if self.phase in PACED | UNEVEN else self.limit

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begin a phase."""
        self.tick()
        if self.phase in PACED:
            self._longest[self.phase] = max(self._longest.get(self.phase, 0.0), self._pause)
        self.phase, self._pause = phase, 0.0
        self.step = self.step if step is None else step
        if self.on_enter is not None:
            self.on_enter(phase, self.step)

    def tick(self) -> None:
        """Record that something was finished, so that the phase's patience starts anew."""
        now = time.monotonic()
        self._pause, self.since = max(self._pause, now - self.since), now

    def forget_pace(self) -> None:
        """Discard the longest pauses so far, because the next steps may take longer."""
        self._longest.clear()

    def begin_round(self, doing: str, is_meeting: bool = False) -> None:
        """Begin the next round."""
        self.round = Round(self.round.number + 1, doing, is_meeting, self.round.num_met)


PROGRESS = Progress()
"""The state of this process."""


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
    told = (getattr(one, DOING, None) for one in chain_of(error))
    return next(filter(None, told), PROGRESS.doing)
