"""Messages between the stages of one pipeline.

A virtual stage sends to the next one, which is on the next process, on the first one again, or, where a V turns, on
the same one (`planning.placement`).

control group    pickled objects, which describe the tensors that follow
pipeline group   tensors on the device, each in a message of its own, and always as a batch: on NCCL both ends must
                 use the group's communicator, which `ProcessMesh` has created
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply

from ..model.layer_stack import CarrySlot
from ..model.nested import tensors_of
from ..planning.placement import Placement
from .stage import BoundaryShapes, CarriedTensor

Pending = list[tuple[dist.Work, Any]]
"""What is being sent, with the tensors, which must be kept until the transfer is complete."""


class Crossing(NamedTuple):
    """The tensors of one micro-batch that cross a boundary.

    Attributes:
        virtual_stage: the virtual stage that sends them.
        slots: the slots of the boundary.
        values: what crosses it; empty where it is to be received.
    """

    virtual_stage: int
    slots: Sequence[CarrySlot]
    values: Sequence[torch.Tensor] = ()


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
        self.virtual_stages = placement.held_by(stage_index)
        """The virtual stages of this process, in the model's order."""
        self._kept: dict[int, Any] = {}  # what a virtual stage has sent to the next one on this process
        self.group = group
        self.control = control
        self.device = device

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def last(self) -> int:
        """Index of the stage that computes the loss."""
        return self.placement.loss_stage

    @property
    def previous_rank(self) -> int | None:
        return self.ranks[self.stage_index - 1] if self.stage_index > 0 else None

    @property
    def next_rank(self) -> int | None:
        return self.ranks[self.stage_index + 1] if self.stage_index < self.num_stages - 1 else None

    # ------------------------------------------------------------------------------------ over all stages
    def of_each_stage(self, mine: Any) -> list[Any]:
        """Return every stage's object, on all stages. Collective over the pipeline."""
        everyone: list[Any] = [None] * self.num_stages
        dist.all_gather_object(everyone, mine, group=self.control)
        return [everyone[self.placement.position_of(stage)] for stage in range(self.num_stages)]

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        """Maximum of each number over the stages, in place, on the CPU. Collective over the pipeline."""
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.control)
        return numbers

    # ------------------------------------------------------------------------------------ from stage to stage
    def send_shapes(self, virtual_stage: int, shapes: Sequence[BoundaryShapes]) -> None:
        """Send shapes of the tensors that leave a virtual stage of this process to the next one."""
        to = self._after(virtual_stage)
        if to == self.stage_index:
            self._kept[virtual_stage] = tuple(shapes)
        else:
            wait_for(self._send_object(tuple(shapes), to))

    def receive_shapes(self, virtual_stage: int) -> Sequence[BoundaryShapes]:
        """Receive what has been sent to a virtual stage of this process."""
        source = self._before(virtual_stage)
        return self._kept.pop(virtual_stage - 1) if source == self.stage_index else self._receive_object(source)

    def send_values(self, crossing: Crossing) -> Pending:
        """Send the used tensors of a boundary to the next virtual stage."""
        to = self._after(crossing.virtual_stage)
        if to == self.stage_index:
            self._kept[crossing.virtual_stage] = list(crossing.values)
            return []
        return self._announce(crossing, to) + [
            self._send_tensor(value, to)
            for slot, value in zip(crossing.slots, crossing.values, strict=True)
            if slot.is_used
        ]

    def receive_values(
        self, virtual_stage: int, slots: Sequence[CarrySlot], with_gradients: bool = False
    ) -> list[torch.Tensor]:
        """Receive the tensors of a boundary from the virtual stage before; unused ones are zeros.

        Args:
            virtual_stage: a virtual stage of this process.
            slots: the slots of the boundary before it.
            with_gradients: whether a tensor requires a gradient here if it did where it comes from.
        """
        source = self._before(virtual_stage)
        if source == self.stage_index:
            kept: list[torch.Tensor] = self._kept.pop(virtual_stage - 1)
            return kept
        return [
            self._receive_tensor(carried, source).requires_grad_(with_gradients and carried.requires_grad)
            if slot.is_used
            else carried.zeros(self.device)
            for slot, carried in zip(slots, self._receive_object(source), strict=True)
        ]

    def exchange(
        self, outgoing: Sequence[Crossing], incoming: Sequence[Crossing]
    ) -> tuple[Pending, list[list[torch.Tensor]]]:
        """Send to following virtual stages and receive from earlier ones at the same time.

        All tensors are given to the device as one operation: in a ring, where all stages send, an accelerator would
        otherwise finish no send, as each waits for a receive that comes later. Also one tensor alone, because NCCL has
        other communicators for single messages, and the other process may send and receive.

        Args:
            outgoing: what virtual stages of this process send.
            incoming: what others send to this process, in the order in which they send it.

        Returns:
            What is still being sent, and for each of `incoming` the received values as of `receive_values`.
        """
        pending: Pending = []
        operations: list[dist.P2POp] = []
        for crossing in outgoing:
            to = self._after(crossing.virtual_stage)
            if to == self.stage_index:
                pending += self.send_values(crossing)
                continue
            pending += self._announce(crossing, to)
            operations += [
                dist.P2POp(dist.isend, value.detach().contiguous(), self.ranks[to], self.group)
                for slot, value in zip(crossing.slots, crossing.values, strict=True)
                if slot.is_used
            ]
        received: list[list[torch.Tensor]] = []
        for crossing in incoming:
            source = self.placement.stage_of(crossing.virtual_stage)
            if source == self.stage_index:
                received.append(self.receive_values(crossing.virtual_stage + 1, crossing.slots))
                continue
            values = [
                torch.empty(carried.shape, dtype=carried.dtype, device=self.device)
                if slot.is_used
                else carried.zeros(self.device)
                for slot, carried in zip(crossing.slots, self._receive_object(source), strict=True)
            ]
            received.append(values)
            operations += [
                dist.P2POp(dist.irecv, value, self.ranks[source], self.group)
                for slot, value in zip(crossing.slots, values, strict=True)
                if slot.is_used
            ]
        under_way = [(work, operations) for work in dist.batch_isend_irecv(operations)] if operations else []
        if not incoming:
            return pending + under_way, []
        wait_for(under_way)
        return pending, received

    def send_tree(self, tree: Any, stage: int) -> Pending:
        """Send nested mappings, lists and tuples of tensors and other values to a stage."""
        pending = self._send_object(recursively_apply(_describe, tree), stage)
        return pending + [self._send_tensor(tensor, stage) for tensor in tensors_of(tree)]

    def scatter(self, results: Sequence[Any]) -> Any:
        """Return this stage's entry of what the last stage has, one for each stage. Collective over the pipeline."""
        if self.stage_index != self.last:
            return self.receive_tree(self.last)
        pending: Pending = []
        for owner, result in enumerate(results):
            if owner != self.last:
                pending += self.send_tree(result, owner)
        wait_for(pending)
        return results[self.last]

    def receive_tree(self, stage: int) -> Any:
        return recursively_apply(
            lambda carried: self._receive_tensor(carried, stage),
            self._receive_object(stage),
            test_type=lambda value: isinstance(value, CarriedTensor),
        )

    # ------------------------------------------------------------------------------------ inside
    def _before(self, virtual_stage: int) -> int:
        return self.placement.stage_of(virtual_stage - 1)

    def _after(self, virtual_stage: int) -> int:
        return self.placement.stage_of(virtual_stage + 1)

    def _announce(self, crossing: Crossing, stage: int) -> Pending:
        return self._send_object([_describe(value) for value in crossing.values], stage)

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
        # a batch of one, as NCCL would make a communicator of these two ranks for a single message
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, self.ranks[stage], self.group)])
        return work, tensor

    def _receive_tensor(self, carried: CarriedTensor, stage: int) -> torch.Tensor:
        tensor = torch.empty(carried.shape, dtype=carried.dtype, device=self.device)
        (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, self.ranks[stage], self.group)])
        work.wait()
        return tensor


def wait_for(pending: Pending) -> None:
    """Wait until these tensors are sent."""
    for work, _ in pending:
        work.wait()


def _describe(tensor: torch.Tensor) -> CarriedTensor:
    return CarriedTensor(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
