"""A training step with slices of sequences as micro-batches (TeraPipe, ICML 2021).

K = 2 stages, 2 parts of the batch, each of 3 slices (F forward, B backward; part.slice)

stage 0   F0.0 F0.1 F0.2 F1.0 F1.1 F1.2           B0.2 B0.1 B0.0      B1.2 B1.1 B1.0
stage 1        F0.0 F0.1 F0.2           B0.2 B0.1 B0.0 F1.0 F1.1 F1.2 B1.2 B1.1 B1.0

The slices of a sequence run forward from the first to the last and backward from the last to the first; the order of
the parts is 1F1B. Slices have different shapes, and neither direction must wait for the other. So this is not a torch
schedule, but a loop over point-to-point messages. DDP cannot be used either: its reducer prepares for the backward in
the first forward, but that slice's backward comes last. Gradients are reduced over the replicas after the step
instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..model.micro_batch import Batch, batch_rows, slice_rows
from ..pipeline.messages import PipelineMessages
from ..pipeline.shape_book import ShapeBook
from ..pipeline.stage import FIRST, CarriedTensor, StageModule, StageShapes
from ..planning.schedules import Work
from .kv_slices import slice_cache_in
from .slice_choice import SliceChooser, shapes_of_slice
from .slice_planning import RowSlices
from .slice_timeline import work_of
from .slices import SlicedSequence, Windows, check_updates, running_slices

RECEIVES_AHEAD = 2
"""Number of messages with receive buffers posted ahead, in the order of their use."""


class TokenScheduler:
    """Runs batches through this process's stage in slices.

    Creating it is collective over the pipeline: a first message passes through, forward and back. NCCL creates the
    communicator of two ranks at their first message, and both must take part. In a step, one rank would begin with the
    forward messages, and the other with the backward messages.

    Args:
        stage: this process's stage, one of several.
        messages: sends and receives within this pipeline, over the group of the forward direction.
        backward_group: the same processes in another group. With a single group, messages in opposite directions would
            wait for one another if a communicator processes them in order.
        shape_book: the shapes at the stage's boundaries for whole samples.
        windows: attention windows of the model's layers, from `probe_slicing`.
        chooser: chooses the split of each batch.
    """

    def __init__(
        self,
        stage: StageModule,
        messages: PipelineMessages,
        backward_group: dist.ProcessGroup | None,
        shape_book: ShapeBook,
        windows: Windows,
        chooser: SliceChooser,
    ) -> None:
        self._stage = stage
        self._messages = messages
        self._ways = {
            "forward": _Way(messages.previous_rank, messages.next_rank, messages.group),
            "backward": _Way(messages.next_rank, messages.previous_rank, backward_group),
        }
        self._shape_book = shape_book
        self._windows = windows
        self._chooser = chooser
        self.cut = 0
        """First unit of the stage, if it had gradients to send to the stage before in the last step, and had none."""
        first = torch.zeros(1, device=stage.device)
        for way in self._ways.values():
            if way.source is not None:
                dist.recv(first, way.source, group=way.group)
            if way.to is not None:
                dist.send(first, way.to, group=way.group)

    def step(self, batch: Batch) -> None:
        """Run forward and backward of all slices and add gradients to `.grad`. Collective over the pipeline.

        Args:
            batch: the pipeline's whole batch, the same on all its stages.
        """
        parts = self.parts_of(batch)
        assert sum(part.rows for part in parts) == batch_rows(batch), (parts, batch_rows(batch))
        stack, slices, row = self._stage.stack, list[_Slice](), 0
        with running_slices(stack.model, batch):
            for part in parts:
                rows = slice_rows(batch, row, row + part.rows)
                sequence = SlicedSequence(stack.model, rows, part.lengths, self._windows, stack.runner.num_frozen)
                whole = self._shape_book.shapes(batch, part.rows)
                for number, length in enumerate(part.lengths):
                    shapes = shapes_of_slice(self._stage, whole, sequence.length, length)
                    slices.append(_Slice(sequence, number, shapes))
                row += part.rows
            counts = [len(part.lengths) for part in parts]
            work = work_of(self._messages.stage_index, self._messages.num_stages, counts)
            step = _Step(self._stage, slices, self._ways)
            step.run(work)
            self.cut = self._stage.start if step.sends_zeros and not step.sends_gradients else 0

    def parts_of(self, batch: Batch) -> tuple[RowSlices, ...]:
        """Return the split of a batch. Collective over the pipeline for a new shape."""
        return self._chooser.parts_of(self._stage, partial(self._shape_book.shapes, batch), batch)


@dataclass(frozen=True)
class _Way:
    """One direction: the ranks before and after this stage (None at the ends), and the group of its messages."""

    source: int | None
    to: int | None
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class _Slice:
    """One slice of a part of the batch, and the shapes of its tensors at the stage's boundaries."""

    sequence: SlicedSequence
    number: int
    shapes: StageShapes


class _Step:
    """One training step of one stage."""

    def __init__(self, stage: StageModule, slices: Sequence[_Slice], ways: dict[str, _Way]) -> None:
        self._stage = stage
        self._slices = slices
        self._ways = ways
        self._awaited: deque[Work] = deque()  # tasks without receive buffers yet
        self._arriving: dict[Work, tuple[list[torch.Tensor], list[Any]]] = {}
        self._leaving: dict[Work, list[tuple[torch.Tensor, Any]]] = {}  # keeps tensors until they are sent
        self._graphs: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self.sends_gradients = self.sends_zeros = False

    def run(self, work: Sequence[Work]) -> None:
        self._awaited.extend(task for task in work if self._expected(task))
        self._receive_ahead()
        for task in work:
            if task.kind == "forward":
                self._forward(task)
            else:
                self._backward(task)
        for task in list(self._leaving):
            self._wait_sends(task)

    # ------------------------------------------------------------------------------------ computing
    def _forward(self, task: Work) -> None:
        stage, one = self._stage, self._slices[task.micro_batch]
        inputs = [
            tensor.requires_grad_(carried.requires_grad)
            for tensor, carried in zip(self._take(task), self._expected(task), strict=True)
        ]
        batch = one.sequence.slice(one.number)
        with stage.holding((batch,), one.shapes, continues=one.number > 0):
            output = stage(*inputs, index=FIRST)
        cache = slice_cache_in(batch)
        if cache is not None:
            check_updates(stage.stack.model, cache, stage.stop - stage.start)
        outputs = [output] if isinstance(output, torch.Tensor) else list(output)
        if not stage.is_last:
            self._send(task, outputs)
            sent = (
                carried for slot, carried in zip(stage.slots_out, one.shapes.outgoing, strict=True) if slot.is_used
            )
            outputs = [out for out, carried in zip(outputs, sent, strict=True) if carried.requires_grad]
        self._graphs[task.micro_batch] = (inputs, outputs)

    def _backward(self, task: Work) -> None:
        inputs, outputs = self._graphs.pop(task.micro_batch)
        gradients: Sequence[torch.Tensor | None] = [None] if self._stage.is_last else self._take(task)
        if gradients and not self._stage.is_last:
            self._wait_sends(
                Work("forward", task.part, task.micro_batch)
            )  # its forward message has arrived, because its gradient has
        pairs = [(out, g) for out, g in zip(outputs, gradients, strict=True) if out.requires_grad]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        if wanted:
            self._send(task, [torch.zeros_like(t) if t.grad is None else t.grad for t in wanted])
            self.sends_gradients |= any(tensor.grad is not None for tensor in wanted)
            self.sends_zeros |= any(tensor.grad is None for tensor in wanted)
        one = self._slices[task.micro_batch]
        if one.number == 0:
            one.sequence.forget()

    # ------------------------------------------------------------------------------------ messages
    def _expected(self, task: Work) -> list[CarriedTensor]:
        """Return the tensors that a task waits for."""
        stage, shapes = self._stage, self._slices[task.micro_batch].shapes
        if task.kind == "forward":
            return [one for slot, one in zip(stage.slots_in, shapes.incoming, strict=True) if slot.is_used]
        crossing = zip(stage.slots_out, shapes.outgoing, strict=True)
        return [one for slot, one in crossing if slot.is_used and one.requires_grad]

    def _receive_ahead(self) -> None:
        while self._awaited and len(self._arriving) < RECEIVES_AHEAD:
            task = self._awaited.popleft()
            way = self._ways[task.kind]
            buffers = [torch.empty(c.shape, dtype=c.dtype, device=self._stage.device) for c in self._expected(task)]
            self._arriving[task] = (buffers, [dist.irecv(buffer, way.source, group=way.group) for buffer in buffers])

    def _take(self, task: Work) -> list[torch.Tensor]:
        if not self._expected(task):
            return []
        buffers, works = self._arriving.pop(task)
        for work in works:
            work.wait()
        self._receive_ahead()
        return buffers

    def _send(self, task: Work, tensors: Sequence[torch.Tensor]) -> None:
        way = self._ways[task.kind]
        assert way.to is not None
        sent = [tensor.detach().contiguous() for tensor in tensors]
        self._leaving[task] = [(tensor, dist.isend(tensor, way.to, group=way.group)) for tensor in sent]

    def _wait_sends(self, task: Work) -> None:
        """Wait until a task's tensors are sent. Gloo cannot test this without waiting."""
        for _, work in self._leaving.pop(task, []):
            work.wait()
