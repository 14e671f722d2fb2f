"""What the processes of a job tell each other at each interval, and what rank 0 concludes from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...progress import UNKNOWN_PACE, Round

LEAVING = "leaving"
"""Phase of a process that has lost a connection, and waits for the reason."""
SLACK = 1.0
"""Seconds that a process has longer than its patience, where another reason may be found first."""
SECONDS_OF_SILENCE = 2.0
"""Seconds without a beat after which a process that is not known to run counts as dead, if another one has lost a
connection."""


class Beat(NamedTuple):
    """The state of a process.

    Attributes:
        number: counts the beats.
        patience: seconds that may pass without finishing anything.
        alone: seconds for which it has finished nothing, and its main thread has waited for no other process.
        idle: seconds for which it has finished nothing, and its main thread has not used the CPU.
        is_paced: whether its phase takes about as long each time. In others, a process that computes is not stuck.
        phase: name of the phase.
        doing: phase and step, in words.
        place: position of the main thread in the code.
        round: the latest round that it has begun.
    """

    number: int
    patience: float
    alone: float
    idle: float
    is_paced: bool
    phase: str
    doing: str
    place: str
    round: Round

    @property
    def where(self) -> str:
        return f"{self.doing}, in {self.place}"

    @classmethod
    def parse(cls, message: bytes) -> Beat:
        values = json.loads(message)
        values[-1] = Round(*values[-1])
        return cls(*values)


class Verdict(NamedTuple):
    """The reason for ending the job.

    Attributes:
        text: the reason in words, without a full stop.
        ranks: processes of which nothing is heard, so that they may have been stopped.
        is_hang: whether a process makes no progress, so that it matters where it is.
        is_mistake: whether the user's code makes some processes do what all of them must do.
    """

    text: str
    ranks: tuple[int, ...] = ()
    is_hang: bool = False
    is_mistake: bool = False


def judge(beats: Mapping[int, Beat], timeout: float) -> Verdict | None:
    """Find processes that make no progress, or do not what the others do.

    Args:
        beats: the latest beat of each process, by rank.
        timeout: of the watchdog, in seconds.
    """
    return _find_stuck(beats, timeout) or _find_absent(beats, timeout) or _find_deadlock(beats)


def _find_stuck(beats: Mapping[int, Beat], timeout: float) -> Verdict | None:
    """Find a process that waits for nobody and finishes nothing."""
    lost_for = seconds_since_lost(beats)
    for rank, beat in beats.items():
        if lost_for > SECONDS_OF_SILENCE + SLACK and beat.phase != LEAVING and beat.alone > timeout:
            return Verdict(f"rank {rank} made the others wait for {beat.alone:.0f} s {beat.where}", is_hang=True)
        own = beat.alone if beat.is_paced else min(beat.alone, beat.idle)
        if not lost_for and own > beat.patience:
            return Verdict(f"rank {rank} has been stuck for {own:.0f} s {beat.where}", is_hang=True)
    return None


def _find_absent(beats: Mapping[int, Beat], timeout: float) -> Verdict | None:
    """Find a process that will not come to a meeting in which another one waits."""
    meeting = [rank for rank, beat in beats.items() if beat.round.is_meeting]
    meeting.sort(key=lambda rank: beats[rank].round.number)
    # who is past a meeting is past the earliest one; a beat from before a meeting may still be the latest of a process
    for rank in {beats[rank].round.num_met: rank for rank in reversed(meeting)}.values():
        for other, beat in beats.items():
            if beat.round.is_past(beats[rank].round):
                return _mistake(rank, beats[rank], other, beat.round.doing)
    inside = [rank for rank, beat in beats.items() if not beat.round.is_meeting]
    # who waits in a meeting will not come to what the others wait for
    if meeting and inside and all(beat.idle > timeout + SLACK and not beat.alone for beat in beats.values()):
        return _mistake(meeting[0], beats[meeting[0]], inside[0], f"waits {beats[inside[0]].where}")
    return None


def _find_deadlock(beats: Mapping[int, Beat]) -> Verdict | None:
    """Find that all processes wait, and none of them computes."""
    if not beats or seconds_since_lost(beats) or any(b.idle <= b.patience + SLACK for b in beats.values()):
        return None
    who = "; ".join(f"rank {rank} {beat.where}" for rank, beat in list(beats.items())[:8])
    return Verdict(f"all processes wait for each other: {who}", is_hang=True)


def _mistake(rank: int, meeting: Beat, other: int, does: str) -> Verdict:
    call = meeting.round.doing
    remedy = "All processes must decide alike"
    if call.startswith("called"):
        remedy = "Call it on every process, not on the main process alone"
    return Verdict(f"rank {rank} {call}; rank {other} {does}. {remedy}", is_mistake=True)


def find_silent(
    beats: Mapping[int, Beat],
    silence: Mapping[int, float],
    hosts: Sequence[str],
    timeout: float,
    is_running: Callable[[int], bool],
) -> Verdict | None:
    """Find processes from which nothing has come for long.

    Args:
        beats: the latest beat of each process, by rank.
        silence: seconds for which no new one has come from a process, by rank.
        hosts: names of the hosts of all processes.
        timeout: of the watchdog, in seconds.
        is_running: whether a process is known to run. It is silent then because it holds the GIL, or the machine is
            busy, and has not been lost.
    """
    has_lost = seconds_since_lost(beats) > 0
    silent = []
    for rank, seconds in silence.items():
        # in a phase that may hold the GIL for long, a missing beat proves little
        patience = min(max(beats[rank].patience, timeout), UNKNOWN_PACE * timeout) + 2 * SLACK
        is_lost = has_lost and seconds > SECONDS_OF_SILENCE and not is_running(rank)
        if is_lost or seconds > patience:
            silent.append(rank)
    if not silent:
        return None
    who = f"rank {', '.join(map(str, silent[:8]))} (host {', '.join(sorted({hosts[rank] for rank in silent})[:8])})"
    has_died = has_lost and not is_running(silent[0])
    why = (
        "it has died, or lost its network" if has_died else "it is stopped, holds the Python GIL, or lost its network"
    )
    return Verdict(
        f"{who} could not be reached for {silence[silent[0]]:.0f} s, last {beats[silent[0]].doing} ({why})",
        tuple(silent),
    )


def seconds_since_lost(beats: Mapping[int, Beat]) -> float:
    """Seconds for which a process has waited for the reason of a lost connection; 0 if none has lost one."""
    return max((beat.idle for beat in beats.values() if beat.phase == LEAVING), default=0.0)
