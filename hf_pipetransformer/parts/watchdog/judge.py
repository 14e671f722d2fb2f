"""The state that each process of a job publishes at each interval, and the verdicts that follow from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...progress import UNKNOWN_PACE, Round

LEAVING = "leaving"
"""Phase of a process that has lost a connection and waits for the verdict that explains it."""
SLACK = 1.0
"""Extra seconds before a verdict: a more specific verdict may come first."""
SECONDS_OF_SILENCE = 2.0
"""Seconds without a beat after which a process counts as dead, if it is not known to run and another process has lost
a connection."""


class Beat(NamedTuple):
    """The state of a process.

    Attributes:
        number: index of the beat.
        patience: seconds that the process may go without progress.
        alone: seconds without progress during which its main thread has not waited for another process.
        idle: seconds without progress during which its main thread has not used the CPU.
        is_paced: whether its phase takes about the same time in each step. In other phases, a process that uses the
            CPU does not count as stuck.
        phase: name of the phase.
        doing: phase and step, in words.
        place: position of the main thread in the code.
        round: the latest round that the process has begun.
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
        ranks: unreachable processes. They may be stopped (SIGSTOP).
        is_hang: whether a process hangs. Each process then logs its own position, too.
        is_mistake: whether the user's code calls a collective operation on some processes only.
    """

    text: str
    ranks: tuple[int, ...] = ()
    is_hang: bool = False
    is_mistake: bool = False


def judge(beats: Mapping[int, Beat], timeout: float) -> Verdict | None:
    """Find processes that make no progress, or that run other operations than their peers.

    Args:
        beats: the latest beat of each process, by rank.
        timeout: the watchdog's timeout, in seconds.
    """
    return _find_stuck(beats, timeout) or _find_absent(beats, timeout) or _find_deadlock(beats)


def _find_stuck(beats: Mapping[int, Beat], timeout: float) -> Verdict | None:
    """Find a process that makes no progress and waits for no other process."""
    lost_for = seconds_since_lost(beats)
    for rank, beat in beats.items():
        if lost_for > SECONDS_OF_SILENCE + SLACK and beat.phase != LEAVING and beat.alone > timeout:
            return Verdict(f"rank {rank} made the others wait for {beat.alone:.0f} s {beat.where}", is_hang=True)
        own = beat.alone if beat.is_paced else min(beat.alone, beat.idle)
        if not lost_for and own > beat.patience:
            return Verdict(f"rank {rank} has been stuck for {own:.0f} s {beat.where}", is_hang=True)
    return None


def _find_absent(beats: Mapping[int, Beat], timeout: float) -> Verdict | None:
    """Find a process that waits in a meeting that another process will never join."""
    meeting = [rank for rank, beat in beats.items() if beat.round.is_meeting]
    meeting.sort(key=lambda rank: beats[rank].round.number)
    # a process past a meeting is past the earliest one; its latest beat may still be older than a meeting
    for rank in {beats[rank].round.num_met: rank for rank in reversed(meeting)}.values():
        for other, beat in beats.items():
            if beat.round.is_past(beats[rank].round):
                return _mistake(rank, beats[rank], other, beat.round.doing)
    inside = [rank for rank, beat in beats.items() if not beat.round.is_meeting]
    # processes that wait in a meeting will not join the operation that the others wait for
    if meeting and inside and all(beat.idle > timeout + SLACK and not beat.alone for beat in beats.values()):
        return _mistake(meeting[0], beats[meeting[0]], inside[0], f"waits {beats[inside[0]].where}")
    return None


def _find_deadlock(beats: Mapping[int, Beat]) -> Verdict | None:
    """Find a deadlock: all processes wait, and none uses the CPU."""
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
    """Find processes that have not sent a beat for too long.

    Args:
        beats: the latest beat of each process, by rank.
        silence: seconds since the last new beat of each process, by rank.
        hosts: names of the hosts of all processes.
        timeout: the watchdog's timeout, in seconds.
        is_running: whether a process is known to run. If it runs, it is silent because it holds the GIL or because the
            machine is busy.
    """
    has_lost = seconds_since_lost(beats) > 0
    silent = []
    for rank, seconds in silence.items():
        # some phases may hold the GIL for long, so a missing beat proves little
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
    """Return the longest time, in seconds, since a process has lost a connection; 0 if none has."""
    return max((beat.idle for beat in beats.values() if beat.phase == LEAVING), default=0.0)
