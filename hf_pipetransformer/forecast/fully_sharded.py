"""What full sharding takes (FSDP, ZeRO-3; Zhao et al., VLDB 2023): a device's memory, and what its transfers cost.

N devices divide the parameters, the gradients and the optimizer state of the same units; at rest each has 1 / N of all
that. A layer's parameters are gathered before its forward and again before its backward, while its neighbour computes,
and its gradient is reduced and scattered after that:

    computes    |--- forward 0 ---|--- forward 1 ---| ... |------ backward 1 ------|------ backward 0 ------|
    transfers   |-- gather 1 --|   |-- gather 2 --|   ...  |- gather 0 -|- reduce 2 -|        |- reduce 1 -|

What is outside of the layers (embeddings, head, parameters of several layers) is gathered before the first forward,
and its gradient is reduced after the last backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

from ..planning.costs import UnitCost
from ..planning.layout import Layout, MicroBatching
from ..planning.predictions import ADAM_BYTES_PER_PARAMETER_BYTE, SHARE_OF_A_REDUCTION, CostModel

LAYERS_GATHERED = 2
"""Layers whose parameters a device holds at once: of the one that computes and of the next one."""
GRADIENTS_AT_ONCE = 2
"""Layers' gradients that a device holds at once: the one that a backward has left, and the message made of it."""


@dataclass(frozen=True)
class Part:
    """Parameters that are gathered together.

    Attributes:
        parameter_bytes: their bytes.
        trained_bytes: bytes of those that have a gradient.
    """

    parameter_bytes: int = 0
    trained_bytes: float = 0.0


@dataclass(frozen=True)
class Divided:
    """What devices divide of their units.

    Attributes:
        layers: what each unit's layer alone needs. `[len(units)]`
        outside: what is outside of the layers.
    """

    layers: tuple[Part, ...]
    outside: Part

    @property
    def all_parts(self) -> Part:
        """Return all that is divided."""
        parts = (self.outside, *self.layers)
        return Part(sum(part.parameter_bytes for part in parts), sum(part.trained_bytes for part in parts))


def divide(units: Sequence[UnitCost]) -> Divided:
    """Return what devices divide of their units, given in execution order."""
    num_units = Counter(name for unit in units for name in unit.parameters)
    layers, outside, trained_outside = [], dict[str, int](), 0.0
    for unit in units:
        inside, others = 0, dict[str, int]()
        for name, size in unit.parameters.items():
            if name.startswith(f"{unit.name}.") and num_units[name] == 1:  # the layer alone needs it
                inside += size
            elif name not in outside:
                others[name] = size
        own = sum(unit.parameters.values())
        trained = unit.trainable_bytes / own if own else 0.0  # of each of them, as it is not known of which
        layers.append(Part(inside, inside * trained))
        outside.update(others)
        trained_outside += sum(others.values()) * trained
    return Divided(tuple(layers), Part(sum(outside.values()), trained_outside))


def state_bytes(divided: Divided, num_devices: int) -> int:
    """Return the bytes of parameters, gradients and Adam's state on each of N devices, at most at any time of a step.

    Args:
        divided: what the devices divide.
        num_devices: number of devices N.
    """
    whole, outside, layers = divided.all_parts, divided.outside, divided.layers
    at_rest = whole.parameter_bytes + whole.trained_bytes * (1 + ADAM_BYTES_PER_PARAMETER_BYTE)
    gathered = outside.parameter_bytes + sum(nlargest(LAYERS_GATHERED, (part.parameter_bytes for part in layers)))
    largest = max((part.trained_bytes for part in layers), default=0.0)
    return round(at_rest / num_devices + gathered + outside.trained_bytes + GRADIENTS_AT_ONCE * largest)


def pass_seconds(
    computing: Sequence[tuple[float, float]], divided: Divided, seconds_per_byte: float
) -> tuple[float, float]:
    """Return the seconds of a forward and a backward with what is gathered layer by layer.

    A layer's transfers take place while a layer computes; what they take longer is added. Nothing is computed while
    what is outside of the layers and the first layer are gathered, nor while the gradients of what is outside are
    reduced.

    Args:
        computing: seconds of each unit's forward and backward.
        divided: what the devices divide of these units.
        seconds_per_byte: seconds per byte of an all-reduce over these devices.
    """
    share = SHARE_OF_A_REDUCTION * seconds_per_byte
    layers, outside = divided.layers, divided.outside
    first = next((part.parameter_bytes for part in layers if part.parameter_bytes), 0)
    forward, backward = share * (outside.parameter_bytes + first), share * outside.trained_bytes
    for index, ((of_forward, of_backward), part) in enumerate(zip(computing, layers, strict=True)):
        again = part.parameter_bytes if index + 1 < len(layers) else 0  # the last one's stay for its backward
        forward += max(of_forward, share * part.parameter_bytes)
        backward += max(of_backward, share * (again + part.trained_bytes))
    return forward, backward


class FullySharded(CostModel):
    """Predicts layouts of one stage whose devices divide everything."""

    def layout(self, num_devices: int, rows_per_device: int) -> Layout:
        """Return such a layout.

        Args:
            num_devices: number of devices.
            rows_per_device: samples per device in a batch.
        """
        return Layout(1, num_devices, (0, len(self.unit_costs)), micro_batching=MicroBatching(rows_per_device))

    def _seconds_of(self, layout: Layout, units: range, rows: float) -> tuple[float, float]:
        computing = [self._unit_seconds(layout, unit, rows) for unit in units]
        forward, backward = pass_seconds(computing, divide(self.unit_costs), self._reduce_seconds_per_byte(layout))
        return self._measured.prologue.forward.of(rows) + forward, backward

    def _seconds_at_end(self, layout: Layout, stage: int) -> float:
        return self._trainable_bytes(layout, stage) * self._measured.update_seconds_per_byte / layout.world_size

    def _state_bytes(self, layout: Layout, stage: int) -> int:
        return state_bytes(divide(self.unit_costs), layout.world_size)
