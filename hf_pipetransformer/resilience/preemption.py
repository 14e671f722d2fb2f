"""SIGTERM means: save, and leave.

Schedulers announce the end of an allocation by SIGTERM, to one process or to all, at any time. A process that saved at
once would do so alone. So the signal only sets a flag, which travels with the loss of the next step; then all of them
save at the same step's end.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

EXIT_CODE = getattr(os, "EX_TEMPFAIL", 75)
"""Of a process that has saved and left: try again later."""


@dataclass(frozen=True)
class WorkerStart:
    """At the start of a data loader's worker: leave the process group.

    Launchers and schedulers send SIGTERM to whole groups. A worker that ended by it would end the training as a
    failure, before the checkpoint is saved.

    Attributes:
        init: of the loader, called with the worker's number.
    """

    init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)
        if self.init is not None:
            self.init(worker)


class StopSignal:
    """Notes SIGTERM while it is entered; what has been noted when it is left without an error is delivered then.

    Does nothing in another thread than the main one, which alone gets signals.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._before: Any = None
        self._is_installed = False
        self._pid = 0

    def __enter__(self) -> StopSignal:
        self.is_asked, self._pid = False, os.getpid()
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._is_installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._is_installed:
            # None: a handler that was not installed from Python
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
            self._is_installed = False
            if self.is_asked and kind is None:  # it came too late for a step to see to it
                signal.raise_signal(signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a fork that has inherited this handler, and which somebody wants to end
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        self.is_asked = True
