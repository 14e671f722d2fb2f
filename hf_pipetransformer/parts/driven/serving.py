"""A stage below the last one serves calls of the model on the last stage (`served_calls`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn

from ...model.batch_statistics import statistics_set_aside
from ...model.micro_batch import Batch
from ...model.nested import tensors_of
from ...pipeline.messages import Crossing, FailedBelow, PipelineMessages
from ...pipeline.stage import StageModule
from ...progress import PROGRESS
from .left_behind import Note, StateBelow
from .orders import Ask, Backward, End, Forward, Own, StageCalls


@dataclass
class _Held:
    """The graph of a micro-batch on a stage below: its received and its sent tensors."""

    received: list[torch.Tensor]
    sent: Sequence[torch.Tensor] = ()


class ServingStage(StageCalls):
    """Runs the layers of a stage below the last one, for calls on the last stage.

    Args:
        stage: as in `StageCalls`.
        messages: as in `StageCalls`.
    """

    def __init__(self, stage: StageModule, messages: PipelineMessages) -> None:
        super().__init__(stage, messages)
        self._state = StateBelow(stage)
        self._held: dict[tuple[int, int], _Held] = {}  # (call, micro-batch) -> graph
        self._leaves: dict[int, list[torch.Tensor]] = {}  # call -> inputs with gradients that may be requested

    def run(self, batch: Batch, code: Callable[[], Any], unread: Collection[str] = ()) -> None:
        """Follow the orders of the last stage, until the user's code there has returned.

        Args:
            batch: the batch, the same on all stages.
            code: used on the last stage only.
            unread: used on the last stage only.
        """
        tensors = tensors_of(batch)
        self._state.begin()
        while True:
            order, released, given = self.messages.receive_tree(self.index + 1)
            PROGRESS.tick()
            for key in released:
                self._held.pop(key, None)
            if not isinstance(order, Backward) and self.index > 0:
                self.send((order, released, given), self.index - 1)
            if isinstance(order, End):
                self._state.put(order.changes)
                break
            if isinstance(order, Ask):
                self._answer(order)
            elif isinstance(order, Forward):
                inputs = recursively_apply(
                    lambda own: tensors[own.index], given, test_type=lambda value: isinstance(value, Own)
                )
                self._forward(order, inputs)
            else:
                self._backward(order, given)
        self.wait()
        self._held.clear()
        self._leaves.clear()

    def _answer(self, order: Ask) -> None:
        """Send the gradients of a call's inputs on this stage."""
        leaves = self._leaves[order.call]
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        self.send(gradients, self.messages.last)

    def _forward(self, order: Forward, inputs: Batch) -> None:
        self._state.put(order.changes)
        module = self.modules[order.module]
        if order.wanted:
            position = itertools.count()
            leaves: list[torch.Tensor] = []

            def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
                if next(position) not in order.wanted:
                    return tensor
                leaves.append(tensor.detach().requires_grad_())
                return leaves[-1]

            inputs = recursively_apply(leaf_of, inputs)
            self._leaves[order.call] = leaves
        has_failed = False
        parts = self.parts(inputs, order.spans)
        for number, part in enumerate(parts):
            values: list[torch.Tensor] = []
            note: Note | None = None
            if self.index > 0:
                try:
                    values = self.messages.receive_values(
                        self.index, self.stage.slots_in, with_gradients=order.has_gradients
                    )
                    note = self.messages.note
                except FailedBelow as failure:
                    if not has_failed:
                        self._give_up(failure)
                    return  # the stages below have left the call
            if has_failed:
                self._state.keep(note)
                continue  # the remaining messages of this call are not needed
            try:
                crossing = self._run(order, number, module, values, part)
            except Exception as error:
                has_failed = True
                self._state.keep(note)
                self._give_up(FailedBelow.of(error, self.messages.ranks[self.index]))
            else:
                if number == len(parts) - 1:
                    note = self._state.after_call(note, bool(order.spans))
                noted = Crossing(crossing.virtual_stage, crossing.slots, crossing.values, note)
                self.keep(self.messages.send_values(noted))

    def _give_up(self, failure: FailedBelow) -> None:
        """Report a failed call to the last stage. The user's code there may catch the error."""
        self.keep(self.messages.send_failure(self.index, failure))

    def _run(
        self, order: Forward, number: int, module: nn.Module, values: list[torch.Tensor], part: Batch
    ) -> Crossing:
        """Run a micro-batch of a call. Returns the values for the next stage."""
        held = _Held([value for value in values if value.requires_grad])
        # views, as in `StageModule`: autocast must not take them for weights
        values = [value.view_as(value) if value.requires_grad else value for value in values]
        with self.running(order, number, module.forward), statistics_set_aside(self.stage.counted_elsewhere):
            outputs = self.stage.carry_on(values, part)
        slots = self.stage.slots_out
        outputs = tuple(
            out if slot.is_used and slot.needs_gradient else out.detach()
            for slot, out in zip(slots, outputs, strict=True)
        )
        held.sent = [out for out in outputs if out.requires_grad]
        if held.sent:
            self._held[order.call, number] = held
        return Crossing(self.index, slots, outputs)

    def _backward(self, order: Backward, gradients: Sequence[torch.Tensor]) -> None:
        held = self._held[order.call, order.part]
        for leaf in held.received:
            leaf.grad = None
        undo = self._state.put(order.changes)
        if order.only_inputs:
            leaves = [*held.received, *self._leaves.get(order.call, ())]
            found = torch.autograd.grad(
                held.sent, leaves, gradients, retain_graph=order.keeps_graph, allow_unused=True
            )
            for leaf, gradient in zip(leaves, found, strict=True):
                if gradient is not None:
                    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        else:
            torch.autograd.backward(held.sent, gradients, retain_graph=order.keeps_graph)
        undo()
        if order.changes:
            self._state.note()
        down = [torch.zeros_like(x) if x.grad is None else x.grad for x in held.received]
        if not order.keeps_graph:
            del self._held[order.call, order.part]
        if down:
            self.send((order, [], down), self.index - 1)
