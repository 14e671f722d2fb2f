"""Watchdog: when one process of a job dies, stops or hangs, the others report which one and where, and exit.

Without it, the peers of a killed process fail with an error that names only a port, and the peers of a stopped one
wait for the timeout of their collectives, half an hour. With it, each process has two threads:

    this host     reads the peers' records (`progress.py`) and asks the operating system whether they are alive
    other hosts   announces through a separate store of the job that this process is alive, and reads which others are

The first verdict wins, and all processes show the same one. A process whose main thread can still raise an error does
so (`PeerFailedError`); one that is blocked inside a collective, or keeps computing, cannot be interrupted, logs the
verdict and exits with `EXIT_CODE`. Nothing is repaired inside a process: the job is started again, and resumes.

What all processes must call (an evaluation, a save) they begin by `meet`. A process that is in a later round of the
training without having met the others is a certain deadlock, found without a timeout (`_look_who_waits`). In the
middle of a round it is found when all processes of the host have waited for the timeout (`_look_for_the_stuck`).

    rank 0    step 5    meets for evaluate()  ......  ValueError
    rank 1    step 5    step 6, waits for rank 0 ...  sees what rank 0 waits for: verdict
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil
import torch.distributed as dist

from ...errors import ONE_LINE, PeerFailedError, in_one_line
from ...own_files import unlink_created
from ..exit import end_at_exit
from ..stop_signal import EXIT_CODE as PREEMPTED
from ..stores import SignedStore, keep_store, own_address
from .neighbours import Beat, Finding, Introduction, Kind, Neighbour, pid_namespace
from .progress import LEFT, PROGRESS, UNKNOWN_PACE, Round, doing_when

logger = logging.getLogger(__name__)

EXIT_CODE = 76
"""Exit code of a process that was blocked when the watchdog ended the job."""
BEAT = 0.2
"""Seconds between two checks."""
BUSY = 0.1
"""A thread that uses the CPU for more than this fraction of the time between two checks is computing, not waiting."""
GRACE = 1.0
"""Seconds that the main thread has to exit by an error of its own, once there is a verdict."""
GRACE_AFTER_FAILURE = 3.0
"""The same if another process has failed: once that is gone, its connections are closed, and collectives raise."""
SECONDS_TO_CONNECT = 12.0
"""Minimum timeout for connecting to the store. Torch resolves the names of both ends, and a name server that does not
respond takes five seconds for each."""
SECONDS_FOR_A_VERDICT = 5.0
"""Seconds to wait for a verdict that explains a lost connection."""
SECONDS_BETWEEN_LOOKS = 0.005
"""Seconds after which a process that waits for the others in `meet` looks again; longer and longer, up to `BEAT`."""
VERDICT = "verdict"
WAITS = "waits"
"""Key under which a process that waits in `meet` writes its round, its rank and what it does."""
READ = "read"
"""Key under which the processes count that have read the verdict of another one."""
INTERRUPTED = "was interrupted"
"""Words of a verdict about a process that has received SIGINT."""
PUBLISH = "publish"
"""Phase in which a checkpoint, all of whose files are written, is renamed to its final name."""
LEAVING = "leaving"
"""Phase of a process that has an error, and determines which process caused it."""
LIBRARIES = ("torch.", "hf_pipetransformer.", "transformers.", "accelerate.")
"""Modules whose code may be waiting for other processes; in other code, the process itself takes long."""
LOST_CONNECTION = (
    "gloo",
    "nccl",
    "xccl",
    "hccl",
    "connection",
    "socket",
    "broken pipe",
    "timed out",
    "timeout",
    "remote process",
)
"""Words in the error messages of a collective whose peer no longer exists."""


class Watchdog:
    """Context manager that watches all processes of a job. Entering it and leaving it without an error are collective.

    Args:
        rank: rank of this process.
        local_rank: rank of this process among those of its host.
        gather: returns every process's small object on every process; collective.
        timeout: seconds after which a process that is stopped, or stuck in the training loop, ends the job.
        limit: seconds after which a process that is stuck anywhere ends the job.
        has_accelerator: whether there is an accelerator, in which case any operation on a device may wait for others.
        is_interrupted: whether this process has received SIGINT itself, so that it ends without a word about others.

    Attributes:
        has_store: whether all processes can reach the job's store.
    """

    def __init__(
        self,
        rank: int,
        local_rank: int,
        gather: Callable[[Any], list[Any]],
        timeout: float,
        limit: float,
        has_accelerator: bool = False,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank, self._local_rank, self._gather, self._timeout = rank, local_rank, gather, timeout
        self._limit = max(limit, timeout)
        self._has_accelerator, self._is_interrupted = has_accelerator, is_interrupted
        self._main = 0  # identifier of the thread that trains
        self._is_leaving = False  # the main thread has an error and is about to exit
        self._is_given_up = False
        self._has_told = False
        self._done = threading.Event()
        self._told = threading.Event()
        self._judging = threading.Lock()
        self._verdict: Finding | None = None
        self._kept: dist.TCPStore | None = None
        self._for_verdicts: SignedStore | None = None
        self._for_meetings: SignedStore | None = None
        self._awaited_by: tuple[int, str] | None = None  # who waits in `meet` for this process, and what it does
        self._address = ("", 0)  # address of the job's store
        self.has_store = False
        self._heard: dict[int, Beat] = {}  # rank -> the last message, for processes of other hosts
        self._answered_at = math.inf  # last answer of the store; inf until connected, as connecting has a timeout
        self._own_since = self._awake_since = self._busy_at = time.monotonic()
        self._processor_seconds = 0.0  # CPU time of the main thread

    # ------------------------------------------------------------------------------------ main thread
    def __enter__(self) -> Watchdog:
        PROGRESS.timeout, PROGRESS.limit = self._timeout, self._limit
        PROGRESS.forget_pace()
        PROGRESS.round = Round(0, "is at the start of train()", 0)
        self._main = threading.get_ident()
        descriptor, name = tempfile.mkstemp(prefix="progress-")
        os.close(descriptor)
        try:
            PROGRESS.share(Path(name))
            if self._rank == 0:
                address = own_address(os.environ.get("MASTER_ADDR"))
                self._kept = keep_store(self._store_timeout, address)
                self._address = address, self._kept.port
            node = self._rank - self._local_rank, pid_namespace()
            secret = secrets.token_bytes()
            me = Introduction(node, socket.gethostname(), os.getpid(), name, self._address, secret)
            self._everyone: list[Introduction] = self._gather(me)
            self._address = self._everyone[0].store
            self._meet(node)
            self._look_at_main_thread(time.monotonic())
            # all processes have opened the files, and announce themselves
            self.has_store = all(self._gather(self._reaches_store()))
        finally:
            unlink_created(name)
        if not self.has_store and self._rank == 0:
            logger.warning(
                "Not all processes can reach the store at %s, port %d, so hangs and crashes are only detected on the"
                " same host.",
                *self._address,
            )
        for watch in (self._watch_this_host, self._watch_other_hosts):
            if self.has_store or watch == self._watch_this_host:
                thread = threading.Thread(target=watch, name="watchdog", daemon=True)
                end_at_exit(thread)
                thread.start()
        return self

    def _meet(self, node: tuple[int, int]) -> None:
        self._neighbours: list[Neighbour] = []
        self._distant: list[int] = []
        for rank, other in enumerate(self._everyone):
            if rank == self._rank:
                continue
            try:
                if other.node != node:
                    raise FileNotFoundError(other.file)
                self._neighbours.append(Neighbour(rank, other))
            except (OSError, psutil.Error):  # for example because it runs in a container of its own
                self._distant.append(rank)

    def _reaches_store(self) -> bool:
        try:
            # early, because resolving names may take seconds
            self._for_verdicts, self._for_meetings = self._connect(), self._connect()
            self._for_verdicts.write(f"beat {self._rank}", "0")
        except RuntimeError:
            return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and error.code == PREEMPTED):
            try:
                return self._explain(error)
            except KeyboardInterrupt:  # the signal came while the main thread was blocked
                self._end()
                raise
        PROGRESS.begin_round("is at the end of train()")
        try:
            self._gather(None)  # afterwards no process takes the exit of another one for a failure
        except RuntimeError as lost:
            self._explain(lost)
            raise
        finally:
            self._end()
        with suppress(RuntimeError):
            self._gather(None)  # afterwards no process reads the store any more

    def _explain(self, error: BaseException) -> None:
        """Determine which process caused an error of the main thread, before the error propagates.

        Raises:
            PeerFailedError: another process caused it.
        """
        self._is_leaving = True
        own = f"rank {self._rank} failed {doing_when(error)}: {in_one_line(error).rstrip('.')}"
        if isinstance(error, KeyboardInterrupt):
            own = f"rank {self._rank} {INTERRUPTED} {doing_when(error)}"
        PROGRESS.enter(LEAVING)
        is_lost = isinstance(error, Exception) and _is_lost_connection(error)
        if is_lost:
            self._told.wait(SECONDS_FOR_A_VERDICT + (self._longest_beat if self._distant else 0))
        if self._verdict is None:
            others = self._silent_host(self._longest_beat) or self._who_let_wait() if is_lost else None
            if is_lost and others is None and self.has_store and 0 in self._distant and not self._store_answers():
                others = self._without_store("any more")
            self._judge(others or Finding(own))
        try:
            self._wait_for_readers()
        finally:
            self._end()
        verdict = self._verdict.text if self._verdict is not None else own
        if is_lost and not verdict.startswith(f"rank {self._rank} "):
            failure = PeerFailedError(f"{verdict}. This is rank {self._rank}.")
            if self._has_told:
                setattr(failure, ONE_LINE, "")
            raise failure from error
        if self._has_told and verdict != own and verdict.endswith(in_one_line(error).rstrip(".")):
            with suppress(Exception):  # an error that cannot be changed
                setattr(error, ONE_LINE, "")  # it has been said, and the other process shows its traceback

    def _who_let_wait(self) -> Finding | None:
        """Find a process of this host that computed for too long and did not reach a collective in time."""
        now = time.monotonic()
        for neighbour in self._neighbours:
            record = neighbour.read()
            own = now - max(record.since, record.own_since)
            if record.phase not in (LEFT, LEAVING) and own > self._timeout:
                text = f"rank {neighbour.rank} made the others wait for {own:.0f} s {record.doing}, in {record.place}"
                return Finding(text, Kind.HANGS, without_store=neighbour.rank == 0)
        return None

    def _wait_for_readers(self) -> None:
        """Wait until this process has logged the verdict and, if it keeps the store, the others have read it."""
        # after SIGINT to a whole job the others end without reading
        is_short = self._rank != 0 or self._is_interrupted()
        deadline = time.monotonic() + (2 * BEAT if is_short else GRACE)
        while time.monotonic() < deadline:
            is_read = self._rank != 0
            if not is_read and self._for_meetings is not None:
                with suppress(RuntimeError):
                    is_read = self._for_meetings.counted(READ) >= len(self._everyone) - 1
            if self._has_told and is_read:
                return
            time.sleep(BEAT / 10)

    @property
    def _longest_beat(self) -> float:
        """Longest time in seconds between two messages of a live process on another host, unless the GIL is held."""
        return self._timeout / 4 + GRACE

    def _connect(self) -> SignedStore:
        """Connect to the store. Each thread has its own connection, because a request blocks its connection."""
        store = dist.TCPStore(*self._address, timeout=self._store_timeout)
        return SignedStore(store, self._everyone[0].secret)

    @property
    def _store_timeout(self) -> timedelta:
        return timedelta(seconds=max(self._timeout, SECONDS_TO_CONNECT))

    def _end(self) -> None:
        self._done.set()
        PROGRESS.enter(LEFT)

    def meet(self, doing: str) -> None:
        """Wait for all processes to begin the same round. Collective over all processes. Only if `has_store`.

        Args:
            doing: what all processes must do, as the predicate of a sentence. Its first two words must be the same.

        Raises:
            ValueError: another process does something else that it cannot end without this one. The message says what
                both do.
            PeerFailedError: another process has failed.
        """
        store, now = self._for_meetings, PROGRESS.begin_round(doing, is_meeting=True)
        assert store is not None
        first = store.write_once(f"round {now.number}", f"{self._rank} {doing}")
        rank, _, theirs = first.partition(" ")
        if theirs.split()[:2] != doing.split()[:2]:
            self._judge(_diverged(int(rank), theirs, self._rank, doing))
            raise self._verdict_as_error()
        arrived = store.count(f"arrived {now.number}")
        pause = SECONDS_BETWEEN_LOOKS
        while arrived < len(self._everyone):
            time.sleep(pause)  # here, so that this thread is seen to wait
            if self._told.is_set():
                raise self._verdict_as_error()
            pause = min(2 * pause, BEAT)
            arrived = store.counted(f"arrived {now.number}")
            if arrived < len(self._everyone):
                self._look_who_has_gone_on(store, now)

    def _look_who_has_gone_on(self, store: SignedStore, now: Round) -> None:
        """Say what this process waits for, unless another one waits in a later round.

        Raises:
            ValueError: one does, so it did not meet this process.
        """
        waits = store.read(WAITS)
        if waits is not None and int(waits.partition(" ")[0]) > now.number:
            _, rank, theirs = waits.split(" ", 2)
            self._judge(_diverged(self._rank, now.doing, int(rank), theirs))
            raise self._verdict_as_error()
        store.write(WAITS, f"{now.number} {self._rank} {now.doing}")

    def _verdict_as_error(self) -> Exception:
        assert self._verdict is not None
        if self._verdict.kind is Kind.DIVERGED:
            return ValueError(f"{self._verdict.text}.")
        return PeerFailedError(f"{self._verdict.text}. This is rank {self._rank}.")

    # ------------------------------------------------------------------------------------ this host
    def _watch_this_host(self) -> None:
        last = time.monotonic()
        while not self._done.wait(BEAT):
            now = time.monotonic()
            if now - last > GRACE:  # the machine, or the whole job, was suspended
                self._awake_since = now
            last = now
            try:
                self._look_at_main_thread(now)
                finding = self._look_at_neighbours(now) or self._look_for_the_stuck(now) or self._look_at_store(now)
            except Exception:  # for example too many open files; the next check may succeed
                logger.debug("The watchdog could not check the processes.", exc_info=True)
                continue
            if finding is not None:
                self._give_up(finding)
                return

    def _look_at_main_thread(self, now: float) -> None:
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return
        if _may_wait(frame, anywhere=self._has_accelerator):
            self._own_since = math.inf
        elif self._own_since == math.inf:
            self._own_since = now
        seconds = time.clock_gettime(time.pthread_getcpuclockid(self._main))
        if seconds - self._processor_seconds > BUSY * BEAT:
            self._busy_at = now
        self._processor_seconds = seconds
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
            frame = frame.f_back
        place = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        PROGRESS.note_watch(self._own_since, self._busy_at, place)

    def _look_at_neighbours(self, now: float) -> Finding | None:
        for neighbour in self._neighbours:
            record = neighbour.read()
            if record.phase == LEFT:
                continue
            state = neighbour.state()
            if state == "gone":
                text = f"rank {neighbour.rank} (process {record.pid}) died {record.doing}"
                return Finding(text, without_store=neighbour.rank == 0)
            neighbour.stopped_since = min(neighbour.stopped_since, now) if state == "stopped" else math.inf
            if now - max(neighbour.stopped_since, self._awake_since) >= self._timeout:
                text = f"rank {neighbour.rank} has been stopped for {self._timeout:g} s {record.doing}"
                return Finding(text, without_store=neighbour.rank == 0, victim=neighbour)
        return None

    def _look_for_the_stuck(self, now: float) -> Finding | None:
        """Find a process that makes no progress by itself, or report that all of them wait for each other."""
        records = {neighbour.rank: neighbour.read() for neighbour in self._neighbours}
        records[self._rank] = PROGRESS.read()
        records = {rank: record for rank, record in records.items() if record.phase != LEFT}
        if any(neighbour.stopped_since < math.inf for neighbour in self._neighbours):
            return None  # the stopped process will be blamed once its timeout is over
        if any(record.phase == LEAVING for record in records.values()):
            return None  # that process will report the reason itself
        waiting, awaited_by = [], self._awaited_by
        for rank, record in sorted(records.items()):
            since = max(record.since, self._awake_since)
            idle_since = max(since, record.busy_at)
            # if the usual duration of a phase is unknown, a process that computes is not stuck
            own = now - max(since if record.is_paced else idle_since, record.own_since)
            silent = now - max(since, record.beat)
            if own > record.patience:
                text = f"rank {rank} has been stuck for {own:.0f} s {record.doing}, in {record.place}"
                return Finding(text, Kind.HANGS)
            if silent > max(record.patience, self._timeout):
                return Finding(f"rank {rank} has held the Python GIL for {silent:.0f} s {record.doing}", Kind.HANGS)
            # a little longer, so that a process that waits for no other, maybe on another host, is blamed first
            # a process that waits in `meet` will not come to what the others wait for in this round
            patience = record.patience if awaited_by is None else self._timeout
            if now - idle_since > (self._limit if self._distant else patience) + GRACE:
                waiting.append(f"rank {rank} {record.doing}, in {record.place}")
        if records and len(waiting) == len(records) and awaited_by is not None:
            mine = PROGRESS.read()
            return _diverged(*awaited_by, self._rank, f"waits {mine.doing}, in {mine.place}")
        if records and len(waiting) == len(records):
            text = f"all processes of {socket.gethostname()} wait for each other: {'; '.join(waiting)}"
            return Finding(text, Kind.HANGS)
        return None

    def _look_at_store(self, now: float) -> Finding | None:
        """Report a store that does not answer. A request to a disconnected host has no timeout of its own."""
        silent = now - max(self._answered_at, self._awake_since)
        if not self._distant or not self.has_store or silent <= self._timeout + 2 * GRACE:
            return None
        return self._without_store(f"for {silent:.0f} s")

    def _without_store(self, why: str) -> Finding:
        last = f", last {self._heard[0].doing}" if 0 in self._heard else ""
        host = self._everyone[0].host
        return Finding(
            f"rank 0 (host {host}), which keeps the job's store, could not be reached {why}{last}", without_store=True
        )

    # ------------------------------------------------------------------------------------ other hosts
    def _watch_other_hosts(self) -> None:
        beat, next_beat = 0, 0.0
        try:
            store = self._connect()
            self._answered_at = time.monotonic()
            while not self._done.wait(BEAT):
                verdict = store.read(VERDICT)
                if verdict is not None:
                    if self._verdict is None:
                        store.count(READ)
                    return self._give_up(Finding.parse(verdict))
                diverged = self._look_who_waits(store.read(WAITS))
                if diverged is not None:
                    return self._give_up(diverged)
                now = time.monotonic()
                was_asleep, self._answered_at = now - self._answered_at > self._timeout / 2, now
                if not self._distant or now < next_beat:
                    continue
                next_beat, beat = now + self._timeout / 8, beat + 1
                mine = PROGRESS.read()
                # in phases that may hold the GIL for long, a missing message proves nothing
                patience = min(max(mine.patience, self._timeout), UNKNOWN_PACE * self._timeout)
                store.write(f"beat {self._rank}", f"{beat} {patience:g} {mine.doing}")
                answers = store.read_all([f"beat {rank}" for rank in self._distant])
                for rank, answer in zip(self._distant, answers, strict=True):
                    is_news = was_asleep or rank not in self._heard or answer != self._heard[rank].text
                    if answer is not None and is_news:
                        self._heard[rank] = Beat(answer, now)
                finding = self._silent_host()
                if finding is not None:
                    return self._give_up(finding)
        except (RuntimeError, OSError) as error:
            if not self._told.wait(GRACE) and not self._done.is_set():  # if it was rank 0, its host reports more
                self._give_up(self._without_store(f"({type(error).__name__})"))

    def _look_who_waits(self, waits: str | None) -> Finding | None:
        """Note who waits in `meet` for this process; a finding if it has gone past that round without meeting it."""
        self._awaited_by, mine = None, PROGRESS.round
        if waits is not None:
            number, rank, theirs = waits.split(" ", 2)
            if mine.number >= int(number) > mine.meeting:
                return _diverged(int(rank), theirs, self._rank, mine.doing)
            if int(number) > mine.number:
                self._awaited_by = int(rank), theirs
        return None

    def _silent_host(self, patience: float | None = None) -> Finding | None:
        """Find processes of other hosts that are silent for longer than they announced, or than `patience` seconds."""
        now = time.monotonic()
        silent = {
            rank: beat
            for rank, beat in self._heard.items()
            if now - beat.at > (patience if patience is not None else beat.patience(self._timeout))
        }
        if not silent:
            return None
        ranks_of: dict[str, list[str]] = {}
        for rank in silent:
            ranks_of.setdefault(self._everyone[rank].host, []).append(str(rank))
        who = ", ".join(f"rank {', '.join(ranks)} (host {host})" for host, ranks in ranks_of.items())
        beat = next(iter(silent.values()))
        last = f", last {beat.doing}" if beat.doing else ""
        return Finding(f"{who} could not be reached for {now - beat.at:.0f} s{last}")

    # ------------------------------------------------------------------------------------ verdicts
    def _store_answers(self) -> bool:
        """Whether the store answers, even right after the start, while the other thread may still be connecting."""
        answers: list[bool] = []

        def ask() -> None:
            with suppress(Exception):
                assert self._for_verdicts is not None
                self._for_verdicts.read(VERDICT)
                answers.append(True)

        asking = threading.Thread(target=ask, daemon=True)
        end_at_exit(asking)
        asking.start()
        asking.join(GRACE)
        return bool(answers)

    def _judge(self, finding: Finding) -> None:
        """Agree on what happened: the first verdict in the store wins."""

        def tell() -> None:
            try:
                assert self._for_verdicts is not None
                agreed.append(Finding.parse(self._for_verdicts.write_once(VERDICT, finding.message)))
            except Exception:  # the store is gone as well
                logger.debug("The verdict could not be written to the store.", exc_info=True)

        with self._judging:
            if self._verdict is not None:
                return
            agreed: list[Finding] = []
            if self.has_store and not finding.without_store:
                writer = threading.Thread(target=tell, daemon=True)
                end_at_exit(writer)
                writer.start()
                writer.join(GRACE)
            self._verdict = agreed[0] if agreed else finding
            self._told.set()

    def _give_up(self, finding: Finding) -> None:
        self._judge(finding)
        with self._judging:
            if self._is_given_up or self._done.is_set():
                return
            self._is_given_up = True
        verdict = self._verdict
        assert verdict is not None
        if INTERRUPTED in verdict.text:
            self._done.wait(BEAT)  # most likely this process is interrupted as well
        if self._is_interrupted():
            self._has_told = True
            return
        # a process that has failed itself shows its error
        if verdict.kind is Kind.HANGS or not verdict.text.startswith(f"rank {self._rank} "):
            logger.error("[rank %d] %s.", self._rank, verdict.text)
        self._has_told = True
        if finding.victim is not None:
            time.sleep(2 * BEAT)  # so that the others see that it is stopped, too
            with suppress(psutil.Error):
                finding.victim.kill()
        began = time.monotonic()
        while self._may_still_leave(time.monotonic() - began):
            if self._is_leaving or self._done.is_set():
                return
            time.sleep(BEAT / 4)
        if self._is_leaving:
            return
        try:
            frame = sys._current_frames().get(self._main)
            if frame is not None and verdict.kind is Kind.HANGS:
                where = "".join(traceback.format_stack(frame, limit=12))
                logger.error("[rank %d] was %s, at\n%s", self._rank, PROGRESS.read().doing, where)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(EXIT_CODE)

    def _may_still_leave(self, seconds: float) -> bool:
        """Whether the main thread may still exit by itself, `seconds` after the verdict.

        A checkpoint whose files are complete may still be renamed. A process that computes outside of the training
        steps may be about to raise an error of its own, or to reach a collective that fails.
        """
        is_hanging = self._verdict is not None and self._verdict.kind is Kind.HANGS
        if seconds < (GRACE if is_hanging else GRACE_AFTER_FAILURE):
            return True
        now = time.monotonic()
        self._look_at_main_thread(now)
        record = PROGRESS.read()
        works = not record.is_paced and now - record.busy_at < GRACE
        return seconds < self._timeout and (record.phase == PUBLISH or works)


def _diverged(waiting: int, theirs: str, other: int, doing: str) -> Finding:
    remedy = "All processes must decide alike"
    if theirs.startswith("called"):
        remedy = "Call it on every process, not on the main process alone"
    return Finding(f"rank {waiting} {theirs}; rank {other} {doing}. {remedy}", Kind.DIVERGED)


def _may_wait(frame: FrameType, anywhere: bool) -> bool:
    """Whether a thread in this frame may be waiting for other processes.

    Args:
        frame: the innermost frame.
        anywhere: check the outer frames, too, so that code called by the libraries counts: any operation on an
            accelerator waits for all operations that were queued on it before.
    """
    inner: FrameType | None = frame
    while inner is not None:
        if inner.f_globals.get("__name__", "").startswith(LIBRARIES):
            return True
        inner = inner.f_back if anywhere else None
    return False


def _is_lost_connection(error: BaseException) -> bool:
    """Whether an error may be the mere consequence of another process's failure."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, (dist.DistError, ConnectionError)):
            return True
        if isinstance(chain, RuntimeError) and any(words in str(chain).lower() for words in LOST_CONNECTION):
            return True
        chain = chain.__cause__
    return False


@contextmanager
def watching(
    rank: int,
    world_size: int,
    local_rank: int,
    gather: Callable[[Any], list[Any]],
    timeout: float,
    limit: float,
    has_accelerator: bool,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[Watchdog | None]:
    """Inside, the death or hang of one process ends all of them. Collective over all processes.

    Nothing is watched where `timeout` is 0, where there is one process, and inside a training that is already watched
    (a training that a callback of another training runs).

    Args:
        rank: of this process.
        world_size: number of processes.
        local_rank: rank on this host.
        gather: gathers an object of every process; collective.
        timeout: in seconds; 0 disables the watchdog.
        limit: bound on any wait, in seconds.
        has_accelerator: whether the process computes on one.
        is_interrupted: whether this process has received SIGINT.

    Yields:
        The watchdog, or None where nothing is watched.
    """
    before, step = PROGRESS.phase, PROGRESS.read().step
    watch: Any = nullcontext()
    if timeout and before == LEFT and world_size > 1:
        watch = Watchdog(rank, local_rank, gather, timeout, limit, has_accelerator, is_interrupted)
    try:
        with watch as entered:
            PROGRESS.enter("start", 0)
            yield entered
    finally:
        PROGRESS.enter(before, step)
