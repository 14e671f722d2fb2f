"""The front as a part of a training: in one stage, without a freeze policy."""

from __future__ import annotations

import difflib
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from ...model.micro_batch import Batch
from ...registry import find_part, is_installed
from ...run.loss import Loss
from ...run.parts import Ending, RunPart
from ...run.run import PipelineRun
from ...run.setup.placing import Findings

if TYPE_CHECKING:
    from .front_cache import FrontCache

OUTSIDE = ("trainer.", "loss.")
"""What names of modules begin with that are no part of the model: the loss calls them (`frozen_calls`)."""


class Front(RunPart):
    """Holds the cache for modules that the user has frozen. It is created once a parameter is frozen.

    Until then the cache's code is not imported, and steps have no extra cost.

    Args:
        run: the run of the training.
    """

    def __init__(self, run: PipelineRun) -> None:
        self._run, self._job = run, run.job
        self._cache: FrontCache | None = None
        self._loss: Loss | None = None
        self._parameters: list[nn.Parameter] = []

    def found(self, found: Findings) -> None:
        self._loss = found.loss

    def train_begins(self) -> None:
        self._refuse_unknown_names()
        self._look_for_frozen()  # an evaluation may come before the first step

    def step_begins(self, is_first: bool) -> None:
        self._look_for_frozen()  # callbacks may have frozen parameters in `on_epoch_begin`

    def _refuse_unknown_names(self) -> None:
        """Refuse `cached_modules` that the model does not have. All processes have the same model.

        Raises:
            ValueError: there is no module of this name.
        """
        names = [name for name, _ in self._job.model.named_modules() if name]
        for name in self._job.args.cached_modules or ():
            if name not in names and not name.startswith(OUTSIDE):
                close = difflib.get_close_matches(name, names, 3) or names[:3]
                raise ValueError(
                    f"cached_modules contains {name!r}, but {type(self._job.model).__name__} has no module of this"
                    f" name. Set it to names from model.named_modules(), such as {', '.join(map(repr, close))}."
                )

    def _look_for_frozen(self) -> None:
        """Create the cache when a parameter is frozen. Collective over all processes.

        Several processes agree on it only in the first step of an epoch, not in each step.
        """
        mesh = self._job.mesh
        if self._cache is not None or (self._run.is_within_epoch and mesh.world_size > 1):
            return
        if not self._run.is_within_epoch:  # to walk through the modules costs a small model's step several percent
            self._parameters = list(self._job.model.parameters())
        if mesh.any(any(not parameter.requires_grad for parameter in self._parameters)):
            front, sharing = find_part("front.front_cache"), find_part("prefix_cache.cache.sharing")
            assert front is not None and sharing is not None, "make() has asked for them"
            assert self._loss is not None
            dataset = self._run.training_batches.dataset
            self._cache = front.FrontCache(self._loss, dataset, sharing.store_file(self._job))

    def around_step(self, batch: Batch) -> AbstractContextManager[Any]:
        return self._cache.step(self._job.trainer.state, batch) if self._cache is not None else nullcontext()

    def around_evaluation(self, dataloader: Any, prefix: str) -> AbstractContextManager[Any]:
        return self._cache.evaluation(self._job.trainer.state, prefix) if self._cache is not None else nullcontext()

    def aside(self) -> AbstractContextManager[None]:
        """Inside, calls of the model are not looked at. Not collective."""
        return self._cache.aside() if self._cache is not None else nullcontext()

    def epoch_ends(self) -> None:
        report = self._cache.epoch_report() if self._cache is not None else None
        if report is not None:
            self._run.publish("front_epoch", report)

    def train_ends(self) -> None:
        if self._cache is not None:
            self._run.publish("not_read", self._cache.why_not_read)

    def release(self) -> None:
        if self._cache is not None:
            self._cache.release()  # before other code that has replaced the layers' forward

    def close(self, ending: Ending) -> None:
        if self._cache is not None:
            self._cache.close(ending.has_failed, keeps_evaluations=ending.error is None)

    def keeps_evaluations_of(self, model: nn.Module) -> bool:
        return self._cache is not None and self._cache.keeps_evaluations_of(model)

    def forget(self) -> None:
        if self._cache is not None:
            self._cache.forget()


def make(run: PipelineRun) -> Front | None:
    """Return the part; None if the modules that it needs are not installed."""
    return Front(run) if is_installed("front.front_cache", "prefix_cache.cache.sharing") else None
