"""How the processes of a restarted job find one another."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist
from distributed import run_ranks

from hf_pipetransformer.resilience.stores import ADDRESS, use_fresh_store

SECONDS = timedelta(seconds=120)
LAUNCHED = {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def attempt(rank: int, world_size: int, port: int) -> tuple[str, int]:
    """As in a process that a launcher has started: its store is elsewhere, and lives through all attempts."""
    os.environ["MASTER_PORT"] = str(port)
    use_fresh_store(os.environ, SECONDS)
    use_fresh_store(os.environ, SECONDS)  # a second set of arguments
    dist.init_process_group("gloo", timeout=SECONDS)
    dist.barrier()
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def test_each_attempt_has_a_store_of_its_own() -> None:
    launchers = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = run_ranks(attempt, 3, launchers.port)
    second = run_ranks(attempt, 3, launchers.port)  # without the store of its own: hangs, or connects to the dead
    assert len(set(first)) == len(set(second)) == 1
    assert launchers.port not in (first[0][1], second[0][1]) and first[0][0] == "127.0.0.1"


def test_an_address_of_another_jobs_store_is_not_taken() -> None:
    launchers, other = (dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2))
    launchers.set(ADDRESS, f"127.0.0.1 {other.port} an-attempt-before")
    environ = {**LAUNCHED, "RANK": "1", "MASTER_PORT": str(launchers.port)}
    with pytest.raises(TimeoutError, match=f"127.0.0.1:{other.port}"):
        use_fresh_store(environ, timedelta(seconds=1))
    assert environ["MASTER_PORT"] == str(launchers.port)


def test_a_port_of_zero_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"MASTER_PORT=0.*--standalone"):
        use_fresh_store({**LAUNCHED, "RANK": "0", "MASTER_PORT": "0"}, timedelta(seconds=1))
