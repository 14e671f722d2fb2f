"""Preemption as a part of a training."""

from __future__ import annotations

from ...run.run import PipelineRun
from .preemption import Preemption


def make(run: PipelineRun) -> Preemption:
    """Every training may be preempted."""
    return Preemption(run)
