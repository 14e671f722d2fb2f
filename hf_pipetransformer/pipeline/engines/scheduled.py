"""A step as a schedule of micro-batches over several stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from torch import nn

from ...errors import users_error
from ...model.micro_batch import Batch, batch_rows
from ..schedule import PipelineScheduler
from .engine import Engine, Position, StepLoss


class ScheduledEngine(Engine):
    """Runs micro-batches in the order of the plan's schedule."""

    def __init__(self, position: Position) -> None:
        super().__init__(position)
        plan, stage, wrapped = position.plan, position.stage, position.wrapped
        modules: Sequence[nn.Module] = stage.stages if wrapped is None else (wrapped,)
        books = position.shape_books()
        self._scheduler = PipelineScheduler(stage, modules, position.messages, books, plan.schedule)
        self._num_microbatches = cache(plan.num_microbatches_for)

    def step(self, batch: Batch, loss: StepLoss, gradients_synchronise: bool) -> None:
        """Run a step, as in `Engine`. An error that torch's stage has wrapped in a `RuntimeError` is raised alone."""
        try:
            return self._scheduler.step(batch, self._num_microbatches(batch_rows(batch)), gradients_synchronise)
        except RuntimeError as error:
            inner = users_error(error)
            if inner is error:
                raise
        raise inner  # here, where no error is handled, so that its own context stays
