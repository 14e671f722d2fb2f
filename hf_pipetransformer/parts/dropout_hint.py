"""Warns that dropout keeps frozen modules from being cached, and names the gain of `eval_frozen_modules=True`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..logs import log_on_main
from ..run.job import TrainingJob

logger = logging.getLogger(__name__)

WORTH_A_WARNING = 1.1
"""Minimum predicted speed-up for the hint to be logged as a warning, not as information."""


LEAST_REST = 0.05
"""Minimum share of a step that is assumed to remain, because reading takes time, too."""
MOST_TO_NAME = 3


def give_hint(job: TrainingJob, modules: Sequence[str], share: float | None, of: str = "a step") -> None:
    """Log that frozen modules run with dropout, and the speed-up without it.

    Args:
        job: the training job.
        modules: names of the modules.
        share: their share of a training step, from 0 to 1; None if it is not known.
        of: the reference of `share`, in words. A speed-up is logged only for a share of "a step".
    """
    names = ", ".join(modules[:MOST_TO_NAME]) + (", ..." if len(modules) > MOST_TO_NAME else "")
    are, run, they, their = ("are", "run", "they", "their") if len(modules) > 1 else ("is", "runs", "it", "its")
    if job.args.eval_frozen_modules:
        text = f"{names} {are} frozen, but {their} outputs cannot be cached: they are random in evaluation mode, too."
        return log_on_main(logger, job.args, text)
    gain = 1.0 if share is None else 1 / max(1 - share, LEAST_REST)
    text = (
        f"{names} {are} frozen, but {run} with dropout as under the stock Trainer: {their} outputs cannot be cached."
    )
    text += " With" if share is None else f" Computing {names} takes {share:.0%} of {of}: with"
    text += f" eval_frozen_modules=True {they} would run without dropout and be read from the second epoch on"
    text += "." if share is None or of != "a step" else f", about {gain:.1f} times as fast."
    log_on_main(logger, job.args, text, logging.WARNING if gain >= WORTH_A_WARNING else logging.INFO)
