"""The state of this process: its phase and step, its latest progress, and its round of the training.

The main thread writes a few attributes; the thread of a `Watchdog` reads them and sends them to the other processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .errors import chain_of

PACED = frozenset({"step", "all-reduce", "update", "prediction"})
"""Phases that repeat, and take about the same time."""
UNEVEN = frozenset({"data", "freeze", "move", "drop", "build"})
"""Phases that sometimes take longer, for example while data comes from a network or weights are moved."""
LONGER_THAN_EVER = 5
"""A paced phase counts as stuck after this many times its longest pause so far."""
UNKNOWN_PACE = 10
"""Number of timeouts that a phase may take if its usual duration is unknown."""
DOING = "_hf_pipetransformer_doing"
"""Attribute of an error: a description of the process's phase and step."""
LEFT = "left"
"""Phase of a process that no longer takes part: its exit is not reported as a failure."""


class Round(NamedTuple):
    """A common operation of all processes of a training. All processes have the same sequence of rounds.

    Attributes:
        number: index of the round since the start of the training.
        doing: this process's operation, as the predicate of a sentence.
        is_meeting: whether the processes wait for each other in this round (`Watchdog.meet`).
        num_met: number of earlier meetings of all processes.
    """

    number: int = 0
    doing: str = "is at the start of train()"
    is_meeting: bool = False
    num_met: int = 0

    def is_past(self, meeting: Round) -> bool:
        """Whether a process in this round will never join `meeting`, where another process waits.

        Both have met equally often. A process in a later round that has not met more often has skipped the meeting.
        """
        is_elsewhere = not self.is_meeting or self.doing.split()[:2] != meeting.doing.split()[:2]
        is_there = self.number > meeting.number or (self.number == meeting.number and is_elsewhere)
        return is_there and self.num_met == meeting.num_met


class Progress:
    """The state of this process.

    Each phase has a patience: the seconds without progress (`tick`) after which the process counts as stuck. It is
    short in the training loop, where steps take about the same time, and longer while data is loaded or weights are
    moved. In all other phases, such as writing files or running the user's code, it equals the timeout of the other
    processes' collectives.

    Attributes:
        timeout: seconds, for the paced phases.
        limit: seconds, for phases of unknown duration.
        on_enter: called with each new phase and the step; tests use it to inject faults.
        phase: the current phase.
        step: number of optimizer steps done.
        since: `time.monotonic` at the latest progress.
        round: the latest round that this process has begun.
    """

    def __init__(self) -> None:
        self.timeout = self.limit = math.inf
        self.on_enter: Callable[[str, int], None] | None = None
        self.phase, self.step, self.since, self.round = LEFT, 0, 0.0, Round()
        self._longest: dict[str, float] = {}  # paced phase -> its longest pause so far
        self._pause = 0.0  # the longest pause in the current phase

    @property
    def doing(self) -> str:
        return f"in phase {self.phase!r} at step {self.step}"

    @property
    def patience(self) -> float:
        """Seconds that the current phase may take without progress."""
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
        """Record progress: the phase's patience starts anew."""
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
    """Inside the context, this process is in that phase. An error that leaves the context carries `doing_when`."""
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
    """Describe the phase and step of this process at the time of an error or its cause."""
    told = (getattr(one, DOING, None) for one in chain_of(error))
    return next(filter(None, told), PROGRESS.doing)
