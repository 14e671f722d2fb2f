"""When one process of a job dies, stops or hangs, the others say which one and where, and end.

Elsewhere the peers of a killed process fail with the number of a port, and the peers of a stopped one wait for the
timeout of their collectives, half an hour. Here each process has two threads:

    this host     reads the peers' records (`progress.py`) and asks the system whether they live
    other hosts   says through a store of the job's own that this process lives, and reads who else does

The first verdict wins: all log the same one. A process whose main thread can still raise does so (`PeerFailedError`);
one that is blocked inside a collective cannot be reached and leaves with `EXIT_CODE`. Nothing is repaired inside a
process: the job is started again, and resumes.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch.distributed as dist

from ..errors import PeerFailedError
from .preemption import EXIT_CODE as PREEMPTED
from .progress import LEFT, PROGRESS, SIZE, Record
from .stores import keep_store, own_address

logger = logging.getLogger(__name__)

EXIT_CODE = 76
"""Of a process that was blocked when the job was given up."""
BEAT = 0.2
"""Seconds between two looks."""
GRACE = 1.0
"""Seconds that the main thread has to leave by an error of its own, once there is a verdict."""
SECONDS_FOR_A_VERDICT = 5.0
"""That a lost connection is waited for to be explained."""
VERDICT = "verdict"
LIBRARIES = ("torch.", "hf_pipetransformer.", "transformers.", "accelerate.")
"""Whose code may be waiting for other processes; elsewhere it is the process itself that takes long."""
LOST_CONNECTION = ("gloo", "nccl", "connection", "socket", "broken pipe", "timed out", "timeout", "remote process")
"""Words in the errors of a collective whose peer is gone."""


@dataclass(frozen=True)
class _Introduction:
    """What a process tells the others about itself.

    Attributes:
        node: the first rank on its host.
        host: its name.
        pid: of the process.
        file: with its record.
        store: address of the job's store; of rank 0, which keeps it.
    """

    node: int
    host: str
    pid: int
    file: str
    store: tuple[str, int]


class _Neighbour:
    """Another process of this host."""

    def __init__(self, rank: int, introduction: _Introduction) -> None:
        self.rank = rank
        self.stopped_since = math.inf
        self._process = psutil.Process(introduction.pid)
        with open(introduction.file, "rb") as file:
            self._record = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)

    def read(self) -> Record:
        return Record.read(self._record)

    def state(self) -> str:
        """ "gone", "stopped" or "running"."""
        try:
            status = self._process.status() if self._process.is_running() else psutil.STATUS_DEAD
        except psutil.NoSuchProcess:
            return "gone"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "gone"
        return "stopped" if status == psutil.STATUS_STOPPED else "running"

    def kill(self) -> None:
        """A stopped process hears no other signal, and its launcher would wait for it."""
        if self._process.is_running():
            self._process.kill()


@dataclass(frozen=True)
class _Finding:
    """Why the job is given up.

    Attributes:
        text: in words.
        without_store: the process that keeps the job's store is the one that is gone: all of its host can see that.
        victim: a stopped process, to be killed.
    """

    text: str
    without_store: bool = False
    victim: _Neighbour | None = None


class Watchdog:
    """Watches all processes of a job while it is entered. Entering and leaving without an error are collective.

    Args:
        rank: of this process.
        gather: every process's small object, on every process; collective.
        timeout: seconds after which a process that is stopped, or stuck in the training loop, ends the job.
        limit: seconds after which one that is stuck anywhere does.
    """

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]], timeout: float, limit: float) -> None:
        self._rank, self._gather, self._timeout = rank, gather, timeout
        self._limit = max(limit, timeout)
        self._main = threading.main_thread()
        self._is_leaving = False  # the main thread is on its way out
        self._is_given_up = False
        self._done = threading.Event()
        self._told = threading.Event()
        self._judging = threading.Lock()
        self._verdict: str | None = None
        self._kept: dist.TCPStore | None = None
        self._address = ("", 0)  # of the job's store
        self._own_since = time.monotonic()
        self._awake_since = time.monotonic()
        self._place = ""

    # ------------------------------------------------------------------------------------ of the main thread
    def __enter__(self) -> Watchdog:
        PROGRESS.timeout, PROGRESS.limit = self._timeout, self._limit
        PROGRESS.forget_pace()
        descriptor, name = tempfile.mkstemp(prefix="progress-")
        os.close(descriptor)
        file = Path(name)
        try:
            PROGRESS.share(file)
            if self._rank == 0:
                self._kept = keep_store(timedelta(seconds=self._timeout))
                self._address = own_address(os.environ.get("MASTER_ADDR")), self._kept.port
            node = self._rank - int(os.environ.get("LOCAL_RANK", self._rank))
            everyone: list[_Introduction] = self._gather(
                _Introduction(node, socket.gethostname(), os.getpid(), name, self._address)
            )
            self._everyone = everyone
            self._neighbours = [
                _Neighbour(rank, other)
                for rank, other in enumerate(everyone)
                if other.node == node and rank != self._rank
            ]
            self._distant = [rank for rank, other in enumerate(everyone) if other.node != node]
            self._address = everyone[0].store
            self._connect().set(f"beat {self._rank}", "0")
            self._look_at_main_thread(time.monotonic())
            self._gather(None)  # all have opened the files, and all beat
        finally:
            file.unlink()
        for watch in (self._watch_this_host, self._watch_other_hosts):
            threading.Thread(target=watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and error.code == PREEMPTED):
            return self._explain(error)
        try:
            self._gather(None)  # nobody takes the end for a death
        except RuntimeError as lost:
            self._explain(lost)
            raise
        self._end()

    def _explain(self, error: BaseException) -> None:
        """Before an error of the main thread goes on: whose it is.

        Raises:
            PeerFailedError: another process's.
        """
        self._is_leaving = True
        is_lost = isinstance(error, Exception) and _is_lost_connection(error)
        if is_lost:
            self._told.wait(SECONDS_FOR_A_VERDICT)
        else:
            text = f"rank {self._rank} failed {PROGRESS.read().doing}: {type(error).__name__}: {error}"
            self._judge(_Finding(text))
            time.sleep(2 * BEAT)  # others read it, if this process keeps the store
        self._end()
        if is_lost and self._verdict is not None and not self._verdict.startswith(f"rank {self._rank} "):
            raise PeerFailedError(f"{self._verdict.rstrip('.')}. This is rank {self._rank}.") from error

    def _connect(self) -> dist.TCPStore:
        """Each thread has a connection of its own: one waits for its answer."""
        return dist.TCPStore(*self._address, timeout=timedelta(seconds=self._timeout))

    def _end(self) -> None:
        self._done.set()
        PROGRESS.enter(LEFT)

    # ------------------------------------------------------------------------------------ this host
    def _watch_this_host(self) -> None:
        last = time.monotonic()
        while not self._done.wait(BEAT):
            now = time.monotonic()
            if now - last > GRACE:  # the machine, or all of the job, was asleep
                self._awake_since = now
            last = now
            self._look_at_main_thread(now)
            finding = self._look_at_neighbours(now) or self._look_for_the_stuck(now)
            if finding is not None:
                self._give_up(finding)
                return

    def _look_at_main_thread(self, now: float) -> None:
        frame = sys._current_frames().get(self._main.ident or 0)
        if frame is None:
            return
        if frame.f_globals.get("__name__", "").startswith(LIBRARIES):
            self._own_since = math.inf
        elif self._own_since == math.inf:
            self._own_since = now
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
            frame = frame.f_back
        self._place = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        PROGRESS.note_watch(self._own_since, self._place)

    def _look_at_neighbours(self, now: float) -> _Finding | None:
        for neighbour in self._neighbours:
            record = neighbour.read()
            if record.phase == LEFT:
                continue
            state = neighbour.state()
            if state == "gone":
                text = f"rank {neighbour.rank} (process {record.pid}) died {record.doing}"
                return _Finding(text, without_store=neighbour.rank == 0)
            neighbour.stopped_since = min(neighbour.stopped_since, now) if state == "stopped" else math.inf
            if now - max(neighbour.stopped_since, self._awake_since) >= self._timeout:
                text = f"rank {neighbour.rank} has been stopped for {self._timeout:g} s {record.doing}"
                return _Finding(text, without_store=neighbour.rank == 0, victim=neighbour)
        return None

    def _look_for_the_stuck(self, now: float) -> _Finding | None:
        """Who gets nowhere by itself; or all, each waiting for another."""
        records = {neighbour.rank: neighbour.read() for neighbour in self._neighbours}
        records[self._rank] = PROGRESS.read()
        records = {rank: record for rank, record in records.items() if record.phase != LEFT}
        if any(neighbour.stopped_since < math.inf for neighbour in self._neighbours):
            return None  # it is to blame, in a moment
        overdue = []
        for rank, record in sorted(records.items()):
            since = max(record.since, self._awake_since)
            own, silent = now - max(since, record.own_since), now - max(since, record.beat)
            if own > record.patience:
                return _Finding(f"rank {rank} has been stuck for {own:.0f} s {record.doing}, in {record.place}")
            if silent > max(record.patience, self._timeout):
                return _Finding(f"rank {rank} has held the interpreter for {silent:.0f} s {record.doing}")
            # a little longer, so that one of them that waits for nobody is blamed before; it may be on another host
            if now - since > record.patience * (2 if self._distant else 1) + GRACE:
                overdue.append(f"rank {rank} {record.doing}, in {record.place}")
        if records and len(overdue) == len(records):
            return _Finding(f"all processes of {socket.gethostname()} wait for one another: {'; '.join(overdue)}")
        return None

    # ------------------------------------------------------------------------------------ other hosts
    def _watch_other_hosts(self) -> None:
        beat, next_beat = 0, 0.0
        seen: dict[int, tuple[bytes, float]] = {}
        try:
            store = self._connect()
            while not self._done.wait(BEAT):
                if store.check([VERDICT]):
                    self._give_up(_Finding(store.get(VERDICT).decode()))
                    return
                now = time.monotonic()
                if not self._distant or now < next_beat:
                    continue
                next_beat, beat = now + self._timeout / 8, beat + 1
                store.set(f"beat {self._rank}", f"{beat} {PROGRESS.read().doing}")
                answers = store.multi_get([f"beat {rank}" for rank in self._distant])
                for rank, answer in zip(self._distant, answers, strict=True):
                    if rank not in seen or seen[rank][0] != answer:
                        seen[rank] = answer, now
                silent = {rank: text for rank, (text, when) in seen.items() if now - when > self._timeout}
                silent = {rank: text for rank, text in silent.items() if LEFT not in text.decode()}
                if silent:
                    rank, text = next(iter(silent.items()))
                    host, doing = self._everyone[rank].host, text.decode().partition(" ")[2]
                    ranks = ", ".join(map(str, silent))
                    self._give_up(
                        _Finding(
                            f"rank {ranks} (host {host}) could not be reached for {self._timeout:g} s, last {doing}"
                        )
                    )
                    return
        except Exception as error:
            if not self._told.wait(GRACE) and not self._done.is_set():  # this host knows better if it was rank 0
                why = f"rank 0 (host {self._everyone[0].host}) cannot be reached, which keeps the job's store"
                self._give_up(_Finding(f"{why} ({type(error).__name__})", without_store=True))

    # ------------------------------------------------------------------------------------ verdicts
    def _judge(self, finding: _Finding) -> None:
        """Settle what happened: the first one to say so is right."""

        def tell() -> None:
            try:
                agreed.append(self._connect().compare_set(VERDICT, "", finding.text).decode())
            except Exception:  # the store is gone, too
                logger.debug("no store to write a verdict to", exc_info=True)

        with self._judging:
            if self._verdict is not None:
                return
            agreed: list[str] = []
            if not finding.without_store:
                writer = threading.Thread(target=tell, daemon=True)
                writer.start()
                writer.join(GRACE)
            self._verdict = agreed[0] if agreed and agreed[0] else finding.text
            self._told.set()

    def _give_up(self, finding: _Finding) -> None:
        self._judge(finding)
        with self._judging:
            if self._is_given_up or self._done.is_set():
                return
            self._is_given_up = True
        logger.error("[rank %d] %s.", self._rank, (self._verdict or "").rstrip("."))
        if finding.victim is not None:
            time.sleep(2 * BEAT)  # the others see that it is stopped, too
            finding.victim.kill()
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            if self._is_leaving or self._done.is_set():
                return
            time.sleep(BEAT / 4)
        if self._is_leaving:
            return
        frame = sys._current_frames().get(self._main.ident or 0)
        where = "".join(traceback.format_stack(frame, limit=12)) if frame is not None else ""
        logger.error("[rank %d] was %s, at\n%s", self._rank, PROGRESS.read().doing, where)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(EXIT_CODE)


def _is_lost_connection(error: BaseException) -> bool:
    """Whether an error may only be the consequence of another process's end."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, (dist.DistError, ConnectionError)):
            return True
        if isinstance(chain, RuntimeError) and any(words in str(chain).lower() for words in LOST_CONNECTION):
            return True
        chain = chain.__cause__
    return False
