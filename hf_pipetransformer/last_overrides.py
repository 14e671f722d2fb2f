"""Overrides of the Trainer that run behind those of other libraries' trainers.

    class MyTrainer(PipeTransformerTrainer, GKDTrainer): ...

    method resolution     MyTrainer, PipeTransformerTrainer, GKDTrainer, SFTTrainer, LastOverrides, Trainer

`GKDTrainer.training_step` replaces words of the batch by generated ones, and then calls `super().training_step`: this
must be the pipeline's step. If `PipeTransformerTrainer` had the step itself, GKD's would never run.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from .run.run import PipelineRun


class _LastInLine(ABCMeta):
    """Resolves methods of `LastOverrides` directly before those of `transformers.Trainer`.

    (It is an `ABCMeta` so that a user's trainer may also have an abstract base class.)
    """

    def mro(cls) -> list[type]:
        order = super().mro()
        last = next((one for one in order if one.__dict__.get("_is_last_in_line")), None)
        if last is not None:
            order.remove(last)
            order.insert(order.index(Trainer), last)
        return order


class LastOverrides(Trainer, metaclass=_LastInLine):
    """The methods of a step that replace the stock ones during `train()`."""

    _is_last_in_line = True
    _pipeline_run: PipelineRun | None = None

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        run = self._pipeline_run
        if self.state.global_step >= self.state.max_steps:
            # resumed after the last step, inside an epoch: the stock loop would run another step
            self.control.should_training_stop = True
            if run is not None:
                run.nothing_left()
            return [], 1
        if run is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        return run.take(epoch_iterator, num_batches)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        if self._pipeline_run is None:
            return super().training_step(model, inputs, num_items_in_batch)
        return self._pipeline_run.step(inputs, num_items_in_batch)

    def _evaluate(self, *positional: Any, **keywords: Any) -> dict[str, float]:
        evaluate: Any = partial(super()._evaluate, *positional, **keywords)
        metrics: dict[str, float] = evaluate() if self._pipeline_run is None else self._pipeline_run.evaluate(evaluate)
        return metrics
