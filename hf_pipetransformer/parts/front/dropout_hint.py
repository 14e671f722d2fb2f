"""Warns that dropout keeps frozen modules from being cached, and says what `eval_frozen_modules=True` would gain."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...logs import tell
from ...run.job import TrainingJob
from .timing import ModuleTimer

logger = logging.getLogger(__name__)

WORTH_A_WARNING = 1.1
"""Predicted speed-up from which on the hint is a warning, and not an information."""


LEAST_REST = 0.05
"""Least share of a step that is taken to remain: reading takes time, too."""
MOST_TO_NAME = 3


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
        """An evaluation or another epoch begins, which is no part of a step."""
        if self._timer is not None:
            self._timer.interrupt()

    def close(self, is_given: bool) -> None:
        """Let the modules run as they are, and give the hint if it has not been given yet, unless told otherwise."""
        if self._timer is not None:
            self._timer.close()
            if is_given:
                give_hint(self._job, self._timer.names, self._timer.share)
            self._timer = None


def give_hint(job: TrainingJob, modules: Sequence[str], share: float | None, of: str = "a step") -> None:
    """Log that frozen modules run with dropout, and what it would gain to run them without.

    Args:
        job: the training job.
        modules: names of the modules.
        share: share of a training step that computing them takes, from 0 to 1; None if it is not known.
        of: what it is a share of. Only a share of the time tells how much faster a step would be.
    """
    names = ", ".join(modules[:MOST_TO_NAME]) + (", ..." if len(modules) > MOST_TO_NAME else "")
    are, run, they, their = ("are", "run", "they", "their") if len(modules) > 1 else ("is", "runs", "it", "its")
    if job.args.eval_frozen_modules:
        text = f"{names} {are} frozen, but {their} outputs cannot be cached: they are random in evaluation mode, too."
        return tell(logger, job.args, text)
    gain = 1.0 if share is None else 1 / max(1 - share, LEAST_REST)
    text = (
        f"{names} {are} frozen, but {run} with dropout as under the stock Trainer: {their} outputs cannot be cached."
    )
    text += " With" if share is None else f" Computing {names} takes {share:.0%} of {of}: with"
    text += f" eval_frozen_modules=True {they} would run without dropout and be read from the second epoch on"
    text += "." if share is None or of != "a step" else f", about {gain:.1f} times as fast."
    tell(logger, job.args, text, logging.WARNING if gain >= WORTH_A_WARNING else logging.INFO)
