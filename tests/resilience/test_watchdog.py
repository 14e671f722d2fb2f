"""The watchdog alone, without a training: what the peers of a dead, stopped or stuck process say and do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import RankDiedError, RankOutcome, launch_ranks, run_ranks
from selection import slow

from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.resilience.watchdog import watchdog
from hf_pipetransformer.resilience.watchdog.progress import PROGRESS, phase
from hf_pipetransformer.resilience.watchdog.watchdog import BEAT, EXIT_CODE, GRACE, Watchdog

TIMEOUT = 2.0


def watched(
    rank: int, world_size: int, kind: str, culprit: int, hosts: int = 1, where: str = "step"
) -> tuple[float, Any]:
    """One process goes wrong in the second step; the others wait for it in an all-reduce."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = ProcessMesh(timedelta(seconds=60))
    timeout = TIMEOUT if hosts == 1 else 2 * TIMEOUT  # a store answers late on a busy machine
    with Watchdog(rank, rank % (world_size // hosts), mesh.gather_objects, timeout, limit=2 * timeout):
        for step in range(3):
            PROGRESS.enter(where, step)
            if step == 1 and rank == culprit:
                time.sleep(0.5 if hosts == world_size else 0)  # other hosts hear of it at the next beat
                misbehave(kind)
            with phase("all-reduce"):
                dist.all_reduce(torch.zeros(1))
            time.sleep(0.1)
    return time.monotonic(), PROGRESS.phase


def misbehave(kind: str) -> None:
    if kind == "raise":
        raise LookupError("no such thing")
    if kind == "reset":  # an error of its own that looks like the loss of a peer
        raise ConnectionResetError("the storage hung up")
    if kind == "wait":  # for something that the others do not know of
        dist.recv(torch.zeros(1), 1)
    while kind in ("hang", "busy"):
        time.sleep(1 if kind == "hang" else 0)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])


def said(outcome: RankOutcome) -> str:
    """In its log, or by its error if that came first."""
    return f"{outcome.log}\n{outcome.error}"


def assert_all_say(outcomes: list[RankOutcome], culprit: int, words: str) -> None:
    for outcome in outcomes:
        if outcome.rank == culprit:
            continue
        assert words in said(outcome)
        assert isinstance(outcome.error, PeerFailedError) or outcome.exitcode == EXIT_CODE
        if isinstance(outcome.error, PeerFailedError):
            assert words in str(outcome.error) and f"This is rank {outcome.rank}." in str(outcome.error)


@pytest.mark.parametrize("culprit", [*slow(0), 1])
def test_a_death_is_told_by_name(culprit: int) -> None:
    outcomes = launch_ranks(watched, 3, "kill", culprit)
    assert isinstance(outcomes[culprit].error, RankDiedError)
    assert_all_say(outcomes, culprit, "died in phase 'step' at step 1")
    assert all(f"rank {culprit} (process " in said(o) for o in outcomes if o.rank != culprit)


@pytest.mark.parametrize("culprit", [*slow(0), 2])
def test_a_stopped_process_is_killed(culprit: int) -> None:
    outcomes = launch_ranks(watched, 3, "stop", culprit)
    assert outcomes[culprit].exitcode == -signal.SIGKILL
    assert_all_say(outcomes, culprit, f"has been stopped for {TIMEOUT:g} s in phase 'step' at step 1")


@pytest.mark.parametrize("kind", ["hang", *slow("busy")])
def test_a_stuck_process_is_found_among_those_that_wait(kind: str) -> None:
    outcomes = launch_ranks(watched, 3, kind, 1)
    assert_all_say(outcomes, 1, "rank 1 has been stuck for ")
    assert outcomes[1].exitcode == EXIT_CODE and "in misbehave" in outcomes[1].log  # its stack
    assert all("in misbehave (test_watchdog.py:" in said(outcome) for outcome in outcomes)


def test_where_nothing_is_known_of_a_phase_it_has_the_collectives_timeout() -> None:
    outcomes = launch_ranks(watched, 2, "hang", 1, where="save")
    assert_all_say(outcomes, 1, "rank 1 has been stuck for ")
    assert all("in phase 'save' at step 1" in said(outcome) for outcome in outcomes)


def computes_on(rank: int, world_size: int) -> None:
    """One process computes for ever where nothing is known of how long it may; the others' collective times out."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    mesh = ProcessMesh(timedelta(seconds=60))
    with Watchdog(rank, rank, mesh.gather_objects, TIMEOUT, limit=60):
        PROGRESS.enter("callbacks", 1)
        if rank == 1:
            misbehave("busy")
        dist.all_reduce(torch.zeros(1))


def test_who_is_waited_for_in_vain_is_named() -> None:
    outcomes = launch_ranks(computes_on, 3)
    assert_all_say(outcomes, 1, "rank 1 made the others wait for ")
    assert all("in phase 'callbacks' at step 1, in misbehave" in said(outcome) for outcome in outcomes)
    assert outcomes[1].exitcode == EXIT_CODE


def fail_one_after_the_other(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = ProcessMesh(timedelta(seconds=60))
    with Watchdog(rank, rank, mesh.gather_objects, TIMEOUT, limit=60):
        PROGRESS.enter("start", 0)
        end = time.monotonic() + 1.5 * GRACE * rank
        while time.monotonic() < end:
            torch.nn.Linear(64, 64)(torch.zeros(64, 64))
        raise LookupError(f"found by rank {rank}")


def test_a_process_at_work_may_come_to_an_error_of_its_own() -> None:
    outcomes = launch_ranks(fail_one_after_the_other, 2)
    assert [str(outcome.error) for outcome in outcomes] == ["found by rank 0", "found by rank 1"]


def test_an_error_of_one_process_ends_all() -> None:
    outcomes = launch_ranks(watched, 3, "raise", 2)
    assert isinstance(outcomes[2].error, LookupError)
    assert_all_say(outcomes, 2, "rank 2 failed in phase 'step' at step 1: LookupError: no such thing")


def test_an_error_that_looks_like_a_lost_peer_is_told_too() -> None:
    outcomes = launch_ranks(watched, 2, "reset", 1)
    assert isinstance(outcomes[1].error, ConnectionResetError)
    assert_all_say(outcomes, 1, "rank 1 failed in phase 'step' at step 1: ConnectionResetError: the storage hung up")


def computes(rank: int, world_size: int) -> str:
    """All of them for long, in the library's own code."""
    dist.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(seconds=60))
    with Watchdog(rank, rank, mesh.gather_objects, TIMEOUT, limit=3):
        for step in range(2):
            PROGRESS.enter("step", step)
            dist.all_reduce(torch.zeros(1))
        end = time.monotonic() + 3 * TIMEOUT
        while time.monotonic() < end:
            torch.nn.Linear(64, 64)(torch.zeros(64, 64))
        dist.all_reduce(torch.zeros(1))
    return PROGRESS.phase


def test_those_that_compute_do_not_wait() -> None:
    assert run_ranks(computes, 2) == ["left", "left"]


def test_a_host_of_one_process_dies() -> None:
    outcomes = launch_ranks(watched, 3, "kill", 1, hosts=3)
    assert_all_say(outcomes, 1, "rank 1 (host ")
    assert all("last in phase 'step' at step 1" in said(o) for o in outcomes if o.rank != 1)


def test_processes_that_wait_for_one_another() -> None:
    outcomes = launch_ranks(watched, 2, "wait", 0)
    for outcome in outcomes:
        assert isinstance(outcome.error, PeerFailedError) or outcome.exitcode == EXIT_CODE
        assert "wait for each other: rank 0 in phase 'step' at step 1, in misbehave (test_watchdog.py:" in said(
            outcome
        )


@pytest.mark.parametrize(
    ("kind", "culprit"), [("kill", 3), *slow(("kill", 0), ("stop", 2)), ("hang", 1), *slow(("raise", 0))]
)
def test_other_hosts_hear_of_it(kind: str, culprit: int) -> None:
    outcomes = launch_ranks(watched, 4, kind, culprit, hosts=2)
    for outcome in outcomes:
        if outcome.rank != culprit:
            assert isinstance(outcome.error, PeerFailedError) or outcome.exitcode == EXIT_CODE
            assert f"rank {culprit} " in said(outcome)


def watched_from_afar(rank: int, world_size: int) -> None:
    """The connections over which hosts hear of one another come late, as where a name server takes seconds."""
    Watchdog._watch_other_hosts = lambda self: None  # type: ignore[method-assign]
    watched(rank, world_size, "kill", 0, hosts=2)


@pytest.mark.slow
def test_a_store_that_is_gone_soon_after_the_start_is_rank_0s() -> None:
    for outcome in launch_ranks(watched_from_afar, 4):
        if outcome.rank > 1:
            assert isinstance(outcome.error, PeerFailedError)
            assert "rank 0 (host " in str(outcome.error) and "could not be reached" in str(outcome.error)


def test_an_undisturbed_end_is_no_death() -> None:
    for _, last_phase in run_ranks(watched, 3, "none", -1):
        assert last_phase == "left"


def errors_everywhere(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(seconds=60))
    with Watchdog(rank, rank, mesh.gather_objects, TIMEOUT, limit=4):
        raise ValueError("the same on all")


def test_an_error_of_all_stays_what_it_is() -> None:
    for outcome in launch_ranks(errors_everywhere, 3):
        assert isinstance(outcome.error, ValueError) and str(outcome.error) == "the same on all"


def asleep_together(rank: int, world_size: int) -> str:
    """All processes of a job are stopped, and later go on."""
    dist.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(seconds=60))
    pids = mesh.gather_objects(os.getpid())
    with Watchdog(rank, rank, mesh.gather_objects, TIMEOUT, limit=4):
        for step in range(2):
            PROGRESS.enter("step", step)
        if rank == 0:
            waker = f"import os, time; time.sleep({2 * TIMEOUT}); [os.kill(pid, {signal.SIGCONT:d}) for pid in {pids}]"
            subprocess.Popen([sys.executable, "-c", waker], start_new_session=True)
        dist.all_reduce(torch.zeros(1))
        os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.zeros(1))
    return PROGRESS.phase


def test_a_job_that_was_stopped_as_a_whole_goes_on() -> None:
    assert run_ranks(asleep_together, 2) == ["left", "left"]


def trains_in_another_thread(rank: int, world_size: int) -> str:
    """While the main thread does nothing."""
    dist.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(seconds=60))

    def train() -> None:
        with Watchdog(rank, rank, mesh.gather_objects, TIMEOUT, limit=20):
            for step in range(3):
                PROGRESS.enter("step", step)
                dist.all_reduce(torch.zeros(1))
            if rank == 0:
                PROGRESS.enter("callbacks")
                time.sleep(2 * TIMEOUT)  # a user's own; the other one waits in its step
            dist.all_reduce(torch.zeros(1))

    with ThreadPoolExecutor() as pool:
        pool.submit(train).result()
    return PROGRESS.phase


def test_a_training_in_another_thread_is_watched_there() -> None:
    assert run_ranks(trains_in_another_thread, 2) == ["left", "left"]


def without_store(rank: int, world_size: int) -> bool:
    dist.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(seconds=60))
    if rank == 0:
        watchdog.own_address = lambda towards: "no-such-host.invalid"  # type: ignore[assignment]
    with Watchdog(rank, rank, mesh.gather_objects, TIMEOUT, limit=4) as watch:
        PROGRESS.enter("step", 1)
        if rank == 1:
            time.sleep(3 * BEAT)
            misbehave("kill")
        dist.all_reduce(torch.zeros(1))
    return watch.has_store


@pytest.mark.slow
def test_without_a_store_this_host_is_watched_all_the_same() -> None:
    outcomes = launch_ranks(without_store, 2)
    assert "only detected on the same host" in outcomes[0].log
    assert_all_say(outcomes, 1, "died in phase 'step' at step 1")
