"""One stage of a pipeline: units [start, stop) of a model, which holds only the parameters of these units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..model.batch_statistics import statistics_set_aside
from ..model.called_inputs import BatchTags
from ..model.layer_range import Carry
from ..model.layer_stack import CarrySlot, LayerStack
from ..model.micro_batch import Batch
from ..model.tags import TAGS, without_tags
from ..progress import PROGRESS

FIRST = torch.zeros(1, dtype=torch.long)
"""Index of the micro-batch when `micro_batches` holds only one."""

LossFunction = Callable[[nn.Module, Batch], torch.Tensor]
"""Calls the model on a micro-batch and returns this micro-batch's part of the loss, a tensor of one element."""


class Shortcut(Protocol):
    """Lets passes skip the lowest layers if their outputs are known already, for example from a cache."""

    met_other_inputs: bool
    """Whether the model was called, in training, on inputs other than the ones looked up."""

    def begin(
        self, batch: Batch, tags: torch.Tensor, start: int, carry: Carry | None, stop: int
    ) -> tuple[int, Carry | None]:
        """Return the unit of [start, stop) to begin with, and the outputs of the units before it.

        Args:
            batch: the model's inputs on its device.
            tags: the tags of its samples.
            start: the first unit of the stage.
            carry: the outputs of the units before it; None if there are none.
            stop: the first unit behind the stage.
        """

    def watching_calls(self) -> AbstractContextManager[None]:
        """Inside, in a pass to the end, each call of the model by the loss may begin elsewhere."""

    def begin_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called without its hooks, in a pass that `begin` has prepared."""

    def is_called_otherwise(self, called: Mapping[str, Any]) -> bool:
        """Whether this call of the model differs from the loss's call. No outputs are known for it then."""

    def read_ahead(self, tags: BatchTags, stop: int) -> None:
        """Prepare for a pass up to the unit `stop` of the batch that has these tags."""


@dataclass(frozen=True)
class CarriedTensor:
    """Shape, dtype and gradient flag of one carried tensor, known before the tensor itself arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def zeros(self, device: torch.device) -> torch.Tensor:
        """Zeros of this shape that occupy one element of memory."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)

    def meta(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)


BoundaryShapes = tuple[CarriedTensor, ...]
"""The carried tensors at a boundary, in the order of its slots."""


@dataclass(frozen=True)
class StageShapes:
    """The carried tensors that a stage receives and sends, in the order of its boundaries' slots."""

    incoming: BoundaryShapes
    outgoing: BoundaryShapes

    @property
    def num_bytes(self) -> int:
        """Bytes that a stage receives for a micro-batch: the tensors, and the gradients of its outputs."""
        received = (*self.incoming, *(carried for carried in self.outgoing if carried.requires_grad))
        return sum(carried.meta().nbytes for carried in received)


class StageModule(nn.Module):
    """Units [start, stop) of the model as a module of their own.

    Its parameters are exactly those that the units need, so DDP, the optimizer and `zero_grad` see only this stage;
    the model itself is referenced, not registered. `forward` runs a micro-batch that it was given beforehand
    (`holding`), because torch's schedules split tensors only and a batch may hold values of any type.

    Args:
        stack: the model's units.
        start: first unit of the stage.
        stop: first unit after the stage.
        device: the device of the stage's computations.
    """

    stack: LayerStack

    def __init__(self, stack: LayerStack, start: int, stop: int, device: torch.device) -> None:
        super().__init__()
        self.__dict__["stack"] = stack  # not registered: its modules hold placeholders for other stages' parameters
        self.start, self.stop = start, stop
        self.is_last = stop == stack.num_units
        self.device = device
        self.loss_of: LossFunction | None = None
        """On the last stage, the loss of the step that runs; None between steps."""
        self.shortcut: Shortcut | None = None
        """The shortcut in use. The `ElasticPipeline` chooses it."""
        self.micro_batches: Sequence[Batch] = ()
        """The micro-batches of the pass that runs; empty between passes."""
        self.continues = False
        """Whether the micro-batch that runs has later tokens of the same samples as the one before it."""
        self.counted_elsewhere: Sequence[nn.Module] = ()
        """Normalisation layers that this stage runs again, and whose running statistics another one keeps."""
        self._shapes = StageShapes((), ())
        owned = stack.owned(start, stop)
        self.names = tuple(name for name in stack.table.names if name in owned)
        for index, name in enumerate(self.names):
            self.register_parameter(f"parameter_{index}", stack.table[name])
        for index, buffer in enumerate(_persistent_buffers(stack.model)):
            self.register_buffer(f"buffer_{index}", buffer)  # running statistics, which DDP keeps equal

    def train(self, mode: bool = True) -> StageModule:
        super().train(mode)
        self.stack.model.train(mode)
        return self

    @property
    def slots_in(self) -> tuple[CarrySlot, ...]:
        return self.stack.boundaries[self.start]

    @property
    def slots_out(self) -> tuple[CarrySlot, ...]:
        return () if self.is_last else self.stack.boundaries[self.stop]

    @contextmanager
    def holding(
        self, micro_batches: Sequence[Batch], shapes: StageShapes | None = None, continues: bool = False
    ) -> Iterator[None]:
        """Inside, `forward` runs these micro-batches.

        Args:
            micro_batches: the micro-batches, by index.
            shapes: the tensors of each of them at the stage's boundaries; None if this is the only stage.
            continues: whether they have later tokens of the samples in the last pass.
        """
        self.micro_batches, self._shapes = micro_batches, shapes or StageShapes((), ())
        self.continues = continues
        try:
            yield
        finally:
            self.micro_batches, self.continues = (), False

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the micro-batch number `index`.

        Args:
            received: the used tensors of the incoming boundary, in the order of `slots_in`.
            index: index of the micro-batch, a tensor of one element on the CPU.

        Returns:
            The used tensors of the outgoing boundary; on the last stage the loss, shape [1].
        """
        PROGRESS.tick()
        if not self.counted_elsewhere:
            return self._forward(received, index)
        with statistics_set_aside(self.counted_elsewhere):
            return self._forward(received, index)

    def _forward(
        self, received: Sequence[torch.Tensor], index: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        batch = self.micro_batches[int(index)]
        # A view, because autocast casts a leaf once for all its uses, as a weight, and then their gradients are summed
        # in half precision. In the whole model this value is no leaf: each use casts it, and the sum is exact.
        supply = (value.view_as(value) for value in received)
        values = [
            next(supply) if slot.is_used else carried.zeros(self.device)
            for slot, carried in zip(self.slots_in, self._shapes.incoming, strict=True)
        ]
        if self.is_last:
            assert self.loss_of is not None, "no step runs"
            with self.running_to_the_end(values, batch) as inputs:
                return self.loss_of(self.stack.model, inputs).reshape(1)
        outputs = self.carry_on(values, batch)
        for slot, tensor, expected in zip(self.slots_out, outputs, self._shapes.outgoing, strict=True):
            if slot.is_used and (tuple(tensor.shape) != expected.shape or tensor.dtype != expected.dtype):
                raise RuntimeError(
                    f"layer {self.stack.units[self.stop - 1].name!r} returned {tuple(tensor.shape)} {tensor.dtype} in"
                    f" slot {slot}, where {expected.shape} {expected.dtype} was expected for inputs of this shape:"
                    " the model's intermediate shapes depend on its input values. Set pipeline_parallel_size=1."
                )
        return tuple(
            (tensor if carried.requires_grad else tensor.detach()).contiguous()
            for slot, tensor, carried in zip(self.slots_out, outputs, self._shapes.outgoing, strict=True)
            if slot.is_used
        )

    # ------------------------------------------------------------------------------------ values at the boundaries
    def carry_on(self, values: Sequence[torch.Tensor], batch: Batch) -> tuple[torch.Tensor, ...]:
        """Compute the outgoing boundary's tensors from the incoming boundary's; not for the last stage."""
        inputs, start, carry = self.begin(values, batch)
        if start < self.stop:
            carry = self.stack.runner.run(start, self.stop, carry, inputs)
        assert carry is not None
        return tuple(carry[slot.stack][slot.position] for slot in self.slots_out)

    @contextmanager
    def running_to_the_end(self, values: Sequence[torch.Tensor], batch: Batch) -> Iterator[Batch]:
        """Inside this context, on the last stage, calling the model once runs this stage on the incoming tensors.

        Yields the inputs to call the model with.
        """
        inputs, start, carry = self.begin(values, batch)
        if start == 0 and not self.stack.runner.num_frozen:  # the whole model runs: no unit is skipped
            yield inputs
            return
        # several calls of the model (R-Drop) are several passes, unless earlier stages ran the first units only once
        shortcut = self.shortcut if TAGS not in batch and self.start == 0 else None
        calls = shortcut.watching_calls() if shortcut is not None else nullcontext()
        with self.stack.runner.to_the_end(start, carry, may_repeat=self.start == 0), calls:
            yield inputs

    def begin(self, values: Sequence[torch.Tensor], batch: Batch) -> tuple[Batch, int, Carry | None]:
        """Return the model's inputs, the first unit to run and the outputs of the units before it.

        If the shortcut has the outputs of the first layers, the first stage begins after these layers.
        """
        inputs = dict(batch)
        tags = inputs.pop(TAGS, None)
        start: int = self.start
        carry: Carry | None = as_carry(self.slots_in, values)
        if self.shortcut is None or tags is None:
            return inputs, start, carry
        return inputs, *self.shortcut.begin(inputs, tags, start, carry, self.stop)

    def infer_shapes(self, incoming: Sequence[CarriedTensor], batch: Batch) -> tuple[CarriedTensor, ...]:
        """The tensors that this stage sends if it receives `incoming`; costs one forward of `batch` through it."""
        if self.is_last:
            return ()
        values = [carried.zeros(self.device).clone().requires_grad_(carried.requires_grad) for carried in incoming]
        outputs = self.carry_on(values, without_tags(batch))
        return tuple(
            CarriedTensor(tuple(out.shape), out.dtype, slot.needs_gradient and out.requires_grad)
            for slot, out in zip(self.slots_out, outputs, strict=True)
        )


def as_carry(slots: Sequence[CarrySlot], values: Sequence[torch.Tensor]) -> Carry:
    carry: Carry = {}
    for slot, value in zip(slots, values, strict=True):
        carry[slot.stack] = (*carry.get(slot.stack, ()), value)
    return carry


def _persistent_buffers(model: nn.Module) -> list[torch.Tensor]:
    return [
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
