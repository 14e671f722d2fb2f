"""Data of accelerators that are not available here: arithmetic, memory, links.

Peak performance, memory and links come from the vendors' data sheets. Estimates are marked as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..pipeline.devices import USABLE_MEMORY
from ..planning.costs import FORWARDS_OF_A_BACKWARD
from ..planning.unit_times import ModelTimes, PartTimes, Seconds

if TYPE_CHECKING:
    from ..planning.costs import UnitCost

GB = 1e9
GIB = 2**30

ADAM_TRAFFIC = 9.0
"""Bytes of memory traffic for each byte of a trainable parameter: AdamW reads the parameter, the gradient and two
moments, and writes three of them; clipping reads the gradient twice."""


@dataclass(frozen=True)
class CacheHost:
    """Resources of a node for the activation cache.

    Attributes:
        read_bytes_per_second: read bandwidth from the page cache, for all devices of the node together.
        disk_bytes_per_second: read bandwidth if the page cache is too small.
        memory_bytes: memory available to the page cache; None if unknown, which counts as sufficient.
        disk_bytes: disk space available to the store; None if unknown, which counts as sufficient.
    """

    read_bytes_per_second: float
    disk_bytes_per_second: float
    memory_bytes: float | None = None
    disk_bytes: float | None = None


@dataclass(frozen=True)
class Device:
    """An accelerator, and the node that it belongs to.

    Attributes:
        flops_per_second: peak of dense matrix products in the precision of the training.
        memory_bytes: memory of one device.
        memory_bytes_per_second: memory bandwidth of one device.
        link_bytes_per_second: bandwidth between two devices of a node, in one direction.
        network_bytes_per_second: bandwidth out of a node, for all its devices together. An estimate, taken from how
            such a node is often sold.
        efficiency: fraction of the peak that a layer reaches. An estimate.
        seconds_per_unit: fixed cost of one unit's forward, for launching its kernels. An estimate.
        devices_per_node: usual number of devices in a node.
        host: resources for the cache. An estimate.
        backward_forwards: forwards that a backward takes; not a property of the device, but of the training.
    """

    name: str
    flops_per_second: float
    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    efficiency: float = 0.45
    seconds_per_unit: float = 1.2e-4
    devices_per_node: int = 8
    host: CacheHost = CacheHost(20 * GB, 5 * GB, 800 * GB)
    backward_forwards: float = FORWARDS_OF_A_BACKWARD
    autocasts: bool = False

    @property
    def memory_budget_bytes(self) -> int | None:
        """Memory that a stage may use; None if there is no bound."""
        return int(self.memory_bytes * USABLE_MEMORY)

    def num_nodes(self, num_devices: int) -> int:
        """Return the number of nodes that have so many devices."""
        return -(-num_devices // self.devices_per_node)

    @property
    def update_seconds_per_byte(self) -> float:
        """Seconds per byte of trainable parameters for clipping and an AdamW step."""
        return ADAM_TRAFFIC / self.memory_bytes_per_second

    def reduce_seconds_per_byte(self, world_size: int) -> float:
        """Seconds per byte of an all-reduce over so many devices, in a ring."""
        link = self.link_bytes_per_second
        if world_size > self.devices_per_node:
            link = min(link, self.network_bytes_per_second)
        return 2 * (world_size - 1) / world_size / link

    def times(self, unit_costs: Sequence[UnitCost], world_size: int) -> ModelTimes:
        """Predict how long the parts of a model take on this device, from their FLOPs.

        A backward takes `backward_forwards` forwards. The part before the units counts as part of the first
        unit, as its FLOPs do.

        Args:
            unit_costs: costs of the model's units.
            world_size: number of devices that all-reduce gradients together, in a ring.
        """
        speed = self.flops_per_second * self.efficiency

        def part(flops: float, fixed: float) -> PartTimes:
            return PartTimes.of_forward(Seconds(fixed, flops / speed), self.backward_forwards)

        return ModelTimes(
            PartTimes(),
            tuple(part(unit.forward_flops - unit.head.forward_flops, self.seconds_per_unit) for unit in unit_costs),
            part(unit_costs[-1].head.forward_flops, 0.0),
            self.update_seconds_per_byte,
            self.reduce_seconds_per_byte(world_size),
        )


TFLOPS = 1e12
DEVICES = {
    device.name: device
    for device in (
        Device("v100-16g", 125 * TFLOPS, 16 * GIB, 900 * GB, 150 * GB, 12.5 * GB),
        Device("v100-32g", 125 * TFLOPS, 32 * GIB, 900 * GB, 150 * GB, 12.5 * GB),
        Device("a100-40g", 312 * TFLOPS, 40 * GIB, 1555 * GB, 300 * GB, 100 * GB),
        Device("a100-80g", 312 * TFLOPS, 80 * GIB, 2039 * GB, 300 * GB, 200 * GB),
        Device("h100-80g", 989 * TFLOPS, 80 * GIB, 3350 * GB, 450 * GB, 400 * GB),
        Device("h200-141g", 989 * TFLOPS, 131 * GIB, 4800 * GB, 450 * GB, 400 * GB),
        # no NVLink, but PCI Express only
        Device("l4-24g", 121 * TFLOPS, 24 * GIB, 300 * GB, 32 * GB, 12.5 * GB),
        Device("rtx4090-24g", 165 * TFLOPS, 24 * GIB, 1008 * GB, 32 * GB, 12.5 * GB),
    )
}
"""Name -> device. FLOP/s are those of bf16 (V100: fp16) with accumulation in fp32."""


def device_named(name: str) -> Device:
    """Return the device with this name.

    Raises:
        ValueError: it is not in the table.
    """
    if name not in DEVICES:
        raise ValueError(
            f"device={name!r} is not in the device table, which contains {', '.join(DEVICES)}. Use the most similar"
            " one and set memory_gib and efficiency."
        )
    return DEVICES[name]
