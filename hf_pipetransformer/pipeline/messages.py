"""Messages between the stages of one pipeline.

The stages form a ring: with virtual stages, the last stage sends to the first one what that one's next part takes.

control group    pickled objects, which describe the tensors that follow
pipeline group   tensors on the device, each in a message of its own
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply

from ..model.layer_stack import CarrySlot
from ..model.nested import tensors_of
from .stage import BoundaryShapes, CarriedTensor

Pending = list[tuple[dist.Work, torch.Tensor]]
"""Tensors that are being sent and must be kept until the transfer is complete."""


Boundary = tuple[Sequence[CarrySlot], Sequence[torch.Tensor]]
"""The slots of a boundary and the values that cross it."""


class PipelineMessages:
    """Sends and receives between one stage and the other stages of its pipeline.

    Args:
        ranks: ranks of the stages, in order.
        stage_index: index of this stage, 0 ... K - 1.
        group: the pipeline's processes; None if there is one stage.
        control: the same processes, in a group on the CPU.
        device: the device of this process.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stage_index: int,
        group: dist.ProcessGroup | None,
        control: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.ranks = tuple(ranks)
        self.stage_index = stage_index
        self.group = group
        self.control = control
        self.device = device

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def last(self) -> int:
        return len(self.ranks) - 1

    @property
    def previous_rank(self) -> int | None:
        return self.ranks[self.stage_index - 1] if self.stage_index > 0 else None

    @property
    def next_rank(self) -> int | None:
        return self.ranks[self.stage_index + 1] if self.stage_index < self.last else None

    # ------------------------------------------------------------------------------------ over all stages
    def of_each_stage(self, mine: Any) -> list[Any]:
        """Return every stage's object, on all stages. Collective over the pipeline."""
        everyone: list[Any] = [None] * self.num_stages
        dist.all_gather_object(everyone, mine, group=self.control)
        return everyone

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        """Maximum of each number over the stages, in place, on the CPU. Collective over the pipeline."""
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.control)
        return numbers

    # ------------------------------------------------------------------------------------ from stage to stage
    def send_shapes(self, shapes: Sequence[BoundaryShapes]) -> None:
        """Send shapes of the tensors that cross the boundary to the next stage."""
        wait_for(self._send_object(tuple(shapes), self._next))

    def receive_shapes(self) -> Sequence[BoundaryShapes]:
        return self._receive_object(self._previous)

    def send_values(self, slots: Sequence[CarrySlot], values: Sequence[torch.Tensor]) -> Pending:
        """Send the used tensors of a boundary to the next stage."""
        pending = self._send_object([_describe(value) for value in values], self._next)
        return pending + [
            self._send_tensor(value, self._next) for slot, value in zip(slots, values, strict=True) if slot.is_used
        ]

    def receive_values(self, slots: Sequence[CarrySlot]) -> list[torch.Tensor]:
        """Receive the tensors of a boundary from the previous stage; unused ones are zeros."""
        return [
            self._receive_tensor(carried, self._previous) if slot.is_used else carried.zeros(self.device)
            for slot, carried in zip(slots, self._receive_object(self._previous), strict=True)
        ]

    def exchange(
        self, outgoing: Boundary | None, incoming: Sequence[CarrySlot] | None
    ) -> tuple[Pending, list[torch.Tensor]]:
        """Send to the next stage and receive from the previous one at the same time.

        Both are given to the device as one operation if there are both: in a ring, where all stages send, an
        accelerator would otherwise finish no send, as each waits for a receive that comes later.

        Args:
            outgoing: slots and values of the boundary to the next stage; None if nothing is sent.
            incoming: slots of the boundary from the previous stage; None if nothing is received.

        Returns:
            What is still being sent, and the received values as of `receive_values`.
        """
        if incoming is None:
            return (self.send_values(*outgoing) if outgoing is not None else []), []
        if outgoing is None:
            return [], self.receive_values(incoming)
        slots, values = outgoing
        pending = self._send_object([_describe(value) for value in values], self._next)
        received = [
            torch.empty(carried.shape, dtype=carried.dtype, device=self.device)
            if slot.is_used
            else carried.zeros(self.device)
            for slot, carried in zip(incoming, self._receive_object(self._previous), strict=True)
        ]
        sent = [value.detach().contiguous() for slot, value in zip(slots, values, strict=True) if slot.is_used]
        used = [value for slot, value in zip(incoming, received, strict=True) if slot.is_used]
        to, source = self.ranks[self._next], self.ranks[self._previous]
        operations = [dist.P2POp(dist.isend, tensor, to, self.group) for tensor in sent]
        operations += [dist.P2POp(dist.irecv, tensor, source, self.group) for tensor in used]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return pending, received

    def send_tree(self, tree: Any, stage: int) -> Pending:
        """Send nested mappings, lists and tuples of tensors and other values to a stage."""
        pending = self._send_object(recursively_apply(_describe, tree), stage)
        return pending + [self._send_tensor(tensor, stage) for tensor in tensors_of(tree)]

    def receive_tree(self, stage: int) -> Any:
        return recursively_apply(
            lambda carried: self._receive_tensor(carried, stage),
            self._receive_object(stage),
            test_type=lambda value: isinstance(value, CarriedTensor),
        )

    # ------------------------------------------------------------------------------------ inside
    @property
    def _previous(self) -> int:
        return (self.stage_index - 1) % self.num_stages

    @property
    def _next(self) -> int:
        return (self.stage_index + 1) % self.num_stages

    def _send_object(self, value: Any, stage: int) -> Pending:
        """Begin to send any value: its length, then its bytes.

        `send_object_list` returns when the value has arrived. In a ring all stages could then wait for one another.
        """
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        pending: Pending = []
        for part in (torch.tensor([content.numel()]), content):
            work = dist.isend(part, self.ranks[stage], group=self.control)
            assert work is not None
            pending.append((work, part))
        return pending

    def _receive_object(self, stage: int) -> Any:
        length = torch.empty(1, dtype=torch.long)
        dist.recv(length, self.ranks[stage], group=self.control)
        content = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(content, self.ranks[stage], group=self.control)
        return pickle.loads(content.numpy().tobytes())

    def _send_tensor(self, tensor: torch.Tensor, stage: int) -> tuple[dist.Work, torch.Tensor]:
        tensor = tensor.detach().to(self.device).contiguous()
        work = dist.isend(tensor, self.ranks[stage], group=self.group)
        assert work is not None
        return work, tensor

    def _receive_tensor(self, carried: CarriedTensor, stage: int) -> torch.Tensor:
        tensor = torch.empty(carried.shape, dtype=carried.dtype, device=self.device)
        dist.recv(tensor, self.ranks[stage], group=self.group)
        return tensor


def wait_for(pending: Pending) -> None:
    """Wait until these tensors are sent."""
    for work, _ in pending:
        work.wait()


def _describe(tensor: torch.Tensor) -> CarriedTensor:
    return CarriedTensor(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
