"""The front as a part of a training: in one stage, without a freeze policy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ...model.micro_batch import Batch
from ...run.parts import Ending, RunPart
from ...run.placing import Examined
from ...run.run import PipelineRun
from ..prefix_cache.cache.sharing import store_file
from .front_cache import FrontCache


class Front(RunPart):
    """Holds the cache of what the user has frozen.

    Args:
        run: the run of the training.
    """

    def __init__(self, run: PipelineRun) -> None:
        self._run, self._job = run, run.job
        self._cache: FrontCache | None = None

    @property
    def cache(self) -> FrontCache:
        assert self._cache is not None, "the model has not been examined"
        return self._cache

    def found(self, found: Examined) -> None:
        self._cache = FrontCache(self._job, self._run.training_batches.dataset, store_file(self._job))

    def around_step(self, batch: Batch) -> AbstractContextManager[Any]:
        return self.cache.step(self._job.trainer.state, batch)

    def around_evaluation(self, dataloader: Any, prefix: str) -> AbstractContextManager[Any]:
        return self.cache.evaluation(self._job.trainer.state, prefix)

    def epoch_ends(self) -> None:
        report = self.cache.epoch_report()
        if report is not None:
            self._run.publish("front_epoch", report)

    def train_ends(self) -> None:
        self._run.publish("not_read", self.cache.why_not_read)

    def release(self) -> None:
        self.cache.release()  # before what else has replaced the layers' forward

    def close(self, ending: Ending) -> None:
        if self._cache is not None:
            self._cache.close(ending.has_failed, keeps_evaluations=ending.error is None)

    def keeps_evaluations_of(self, model: nn.Module) -> bool:
        return self._cache is not None and self._cache.keeps_evaluations_of(model)

    def forget(self) -> None:
        if self._cache is not None:
            self._cache.forget()


def make(run: PipelineRun) -> Front:
    return Front(run)
