"""A step on a single stage: there is no schedule, and the step costs as much as in the stock Trainer."""

from __future__ import annotations

from contextlib import nullcontext

from ...model.micro_batch import Batch
from ..stage import FIRST
from .engine import Engine, StepLoss


class OneStageEngine(Engine):
    """Runs forward and backward of the whole batch."""

    def step(self, batch: Batch, loss: StepLoss, gradients_synchronise: bool) -> None:
        stage, wrapped = self.position.stage.first, self.position.wrapped
        unreduced = wrapped.no_sync() if wrapped is not None and not gradients_synchronise else nullcontext()
        with stage.holding((batch,)), unreduced:
            loss.backward((wrapped if wrapped is not None else stage)(index=FIRST))
