"""What a process that ends does about its process groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from selection import slow

from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.resilience import exit as process_exit

HELD: list[SimpleNamespace] = []


def ends_its_groups(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    dist.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(seconds=60))
    mesh.gather_objects(rank)
    holder = SimpleNamespace(mesh=mesh, group=mesh.groups(2).pipeline)  # as a trainer that the script holds
    HELD.append(holder)
    return process_exit.end(), dist.is_initialized(), holder.group is None and mesh.control is None


def test_groups_are_destroyed_and_let_go_of() -> None:
    assert run_ranks(ends_its_groups, 2) == [(True, False, True)] * 2


def ends_beside_a_stuck_peer(rank: int, world_size: int) -> float:
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    dist.barrier()
    if rank == 1:
        time.sleep(5)
        return 0.0
    work = dist.all_reduce(torch.ones(1), async_op=True)  # the other one never comes
    began = time.monotonic()
    os.getloadavg = lambda: (0.0, 0.0, 0.0)  # on a busy machine the bound is longer
    process_exit.end(seconds=1)
    del work
    return time.monotonic() - began


def test_the_end_is_bounded_where_a_peer_is_stuck() -> None:
    assert run_ranks(ends_beside_a_stuck_peer, 2)[0] < 4


LEAVES_QUICKLY = """
import atexit, gc, sys
from types import SimpleNamespace
import torch.distributed as dist
from hf_pipetransformer.resilience.exit import leave_quickly

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
held = SimpleNamespace(group=dist.group.WORLD, args=[])  # as a trainer that the script holds
atexit.register(lambda: print(gc.get_freeze_count() > 0, held.group, flush=True))
leave_quickly()
holder = SimpleNamespace(file=open(sys.argv[1], "w"))
holder.file.write("the last line")
holder.itself = holder  # only a collection would close the file
"""


def test_an_exit_without_collections_keeps_what_was_written_and_lets_go_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "log"
    program = (sys.executable, "-c", LEAVES_QUICKLY, str(path))
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout.strip(), path.read_text()) == (0, "True None", "the last line"), (
        ended.stderr
    )


WITH_A_FILE_THAT_IS_HELD = """
import os, threading
from hf_pipetransformer.resilience.exit import leave_quickly

full = os.fdopen(os.pipe()[1], "wb")
threading.Thread(target=full.write, args=(bytes(2**20),), daemon=True).start()  # nobody reads the pipe
leave_quickly()
"""


def test_an_exit_without_collections_does_not_wait_for_a_file_that_a_thread_holds() -> None:
    ended = subprocess.run([sys.executable, "-c", WITH_A_FILE_THAT_IS_HELD], timeout=60)
    assert ended.returncode == 0


# ---------------------------------------------------------------------------------------------------------
# Groups on an accelerator, with a kernel that waits for other processes. A semaphore stands for the kernel: destroying
# the groups waits for it under a lock, as NCCL's shutdown does, and so do destructors after the interpreter.
# ---------------------------------------------------------------------------------------------------------
WITH_A_PENDING_KERNEL = """
import ctypes, sys, threading, torch.distributed as dist
from hf_pipetransformer.resilience import exit as process_exit

libc = ctypes.CDLL(None)
libc.calloc.restype = ctypes.c_void_p
kernel = ctypes.c_void_p(libc.calloc(1, 64))
libc.sem_init(kernel, 0, 0)
libc.__cxa_atexit(ctypes.cast(libc.sem_wait, ctypes.c_void_p), kernel, None)
lock = threading.Lock()

def destroy():
    with lock:
        libc.sem_wait(kernel)
        libc.sem_post(kernel)

abort_groups = dist.distributed_c10d._abort_process_group

def abort():
    print("abort", flush=True)
    with lock:
        if {can_abort}:
            libc.sem_post(kernel)
            abort_groups()
        else:
            libc.sem_wait(kernel)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.get_backend = lambda group=None: "nccl"
dist.destroy_process_group = destroy
dist.distributed_c10d._abort_process_group = abort
process_exit.SECONDS_FOR_THE_REST = 1.0
process_exit.end_at_exit()
{then}
"""
FAILS = "raise ValueError('the reason')"
FAILS_AND_SAYS_SO = "process_exit.note_training(has_failed=True); sys.exit(3)"


def run_with_a_pending_kernel(can_abort: bool, then: str) -> subprocess.CompletedProcess[str]:
    script = WITH_A_PENDING_KERNEL.format(can_abort=can_abort, then=then)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("then", "code"), [(FAILS, 1), *slow((FAILS_AND_SAYS_SO, 3))])
def test_a_failed_process_aborts_its_groups_and_exits(then: str, code: int) -> None:
    ended = run_with_a_pending_kernel(True, then)
    assert ended.returncode == code and ended.stdout == "abort\n"
    assert "the reason" in ended.stderr or code == 3


@pytest.mark.slow
def test_a_process_that_cannot_abort_its_groups_exits_nevertheless() -> None:
    ended = run_with_a_pending_kernel(False, FAILS)
    assert ended.returncode == -signal.SIGALRM and "the reason" in ended.stderr


def test_work_that_waits_for_a_device_is_left_behind() -> None:
    done: list[int] = []
    assert process_exit.finishes(lambda: done.append(1)) and done == [1]
    assert not process_exit.finishes(lambda: time.sleep(5), seconds=0.1)
    assert process_exit.finishes(lambda: done.remove(2)), "errors are logged"
