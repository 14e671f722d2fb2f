"""The cost of each unit of a model: FLOPs, parameters, activations, and the tensors that it sends on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ..model.layer_range import Unit
from ..model.layer_stack import CarrySlot, LayerStack
from ..model.micro_batch import batch_rows
from ..model.nested import tensors_of
from ..model.placeholders import ParameterTable, evaluation_mode, num_bytes, values_of

FORWARDS_OF_A_BACKWARD = 2
"""Forwards that a backward counts as: it multiplies matrices twice, for inputs and for weights."""
HALF_PRECISION_BYTES = 2
"""Bytes of an element in fp16 or bf16."""


@dataclass(frozen=True)
class HeadCost:
    """The part of a unit's cost that remains when the unit is frozen, per sample of the probed batch.

    For the last unit this is the cost of the head; for any other unit it is zero.
    """

    forward_flops: float = 0.0
    activation_bytes: int = 0
    trainable_bytes: int = 0
    copies: Mapping[str, int] = field(default_factory=dict, hash=False)
    """As `UnitCost.copies`."""
    untrained_copies_bytes: int = 0


@dataclass(frozen=True)
class UnitCost:
    """The cost of one unit, per sample of the probed batch.

    The part before the first unit (embeddings) counts with the first unit, and the head with the last.
    """

    name: str
    """Module path of the unit, `bert.encoder.layer.3`."""
    forward_flops: float
    activation_bytes: int
    """Bytes saved for the backward."""
    boundary_bytes: int
    """Bytes sent to the next unit, including outputs of earlier stacks that are read later; 0 for the last unit."""
    parameters: Mapping[str, int]
    """Parameter name -> bytes. A parameter that several units need appears in each of them."""
    trainable_bytes: int
    """Bytes of those of its parameters that require a gradient."""
    head: HeadCost = HeadCost()
    """The part of all these costs that remains when the unit is frozen."""
    copies: Mapping[str, int] = field(default_factory=dict)
    """Trained parameter -> bytes of the 16-bit copy that autocast would keep of it from forward to backward."""
    untrained_copies_bytes: int = 0
    """Bytes of such copies of parameters that are not trained. Autocast makes one for each use of them."""


def measure_costs(
    stack: LayerStack, batch: dict[str, Any], never_frozen: Collection[str] = ()
) -> tuple[UnitCost, ...]:
    """Count the operations and saved bytes of one forward of `batch` through the whole model.

    Unlike times, counts are the same on every process, so every process derives the same plan.

    Args:
        stack: the units of a complete model.
        batch: the keyword arguments of the model's forward, with a few samples.
        never_frozen: names of the parameters that are trained even if every unit is frozen.
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
        parameters = {name: num_bytes(stack.table[name]) for name in stack.table.names if name in stack.owners[k]}
        trainable = {name: size for name, size in parameters.items() if stack.table[name].requires_grad}
        head = HeadCost()
        if k == last:
            head = HeadCost(
                meter.flops[-1] / rows,
                round(meter.saved_bytes[-1] / rows),
                sum(size for name, size in trainable.items() if name in never_frozen),
                *_copies_of(stack.table, meter.read_again[-1]),
            )
        copies, untrained_copies_bytes = _copies_of(stack.table, set().union(*(meter.read_again[i] for i in mine)))
        costs.append(
            UnitCost(
                name=unit.name,
                forward_flops=sum(meter.flops[i] for i in mine) / rows,
                activation_bytes=round(sum(meter.saved_bytes[i] for i in mine) / rows),
                boundary_bytes=round(meter.bytes_of(boundaries[k], after=k) / rows),
                parameters=parameters,
                trainable_bytes=sum(trainable.values()),
                head=head,
                copies=copies,
                untrained_copies_bytes=untrained_copies_bytes,
            )
        )
    return tuple(costs)


def _copies_of(table: ParameterTable, names: Collection[str]) -> tuple[dict[str, int], int]:
    """Return what autocast's copies of these parameters take: of each that is trained, and of the others together.

    Operations that autocast runs in 16 bits save matrices for the backward; of vectors, only norms do.
    """
    copied = [name for name in table.names if name in names]
    copied = [name for name in copied if table[name].dtype == torch.float32 and table[name].dim() > 1]
    sizes = {name: table[name].numel() * HALF_PRECISION_BYTES for name in copied}
    trained = {name: size for name, size in sizes.items() if table[name].requires_grad}
    return trained, sum(sizes.values()) - sum(trained.values())


def cost_of_whole(stack: LayerStack) -> UnitCost:
    """The cost of a model that is not split, as a single unit; only its parameters are counted."""
    table = stack.table
    parameters = {name: num_bytes(table[name]) for name in table.names}
    trainable = sum(size for name, size in parameters.items() if table[name].requires_grad)
    return UnitCost(type(stack.model).__name__, 0.0, 0, 0, parameters, trainable)


def parameter_bytes(units: Sequence[UnitCost]) -> int:
    """Return the bytes of the units' parameters; a parameter that several of them need is counted once."""
    return sum({name: size for unit in units for name, size in unit.parameters.items()}.values())


def copied_bytes(units: Sequence[UnitCost], num_frozen: int) -> int:
    """Return the bytes of the 16-bit copies of weights that autocast has made when a forward of the units ends.

    Args:
        units: the units in execution order.
        num_frozen: number of units, from the first one on, that are frozen; of a last one the head is still trained.
    """
    costs: list[UnitCost | HeadCost] = [*(unit.head for unit in units[:num_frozen]), *units[num_frozen:]]
    copies = {name: size for cost in costs for name, size in cost.copies.items()}
    return sum(copies.values()) + sum(cost.untrained_copies_bytes for cost in costs)


def step_flops(unit_costs: Sequence[UnitCost], num_frozen_layers: int, num_cached_layers: int = 0) -> list[float]:
    """Return the FLOPs of each unit in a training step, per sample."""
    return [sum(both) for both in unit_flops(unit_costs, num_frozen_layers, num_cached_layers)]


def unit_flops(
    unit_costs: Sequence[UnitCost], num_frozen_layers: int, num_cached_layers: int = 0
) -> list[tuple[float, float]]:
    """Return the FLOPs of each unit's forward and of its backward in a training step, per sample.

    A frozen unit has no backward, and a cached unit is not run. The head is always trained.
    """
    flops = []
    for index, unit in enumerate(unit_costs):
        forward = unit if index >= num_cached_layers else unit.head
        backward = unit if index >= num_frozen_layers else unit.head
        flops.append((forward.forward_flops, FORWARDS_OF_A_BACKWARD * backward.forward_flops))
    return flops


def _grouped_mm_flops(rows: Sequence[int], experts: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of the experts' matrix product: [T, K] x [E, K, N], where each row of the first uses one expert."""
    return 2 * rows[0] * rows[1] * experts[-1]


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of the CPU's fused attention, which torch's counter does not know, though it knows other devices'."""
    count: int = sdpa_flop_count(query, key, value)
    return count


UNKNOWN_TO_TORCH: dict[Any, Any] = {
    torch.ops.aten._grouped_mm: _grouped_mm_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
}
"""FLOP functions for operations that torch's `FlopCounterMode` would count as zero."""


class _Meter:
    """Counts operations and saved bytes between the ends of units."""

    def __init__(self, stack: LayerStack) -> None:
        self.flops: list[int] = []
        self.saved_bytes: list[int] = []
        self.read_again: list[set[str]] = []  # parameters that the backward reads
        self.sizes: list[dict[int, list[int]]] = []  # after each unit: stack -> bytes of its latest output's tensors
        self._flops_before = 0
        self._saved: dict[int, int] = {}
        self._read: set[str] = set()
        self._weights = {
            v.untyped_storage().data_ptr(): n for n in stack.table.names for v in values_of(stack.table[n])
        }
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
        """Record what was computed and saved since the last call."""
        flops = self._counter.get_total_flops()
        self.flops.append(flops - self._flops_before)
        self._flops_before = flops
        self.saved_bytes.append(sum(self._saved.values()))
        self._saved.clear()
        self.read_again.append(self._read)
        self._read = set()

    def bytes_of(self, slots: Sequence[CarrySlot], after: int) -> int:
        """Bytes of the tensors in the used slots, in their sizes after a unit."""
        return sum(self.sizes[after][slot.stack][slot.position] for slot in slots if slot.is_used)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        # sparse tensors have no storage of their own, and are not counted
        for storage in (v.untyped_storage() for v in values_of(tensor) if v.layout is torch.strided):
            if storage.data_ptr() in self._weights:
                self._read.add(self._weights[storage.data_ptr()])
            else:  # a storage that is saved twice occupies memory once
                self._saved[storage.data_ptr()] = storage.nbytes()
        # An operation that saves its own result would be kept by it, and the graph and the model with it, for ever:
        # Python's garbage collector does not see what is saved in C++.
        return tensor.detach()
