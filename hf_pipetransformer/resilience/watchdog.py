"""Watchdog: when a process of a job dies, stops or hangs, the others say which one and where, and exit.

Without it, the peers of a dead process fail with an error that names only a port, and the peers of a stuck one wait
for the timeout of their collectives, half an hour. With it, each process writes what it is doing (`Beat`) into the
job's store at each interval. Rank 0 reads all of them and judges; the others read that of rank 0. The first verdict in
the store wins:

    rank 1    set beat 1    get verdict, beat 0
    rank 0    set beat 0    get verdict, beats 0, 1, ...    compare_set verdict

A thread of its own does this (`_exchange`), since a request to a host that is cut off never returns. Another one
(`_watch`) looks at the main thread and at what was heard, and ends the process once there is a verdict. A main thread
that can still raise an error does so (`PeerFailedError`); a process that is blocked inside a collective, or keeps
computing, logs the verdict and exits with `EXIT_CODE`. Nothing is repaired inside a process: the job is started again,
and resumes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

import psutil
import torch.distributed as dist

from ..errors import ONE_LINE, PeerFailedError, chain_of, in_one_line
from .exit import end_at_exit
from .judge import LEAVING, START, Beat, Verdict, find_silent, judge, seconds_since_lost
from .progress import LEFT, PACED, PROGRESS, Round, doing_when, phase
from .stop_signal import EXIT_CODE as PREEMPTED

__all__ = ["PROGRESS", "Watchdog", "phase"]

logger = logging.getLogger(__name__)

EXIT_CODE = 76
"""Exit code of a process that was blocked when the watchdog ended the job."""
INTERVAL, INTERVAL_OF_MANY = 0.2, 0.5
"""Seconds between two beats of a process, and in jobs of more processes than `MANY`, to spare the store."""
MANY = 64
BUSY = 0.1
"""A thread that uses the CPU for more than this fraction of an interval is computing, not waiting."""
GRACE = 1.0
"""Seconds that the main thread has to exit by an error of its own, once there is a verdict; three times as many if
another process has failed: once that is gone, its connections are closed, and collectives raise."""
SECONDS_TO_CONNECT = 12.0
"""Minimum timeout of a request. Torch resolves the names of both ends, and a name server that does not respond takes
five seconds for each."""
SECONDS_FOR_A_VERDICT = 5.0
"""Seconds to wait for a verdict that explains a lost connection."""
VERDICT = "verdict"
LIBRARIES = ("torch.", "hf_pipetransformer.", "transformers.", "accelerate.")
"""Modules whose code may be waiting for other processes; in other code, the process itself takes long."""
LOST_CONNECTION = ("gloo", "ccl", "connection", "socket", "broken pipe", "timed out", "timeout", "remote process")
"""Words in the error messages of a collective whose peer no longer exists."""


class Watchdog:
    """Context manager that watches all processes of a job. Entering it and leaving it without an error are collective.

    It does nothing if `timeout` is 0, if there is one process, and inside a training that is already watched (a
    training that a callback of another training runs).

    Args:
        rank: rank of this process.
        gather: returns every process's small object on every process; collective.
        timeout: seconds after which a process that is stopped, or stuck in the training loop, ends the job.
        limit: seconds after which a process that is stuck anywhere ends the job.
        has_accelerator: whether there is an accelerator, in which case any operation on a device may wait for others.

    Attributes:
        is_watching: whether the processes watch each other, so that `meet` may be called.
    """

    def __init__(
        self,
        rank: int,
        gather: Callable[[Any], list[Any]],
        timeout: float,
        limit: float,
        has_accelerator: bool = False,
    ) -> None:
        self.is_watching = False
        self._rank, self._gather, self._has_accelerator = rank, gather, has_accelerator
        self._timeout, self._limit = timeout, max(limit, timeout)
        self._done, self._leaving = threading.Event(), threading.Event()
        self._found: Verdict | None = None  # by this process, to be told to the others
        self._verdict: Future[Verdict] = Future()
        self._beat = START
        self._heard: dict[int, tuple[bytes, float]] = {}  # rank -> the latest beat, and when it came
        self._lost_store_at: float | None = None

    # ------------------------------------------------------------------------------------ main thread
    def __enter__(self) -> Watchdog:
        self._outer = PROGRESS.phase, PROGRESS.step
        if self._timeout and PROGRESS.phase == LEFT:
            me = (socket.gethostname(), os.getpid(), psutil.Process().create_time(), uuid4().hex)
            self._everyone = self._gather(me)
            if len(self._everyone) > 1:
                self._begin()
        PROGRESS.enter("start", 0)
        return self

    def _begin(self) -> None:
        PROGRESS.begin(self._timeout, self._limit)
        self._main = threading.get_ident()
        self._interval = INTERVAL if len(self._everyone) <= MANY else INTERVAL_OF_MANY
        self._processor_seconds, self._place, begins = 0.0, "", json.dumps((0, *START))
        has_begun = False
        # a launcher's store may be unreachable, and a process group may be created without one
        with suppress(RuntimeError, KeyError, ValueError):
            self._exchanges, self._meetings = self._connect(), self._connect()  # a request blocks its connection
            self._exchanges.set(f"beat {self._rank}", begins)
            if self._rank == 0:
                self._exchanges.set(VERDICT, "")
            has_begun = True
        self.is_watching = all(self._gather(has_begun))
        if not self.is_watching and self._rank == 0:
            logger.warning(
                "Not all processes can reach the job's store at %s, port %s, so hangs are only detected by the timeout"
                " of collectives (ddp_timeout).",
                os.environ.get("MASTER_ADDR"),
                os.environ.get("MASTER_PORT"),
            )
        self._awake_since = self._alone_since = self._busy_at = now = time.monotonic()
        self._heard = dict.fromkeys(range(len(self._everyone) if self._rank == 0 else 1), (begins.encode(), now))
        for work in (self._exchange, self._watch) if self.is_watching else ():
            thread = threading.Thread(target=work, name="watchdog", daemon=True)
            end_at_exit(thread)
            thread.start()

    def _connect(self) -> dist.PrefixStore:
        seconds = timedelta(seconds=max(self._timeout, SECONDS_TO_CONNECT))
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # the launcher's store may still hold what an earlier attempt has written
        return dist.PrefixStore(self._everyone[0][-1], dist.TCPStore(address, port, timeout=seconds))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> None:
        try:
            if self.is_watching:
                self._leave(error)
        finally:
            self._done.set()
            PROGRESS.enter(*self._outer)

    def _leave(self, error: BaseException | None) -> None:
        if error is not None and not (isinstance(error, SystemExit) and error.code == PREEMPTED):
            return self._explain(error)
        PROGRESS.begin_round("is at the end of train()")
        try:
            self._gather(None)  # afterwards no process takes the exit of another one for a failure
        except RuntimeError as lost:
            self._explain(lost)
            raise
        self._done.set()
        with suppress(RuntimeError):
            self._gather(None)  # afterwards no process reads the store any more

    def _explain(self, error: BaseException) -> None:
        """Determine which process caused an error of the main thread, before the error propagates.

        Raises:
            PeerFailedError: another process caused it.
        """
        self._leaving.set()
        own = f"rank {self._rank} failed {doing_when(error)}: {in_one_line(error).rstrip('.')}"
        if isinstance(error, KeyboardInterrupt):
            own = f"rank {self._rank} was interrupted {doing_when(error)}"
        is_lost = isinstance(error, Exception) and _is_lost_connection(error)
        if is_lost:
            PROGRESS.enter(LEAVING)
            wait([self._verdict], SECONDS_FOR_A_VERDICT + 4 * self._interval)
        verdict = self._agree(Verdict(own))
        if self._rank == 0:
            time.sleep(4 * self._interval)  # the others read the verdict, maybe in this process's store
        if verdict.text.startswith(f"rank {self._rank} "):
            return
        if is_lost:
            raise self._failure(verdict) from error
        if verdict.text.endswith(in_one_line(error).rstrip(".")):
            with suppress(Exception):  # an error that cannot be changed
                setattr(error, ONE_LINE, verdict.text)  # the other process shows its traceback

    def _failure(self, verdict: Verdict) -> PeerFailedError:
        return PeerFailedError(f"{verdict.text}. This is rank {self._rank}.")

    def meet(self, doing: str) -> None:
        """Wait for all processes to begin the same round. Collective over all processes. Only if `is_watching`.

        Args:
            doing: what all processes must do, as the predicate of a sentence. Its first two words must be the same.

        Raises:
            ValueError: another process does something else that it cannot end without this one. The message says what
                both do.
            PeerFailedError: another process has failed.
        """
        PROGRESS.begin_round(doing, is_meeting=True)
        now = PROGRESS.round
        key = f"round {now.number} {doing.split()[:2]}"
        arrived, pause = self._meetings.add(key, 1), INTERVAL / 40
        while arrived < len(self._everyone):
            time.sleep(pause)  # here, so that this thread is seen to wait
            if self._verdict.done():
                verdict = self._verdict.result()
                raise ValueError(f"{verdict.text}.") if verdict.is_mistake else self._failure(verdict)
            arrived, pause = self._meetings.add(key, 0), min(2 * pause, INTERVAL)
        PROGRESS.round = Round(now.number, doing, is_meeting=False, num_met=now.num_met + 1)

    # ------------------------------------------------------------------------------------ thread: exchange
    def _exchange(self) -> None:
        """Tell the others at each interval what this process does, and what it has found; hear what they say."""
        keys, number, before = [VERDICT, *(f"beat {rank}" for rank in self._heard)], 0, time.monotonic()
        try:
            while not self._done.wait(self._interval):
                number += 1
                self._exchanges.set(f"beat {self._rank}", json.dumps((number, *self._beat)))
                if self._found is not None and not self._verdict.done():
                    self._exchanges.compare_set(VERDICT, "", json.dumps(self._found))
                verdict, *beats = self._exchanges.multi_get(keys)
                before = now = self._time_after(before)
                for rank, beat in zip(self._heard, beats, strict=True):
                    if beat != self._heard[rank][0]:
                        self._heard[rank] = beat, now
                if verdict:
                    self._settle(Verdict.parse(verdict))
        except (RuntimeError, OSError):
            self._lost_store_at = time.monotonic()

    def _time_after(self, before: float) -> float:
        """Return the time, after an interval. If it took long, the machine or the whole job was suspended, or is slow.

        What was seen counts from now on then.
        """
        now = time.monotonic()
        if now - before > GRACE + 2 * self._interval:
            self._awake_since = self._alone_since = self._busy_at = now
        return now

    def _settle(self, verdict: Verdict) -> Verdict:
        """Let this be the verdict if there is none yet. Returns the verdict."""
        with suppress(InvalidStateError):
            self._verdict.set_result(verdict)
        return self._verdict.result()

    def _agree(self, found: Verdict) -> Verdict:
        """Tell what was found, and return what all processes agree on. It is `found` if the store does not answer."""
        self._found = found
        if self._lost_store_at is None:  # who cannot reach a process may be cut off itself
            wait([self._verdict], GRACE if found.ranks else SECONDS_FOR_A_VERDICT)
        return self._settle(found)

    # ------------------------------------------------------------------------------------ thread: watch
    def _watch(self) -> None:
        """Look at the main thread and at what was heard, until there is a verdict."""
        before = time.monotonic()
        while not self._done.wait(self._interval):
            before = now = self._time_after(before)
            self._beat = self._look(now)
            found = self._verdict.result() if self._verdict.done() else self._find(now)
            if found is not None:
                return self._give_up(self._agree(found))

    def _look(self, now: float) -> Beat:
        """Look at the main thread."""
        frame = sys._current_frames().get(self._main)
        if frame is None or _may_wait(frame, anywhere=self._has_accelerator):
            self._alone_since = now
        seconds = time.clock_gettime(time.pthread_getcpuclockid(self._main))
        if seconds - self._processor_seconds > BUSY * self._interval:
            self._busy_at = now
        self._processor_seconds = seconds
        while frame is not None and frame.f_back and _module_of(frame).startswith("torch."):
            frame = frame.f_back
        if frame is not None:
            self._place = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        return Beat(
            PROGRESS.patience,
            now - max(PROGRESS.since, self._alone_since),
            now - max(PROGRESS.since, self._busy_at),
            PROGRESS.phase in PACED,
            PROGRESS.phase,
            PROGRESS.doing,
            self._place,
            PROGRESS.round,
        )

    def _find(self, now: float) -> Verdict | None:
        """Judge what was heard: rank 0 of all processes, the others of rank 0 and its store."""
        heard = {rank: (Beat.parse(message), at) for rank, (message, at) in self._heard.items()}
        beats = {rank: beat for rank, (beat, _) in heard.items() if beat.phase != LEFT}
        silence = {rank: now - max(heard[rank][1], self._awake_since) for rank in beats}
        lost_for = seconds_since_lost([*beats.values(), self._beat])
        if self._lost_store_at is not None:
            lost_for = max(lost_for, now - self._lost_store_at)
        silent = find_silent(beats, silence, [host for host, *_ in self._everyone], self._timeout, lost_for)
        return silent or (judge(beats, self._timeout) if self._rank == 0 else None)

    def _give_up(self, verdict: Verdict) -> None:
        """End this process, unless its main thread leaves by itself."""
        for rank in verdict.ranks:
            self._kill_if_stopped(rank)
        began = time.monotonic()
        while self._may_still_leave(verdict, time.monotonic() - began):
            if self._leaving.wait(INTERVAL / 4) or self._done.is_set():
                return
        try:
            logger.error("[rank %d] %s.", self._rank, verdict.text)
            frame = sys._current_frames().get(self._main)
            if frame is not None and verdict.is_hang:
                where = "".join(traceback.format_stack(frame, limit=12))
                logger.error("[rank %d] was %s, at\n%s", self._rank, PROGRESS.doing, where)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(EXIT_CODE)

    def _may_still_leave(self, verdict: Verdict, seconds: float) -> bool:
        """Whether the main thread may still exit by itself, `seconds` after the verdict.

        A checkpoint whose files are complete may still be renamed. A process that computes outside of the training
        steps may be about to raise an error of its own, or to reach a collective that fails.
        """
        if seconds < (GRACE if verdict.is_hang else 3 * GRACE):
            return True
        self._look(time.monotonic())
        works = PROGRESS.phase not in PACED and time.monotonic() - self._busy_at < GRACE
        return seconds < self._timeout and (PROGRESS.phase == "publish" or works)

    def _kill_if_stopped(self, rank: int) -> None:
        """Kill a stopped process of this host. It reacts to no other signal, and its launcher would wait for it."""
        host, pid, created, _ = self._everyone[rank]
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            is_it = host == self._everyone[self._rank][0] and process.create_time() == created
            if is_it and process.status() == psutil.STATUS_STOPPED:
                process.kill()


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))  # code that is run by `exec` may have none


def _may_wait(frame: FrameType, anywhere: bool) -> bool:
    """Whether a thread in this frame may be waiting for other processes.

    Args:
        frame: the innermost frame.
        anywhere: check the outer frames, too, so that code called by the libraries counts: any operation on an
            accelerator waits for all operations that were queued on it before.
    """
    inner: FrameType | None = frame
    while inner is not None:
        if _module_of(inner).startswith(LIBRARIES):
            return True
        inner = inner.f_back if anywhere else None
    return False


def _is_lost_connection(error: BaseException) -> bool:
    """Whether an error may be the mere consequence of another process's failure."""
    return any(
        isinstance(one, (dist.DistError, ConnectionError))
        or (isinstance(one, RuntimeError) and any(words in str(one).lower() for words in LOST_CONNECTION))
        for one in chain_of(error)
    )
