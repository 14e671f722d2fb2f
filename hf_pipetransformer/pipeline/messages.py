"""Messages between the stages of one pipeline.

control group    pickled objects, which describe the tensors that follow
pipeline group   tensors on the device, each in a message of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply

from ..model.layer_stack import CarrySlot
from ..model.nested import tensors_of
from .stage import CarriedTensor

Pending = list[tuple[dist.Work, torch.Tensor]]
"""Tensors that are being sent and must be kept until the transfer is complete."""


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
    def send_shapes(self, shapes: Sequence[CarriedTensor]) -> None:
        """Send the shapes of the tensors that cross the boundary to the next stage."""
        self._send_object(tuple(shapes), self.stage_index + 1)

    def receive_shapes(self) -> Sequence[CarriedTensor]:
        return self._receive_object(self.stage_index - 1)

    def send_values(self, slots: Sequence[CarrySlot], values: Sequence[torch.Tensor]) -> Pending:
        """Send the used tensors of a boundary to the next stage."""
        self.send_shapes([_describe(value) for value in values])
        return [
            self._send_tensor(value, self.stage_index + 1)
            for slot, value in zip(slots, values, strict=True)
            if slot.is_used
        ]

    def receive_values(self, slots: Sequence[CarrySlot]) -> list[torch.Tensor]:
        """Receive the tensors of a boundary from the previous stage; unused ones are zeros."""
        return [
            self._receive_tensor(carried, self.stage_index - 1) if slot.is_used else carried.zeros(self.device)
            for slot, carried in zip(slots, self.receive_shapes(), strict=True)
        ]

    def send_tree(self, tree: Any, stage: int) -> Pending:
        """Send nested mappings, lists and tuples of tensors and other values to a stage."""
        self._send_object(recursively_apply(_describe, tree), stage)
        return [self._send_tensor(tensor, stage) for tensor in tensors_of(tree)]

    def receive_tree(self, stage: int) -> Any:
        return recursively_apply(
            lambda carried: self._receive_tensor(carried, stage),
            self._receive_object(stage),
            test_type=lambda value: isinstance(value, CarriedTensor),
        )

    # ------------------------------------------------------------------------------------ inside
    def _send_object(self, value: Any, stage: int) -> None:
        dist.send_object_list([value], dst=self.ranks[stage], group=self.control)

    def _receive_object(self, stage: int) -> Any:
        box = [None]
        dist.recv_object_list(box, src=self.ranks[stage], group=self.control)
        return box[0]

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
