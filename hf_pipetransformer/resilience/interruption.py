"""Ctrl-C and SIGTERM end a job also while its processes are blocked.

Ctrl-C: one line on the first process, and all processes of the job gone within a few seconds.

A terminal sends SIGINT to the launcher, which passes it on to every process. Python raises `KeyboardInterrupt` in the
main thread, but only when that runs Python code. A process that is inside a long operation, or waits for another one
in a collective, would notice nothing. Therefore the C-level handler also wakes a thread (`signal.set_wakeup_fd`):

    main thread runs Python     KeyboardInterrupt leaves train() as always; the thread watches that it does
    main thread does not        after `SECONDS_TO_NOTICE`, in which the others may leave, the thread ends the process

In a single process Python's own behaviour is kept: the script may catch `KeyboardInterrupt`, and take its time.

SIGTERM: a training saves at the end of its step, and exits (`StopSignal`). If it does not get there, because this
process finishes nothing any more (`Progress.patience_when_stopping`), the same thread ends the process.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from .exit import end_at_exit, leave_quickly
from .watchdog.progress import PROGRESS

logger = logging.getLogger(__name__)

EXIT_CODE = 130
"""Exit code of a process that was interrupted while it was blocked, as a shell reports SIGINT."""
TERMINATED = 143
"""Exit code of a process that was blocked when it received SIGTERM, as a shell reports it."""
BUSY = 0.1
"""A thread that uses the processor for more than this fraction of the time is computing."""
SECONDS_BETWEEN_LOOKS = 0.2
"""Seconds between two looks at the progress of a process that has received SIGTERM."""
SECONDS_TO_NOTICE = 1.2
"""Seconds that the main thread has to notice the signal."""
SECONDS_TO_TELL = 0.5
"""Seconds for which a process that is blocked waits until what is left of the training has been said."""
SECONDS_TO_LEAVE = 2.4
"""Seconds after the signal in which the main thread must have left the training."""


_WATCHING: weakref.WeakSet[Interruption] = weakref.WeakSet()
"""Trainings of this process that have set the wakeup descriptor."""


def _leave_to_parent() -> None:
    """In a forked process: a signal to it shall not wake the parent's thread, whose descriptor it has inherited."""
    if _WATCHING:
        signal.set_wakeup_fd(-1)
        _WATCHING.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class Interruption:
    """Context manager around a training, which makes SIGINT and SIGTERM end all of its processes.

    It does nothing outside the main thread, or if the program has a wakeup descriptor of its own, and leaves a SIGINT
    handler of the program's own alone.

    Args:
        has_peers: whether there are other processes, so that this one must not stay.
        tell: says what is left of the training. It is called once, possibly by another thread than the main one.

    Attributes:
        is_asked: whether SIGINT was received.
    """

    def __init__(self, has_peers: bool, tell: Callable[[], None]) -> None:
        self.is_asked = False
        self._has_peers, self._tell = has_peers, tell
        self._is_installed = self._is_noticed = self._is_told = False
        self._lock = threading.Lock()
        self._has_left = threading.Event()
        self._pid = 0
        self._fd_before = -1
        self._wake: tuple[socket.socket, socket.socket] | None = None

    def __enter__(self) -> Interruption:
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._notice)
                self._is_installed = True
            self._watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        is_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        if self._is_installed and is_interrupted:
            self._tell_once()
            if self._has_peers and error is not None:
                _silence_traceback(error)
                leave_quickly()
        self._tell = _nothing  # the thread, which may end later, shall not keep the training alive
        self._has_left.set()
        if self._wake is not None:
            _WATCHING.discard(self)
            signal.set_wakeup_fd(self._fd_before)
            for end in reversed(self._wake):  # the writing end first, so that the thread reads the end of the stream
                end.close()
        if signal.getsignal(signal.SIGINT) == self._notice:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._is_installed = False

    def _notice(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second signal is Python's own
        if os.getpid() == self._pid:  # not in a forked process that has inherited the handler
            self.is_asked = self._is_noticed = True
        raise KeyboardInterrupt

    def _tell_once(self) -> None:
        with self._lock:
            is_told, self._is_told = self._is_told, True
        if not is_told:
            self._tell()

    # ------------------------------------------------------------------------------------ a blocked main thread
    def _watch(self) -> None:
        reading, writing = self._wake = socket.socketpair()
        writing.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        if self._fd_before != -1:  # an event loop's
            signal.set_wakeup_fd(self._fd_before)
            reading.close()
            writing.close()
            self._wake = None
            return
        _WATCHING.add(self)
        thread = threading.Thread(target=self._end_if_blocked, args=(reading,), name="interruption", daemon=True)
        end_at_exit(thread)
        thread.start()

    def _end_if_blocked(self, reading: socket.socket) -> None:
        with suppress(OSError):
            if not self._wait_for_sigint(reading) or not self._has_peers:
                return
            self.is_asked = True
            asked = time.monotonic()
            if not self._has_left.wait(SECONDS_TO_NOTICE) and not self._is_noticed:
                self._end(EXIT_CODE)
            if not self._has_left.wait(max(asked + SECONDS_TO_LEAVE - time.monotonic(), 0)):
                self._end(EXIT_CODE)

    def _wait_for_sigint(self, reading: socket.socket) -> bool:
        """Wait for SIGINT, and end the process if it does not react to SIGTERM. False if the training has ended."""
        stopping: _Stopping | None = None
        numbers = b"-"
        while numbers and (signal.SIGINT not in numbers or not self._is_installed):
            try:
                numbers = reading.recv(64)
            except TimeoutError:
                numbers = b"-"
            if signal.SIGTERM in numbers and stopping is None:
                stopping = _Stopping()
                reading.settimeout(SECONDS_BETWEEN_LOOKS)
            if stopping is not None and numbers:
                seconds = stopping.idle_seconds()
                if seconds > PROGRESS.patience_when_stopping:
                    logger.error(
                        "Received SIGTERM, but this process has finished nothing for %.0f s since (%s), so it ends"
                        " without saving a checkpoint. Exit code %d.",
                        seconds,
                        PROGRESS.read().doing,
                        TERMINATED,
                    )
                    self._end(TERMINATED)
        return bool(numbers)

    def _end(self, code: int) -> None:
        # in a thread, because a disk that hangs, or a lock of the blocked main thread, may be in the way
        telling = threading.Thread(target=self._tell_and_flush, name="interruption-tell", daemon=True)
        telling.start()
        telling.join(SECONDS_TO_TELL)
        os._exit(code)

    def _tell_and_flush(self) -> None:
        self._tell_once()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


class _Stopping:
    """Whether the main thread of a process that has received SIGTERM still does something."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._used = time.clock_gettime(self._clock)
        self._looked = self._active = time.monotonic()

    def idle_seconds(self) -> float:
        """Seconds for which it has finished nothing and has not used the processor."""
        now, used = time.monotonic(), time.clock_gettime(self._clock)
        was_stopped = now - self._looked > 10 * SECONDS_BETWEEN_LOOKS  # the process, by another signal
        if was_stopped or used - self._used > BUSY * (now - self._looked):
            self._active = now
        self._looked, self._used = now, used
        return now - max(self._active, PROGRESS.read().since)


def _nothing() -> None:
    pass


def _silence_traceback(interrupt: BaseException) -> None:
    """Print no traceback for this `KeyboardInterrupt`: the launcher has many processes, and one line was logged."""
    before: Any = sys.excepthook
    known = id(interrupt)

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if id(error) != known:
            before(kind, error, tb)

    sys.excepthook = hook
