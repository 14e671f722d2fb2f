"""The records as a part of a training."""

from __future__ import annotations

from ...run.run import PipelineRun
from .run_log import RunLog


def make(run: PipelineRun) -> RunLog:
    """Every training is recorded."""
    return RunLog(run)
