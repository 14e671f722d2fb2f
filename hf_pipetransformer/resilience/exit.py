"""Shutdown of the process groups and threads that would otherwise abort this process when the interpreter exits.

If a thread of gloo, or one of our threads inside a call of torch, is still running while the interpreter shuts down,
the process ends with "terminate called without an active exception" (exit code -6), after a complete training. The
threads of a gloo group end when its object is freed. `dist.destroy_process_group` alone does not free it, because
trainers hold references to it as well.

The shutdown needs no peer. Operations that could still wait for one (a collective in progress, a device) have a
timeout. They run in threads that were started earlier, because from Python 3.12 on no thread can be started while
the interpreter shuts down.

    groups of gloo alone         destroy, else abort
    groups on an accelerator     the same; after a failure first abort

A process that fails may have given the device a kernel that waits for other processes. Destroying a group of NCCL
waits for such a kernel, holding a lock that aborting the group needs, and destructors that run after the interpreter
wait for it, too. Aborting the group ends the kernel. If that is not possible, the operating system ends the process.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

SECONDS = 5.0
"""Upper bound, in seconds, for destroying the process groups, and again for aborting them."""
SECONDS_FOR_THE_REST = 60.0
"""Upper bound, in seconds, for the rest of the exit, if groups on an accelerator cannot be ended."""
SECONDS_TO_FLUSH = 1.0
"""Upper bound, in seconds, for flushing open files. Another thread may hold one of them and never let it go."""

MOST_PATIENCE = 8.0
"""Upper bound on the factor by which a busy machine makes these bounds longer."""

_work: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_is_registered = False
_has_failed = False  # the latest training
_leaves_quickly = False


def note_training(has_failed: bool) -> None:
    """Record that a training has ended, by an error or not."""
    global _has_failed
    _has_failed = has_failed


def finishes(work: Callable[[], None], seconds: float = SECONDS) -> bool:
    """Run `work`, which may wait for a device forever, in a thread, and wait for it at most so many seconds.

    Returns:
        Whether it finished in time. Its errors are logged.
    """

    def run() -> None:
        try:
            work()
        except Exception:
            logger.debug("Work that was left to a thread failed.", exc_info=True)

    thread = threading.Thread(target=run, name="unwind", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def end_at_exit(thread: threading.Thread | None = None) -> None:
    """Destroy the process groups when the interpreter exits, and first wait for a thread that was told to end.

    It may be called any number of times, and before a process group exists.
    """
    global _is_registered
    if thread is not None:
        _threads.add(thread)
    if not _is_registered:
        _is_registered = True
        for _ in range(2):  # the second one tries the other way if the first one hangs
            threading.Thread(target=_do_work, name="exit", daemon=True).start()
        atexit.register(_at_exit)


def _forget_in_child() -> None:
    """Reset the state in a forked process, which has none of the threads."""
    global _is_registered, _leaves_quickly
    _is_registered = _leaves_quickly = False


os.register_at_fork(after_in_child=_forget_in_child)


def end(seconds: float = SECONDS) -> bool:
    """Destroy or abort this process's part of all process groups. Not collective.

    Args:
        seconds: bound on each step, on a machine whose cores are free; it is longer where more programs want to run
            than there are cores.

    Returns:
        Whether all of them have ended in time.
    """
    end_at_exit()
    seconds *= _patience()
    deadline = time.monotonic() + seconds
    for thread in list(_threads):
        if thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.0))
    if not dist.is_available() or not dist.is_initialized():
        return True
    is_on_device = any(dist.get_backend(group) != "gloo" for group in dist.distributed_c10d._world.pg_map)
    # an error that nobody has caught is the latest one
    has_failed = _has_failed or getattr(sys, "last_value", None) is not None
    for work in (_abort, _destroy) if is_on_device and has_failed else (_destroy, _abort):
        if _ends(work, seconds) and not dist.is_initialized():
            return True
        logger.debug("The process groups did not end in time (%s).", work.__name__)
    if is_on_device and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # works in destructors of libraries, too
        signal.setitimer(signal.ITIMER_REAL, SECONDS_FOR_THE_REST)
    return False


def _patience() -> float:
    """How much longer than on free cores something may take: the number of programs for each core, between 1 and 8."""
    try:
        load = os.getloadavg()[0]
    except OSError:  # not every system has one
        return 1.0
    return min(max(load / (os.cpu_count() or 1), 1.0), MOST_PATIENCE)


def _do_work() -> None:
    while True:
        work, done = _work.get()
        work()
        done.set()


def _ends(work: Callable[[], None], seconds: float) -> bool:
    done = threading.Event()
    _work.put((work, done))
    return done.wait(seconds)


def _destroy() -> None:
    with suppress(Exception):  # a peer or a device may no longer exist
        groups = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        _release(groups)


def _abort() -> None:
    with suppress(Exception):  # a backend may not support it
        groups = list(dist.distributed_c10d._world.pg_map)
        dist.distributed_c10d._abort_process_group()
        _release(groups)


def _release(groups: list[Any]) -> None:
    """Drop other objects' references to the groups, such as those of trainers that outlive the interpreter's exit."""
    traceback.clear_frames(getattr(sys, "last_traceback", None))  # of the error that ended the program
    gc.collect()
    known = {id(group) for group in groups}
    for holder in gc.get_referrers(*groups):  # it looks at all objects, so once for all groups
        if holder is groups:
            continue
        attributes = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        if isinstance(attributes, dict):
            for name in [name for name, value in attributes.items() if id(value) in known]:
                attributes[name] = None
    groups.clear()


def leave_quickly() -> None:
    """Have the interpreter skip the collections of garbage at its exit, which look at all objects of all libraries.

    With torch and transformers they take more than a second of CPU time, in each process. What needs no collection
    to be freed is freed as always; files that only a collection would close are flushed here.
    """
    global _leaves_quickly
    end_at_exit()
    _leaves_quickly = True


def _at_exit() -> None:
    end()
    if _leaves_quickly:  # behind `end`, whose search for who refers to a group does not see frozen objects
        _spare_collections()


def _spare_collections() -> None:
    if not _ends(_flush_files, SECONDS_TO_FLUSH):
        logger.debug("Not all files could be flushed in time.")
    gc.freeze()


def _flush_files() -> None:
    for thing in gc.get_objects():
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with suppress(Exception):  # closed, only readable, or on a disk that is full
                thing.flush()
