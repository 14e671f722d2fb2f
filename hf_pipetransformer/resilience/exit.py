"""Shutdown of process groups and threads, which would otherwise abort this process when the interpreter exits.

A thread of gloo, or one of our threads inside a call of torch, must not run while the interpreter shuts down.
Otherwise the process ends with "terminate called without an active exception" (exit code -6), even after a complete
training. The threads of a gloo group end when its object is freed. `dist.destroy_process_group` alone does not free
it, because trainers hold references to it as well.

A failing process may have launched a kernel that waits for other processes. Destroying an NCCL group waits for such a
kernel, and so do destructors that run after the interpreter. Aborting the group ends the kernel. If that is not
possible, the operating system ends the process.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from contextlib import suppress

import torch.distributed as dist

SECONDS = 15.0
"""Upper bound for ending the process groups. A collective in progress, or a device, may wait for a peer forever."""
SECONDS_FOR_THE_REST = 60.0
"""Upper bound for the rest of the exit, if groups on an accelerator cannot be ended."""

_asked, _ended = threading.Event(), threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_pid = 0  # process that ends its groups; a forked process has none of the threads
_has_failed = False  # whether the latest training has failed


def note_training(has_failed: bool) -> None:
    """Record that a training has ended, by an error or not."""
    global _has_failed
    _has_failed = has_failed


def end_at_exit(thread: threading.Thread | None = None) -> None:
    """Destroy the process groups when the interpreter exits, after waiting for `thread`.

    It may be called any number of times, and before a process group exists.
    """
    global _pid
    if thread is not None:
        _threads.add(thread)
    if _pid != os.getpid():
        _pid = os.getpid()
        # now: since Python 3.12, no thread can start while the interpreter shuts down
        threading.Thread(target=_end_groups, name="exit", daemon=True).start()
        atexit.register(end)


def end(seconds: float = SECONDS) -> bool:
    """Destroy or abort this process's part of all process groups, once. Returns True if they ended in time."""
    end_at_exit()
    deadline = time.monotonic() + seconds
    for thread in list(_threads):
        thread.join(max(deadline - time.monotonic(), 0.0))
    _asked.set()
    has_ended = _ended.wait(seconds)
    if not has_ended and _is_on_device():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # works in destructors of libraries, too
        signal.setitimer(signal.ITIMER_REAL, SECONDS_FOR_THE_REST)
    return has_ended


def _is_on_device() -> bool:
    is_initialized = dist.is_available() and dist.is_initialized()
    return is_initialized and any(dist.get_backend(g) != "gloo" for g in dist.distributed_c10d._world.pg_map)


def _end_groups() -> None:
    _asked.wait()
    if dist.is_available() and dist.is_initialized():
        groups = list(dist.distributed_c10d._world.pg_map)
        # `last_value` is an uncaught error
        has_failed = _has_failed or getattr(sys, "last_value", None) is not None
        with suppress(Exception):  # a peer or a device may no longer exist, or a backend may not support it
            if has_failed and _is_on_device():
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
        _release(groups)
    _ended.set()


def _release(groups: list[dist.ProcessGroup]) -> None:
    """Drop other objects' references to the groups: trainers may outlive the interpreter's exit."""
    traceback.clear_frames(getattr(sys, "last_traceback", None))  # frames of the error that ended the program
    gc.collect()
    known = {id(group) for group in groups}
    for holder in gc.get_referrers(*groups):  # scans all objects: call it once for all groups
        attributes = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if isinstance(attributes, dict):
            attributes.update(dict.fromkeys(name for name, value in attributes.items() if id(value) in known))
    groups.clear()
