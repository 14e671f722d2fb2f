"""The launcher that the other tests start their ranks with."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from distributed import (
    RankTimeoutError,
    patient,
    run_ranks,
    run_ranks_expecting_error,
    slowness,
)


def restore_replaced(rank, world_size, *args, **kwargs):
    return rank, world_size, args, kwargs


def fail_on(rank, world_size, failing_rank):
    torch.distributed.init_process_group("gloo")
    if rank == failing_rank:
        raise KeyError("the cause")
    torch.distributed.all_reduce(torch.ones(1))


def hang(rank, world_size, folder=None):
    if folder:
        Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    if rank == 1:
        print("rank 1 goes to sleep", flush=True)
        time.sleep(600)


def stop(rank, world_size, folder):
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_cause_is_raised_and_not_its_consequences():
    failing_rank = 2
    with pytest.raises(KeyError, match="the cause") as caught:
        run_ranks(fail_on, 3, failing_rank)
    assert f"on rank {failing_rank}" in str(caught.value.__cause__)
    assert "in fail_on" in str(caught.value.__cause__)


def test_a_rank_that_raises_nothing_is_noticed():
    with pytest.raises(AssertionError, match="rank 0 raised nothing and returned"):
        run_ranks_expecting_error(restore_replaced, 2)


def test_a_hang_is_killed_in_time_and_shown(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match="rank 1 was still running after 2 s") as caught:
        run_ranks(hang, 2, str(tmp_path), timeout=2)
    assert time.monotonic() - start < 60 * slowness()
    assert "rank 1 goes to sleep" in str(caught.value)
    assert "in hang" in str(caught.value)  # its stack
    assert not any(is_alive(int(file.read_text())) for file in tmp_path.glob("*.pid"))


def test_no_rank_outlives_a_killed_test_session(tmp_path):
    session = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import distributed, test_distributed_launcher
distributed._context.set_forkserver_preload(["torch"])
distributed.run_ranks(test_distributed_launcher.stop, 1, {str(tmp_path)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", session])
    try:
        pid_file = tmp_path / "0.pid"
        while not (pid_file.exists() and pid_file.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        pid = int(pid_file.read_text())
        assert is_alive(pid)
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + patient(30)
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)
