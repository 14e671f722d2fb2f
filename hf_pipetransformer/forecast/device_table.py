"""What is known of accelerators without having one: arithmetic, memory, links.

Peaks, memories and links are those of the makers' data sheets. What is an estimate says so; `--profile cuda` measures
instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..planning.unit_times import ModelTimes, PartTimes, Seconds

if TYPE_CHECKING:
    from ..planning.costs import UnitCost

GB = 1e9
GIB = 2**30

ADAM_TRAFFIC = 9.0
"""Bytes that go through memory for each byte of a trainable parameter: AdamW reads parameter, gradient and two moments
and writes three of them; clipping reads the gradient twice."""


@dataclass(frozen=True)
class CacheHost:
    """What a node offers to the activation cache.

    Attributes:
        read_bytes_per_second: from the page cache to all of its devices together.
        disk_bytes_per_second: the same where the page cache is too small.
        memory_bytes: that the page cache may take; None: not known, taken to be enough.
        disk_bytes: that the store may fill; None: not known, taken to be enough.
    """

    read_bytes_per_second: float
    disk_bytes_per_second: float
    memory_bytes: float | None = None
    disk_bytes: float | None = None


@dataclass(frozen=True)
class Device:
    """An accelerator, and the node that it is in.

    Attributes:
        flops_per_second: peak of dense matrix products in the precision of training.
        memory_bytes: of one device.
        memory_bytes_per_second: of one device.
        link_bytes_per_second: between two devices of a node, in one direction.
        network_bytes_per_second: out of a node, all its devices together. An estimate: one such node is often sold so.
        efficiency: share of the peak that a layer reaches. An estimate.
        seconds_per_unit: fixed cost of one unit's forward, for the calls of its kernels. An estimate.
        devices_per_node: usual number.
        flat_tokens: fewer tokens take a layer as long as these. An estimate: those of one layer of 2,048 columns on a
            V100 (TeraPipe, figure 3).
        host: an estimate.
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
    flat_tokens: int = 256

    def times(self, unit_costs: Sequence[UnitCost], world_size: int) -> ModelTimes:
        """How long the parts of a model take here, from their FLOPs.

        A backward takes two forwards. What precedes the units is counted with the first one, as its FLOPs are.

        Args:
            unit_costs: of the model.
            world_size: devices that reduce gradients together, in a ring.
        """
        speed = self.flops_per_second * self.efficiency

        def part(flops: float, fixed: float) -> PartTimes:
            return PartTimes(Seconds(fixed, flops / speed), Seconds(2 * fixed, 2 * flops / speed))

        slowest_link = self.link_bytes_per_second
        if world_size > self.devices_per_node:
            slowest_link = min(slowest_link, self.network_bytes_per_second)
        return ModelTimes(
            PartTimes(),
            tuple(part(unit.forward_flops - unit.head.forward_flops, self.seconds_per_unit) for unit in unit_costs),
            part(unit_costs[-1].head.forward_flops, 0.0),
            ADAM_TRAFFIC / self.memory_bytes_per_second,
            2 * (world_size - 1) / world_size / slowest_link,
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
        # without a link of their own: PCI Express
        Device("l4-24g", 121 * TFLOPS, 24 * GIB, 300 * GB, 32 * GB, 12.5 * GB),
        Device("rtx4090-24g", 165 * TFLOPS, 24 * GIB, 1008 * GB, 32 * GB, 12.5 * GB),
    )
}
"""By name. FLOP/s are those of bf16 (V100: fp16) with sums in fp32."""


def device_named(name: str) -> Device:
    """Look a device up.

    Raises:
        ValueError: it is not in the table.
    """
    if name not in DEVICES:
        raise ValueError(
            f"device={name!r} is not in the table, which has {', '.join(DEVICES)}: take the nearest one and set"
            " memory_gib and efficiency, or measure on the machine by profile='cuda'."
        )
    return DEVICES[name]
