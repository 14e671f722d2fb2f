"""The watchdog alone, without a training: messages and exits of the peers of a dead, stopped or stuck process."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed import RankOutcome, launch_ranks, run_ranks
from selection import slow

from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.parts.watchdog.watchdog import EXIT_CODE, Watchdog
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.progress import PROGRESS, phase

TIMEOUT = 2.0


def watch(rank: int, limit: float = 2 * TIMEOUT, timeout: float = TIMEOUT) -> Watchdog:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return Watchdog(rank, ProcessMesh(timedelta(seconds=60)).gather_objects, timeout, limit)


def watched(rank: int, world_size: int, kind: str, culprit: int, where: str = "step") -> str:
    """One process goes wrong in the second step; the others wait for it in an all-reduce."""
    with watch(rank):
        for step in range(3):
            PROGRESS.enter(where, step)
            if step == 1 and rank == culprit:
                time.sleep(0.5)  # the others hear of the phase at the next beat
                misbehave(kind)
            with phase("all-reduce"):
                dist.all_reduce(torch.zeros(1))
            time.sleep(0.1)
    return PROGRESS.phase


def misbehave(kind: str) -> None:
    if kind == "reset":  # an error of its own that looks like the loss of a peer
        raise ConnectionResetError("the storage hung up")
    if kind == "wait":  # for something that the others do not know of
        dist.recv(torch.zeros(1), 1)
    while kind in ("hang", "busy"):
        time.sleep(1 if kind == "hang" else 0)


def said(outcome: RankOutcome) -> str:
    """The log and the error of a process."""
    return f"{outcome.log}\n{outcome.error}"


def assert_others_say(outcomes: list[RankOutcome], culprit: int, words: str) -> None:
    for outcome in outcomes:
        if outcome.rank != culprit:
            assert words in said(outcome)
            assert isinstance(outcome.error, PeerFailedError) or outcome.exitcode == EXIT_CODE


@pytest.mark.parametrize(("kind", "where"), [("hang", "save"), *slow(("busy", "step"))])
def test_a_stuck_process_is_found_among_those_that_wait(kind: str, where: str) -> None:
    outcomes = launch_ranks(watched, 3, kind, 1, where, timeout=60)
    assert_others_say(outcomes, 1, "rank 1 has been stuck for ")
    assert_others_say(outcomes, 1, f"in phase {where!r} at step 1, in misbehave (test_watchdog.py:")
    assert outcomes[1].exitcode == EXIT_CODE and "in misbehave" in outcomes[1].log  # its stack


def computes_on(rank: int, world_size: int) -> None:
    """One process computes for ever in a phase without a limit; the others' collective times out."""
    with watch(rank, limit=60):
        group = dist.new_group(timeout=timedelta(seconds=5))
        PROGRESS.enter("callbacks", 1)
        if rank == 1:
            misbehave("busy")
        dist.all_reduce(torch.zeros(1), group=group)


@pytest.mark.slow
def test_who_is_waited_for_in_vain_is_named() -> None:
    outcomes = launch_ranks(computes_on, 3, timeout=60)
    assert_others_say(outcomes, 1, "rank 1 made the others wait for ")
    assert_others_say(outcomes, 1, "in phase 'callbacks' at step 1, in misbehave")
    assert outcomes[1].exitcode == EXIT_CODE


@pytest.mark.slow
def test_an_error_of_one_process_ends_all() -> None:
    """An error that looks like the loss of a peer ends all as well."""
    outcomes = launch_ranks(watched, 3, "reset", 2, timeout=60)
    assert isinstance(outcomes[2].error, ConnectionResetError)
    reason = "ConnectionResetError: the storage hung up"
    assert_others_say(outcomes, 2, f"rank 2 failed in phase 'step' at step 1: {reason}")


@pytest.mark.slow
def test_processes_that_wait_for_one_another() -> None:
    for outcome in launch_ranks(watched, 2, "wait", 0, timeout=60):
        assert isinstance(outcome.error, PeerFailedError) or outcome.exitcode == EXIT_CODE
        assert "wait for each other: rank 0 in phase 'step' at step 1, in misbehave (test_watchdog" in said(outcome)


def dies_beside_a_silent_one(rank: int, world_size: int) -> None:
    """Rank 1 dies while the thread of rank 2 that reports cannot run, as a C extension holds the GIL."""
    with watch(rank):
        PROGRESS.enter("step", 1)
        dist.all_reduce(torch.zeros(1))
        time.sleep(0.5)
        if rank == 1:
            os._exit(3)
        if rank == 2:
            ctypes.PyDLL(None).usleep(3_500_000)
        dist.all_reduce(torch.zeros(1))


@pytest.mark.slow
def test_a_silent_process_that_runs_is_not_taken_for_a_dead_one() -> None:
    zero, _, two = launch_ranks(dies_beside_a_silent_one, 3, timeout=60)
    for outcome in (zero, two):
        assert "rank 1 (host" in said(outcome) and "it has died" in said(outcome)
        assert "rank 2 (host" not in said(outcome) and "rank 1, 2" not in said(outcome)


# ---------------------------------------------------------------------------------------------------------
# No verdict
# ---------------------------------------------------------------------------------------------------------
def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.nn.Linear(64, 64)(torch.zeros(64, 64))


def computes(rank: int, world_size: int) -> str:
    """All processes compute for long, in the library's own code."""
    with watch(rank, limit=3):
        for step in range(2):
            PROGRESS.enter("step", step)
            dist.all_reduce(torch.zeros(1))
        compute(3 * TIMEOUT)
        dist.all_reduce(torch.zeros(1))
    return PROGRESS.phase


def asleep_together(rank: int, world_size: int) -> str:
    """All processes of a job are stopped, and later go on."""
    with watch(rank):
        pids = [0] * world_size
        dist.all_gather_object(pids, os.getpid())
        if rank == 0:
            waker = f"import os, time; time.sleep({2 * TIMEOUT}); [os.kill(pid, {signal.SIGCONT:d}) for pid in {pids}]"
            subprocess.Popen([sys.executable, "-c", waker], start_new_session=True)
        for step in range(2):
            PROGRESS.enter("step", step)
        dist.all_reduce(torch.zeros(1))
        os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.zeros(1))
    return PROGRESS.phase


@pytest.mark.slow
@pytest.mark.parametrize("does", [computes, *slow(asleep_together)])
def test_nobody_is_blamed_without_reason(does: object) -> None:
    assert run_ranks(does, 2, timeout=60) == ["left", "left"]  # type: ignore[arg-type]


def errors_everywhere(rank: int, world_size: int) -> None:
    with watch(rank):
        raise ValueError("the same on all")


def test_an_error_of_all_stays_what_it_is() -> None:
    for outcome in launch_ranks(errors_everywhere, 3, timeout=60):
        assert isinstance(outcome.error, ValueError) and str(outcome.error) == "the same on all"


def without_store(rank: int, world_size: int) -> bool:
    dist.init_process_group("gloo")
    os.environ.pop("MASTER_ADDR")
    with Watchdog(rank, ProcessMesh(timedelta(seconds=60)).gather_objects, TIMEOUT, limit=4) as watchdog:
        dist.all_reduce(torch.zeros(1))
    return watchdog.is_watching


def test_without_a_store_nothing_is_watched_and_the_training_goes_on() -> None:
    assert run_ranks(without_store, 2) == [False, False]
