"""What a watchdog knows of the other processes: how it reaches them, their latest messages, and what it concludes."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from enum import Enum

import psutil

from .progress import SIZE, Record


@dataclass(frozen=True)
class Introduction:
    """What a process announces about itself to the others.

    Attributes:
        node: the first rank on its host, and the namespace in which its process id is valid.
        host: name of its host.
        pid: process id.
        file: path of the file with its record.
        store: address of the job's store; rank 0, which keeps the store, sets it.
        secret: with which processes sign what they write to the store; that of rank 0 counts.
    """

    node: tuple[int, int]
    host: str
    pid: int
    file: str
    store: tuple[str, int]
    secret: bytes


class Neighbour:
    """Another process of the same host."""

    def __init__(self, rank: int, introduction: Introduction) -> None:
        self.rank = rank
        self.stopped_since = math.inf
        self._process = psutil.Process(introduction.pid)
        with open(introduction.file, "rb") as file:
            self._record = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)

    def read(self) -> Record:
        return Record.read(self._record)

    def state(self) -> str:
        """State of the process: "gone", "stopped" or "running"."""
        try:
            status = self._process.status() if self._process.is_running() else psutil.STATUS_DEAD
        except psutil.NoSuchProcess:
            return "gone"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "gone"
        return "stopped" if status == psutil.STATUS_STOPPED else "running"

    def kill(self) -> None:
        """Kill the process. A stopped process reacts to no other signal, and its launcher would wait for it."""
        if self._process.is_running():
            self._process.kill()


@dataclass(frozen=True)
class Beat:
    """The last message of a process of another host: a counter, its patience, and what it is doing.

    Attributes:
        text: the whole message.
        at: time at which it was first read.
    """

    text: str
    at: float

    @property
    def doing(self) -> str:
        return self.text.partition(" ")[2].partition(" ")[2]

    def patience(self, timeout: float) -> float:
        return float(self.text.split()[1]) if self.doing else timeout


class Kind(Enum):
    """What ends a job."""

    FAILED = "failed"
    """A process has raised an error, has died, or cannot be reached."""
    HANGS = "hangs"
    """A process makes no progress, so it matters where it is."""
    DIVERGED = "diverged"
    """The user's code makes some processes do what all of them must do."""


@dataclass(frozen=True)
class Finding:
    """The reason for ending the job.

    Attributes:
        text: the reason in words, without a full stop.
        kind: what it is.
        without_store: whether the process that failed keeps the job's store; its whole host can see that.
        victim: a stopped process that has to be killed.
    """

    text: str
    kind: Kind = Kind.FAILED
    without_store: bool = False
    victim: Neighbour | None = None

    @classmethod
    def parse(cls, message: str) -> Finding:
        """The finding of another process, from its `message`."""
        kind, _, text = message.partition(" ")
        return cls(text, Kind(kind))

    @property
    def message(self) -> str:
        return f"{self.kind.value} {self.text}"


def pid_namespace() -> int:
    """Identifier of the process id namespace, which containers may have of their own; 0 if there are none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
