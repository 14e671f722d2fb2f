"""A training step whose micro-batches are slices of sequences (TeraPipe, ICML 2021).

K = 2 stages, 2 parts of the batch, each of 3 slices (F forward, B backward; part.slice)

stage 0   F0.0 F0.1 F0.2 F1.0 F1.1 F1.2           B0.2 B0.1 B0.0      B1.2 B1.1 B1.0
stage 1        F0.0 F0.1 F0.2           B0.2 B0.1 B0.0 F1.0 F1.1 F1.2 B1.2 B1.1 B1.0

The slices of a sequence run forward from the first to the last and backward from the last to the first; the order of
the parts is 1F1B. Slices have different shapes, and neither direction must wait for the other. So this is not a torch
schedule, but a loop over point-to-point messages. DDP cannot be used either, because its reducer prepares for the
backward on the first forward, whose backward comes last: gradients are reduced over the replicas after the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..model.micro_batch import Batch, batch_rows, slice_rows
from ..pipeline.messages import PipelineMessages
from ..pipeline.stage import FIRST, CarriedTensor, ShapeBook, StageModule, StageShapes
from ..planning.layout import Layout
from .slice_choice import OnPlan, SliceChooser, TokenSlices, shapes_of_slice
from .slice_planning import RowSlices
from .slice_timeline import SliceTask, tasks_of
from .slices import SlicedSequence, Windows, check_updates, running_slices

RECEIVES_AHEAD = 2
"""Number of messages for which receive buffers are posted ahead, in the order in which they are needed."""


@dataclass(frozen=True)
class Neighbours:
    """Ranks and groups with which a stage communicates with its neighbours.

    Attributes:
        previous, next: global ranks; None at the ends of the pipeline.
        forward, backward: groups for the two directions. With a single group, messages in opposite directions would
            wait for one another if a communicator processes them in order.
    """

    previous: int | None
    next: int | None
    forward: dist.ProcessGroup | None
    backward: dist.ProcessGroup | None

    def connect(self, device: torch.device) -> None:
        """Send a first message through the pipeline, forward and back. Collective over the pipeline.

        NCCL creates the communicator of two ranks at their first message, and both must take part. In a step, one rank
        would begin with the forward messages, and the other with the backward ones.
        """
        message = torch.zeros(1, device=device)
        for source, to, group in (
            (self.previous, self.next, self.forward),
            (self.next, self.previous, self.backward),
        ):
            if source is not None:
                dist.recv(message, source, group=group)
            if to is not None:
                dist.send(message, to, group=group)


class TokenScheduler:
    """Runs batches through this process's stage in slices.

    Args:
        stage: this process's stage.
        stage_index: index of the stage, 0 ... `num_stages` - 1.
        num_stages: K > 1.
        neighbours: the stages before and after this one.
        shape_book: the shapes at the stage's boundaries for whole samples.
        windows: attention windows of the model's layers, from `probe_slicing`.
        chooser: decides how batches are split.
    """

    def __init__(
        self,
        stage: StageModule,
        stage_index: int,
        num_stages: int,
        neighbours: Neighbours,
        shape_book: ShapeBook,
        windows: Windows,
        chooser: SliceChooser,
    ) -> None:
        self._stage = stage
        self._index = stage_index
        self._num_stages = num_stages
        self._neighbours = neighbours
        self._shape_book = shape_book
        self._windows = windows
        self._chooser = chooser

    def step(self, batch: Batch) -> None:
        """Run forward and backward of all slices and add gradients to `.grad`. Collective over the pipeline.

        Args:
            batch: the pipeline's whole batch, the same on all its stages.
        """
        parts = self.parts_of(batch)
        assert sum(part.rows for part in parts) == batch_rows(batch), (parts, batch_rows(batch))
        model = self._stage.stack.model
        with running_slices(model, batch):
            _Step(self._stage, self._parts(batch, parts), self._neighbours).run(
                tasks_of(self._index, self._num_stages, [len(part.lengths) for part in parts])
            )

    def parts_of(self, batch: Batch) -> tuple[RowSlices, ...]:
        """Return how a batch is split. Collective over the pipeline for a new shape."""
        return self._chooser.parts_of(self._stage, partial(self._shape_book.shapes, batch), batch)

    def _parts(self, batch: Batch, parts: Sequence[RowSlices]) -> list[_Part]:
        stack, result, row = self._stage.stack, [], 0
        for part in parts:
            rows = slice_rows(batch, row, row + part.rows)
            sequence = SlicedSequence(stack.model, rows, part.lengths, self._windows, stack.runner.num_frozen)
            whole = self._shape_book.shapes(batch, part.rows)
            shapes = [shapes_of_slice(self._stage, whole, sequence.length, length) for length in part.lengths]
            result.append(_Part(sequence, shapes))
            row += part.rows
        return result


@dataclass
class _Part:
    sequence: SlicedSequence
    shapes: list[StageShapes]


class _Step:
    """One training step of one stage."""

    def __init__(self, stage: StageModule, parts: Sequence[_Part], neighbours: Neighbours) -> None:
        self._stage = stage
        self._parts = parts
        self._neighbours = neighbours
        self._awaited: deque[SliceTask] = deque()  # tasks whose messages have no buffer yet
        self._arriving: dict[SliceTask, tuple[list[torch.Tensor], list[Any]]] = {}
        self._leaving: dict[SliceTask, list[tuple[torch.Tensor, Any]]] = {}  # tensors are kept until they are sent
        self._graphs: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def run(self, tasks: Sequence[SliceTask]) -> None:
        self._awaited.extend(task for task in tasks if self._messages(task))
        self._receive_ahead()
        for task in tasks:
            if task.is_forward:
                self._forward(task)
            else:
                self._backward(task)
        for task in list(self._leaving):
            self._wait_sends(task)

    # ------------------------------------------------------------------------------------ computing
    def _forward(self, task: SliceTask) -> None:
        stage, part = self._stage, self._parts[task.part]
        shapes = part.shapes[task.slice]
        received = self._take(task)
        inputs = [
            tensor.requires_grad_(carried.requires_grad)
            for tensor, carried in zip(received, _used(stage.slots_in, shapes.incoming), strict=True)
        ]
        batch = part.sequence.slice(task.slice)
        with stage.holding((batch,), shapes):
            output = stage(*inputs, index=FIRST)
        if "past_key_values" in batch and len(part.shapes) > 1:
            check_updates(stage.stack.model, batch["past_key_values"], stage.stop - stage.start)
        outputs = [output] if isinstance(output, torch.Tensor) else list(output)
        self._graphs[task.part, task.slice] = (inputs, [out for out in outputs if out.requires_grad])
        if not stage.is_last:
            self._send(task, outputs, self._neighbours.next, self._neighbours.forward)

    def _backward(self, task: SliceTask) -> None:
        inputs, outputs = self._graphs.pop((task.part, task.slice))
        gradients = None if self._stage.is_last else self._take(task)
        if gradients:
            self._wait_sends(replace(task, is_forward=True))  # it must have arrived, as its gradient is here
        if outputs:
            torch.autograd.backward(outputs, gradients)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        if wanted:
            self._send(
                task,
                [torch.zeros_like(t) if t.grad is None else t.grad for t in wanted],
                self._neighbours.previous,
                self._neighbours.backward,
            )
        if task.slice == 0:
            self._parts[task.part].sequence.forget()

    # ------------------------------------------------------------------------------------ messages
    def _messages(self, task: SliceTask) -> tuple[CarriedTensor, ...]:
        """The tensors that a task waits for."""
        stage, shapes = self._stage, self._parts[task.part].shapes[task.slice]
        if task.is_forward:
            return _used(stage.slots_in, shapes.incoming)
        return tuple(carried for carried in _used(stage.slots_out, shapes.outgoing) if carried.requires_grad)

    def _receive_ahead(self) -> None:
        while self._awaited and len(self._arriving) < RECEIVES_AHEAD:
            task = self._awaited.popleft()
            source, group = (
                (self._neighbours.previous, self._neighbours.forward)
                if task.is_forward
                else (self._neighbours.next, self._neighbours.backward)
            )
            buffers = [torch.empty(c.shape, dtype=c.dtype, device=self._stage.device) for c in self._messages(task)]
            self._arriving[task] = (buffers, [dist.irecv(buffer, source, group=group) for buffer in buffers])

    def _take(self, task: SliceTask) -> list[torch.Tensor]:
        if not self._messages(task):
            return []
        buffers, works = self._arriving.pop(task)
        for work in works:
            work.wait()
        self._receive_ahead()
        return buffers

    def _send(
        self, task: SliceTask, tensors: Sequence[torch.Tensor], to: int | None, group: dist.ProcessGroup | None
    ) -> None:
        assert to is not None
        sent = [tensor.detach().contiguous() for tensor in tensors]
        self._leaving[task] = [(tensor, dist.isend(tensor, to, group=group)) for tensor in sent]

    def _wait_sends(self, task: SliceTask) -> None:
        """Wait until the tensors that a task sends have left; gloo has no way to test this without waiting."""
        for _, work in self._leaving.pop(task, []):
            work.wait()


def _used(slots: Sequence[Any], carried: Sequence[CarriedTensor]) -> tuple[CarriedTensor, ...]:
    return tuple(one for slot, one in zip(slots, carried, strict=True) if slot.is_used)


@dataclass(frozen=True)
class Slicing:
    """How sequences are split along their tokens if there are several stages (`pipeline.placed.SequenceSlicing`).

    Attributes:
        token_slices: the user's setting.
        windows: attention windows of the model's layers, from `probe_slicing`.
        on_plan: called for each new shape of batch.
    """

    token_slices: TokenSlices
    windows: Windows
    on_plan: OnPlan

    def schedule(
        self,
        plan: Layout,
        stage: StageModule,
        messages: PipelineMessages,
        second_group: dist.ProcessGroup | None,
        shape_book: ShapeBook,
    ) -> TokenScheduler:
        """Create what runs the steps of a plan. Collective over the pipeline.

        Args:
            plan: the plan in force.
            stage: the stage of this process.
            messages: sends and receives within this pipeline.
            second_group: another group of the pipeline's processes, for the backward direction.
            shape_book: the shapes at the stage's boundaries.
        """
        chooser = SliceChooser(
            self.token_slices,
            self.windows,
            plan.num_microbatches_for,
            messages.of_each_stage,
            self.on_plan,
            # the dynamic program also chooses the parts of the batch, unless the user has chosen their number
            chooses_parts=self.token_slices == "auto" and plan.micro_batching.requested is None,
        )
        neighbours = Neighbours(messages.previous_rank, messages.next_rank, messages.group, second_group)
        neighbours.connect(stage.device)
        return TokenScheduler(
            stage, messages.stage_index, messages.num_stages, neighbours, shape_book, self.windows, chooser
        )
