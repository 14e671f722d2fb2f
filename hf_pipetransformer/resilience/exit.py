"""At the interpreter's end, this process ends the threads that would otherwise abort it.

A thread of gloo, or one of ours inside a call of torch, that is still there while the interpreter is taken down ends
the process by "terminate called without an active exception" (exit code -6), after a whole training. The threads of a
gloo group end with its object, and `dist.destroy_process_group` alone does not free that: trainers hold it, too.

No peer is needed for it. What could wait for one anyway (a collective that is under way, a device) is bounded in time.
It is left to threads that have been started before: from Python 3.12 on none can be started at the interpreter's end.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import queue
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
"""Upper bound for ending the process groups in order, and once more for aborting them."""

_work: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_is_registered = False


def end_at_exit(thread: threading.Thread | None = None) -> None:
    """End the process groups when the interpreter ends, and wait for a thread that has been told to end before.

    May be called any number of times, and before there is a process group.
    """
    global _is_registered
    if thread is not None:
        _threads.add(thread)
    if not _is_registered:
        _is_registered = True
        for _ in range(2):  # the second one aborts what the first one cannot end
            threading.Thread(target=_do_work, name="exit", daemon=True).start()
        atexit.register(end)


def _forget_in_child() -> None:
    """A forked process has none of the threads."""
    global _is_registered
    _is_registered = False


os.register_at_fork(after_in_child=_forget_in_child)


def end(seconds: float = SECONDS) -> bool:
    """End this process's part in all process groups. Not collective.

    Returns:
        Whether all were ended in time.
    """
    end_at_exit()
    deadline = time.monotonic() + seconds
    for thread in list(_threads):
        if thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.0))
    if not dist.is_available() or not dist.is_initialized():
        return True
    if _ends(_destroy, seconds):
        return True
    logger.debug("the process groups do not end: they are aborted")
    return _ends(_abort, seconds)


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
    with suppress(Exception):  # a peer or a device may be gone
        groups = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        _release(groups)


def _abort() -> None:
    with suppress(Exception):
        dist.distributed_c10d._abort_process_group()


def _release(groups: list[Any]) -> None:
    """Let go of groups that other objects hold: trainers that live until the interpreter has been taken down."""
    traceback.clear_frames(getattr(sys, "last_traceback", None))  # of the error that has ended the program
    gc.collect()
    for group in groups:
        for holder in gc.get_referrers(group):
            if holder is groups:
                continue
            attributes = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
            if isinstance(attributes, dict):
                for name in [name for name, value in attributes.items() if value is group]:
                    attributes[name] = None
    groups.clear()
