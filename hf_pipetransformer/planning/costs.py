"""The cost of each unit of a model: FLOPs, parameters, activations, and the tensors sent to the next unit."""

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
"""Cost of a backward in forwards: it multiplies matrices twice, for inputs and for weights."""
HALF_PRECISION_BYTES = 2
"""Bytes of an element in fp16 or bf16."""


@dataclass(frozen=True)
class Cost:
    """The cost of a part of a model, per sample of the probed batch."""

    forward_flops: float = 0.0
    activation_bytes: int = 0
    """Bytes saved for the backward."""
    trainable_bytes: int = 0
    """Bytes of the parameters that require a gradient."""
    copies: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Trained parameter -> bytes of its 16-bit copy, which autocast would keep from forward to backward."""
    untrained_copies_bytes: int = 0
    """Bytes of such copies of untrained parameters. Autocast makes one for each use."""


@dataclass(frozen=True, kw_only=True)
class UnitCost(Cost):
    """The cost of one unit. Embeddings count with the first unit, and the head with the last one."""

    name: str
    """Module path of the unit, `bert.encoder.layer.3`."""
    parameters: Mapping[str, int]
    """Parameter name -> bytes. A parameter shared by several units appears in each of them."""
    boundary_bytes: int = 0
    """Bytes sent to the next unit, including outputs of earlier stacks that later units read; 0 for the last unit."""
    head: Cost = Cost()
    """The cost that remains when the unit is frozen: the head's cost for the last unit, zero for the others."""


def measure_costs(
    stack: LayerStack, batch: dict[str, Any], never_frozen: Collection[str] = ()
) -> tuple[UnitCost, ...]:
    """Count the operations and saved bytes of one forward of `batch` through the whole model.

    Unlike times, counts are the same on every process, so every process makes the same layouts.

    Args:
        stack: the units of a complete model.
        batch: the keyword arguments of the model's forward, with a few samples.
        never_frozen: names of the parameters that stay trained even if every unit is frozen.
    """
    rows, table = batch_rows(batch), stack.table
    meter = _Meter(stack)
    with evaluation_mode(stack.model), meter:
        stack.runner.install()
        try:
            stack.runner.trace(batch, observer=meter.unit_done)
        finally:
            stack.runner.remove()
    meter.count()  # the head

    def counted(parts: Sequence[int], trainable: Collection[str]) -> dict[str, Any]:
        copies, untrained = _copies_of(table, set().union(*(meter.read_again[part] for part in parts)))
        return {
            "forward_flops": sum(meter.flops[part] for part in parts) / rows,
            "activation_bytes": round(sum(meter.saved_bytes[part] for part in parts) / rows),
            "trainable_bytes": sum(num_bytes(table[name]) for name in trainable),
            "copies": copies,
            "untrained_copies_bytes": untrained,
        }

    last, costs = stack.num_units - 1, []
    for k, unit in enumerate(stack.units):
        names = [name for name in table.names if name in stack.owners[k]]
        trainable = [name for name in names if table[name].requires_grad]
        of_head = counted([last + 1], set(trainable) & set(never_frozen)) if k == last else {}
        boundary = stack.boundaries[k + 1] if k < last else ()
        costs.append(
            UnitCost(
                name=unit.name,
                parameters={name: num_bytes(table[name]) for name in names},
                boundary_bytes=round(meter.bytes_of(boundary, after=k) / rows),
                head=Cost(**of_head),
                **counted([k, last + 1] if k == last else [k], trainable),
            )
        )
    return tuple(costs)


def _copies_of(table: ParameterTable, names: Collection[str]) -> tuple[dict[str, int], int]:
    """Return the bytes of autocast's copies: for each trained parameter, and for all untrained ones together.

    Operations that autocast runs in 16 bits save matrices for the backward. Only norms save vectors.
    """
    copied = [name for name in table.names if name in names]
    copied = [name for name in copied if table[name].dtype == torch.float32 and table[name].dim() > 1]
    sizes = {name: table[name].numel() * HALF_PRECISION_BYTES for name in copied}
    trained = {name: size for name, size in sizes.items() if table[name].requires_grad}
    return trained, sum(sizes.values()) - sum(trained.values())


def cost_of_whole(stack: LayerStack) -> UnitCost:
    """Return the cost of a model that is not split, as a single unit; only its parameters are counted."""
    table = stack.table
    parameters = {name: num_bytes(table[name]) for name in table.names}
    trainable = sum(size for name, size in parameters.items() if table[name].requires_grad)
    return UnitCost(name=type(stack.model).__name__, parameters=parameters, trainable_bytes=trainable)


def step_flops(unit_costs: Sequence[UnitCost], num_frozen_layers: int, num_cached_layers: int = 0) -> list[float]:
    """Return the FLOPs of each unit in a training step, per sample.

    A frozen unit has no backward, and a cached unit is not run. The head is always trained.
    """
    flops = []
    for index, unit in enumerate(unit_costs):
        forward = unit if index >= num_cached_layers else unit.head
        backward = unit if index >= num_frozen_layers else unit.head
        flops.append(forward.forward_flops + FORWARDS_OF_A_BACKWARD * backward.forward_flops)
    return flops


def _grouped_mm_flops(rows: Sequence[int], experts: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of the experts' matrix product: [T, K] x [E, K, N], where each of the T rows uses one expert."""
    return 2 * rows[0] * rows[1] * experts[-1]


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of the CPU's fused attention. Torch's counter only knows the other devices' attention."""
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
        self.sizes: list[dict[int, list[int]]] = []  # after each unit: stack -> bytes of its latest output tensors
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
        """Record the operations and saved bytes since the last call."""
        flops = self._counter.get_total_flops()
        self.flops.append(flops - self._flops_before)
        self._flops_before = flops
        self.saved_bytes.append(sum(self._saved.values()))
        self._saved.clear()
        self.read_again.append(self._read)
        self._read = set()

    def bytes_of(self, slots: Sequence[CarrySlot], after: int) -> int:
        """Return the bytes of the tensors in the used slots, with their sizes after a unit."""
        return sum(self.sizes[after][slot.stack][slot.position] for slot in slots if slot.is_used)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        # sparse tensors have no storage of their own: they are not counted
        for storage in (v.untyped_storage() for v in values_of(tensor) if v.layout is torch.strided):
            if storage.data_ptr() in self._weights:
                self._read.add(self._weights[storage.data_ptr()])
            else:  # a storage saved twice occupies memory once
                self._saved[storage.data_ptr()] = storage.nbytes()
        # An operation that saves its own result would form a cycle, and keep the graph and the model alive for ever:
        # Python's garbage collector does not see tensors saved in C++.
        return tensor.detach()
