"""Messages between the stages of one pipeline.

A virtual stage sends to the next one, which is on the next process, on the first one again, or, where a V turns, on
the same one (`planning.placement`).

control group    values without their tensors on an accelerator (`packed`), and descriptions of the tensors that follow
pipeline group   tensors on the accelerator; on the CPU the tensors of a boundary
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..model.layer_stack import CarrySlot
from ..planning.placement import Placement
from .packed import Packed, packed, unpacked
from .stage import BoundaryShapes, CarriedTensor

Pending = list[tuple[dist.Work, Any]]
"""Unfinished sends, with their tensors, which must be kept until the transfer is complete."""

LENGTHS_BYTES = 24
"""Three numbers at the start of a value's first message: sizes of its pickled part, its content and its tensors."""
FIRST_ROOM = 4096
"""Bytes of content in the first message. Most values fit, and one more message costs more time than these bytes."""


class Crossing(NamedTuple):
    """The tensors of one micro-batch that cross a boundary.

    Attributes:
        virtual_stage: the virtual stage that sends them.
        slots: the slots of the boundary.
        values: the tensors; empty on the side that receives them.
        note: the engine's message that goes with them.
    """

    virtual_stage: int
    slots: Sequence[CarrySlot]
    values: Sequence[torch.Tensor] = ()
    note: Any = None


class _Refused:
    """Sent in place of a value that cannot be sent, with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class FailedBelow(Exception):
    """The layers of a stage below have failed in this micro-batch. That stage sends no more tensors of the call.

    Attributes:
        error: the error of these layers, caused by the traceback of the other process.
    """

    def __init__(self, error: Exception, text: str) -> None:
        super().__init__(error, text)  # the arguments are pickled
        self.error, self.text = error, text
        error.__cause__ = _TracebackBelow(text)

    @classmethod
    def of(cls, error: Exception, rank: int) -> FailedBelow:
        """Describe an error of this process, which has this rank, in a form that can be sent."""
        text = f"On rank {rank}:\n" + "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            error = pickle.loads(pickle.dumps(error))
        except Exception:  # an error may hold anything, and its class may expect other arguments
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error, text)


class _TracebackBelow(Exception):
    """The traceback of an error of another process."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class PipelineMessages:
    """Sends and receives between one stage and the other stages of its pipeline.

    Args:
        ranks: ranks of the stages, in order.
        stage_index: index of this stage, 0 ... K - 1.
        group: the pipeline's processes; None if there is one stage.
        control: the same processes, in a group on the CPU.
        device: the device of this process.
        placement: which stage holds which virtual stages.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stage_index: int,
        group: dist.ProcessGroup | None,
        control: dist.ProcessGroup | None,
        device: torch.device,
        placement: Placement,
    ) -> None:
        self.ranks = tuple(ranks)
        self.stage_index = stage_index
        self.placement = placement
        self.last = placement.loss_stage
        """Index of the stage that computes the loss."""
        self.virtual_stages = placement.held_by(stage_index)
        """The virtual stages of this process, in the model's order."""
        self._kept: dict[int, Any] = {}  # messages between two virtual stages of this process
        self.note: Any = None
        """The note of the latest received crossing from another process."""
        self._shared: Pending = []
        self.group = group
        self.control = control
        self.device = device

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def previous_rank(self) -> int | None:
        return self.ranks[self.stage_index - 1] if self.stage_index > 0 else None

    @property
    def next_rank(self) -> int | None:
        return self.ranks[self.stage_index + 1] if self.stage_index < self.num_stages - 1 else None

    # ------------------------------------------------------------------------------------ over all stages
    def share(self, mine: Any, source: int | None = None) -> Any:
        """Return one stage's value on all stages. Collective over the pipeline.

        The stage that sends continues at once; the others wait for the value, as they do for its activations.

        Args:
            mine: mappings, sequences and any values that can be pickled, with tensors anywhere. The sending stage's
                value is used, and that stage gets back the very object.
            source: the stage that sends; None for the last one. All stages train on the last stage's batch.

        Raises:
            ValueError: on all stages, if the value holds something that cannot be sent to another process.
        """
        if self.num_stages == 1:
            return mine
        source = self.last if source is None else source
        rank = self.ranks[source]
        if self.stage_index != source:
            value = self._receive(lambda buffer, group: dist.broadcast(buffer, rank, group=group))
            if isinstance(value, _Refused):
                raise ValueError(value.reason)
            return value
        wait_for(self._shared)
        refused = None
        try:
            message = packed(mine, self.device)
        except Exception as error:  # an object may raise any error while it is pickled
            refused = _Refused(
                "The batch contains a value that cannot be sent to the pipeline's other stages"
                f" ({type(error).__name__}: {error}). Return only tensors and plain values from the data collator and"
                " _prepare_inputs, or set pipeline_parallel_size=1."
            )
            message = packed(refused, self.device)
        self._shared = self._send(message, partial(dist.broadcast, src=rank, async_op=True))
        if refused is not None:
            wait_for(self._shared)  # the other stages must receive the reason before this process ends
            raise ValueError(refused.reason)
        return mine

    def of_each_stage(self, mine: Any) -> list[Any]:
        """Return every stage's own value, on all stages, as `share` sends it. Collective over the pipeline."""
        return [self.share(mine, stage) for stage in range(self.num_stages)]

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        """Maximum of each number over the stages, in place, on the CPU. Collective over the pipeline."""
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.control)
        return numbers

    # ------------------------------------------------------------------------------------ from stage to stage
    def send_shapes(self, virtual_stage: int, shapes: Sequence[BoundaryShapes]) -> None:
        """Send shapes of the tensors that leave a virtual stage of this process to the next one."""
        to = self.placement.stage_of(virtual_stage + 1)
        if to == self.stage_index:
            self._kept[virtual_stage] = tuple(shapes)
        else:
            wait_for(self.send_tree(tuple(shapes), to))

    def receive_shapes(self, virtual_stage: int) -> Sequence[BoundaryShapes]:
        """Receive the shapes for a virtual stage of this process."""
        source = self.placement.stage_of(virtual_stage - 1)
        return self._kept.pop(virtual_stage - 1) if source == self.stage_index else self.receive_tree(source)

    def send_values(self, crossing: Crossing) -> Pending:
        """Send the used tensors of a boundary to the next virtual stage."""
        return self.exchange([crossing], [])[0]

    def send_failure(self, virtual_stage: int, failure: FailedBelow) -> Pending:
        """Send to the next virtual stage, in place of a micro-batch's tensors, that its layers have failed."""
        return self.send_tree(failure, self.placement.stage_of(virtual_stage + 1))

    def receive_values(
        self, virtual_stage: int, slots: Sequence[CarrySlot], with_gradients: bool = False
    ) -> list[torch.Tensor]:
        """Receive the tensors of a boundary from the virtual stage before; unused ones are zeros.

        Args:
            virtual_stage: a virtual stage of this process.
            slots: the slots of the boundary before it.
            with_gradients: whether a tensor requires a gradient here if it did where it comes from.

        Raises:
            FailedBelow: the stage has sent a failure.
        """
        return self.exchange([], [Crossing(virtual_stage - 1, slots)], with_gradients)[1][0]

    def exchange(
        self, outgoing: Sequence[Crossing], incoming: Sequence[Crossing], with_gradients: bool = False
    ) -> tuple[Pending, list[list[torch.Tensor]]]:
        """Send to following virtual stages and receive from earlier ones at the same time.

        All tensors are given to the device as one operation: in a ring, where all stages send, an accelerator would
        otherwise finish no send, as each waits for a receive that comes later. Also one tensor alone, because NCCL has
        other communicators for single messages, and the other process may send and receive. The whole group must have
        communicated before (`ProcessMesh` sees to it): its communicator would otherwise be made here, where not all
        meet.

        Args:
            outgoing: the tensors that virtual stages of this process send.
            incoming: the tensors that others send to this process, in their order of sending.
            with_gradients: as in `receive_values`.

        Returns:
            The sends that are not completed, and for each of `incoming` the received values as of `receive_values`.
        """
        pending: Pending = []
        operations: list[dist.P2POp] = []
        for crossing in outgoing:
            to = self.placement.stage_of(crossing.virtual_stage + 1)
            if to == self.stage_index:
                self._kept[crossing.virtual_stage] = list(crossing.values)
                continue
            pending += self.send_tree(([_describe(value) for value in crossing.values], crossing.note), to)
            operations += [
                dist.P2POp(dist.isend, value.detach().to(self.device).contiguous(), self.ranks[to], self.group)
                for slot, value in zip(crossing.slots, crossing.values, strict=True)
                if slot.is_used
            ]
        received: list[list[torch.Tensor]] = []
        requiring: list[torch.Tensor] = []
        for crossing in incoming:
            source = self.placement.stage_of(crossing.virtual_stage)
            if source == self.stage_index:
                received.append(self._kept.pop(crossing.virtual_stage))
                continue
            received.append([])
            came = self.receive_tree(source)
            if isinstance(came, FailedBelow):
                raise came
            described, self.note = came
            for slot, carried in zip(crossing.slots, described, strict=True):
                if not slot.is_used:
                    received[-1].append(carried.zeros(self.device))
                    continue
                value = torch.empty(carried.shape, dtype=carried.dtype, device=self.device)
                received[-1].append(value)
                requiring += [value] if with_gradients and carried.requires_grad else []
                operations.append(dist.P2POp(dist.irecv, value, self.ranks[source], self.group))
        under_way = [(work, operations) for work in dist.batch_isend_irecv(operations)] if operations else []
        if not incoming:
            return pending + under_way, []
        wait_for(under_way)
        for value in requiring:
            value.requires_grad_()
        return pending, received

    def send_tree(self, tree: Any, stage: int) -> Pending:
        """Begin to send any value to a stage. In a ring, all stages could wait for one another if this waited."""
        return self._send(packed(tree, self.device), lambda part, group: self._begin(dist.isend, part, stage, group))

    def receive_tree(self, stage: int) -> Any:
        """Receive the value that a stage has sent by `send_tree`."""
        return self._receive(lambda part, group: self._begin(dist.irecv, part, stage, group).wait(), copies=True)

    def scatter(self, results: Sequence[Any]) -> Any:
        """Return this stage's entry of the last stage's list, which has one for each. Collective over the pipeline."""
        if self.stage_index != self.last:
            return self.receive_tree(self.last)
        for owner, result in enumerate(results):
            if owner != self.last:
                wait_for(self.send_tree(result, owner))  # one after another, as each is copied
        return results[self.last]

    # ------------------------------------------------------------------------------------ inside
    def _begin(self, kind: Any, part: torch.Tensor, stage: int, group: dist.ProcessGroup | None) -> dist.Work:
        """Begin to send or receive one tensor, in a batch of one for the reason that `exchange` gives."""
        (work,) = dist.batch_isend_irecv([dist.P2POp(kind, part, self.ranks[stage], group)])
        return work

    def _send(self, message: Packed, send: Callable[..., dist.Work | None]) -> Pending:
        """Begin to send a value: a first message of fixed size, the rest of the content, tensors of accelerators."""
        lengths = torch.tensor([message.pickled, message.content.numel(), message.on_device.numel()])
        first = torch.zeros(LENGTHS_BYTES + FIRST_ROOM, dtype=torch.uint8)
        first[:LENGTHS_BYTES] = lengths.view(torch.uint8)
        begin, rest = message.content[:FIRST_ROOM], message.content[FIRST_ROOM:]
        first[LENGTHS_BYTES : LENGTHS_BYTES + begin.numel()] = begin
        pending: Pending = []
        for part, group in ((first, self.control), (rest, self.control), (message.on_device, self.group)):
            if part.numel():
                work = send(part, group=group)
                assert work is not None
                pending.append((work, part))
        return pending

    def _receive(self, receive: Callable[[torch.Tensor, dist.ProcessGroup | None], Any], copies: bool = False) -> Any:
        """Receive a message that another stage sends by `_send`."""
        first = torch.empty(LENGTHS_BYTES + FIRST_ROOM, dtype=torch.uint8)
        receive(first, self.control)
        pickled, size, size_on_device = first[:LENGTHS_BYTES].view(torch.long).tolist()
        content = torch.empty(size, dtype=torch.uint8)
        begin, rest = content[:FIRST_ROOM], content[FIRST_ROOM:]
        begin.copy_(first[LENGTHS_BYTES : LENGTHS_BYTES + begin.numel()])
        on_device = torch.empty(size_on_device, dtype=torch.uint8, device=self.device)
        for part, group in ((rest, self.control), (on_device, self.group)):
            if part.numel():
                receive(part, group)
        return unpacked(Packed(pickled, content, on_device), copies)


def wait_for(pending: Pending) -> None:
    """Wait until these tensors are sent."""
    for work, _ in pending:
        work.wait()


def _describe(tensor: torch.Tensor) -> CarriedTensor:
    return CarriedTensor(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
