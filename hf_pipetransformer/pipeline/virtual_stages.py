"""The virtual stages of one process: its part of a pipeline. There is one, unless the schedule is interleaved.

K = 2 processes, V = 2

process 0   stages[0]              stages[1]
process 1              stages[0]              stages[1]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..model.batch_statistics import normalisations
from ..model.layer_stack import LayerStack
from ..model.micro_batch import Batch
from ..planning.layout import Layout
from .stage import LossFunction, Shortcut, StageModule


class VirtualStages(nn.Module):
    """The virtual stages of one process, in the model's order.

    A parameter that several of them need is one parameter, which gets the sum of its gradients from autograd.

    Args:
        stack: the model's units.
        ranges: the units of each virtual stage.
        device: the device of their computations.
    """

    stack: LayerStack

    def __init__(self, stack: LayerStack, ranges: Sequence[range], device: torch.device) -> None:
        super().__init__()
        self.__dict__["stack"] = stack  # not registered, as in `StageModule`
        self.device = device
        self.stages: tuple[StageModule, ...] = tuple(
            StageModule(stack, units.start, units.stop, device) for units in ranges
        )
        for index, stage in enumerate(self.stages):
            self.register_module(f"stage_{index}", stage)
        held = {name for stage in self.stages for name in stage.names}
        self.names = tuple(name for name in stack.table.names if name in held)
        """The names of all parameters that are here."""
        for number, stage in enumerate(self.stages):
            stage.counted_elsewhere = self._counted_before(number)
        self.units = frozenset(unit for units in ranges for unit in units)

    @property
    def first(self) -> StageModule:
        return self.stages[0]

    @property
    def last(self) -> StageModule:
        return self.stages[-1]

    @property
    def has_last_unit(self) -> bool:
        """Whether this process computes the loss."""
        return self.last.is_last

    @contextmanager
    def computing(self, loss_of: LossFunction) -> Iterator[None]:
        """Inside, the last stage computes this loss of its micro-batches."""
        self.last.loss_of = loss_of
        try:
            yield
        finally:
            self.last.loss_of = None

    @property
    def continues(self) -> bool:
        """Whether the running micro-batch has later tokens of the samples in the micro-batch before it."""
        return self.last.continues

    @property
    def micro_batches(self) -> Sequence[Batch]:
        """The micro-batches of the pass that runs; empty between passes."""
        return self.last.micro_batches

    def _counted_before(self, number: int) -> list[nn.Module]:
        """Return the layers with running statistics that an earlier virtual stage keeps, and the given one runs again.

        These are in the part before the units, which each virtual stage computes again from the batch.
        """
        stage, earlier = self.stages[number], self.stages[:number]
        own = {module for unit in self.stack.units[stage.start : stage.stop] for module in unit.module.modules()}
        held = {parameter for one in earlier for parameter in one.parameters()}
        runs_first_part = bool(earlier) and not self.first.start
        return [
            module
            for module in normalisations(self.stack.model)
            if module not in own
            and (any(p in held for p in module.parameters()) or (runs_first_part and not list(module.parameters())))
        ]

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the parameters that have one, by the parameters' names in the model."""
        gradients = ((name, self.stack.table[name].grad) for name in self.names)
        return {name: gradient for name, gradient in gradients if gradient is not None}

    def use_shortcut(self, shortcut: Shortcut | None) -> None:
        """From now on, skip layers if `shortcut` has their outputs; None stops using one."""
        for stage in self.stages:
            stage.shortcut = shortcut


def names_of_stage(layout: Layout, stack: LayerStack, stage: int) -> frozenset[str]:
    """The parameters that a stage holds under a layout, in all its virtual stages."""
    return frozenset().union(*(stack.owned(units.start, units.stop) for units in layout.ranges_of(stage)))
