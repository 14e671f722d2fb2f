"""A step as a schedule of micro-batches over several stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from torch import nn

from ...errors import users_error
from ...model.micro_batch import Batch, batch_rows, numbers_of_rows
from ..schedule import PipelineScheduler
from .engine import Engine, Position, StepLoss


class ScheduledEngine(Engine):
    """Runs micro-batches in the order of the layout's schedule."""

    def __init__(self, position: Position) -> None:
        super().__init__(position)
        layout, stage, wrapped = position.layout, position.stage, position.wrapped
        modules: Sequence[nn.Module] = stage.stages if wrapped is None else (wrapped,)
        books = position.shape_books()
        self._scheduler = PipelineScheduler(stage, modules, position.messages, books, layout.schedule)
        self._num_microbatches = cache(layout.num_microbatches_for)

    @property
    def cut(self) -> int:
        return self._scheduler.cut

    def step(self, batch: Batch, loss: StepLoss, gradients_synchronise: bool) -> None:
        """Run a step, as in `Engine`. An error that torch's stage has wrapped in a `RuntimeError` is raised alone.

        Raises:
            ValueError: the batch must be split and not all of its tensors have a row for each sample.
        """
        count = self._num_microbatches(batch_rows(batch))
        if count > 1 and len(rows := numbers_of_rows(batch)) > 1:
            raise ValueError(
                f"The batch has tensors with different numbers of rows {sorted(rows)}, so it cannot be split into"
                f" {count} micro-batches by sample. Those of the first samples had equal numbers. Set"
                " num_microbatches=1, or return tensors with one row for each sample from the data collator."
            )
        try:
            return self._scheduler.step(batch, count, gradients_synchronise)
        except RuntimeError as error:
            inner = users_error(error)
            if inner is error:
                raise
        raise inner  # outside of the except clause, which would replace the error's own context
