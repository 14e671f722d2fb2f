"""What each unit of a model costs: floating-point operations, parameters, activations, what it hands on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ..model.layer_range import Unit, tensors_of
from ..model.layer_stack import CarrySlot, LayerStack
from ..model.micro_batch import batch_rows
from ..model.placeholders import evaluation_mode


@dataclass(frozen=True)
class HeadCost:
    """The part of a unit's cost that stays when the unit is frozen, per row of the sample batch.

    That is what follows the last unit; nothing of any other.
    """

    forward_flops: float = 0.0
    activation_bytes: int = 0
    trainable_bytes: int = 0


@dataclass(frozen=True)
class UnitCost:
    """The cost of one unit, per row of the sample batch.

    What precedes the first unit (embeddings) counts with the first, the head with the last.
    """

    name: str
    """Module path of the unit, `bert.encoder.layer.3`."""
    forward_flops: float
    activation_bytes: int
    """Saved for the backward."""
    boundary_bytes: int
    """Carried from this unit to the next, with what later ones read of earlier stacks; 0 for the last unit."""
    parameters: Mapping[str, int]
    """Parameter name -> bytes. A parameter that several units need appears in each of them."""
    trainable_bytes: int
    """Of its parameters, those that require a gradient."""
    head: HeadCost = HeadCost()
    """Of all this, what goes on when the unit is frozen."""


def measure_costs(
    stack: LayerStack, batch: dict[str, Any], never_frozen: Collection[str] = ()
) -> tuple[UnitCost, ...]:
    """Count the operations and saved bytes of one forward of `batch` through the whole model.

    Counts are the same on every process, as times would not be, so every process derives the same plan.

    Args:
        stack: the units of a complete model.
        batch: the keyword arguments of its forward, a few rows.
        never_frozen: names of the parameters that are trained when every unit is frozen.
    """
    rows = batch_rows(batch)
    meter = _Meter(stack)
    with evaluation_mode(stack.model), meter:
        stack.runner.install()
        try:
            stack.runner.trace(batch, observer=meter.unit_done)
        finally:
            stack.runner.remove()
    meter.count()  # the head
    last = stack.num_units - 1
    boundaries = [*stack.boundaries[1:], ()]
    costs = []
    for k, unit in enumerate(stack.units):
        mine = [k, last + 1] if k == last else [k]
        parameters = {name: stack.table[name].nbytes for name in stack.table.names if name in stack.owners[k]}
        trainable = {name: size for name, size in parameters.items() if stack.table[name].requires_grad}
        head = HeadCost()
        if k == last:
            head = HeadCost(
                meter.flops[-1] / rows,
                round(meter.saved_bytes[-1] / rows),
                sum(size for name, size in trainable.items() if name in never_frozen),
            )
        costs.append(
            UnitCost(
                name=unit.name,
                forward_flops=sum(meter.flops[i] for i in mine) / rows,
                activation_bytes=round(sum(meter.saved_bytes[i] for i in mine) / rows),
                boundary_bytes=round(meter.bytes_of(boundaries[k], after=k) / rows),
                parameters=parameters,
                trainable_bytes=sum(trainable.values()),
                head=head,
            )
        )
    return tuple(costs)


def cost_of_whole(stack: LayerStack) -> UnitCost:
    """A model that is not cut, as one unit; only its parameters are counted."""
    table = stack.table
    parameters = {name: table[name].nbytes for name in table.names}
    trainable = sum(size for name, size in parameters.items() if table[name].requires_grad)
    return UnitCost(type(stack.model).__name__, 0.0, 0, 0, parameters, trainable)


def _grouped_mm_flops(rows: Sequence[int], experts: Sequence[int], *_: Any, **__: Any) -> int:
    """The experts' product, which torch's counter does not know: [T, K] x [E, K, N], each row with one expert."""
    return 2 * rows[0] * rows[1] * experts[-1]


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """The fused attention on the CPU, which torch's counter does not know, though it does those on other devices."""
    count: int = sdpa_flop_count(query, key, value)
    return count


UNKNOWN_TO_TORCH: dict[Any, Any] = {
    torch.ops.aten._grouped_mm: _grouped_mm_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
}
"""Operations that torch's `FlopCounterMode` would count as nothing -> what they take."""


class _Meter:
    """Counts operations and saved bytes between the ends of units."""

    def __init__(self, stack: LayerStack) -> None:
        self.flops: list[int] = []
        self.saved_bytes: list[int] = []
        self.sizes: list[dict[int, list[int]]] = []  # after each unit: stack -> bytes of its latest output's tensors
        self._flops_before = 0
        self._saved: dict[int, int] = {}
        self._weights = {stack.table[name].untyped_storage().data_ptr() for name in stack.table.names}
        self._counter = FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> _Meter:
        self._counter.__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._counter.__exit__(*error)

    def unit_done(self, unit: Unit, output: Any) -> None:
        self.count()
        earlier = self.sizes[-1] if self.sizes else {}
        self.sizes.append({**earlier, unit.stack: [tensor.nbytes for tensor in tensors_of(output)]})

    def count(self) -> None:
        """Note what was computed and saved since the last call."""
        flops = self._counter.get_total_flops()
        self.flops.append(flops - self._flops_before)
        self._flops_before = flops
        self.saved_bytes.append(sum(self._saved.values()))
        self._saved.clear()

    def bytes_of(self, slots: Sequence[CarrySlot], after: int) -> int:
        """Of those tensors that are read later, as they are after a unit."""
        return sum(self.sizes[after][slot.stack][slot.position] for slot in slots if slot.is_used)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._saved[storage.data_ptr()] = storage.nbytes()  # a storage saved twice is kept once
        return tensor
