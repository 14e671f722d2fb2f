"""Measures the share of frozen modules with dropout in a step, for the hint about `eval_frozen_modules`."""

from __future__ import annotations

from collections.abc import Sequence

from ...run.job import TrainingJob
from ..dropout_hint import give_hint
from .timing import ModuleTimer


class DropoutHint:
    """Measures a few steps of a training in one stage, then gives the hint once.

    Args:
        job: the training job.
        names: names of the frozen modules that run with dropout.
    """

    def __init__(self, job: TrainingJob, names: Sequence[str]) -> None:
        self._job = job
        self._timer: ModuleTimer | None = ModuleTimer(job.model, names, job.device)

    def begin_step(self) -> None:
        """A step begins."""
        if self._timer is not None:
            self._timer.begin_step()
            if self._timer.share is not None:
                self.close(is_given=True)

    def interrupt(self) -> None:
        """An evaluation or an epoch begins, which is not part of a step."""
        if self._timer is not None:
            self._timer.interrupt()

    def close(self, is_given: bool) -> None:
        """Restore the modules' own forward. With `is_given`, give the hint if it has not been given yet."""
        if self._timer is not None:
            self._timer.close()
            if is_given:
                give_hint(self._job, self._timer.names, self._timer.share)
            self._timer = None
