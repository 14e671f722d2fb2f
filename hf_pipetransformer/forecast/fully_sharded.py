"""The cost of full sharding (FSDP, ZeRO-3; Zhao et al., VLDB 2023): memory of a device, and transfers.

N devices shard the parameters, the gradients and the optimizer state of the same units; at rest each holds 1 / N of
them. A layer's parameters are gathered before its forward and again before its backward, while its neighbour computes,
and its gradient is reduced and scattered after that:

    computes    |--- forward 0 ---|--- forward 1 ---| ... |------ backward 1 ------|------ backward 0 ------|
    transfers   |-- gather 1 --|   |-- gather 2 --|   ...  |- gather 0 -|- reduce 2 -|        |- reduce 1 -|

Parameters outside of the layers (embeddings, head, parameters of several layers) are gathered before the first
forward, and their gradients are reduced after the last backward.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from heapq import nlargest
from typing import NamedTuple

from ..planning.layout import Layout
from ..planning.predictions import ADAM_BYTES_PER_PARAMETER_BYTE, SHARE_OF_A_REDUCTION, CostModel

LAYERS_GATHERED = 2
"""Number of gathered layers on a device at once: the running layer and the next one."""
GRADIENTS_AT_ONCE = 2
"""Number of layer gradients on a device at once: the gradient of a backward, and its copy in the message."""


class Part(NamedTuple):
    """Parameters that are gathered together: the bytes of all, and of the trained ones."""

    parameter_bytes: float
    trained_bytes: float


class FullySharded(CostModel):
    """Predicts layouts of one stage with full sharding over the devices."""

    def layout(self, num_devices: int, rows_per_device: int) -> Layout:
        """Return such a layout for batches with `rows_per_device` samples on each device."""
        return Layout(1, num_devices, (0, len(self.unit_costs)), rows_per_device=rows_per_device)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parameters outside of the layers, and the parameters of each single layer. `[1 + L]`"""
        num_units = Counter(name for unit in self.unit_costs for name in unit.parameters)
        layers, outside, trained_outside = [], dict[str, int](), 0.0
        for unit in self.unit_costs:
            inside = {n for n in unit.parameters if n.startswith(f"{unit.name}.") and num_units[n] == 1}
            others = {n: size for n, size in unit.parameters.items() if n not in inside and n not in outside}
            own = sum(unit.parameters.values())
            trained = unit.trainable_bytes / own if own else 0.0  # the same share for each parameter
            size = sum(unit.parameters[name] for name in inside)
            layers.append(Part(size, size * trained))
            outside.update(others)
            trained_outside += sum(others.values()) * trained
        return (Part(sum(outside.values()), trained_outside), *layers)

    def _seconds_of(self, layout: Layout, units: range, rows: float) -> tuple[float, float]:
        """Return the forward and backward seconds of a batch, with parameters gathered layer by layer.

        A layer's transfers overlap with the computation of a layer; only the excess is added. The device waits while
        the first layer and the parameters outside of the layers are gathered, and while the gradients of the latter
        are reduced.
        """
        outside, *layers = self.parts
        share = SHARE_OF_A_REDUCTION * self._reduce_seconds_per_byte(layout)
        first = next((part.parameter_bytes for part in layers if part.parameter_bytes), 0)
        forward = self._measured.prologue.forward.of(rows) + share * (outside.parameter_bytes + first)
        backward = share * outside.trained_bytes
        for unit, part in zip(units, layers, strict=True):
            of_forward, of_backward = self._unit_seconds(layout, unit, rows)
            again = part.parameter_bytes if unit < units[-1] else 0  # the last layer stays gathered for its backward
            forward += max(of_forward, share * part.parameter_bytes)
            backward += max(of_backward, share * (again + part.trained_bytes))
        return forward, backward

    def _seconds_at_end(self, layout: Layout, stage: int) -> float:
        return self._trainable_bytes(layout, stage) * self._measured.update_seconds_per_byte / layout.world_size

    def _state_bytes(self, layout: Layout, stage: int) -> int:
        """Return the peak bytes of parameters, gradients and Adam's state on a device during a step."""
        outside, *layers = self.parts
        parameter_bytes, trained_bytes = map(sum, zip(*self.parts, strict=True))
        at_rest = parameter_bytes + trained_bytes * (1 + ADAM_BYTES_PER_PARAMETER_BYTE)
        gathered = outside.parameter_bytes + sum(nlargest(LAYERS_GATHERED, (part.parameter_bytes for part in layers)))
        gradients = outside.trained_bytes + GRADIENTS_AT_ONCE * max(part.trained_bytes for part in layers)
        return round(at_rest / layout.world_size + gathered + gradients)
