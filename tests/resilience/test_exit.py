"""How a process that ends treats its process groups."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from distributed import patient
from selection import slow

# ---------------------------------------------------------------------------------------------------------
# Groups on an accelerator, with a kernel that waits for other processes. A semaphore stands for the kernel: destroying
# the groups waits for it, as NCCL's shutdown does, and so do destructors after the interpreter.
# ---------------------------------------------------------------------------------------------------------
WITH_A_PENDING_KERNEL = """
import ctypes, sys, torch.distributed as dist
from hf_pipetransformer.resilience import exit as process_exit

libc = ctypes.CDLL(None)
libc.calloc.restype = ctypes.c_void_p
kernel = ctypes.c_void_p(libc.calloc(1, 64))
libc.sem_init(kernel, 0, 0)
libc.__cxa_atexit(ctypes.cast(libc.sem_wait, ctypes.c_void_p), kernel, None)
abort_groups = dist.distributed_c10d._abort_process_group

def abort():
    print("abort", flush=True)
    if {can_abort}:
        libc.sem_post(kernel)
        abort_groups()
    else:
        libc.sem_wait(kernel)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.get_backend = lambda group=None: "nccl"
dist.destroy_process_group = lambda: libc.sem_wait(kernel)
dist.distributed_c10d._abort_process_group = abort
process_exit.SECONDS_FOR_THE_REST = 1.0
process_exit.end_at_exit()
{then}
"""
FAILS = "raise ValueError('the reason')"
FAILS_AND_SAYS_SO = "process_exit.note_training(has_failed=True); sys.exit(3)"


@pytest.mark.parametrize(
    ("can_abort", "then", "code"),
    [(True, FAILS, 1), *slow((True, FAILS_AND_SAYS_SO, 3), (False, FAILS, -signal.SIGALRM))],
)
@pytest.mark.slow
def test_a_failed_process_aborts_its_groups_and_exits(can_abort: bool, then: str, code: int) -> None:
    """A process that cannot abort its groups exits as well."""
    script = WITH_A_PENDING_KERNEL.format(can_abort=can_abort, then=then)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=patient(150))
    assert ended.returncode == code and ended.stdout == "abort\n", ended.stderr
    assert "the reason" in ended.stderr or then != FAILS
