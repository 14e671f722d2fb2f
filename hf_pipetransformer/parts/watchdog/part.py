"""The watchdog as a part of a training on several processes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ...run.parts import RunPart
from ...run.run import PipelineRun
from .watchdog import Watchdog


class WatchdogPart(RunPart):
    """Watches the processes of one `train()`.

    Args:
        run: the run of the training.
    """

    def __init__(self, run: PipelineRun) -> None:
        job = run.job
        has_accelerator = job.device.type != "cpu"
        limits = job.args.watchdog_timeout, job.args.ddp_timeout
        self._watchdog = Watchdog(job.mesh.rank, job.mesh.gather_objects, *limits, has_accelerator=has_accelerator)

    def around_train(self) -> AbstractContextManager[Any]:
        return self._watchdog

    def meet(self, doing: str) -> bool:
        if self._watchdog.is_watching:
            self._watchdog.meet(doing)
        return self._watchdog.is_watching


def make(run: PipelineRun) -> WatchdogPart:
    return WatchdogPart(run)
