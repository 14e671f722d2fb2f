"""Watchdog: if a process of a job dies, stops or hangs, the others log its rank and position, and exit.

Without it, the peers of a dead process fail with an error that names only a port. The peers of a hung process wait for
the timeout of their collectives, half an hour. With it, a thread of each process writes the state of the process
(`Beat`) into the job's store at each interval. Rank 0 reads all beats and judges; the others read rank 0's beat. The
first verdict in the store wins:

    rank 1    set beat 1    get beat 0, verdict
    rank 0    set beat 0    get beats 0, 1, ..., verdict    compare_set verdict

If the main thread of a process can still raise an error, it raises `PeerFailedError`. A main thread that is blocked
inside a collective, or keeps computing, cannot be interrupted: the process logs the verdict and exits with
`EXIT_CODE`. Processes are not repaired: restart the job, and it resumes.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

import psutil
import torch.distributed as dist

from ...errors import ONE_LINE, PeerFailedError, chain_of, in_one_line, printable
from ...progress import LEFT, PACED, PROGRESS, Round, doing_when
from ...resilience.exit import end_at_exit
from ..preemption.stop_signal import EXIT_CODE as PREEMPTED
from .judge import LEAVING, SECONDS_OF_SILENCE, Beat, Verdict, find_silent, judge

logger = logging.getLogger(__name__)

EXIT_CODE = 76
"""Exit code of a process that was blocked when the watchdog ended the job."""
INTERVAL = 0.2
"""Seconds between two beats of a process; in jobs of many processes up to `LONGEST_INTERVAL`."""
LONGEST_INTERVAL = SECONDS_OF_SILENCE / 4
AT_ONCE = 64
"""Number of processes above which the interval grows with their number, to bound the load of the store."""
BUSY = 0.1
"""A thread that uses the CPU for more than this fraction of an interval is computing, not waiting."""
GRACE = 1.0
"""Seconds for the main thread to exit by its own error after a verdict. Three times as many if another process has
failed: when it is gone, its connections close and collectives raise."""
SECONDS_TO_CONNECT = 12.0
"""Minimum timeout of a request. Torch resolves the names of both ends, and a name server that does not respond takes
five seconds for each."""
SECONDS_FOR_A_VERDICT = 5.0
"""Seconds to wait for a verdict that explains a lost connection."""
VERDICT = "verdict"
NOT_RUNNING = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
LIBRARIES = ("torch.", "hf_pipetransformer.", "transformers.", "accelerate.")
"""Prefixes of modules that may wait for other processes. In other code, the process itself is slow."""
LOST_CONNECTION = ("gloo", "ccl", "connection", "socket", "broken pipe", "timed out", "timeout", "remote process")
"""Words in the error messages of a collective if a peer no longer exists."""


class Watchdog:
    """Context manager that watches all processes of a job. Entry, and exit without an error, are collective.

    It is disabled if `timeout` is 0, if there is one process, and inside a training that is already watched (a
    callback may run a second training).

    Args:
        rank: rank of this process.
        gather: returns every process's small object on every process; collective.
        timeout: seconds after which a process that is stopped or hung in the training loop ends the job.
        limit: seconds after which a process that hangs anywhere ends the job.
        has_accelerator: whether there is an accelerator. Any operation on it may wait for other processes.

    Attributes:
        is_watching: whether the processes watch each other. `meet` requires it.
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
        self._done, self._told, self._leaving = threading.Event(), threading.Event(), threading.Event()
        self._verdict: Verdict | None = None
        self._judging, self._ending = threading.Lock(), threading.Lock()
        self._heard: dict[int, tuple[Beat, float]] = {}  # rank -> latest beat, and its arrival time

    # ------------------------------------------------------------------------------------ main thread
    def __enter__(self) -> Watchdog:
        self._outer = PROGRESS.phase, PROGRESS.step
        if self._timeout and PROGRESS.phase == LEFT:
            me = (socket.gethostname(), os.getpid(), psutil.Process().create_time(), uuid4().hex)
            self._everyone = self._gather(me)
            if len(self._everyone) > 1:
                self._begin()
        return self

    def _begin(self) -> None:
        PROGRESS.timeout, PROGRESS.limit, PROGRESS.round = self._timeout, self._limit, Round()
        PROGRESS.forget_pace()
        PROGRESS.tick()
        self._main = threading.get_ident()
        self._interval = min(INTERVAL * max(1.0, len(self._everyone) / AT_ONCE), LONGEST_INTERVAL)
        self._alone_since = self._busy_at = self._answered_at = time.monotonic()
        self._number, self._processor_seconds, self._place = 0, 0.0, ""
        has_begun = False
        # a launcher's store may be unreachable, and a process group may have no store
        with suppress(RuntimeError, KeyError, ValueError):
            self._beats, self._store = self._connect(), self._connect()  # each request blocks its connection
            self._store.set(f"beat {self._rank}", json.dumps(self._look(time.monotonic())))
            if self._rank == 0:
                self._store.set(VERDICT, "")
            has_begun = True
        self.is_watching = all(self._gather(has_begun))
        if not self.is_watching and self._rank == 0:
            logger.warning(
                "Not all processes can reach the job's store at %s, port %s, so hangs are only detected by the timeout"
                " of collectives (ddp_timeout).",
                os.environ.get("MASTER_ADDR"),
                os.environ.get("MASTER_PORT"),
            )
        self._alone_since = self._busy_at = self._answered_at = time.monotonic()  # connecting may have taken long
        for watch in (self._watch, self._watch_store) if self.is_watching else ():
            thread = threading.Thread(target=watch, name="watchdog", daemon=True)
            end_at_exit(thread)
            thread.start()

    def _connect(self) -> dist.PrefixStore:
        seconds = timedelta(seconds=max(self._timeout, SECONDS_TO_CONNECT))
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # the launcher's store may still contain the keys of an earlier attempt
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
            self._gather(None)  # from here on no process takes another's exit for a failure
        except RuntimeError as lost:
            self._explain(lost)
            raise
        self._done.set()
        with suppress(RuntimeError):
            self._gather(None)  # from here on no process reads the store

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
            self._told.wait(SECONDS_FOR_A_VERDICT + 4 * self._interval)
        silence = time.monotonic() - self._answered_at
        is_cut_off = is_lost and silence > GRACE + 2 * self._interval
        verdict = self._agree(self._without_store(silence) if is_cut_off else Verdict(own), tells=not is_cut_off)
        if self._rank == 0:
            time.sleep(4 * self._interval)  # lets the others read the verdict: this process may hold the store
        if verdict.text.startswith(f"rank {self._rank} "):
            return
        if is_lost:
            raise PeerFailedError(f"{verdict.text}. This is rank {self._rank}.") from error
        if verdict.text.endswith(in_one_line(error).rstrip(".")):
            with suppress(Exception):  # some errors have no writable attributes
                setattr(error, ONE_LINE, verdict.text)  # one line is enough: the other process shows its traceback

    def meet(self, doing: str) -> None:
        """Wait for all processes to begin the same round. Collective over all processes. Requires `is_watching`.

        Args:
            doing: the operation that all processes must run, as the predicate of a sentence. Its first two words must
                be the same on all processes.

        Raises:
            ValueError: another process runs a different operation, which needs this process. The message names both.
            PeerFailedError: another process has failed.
        """
        PROGRESS.begin_round(doing, is_meeting=True)
        now = PROGRESS.round
        key = f"round {now.number} {doing.split()[:2]}"
        arrived, pause = self._store.add(key, 1), INTERVAL / 40
        while arrived < len(self._everyone):
            time.sleep(pause)  # sleeps in this frame: the watchdog sees that the thread waits
            if self._told.is_set():
                assert self._verdict is not None
                if self._verdict.is_mistake:
                    raise ValueError(f"{self._verdict.text}.")
                raise PeerFailedError(f"{self._verdict.text}. This is rank {self._rank}.")
            arrived, pause = self._store.add(key, 0), min(2 * pause, INTERVAL)
        PROGRESS.round = Round(now.number, doing, is_meeting=False, num_met=now.num_met + 1)

    # ------------------------------------------------------------------------------------ threads
    def _watch(self) -> None:
        ranks = range(len(self._everyone)) if self._rank == 0 else (0, self._rank)
        keys = [VERDICT, *(f"beat {rank}" for rank in ranks)]
        try:
            while not self._done.wait(self._interval):
                try:
                    verdict = self._beat(ranks, keys)
                except (RuntimeError, OSError):
                    raise
                except Exception:  # an unexpected error must not end the watch
                    logger.debug("The watchdog could not look.", exc_info=True)
                    continue
                if verdict is not None:
                    return self._give_up(verdict)
        except (RuntimeError, OSError):
            # if rank 0 has exited, the verdict may already be here
            if not self._told.wait(GRACE) and not self._done.is_set():
                self._give_up(self._without_store(time.monotonic() - self._answered_at), tells=False)

    def _beat(self, ranks: Sequence[int], keys: list[str]) -> Verdict | None:
        """Publish this process's beat, and read the others' beats."""
        now = time.monotonic()
        was_asleep = now - self._answered_at > GRACE + 2 * self._interval  # the machine, or the whole job
        if was_asleep:
            self._alone_since = self._busy_at = now
        self._beats.set(f"beat {self._rank}", json.dumps(self._look(now)))
        message, *messages = self._beats.multi_get(keys)
        self._answered_at = now = time.monotonic()
        return self._read(message) or self._hear(dict(zip(ranks, messages, strict=True)), was_asleep, now)

    def _watch_store(self) -> None:
        """Watch the thread that sends beats: its requests to a disconnected host have no timeout."""
        last = time.monotonic()
        while not self._done.wait(INTERVAL):
            now = time.monotonic()
            if now - last > GRACE:  # the machine, or the whole job, was suspended
                self._answered_at = now
            last = now
            if now - self._answered_at > self._timeout + 3 * GRACE:
                return self._give_up(self._without_store(now - self._answered_at), tells=False)

    def _look(self, now: float) -> Beat:
        """Return the state of the main thread."""
        frame = sys._current_frames().get(self._main)
        if frame is None or _may_wait(frame, anywhere=self._has_accelerator):
            self._alone_since = now
        seconds = time.clock_gettime(time.pthread_getcpuclockid(self._main))
        if seconds - self._processor_seconds > BUSY * self._interval:
            self._busy_at = now
        while frame is not None and frame.f_back and _module_of(frame).startswith("torch."):
            frame = frame.f_back
        if frame is not None:
            self._place = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        self._processor_seconds, self._number = seconds, self._number + 1
        return Beat(
            self._number,
            PROGRESS.patience,
            now - max(PROGRESS.since, self._alone_since),
            now - max(PROGRESS.since, self._busy_at),
            PROGRESS.phase in PACED,
            PROGRESS.phase,
            PROGRESS.doing,
            self._place,
            PROGRESS.round,
        )

    def _read(self, message: bytes) -> Verdict | None:
        text, ranks, *kind = json.loads(message) if message else ("", ())
        return Verdict(printable(text), tuple(ranks), *kind) if text else None

    def _hear(self, messages: dict[int, bytes], was_asleep: bool, now: float) -> Verdict | None:
        for rank, message in messages.items():
            beat = Beat.parse(message)
            if was_asleep or rank not in self._heard or beat.number != self._heard[rank][0].number:
                self._heard[rank] = beat, now
        beats = {rank: beat for rank, (beat, _) in self._heard.items() if beat.phase != LEFT}
        silence = {rank: now - at for rank, (_, at) in self._heard.items() if rank in beats}
        hosts = [host for host, *_ in self._everyone]
        verdict = find_silent(beats, silence, hosts, self._timeout, self._is_running)
        return verdict or (judge(beats, self._timeout) if self._rank == 0 and not was_asleep else None)

    def _without_store(self, seconds: float) -> Verdict:
        last = f", last {self._heard[0][0].doing}" if 0 in self._heard else ""
        host = self._everyone[0][0]
        return Verdict(
            f"rank 0 (host {host}), which keeps the job's store, could not be reached for {seconds:.0f} s{last}", (0,)
        )

    # ------------------------------------------------------------------------------------ verdicts
    def _agree(self, found: Verdict, tells: bool = True) -> Verdict:
        """Agree on what happened: the first verdict in the store wins.

        Args:
            found: the verdict to propose.
            tells: whether to write it to the store. A verdict that the store is unreachable would arrive late, and be
                wrong on the store's host.
        """

        def write() -> None:
            with suppress(RuntimeError, OSError):  # the store is gone as well
                agreed.append(self._read(self._store.compare_set(VERDICT, "", json.dumps(found))))

        with self._judging:
            if self._verdict is None:
                agreed: list[Verdict | None] = []
                if tells:
                    writing = threading.Thread(target=write, daemon=True)
                    end_at_exit(writing)
                    writing.start()
                    writing.join(GRACE)
                self._verdict = next(filter(None, agreed), found)
                self._told.set()
            return self._verdict

    def _give_up(self, found: Verdict, tells: bool = True) -> None:
        """Exit this process, unless its main thread exits by itself or another thread already ends it."""
        verdict = self._agree(found, tells)
        if not self._ending.acquire(blocking=False):
            return
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

        A complete checkpoint may still be renamed. A process that computes outside of the training steps may soon
        raise an error of its own, or reach a collective that fails.
        """
        if seconds < (GRACE if verdict.is_hang else 3 * GRACE):
            return True
        self._look(time.monotonic())
        works = PROGRESS.phase not in PACED and time.monotonic() - self._busy_at < GRACE
        return seconds < self._timeout and (PROGRESS.phase == "publish" or works)

    def _kill_if_stopped(self, rank: int) -> None:
        """Kill a stopped process of this host: it ignores other signals, and its launcher would wait for it."""
        with suppress(psutil.Error):
            process = self._process_of(rank)
            if process is not None and process.status() == psutil.STATUS_STOPPED:
                process.kill()

    def _is_running(self, rank: int) -> bool:
        """Whether a process runs on this host."""
        with suppress(psutil.Error):
            process = self._process_of(rank)
            return process is not None and process.status() not in NOT_RUNNING
        return False

    def _process_of(self, rank: int) -> psutil.Process | None:
        """Return a process of this host; None if it is on another host.

        Raises:
            psutil.Error: the process no longer exists.
        """
        host, pid, created, _ = self._everyone[rank]
        process = psutil.Process(pid) if host == self._everyone[self._rank][0] else None
        return process if process is not None and process.create_time() == created else None


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))  # code run by `exec` may have no name


def _may_wait(frame: FrameType, anywhere: bool) -> bool:
    """Whether a thread in this frame may be waiting for other processes.

    Args:
        frame: the innermost frame.
        anywhere: check the outer frames as well, which includes code called by the libraries. On an accelerator, any
            operation waits for all operations queued before it.
    """
    inner: FrameType | None = frame
    while inner is not None:
        if _module_of(inner).startswith(LIBRARIES):
            return True
        inner = inner.f_back if anywhere else None
    return False


def _is_lost_connection(error: BaseException) -> bool:
    """Whether an error may be a consequence of another process's failure."""
    return any(
        isinstance(one, (dist.DistError, ConnectionError))
        or (isinstance(one, RuntimeError) and any(words in str(one).lower() for words in LOST_CONNECTION))
        for one in chain_of(error)
    )
