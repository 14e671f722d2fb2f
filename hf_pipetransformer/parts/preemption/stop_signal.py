"""Preemption: on SIGTERM, save a checkpoint and exit.

Schedulers announce the end of an allocation by SIGTERM, to one process or to all, at any time. A process that saved
immediately would save alone. Therefore the signal only sets a flag. The flag is reduced together with the loss of the
next step, and all processes save at the end of that step.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

EXIT_CODE = getattr(os, "EX_TEMPFAIL", 75)
"""Exit code of a preempted process that has saved a checkpoint: restart the job to resume."""


class StopSignal:
    """Context manager that records SIGTERM. A recorded signal is raised again on exit, if there was no error.

    Outside the main thread it is disabled, because only the main thread receives signals.
    """

    def __init__(self) -> None:
        self.is_asked = self._is_installed = False
        self._before: Any = None
        self._pid = 0

    def __enter__(self) -> StopSignal:
        self.is_asked, self._pid = False, os.getpid()
        if threading.current_thread() is threading.main_thread():
            self._before, self._is_installed = signal.signal(signal.SIGTERM, self._note), True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._is_installed:
            # None means that the handler was not installed from Python
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
            self._is_installed = False
            if self.is_asked and kind is None:  # no later training step can handle the signal
                signal.raise_signal(signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked process inherits this handler, and must terminate
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        self.is_asked = True
