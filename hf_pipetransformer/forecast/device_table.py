"""A table of accelerators: arithmetic, memory, links. Forecasts use it instead of measurements.

Peak performance, memory and links come from the vendors' data sheets. Estimates are marked as such.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..argument_values import check_cache
from ..parts.prefix_cache.cache.file_store import SHARE_OF_USABLE, USABLE_DISK
from ..pipeline.devices import USABLE_MEMORY
from ..planning.unit_times import ModelTimes, PartTimes, Seconds
from .workload import Workload

GB = 1e9
GIB = 2**30

ADAM_TRAFFIC = 9.0
"""Bytes of memory traffic for each byte of a trainable parameter: AdamW reads the parameter, the gradient and two
moments, and writes three of them; clipping reads the gradient twice."""


@dataclass(frozen=True)
class Device:
    """An accelerator, and the node that it belongs to.

    Attributes:
        flops_per_second: peak of dense matrix products in the precision of the training.
        memory_bytes: memory of one device.
        memory_bytes_per_second: memory bandwidth of one device.
        link_bytes_per_second: bandwidth between two devices of a node, in one direction.
        network_bytes_per_second: bandwidth out of a node, for all its devices together. An estimate, from common
            configurations.
        efficiency: fraction of the peak that a layer reaches. An estimate.
        seconds_per_unit: fixed cost of one unit's forward, for launching its kernels. An estimate.
        devices_per_node: usual number of devices in a node.
        read_bytes_per_second: bandwidth at which all devices of a node together read the cache from the page cache.
            This and the following are estimates.
        disk_bytes_per_second: bandwidth from the disk, if the page cache is too small.
        host_memory_bytes: memory available to the page cache; None if unknown, which counts as sufficient.
        host_disk_bytes: disk space that the cache may take; None if unknown, which counts as sufficient.
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
    read_bytes_per_second: float = 20 * GB
    disk_bytes_per_second: float = 5 * GB
    host_memory_bytes: float | None = 800 * GB
    host_disk_bytes: float | None = None

    @property
    def memory_budget_bytes(self) -> int | None:
        """Memory that a stage may use; None if there is no bound."""
        return int(self.memory_bytes * USABLE_MEMORY)

    def num_nodes(self, num_devices: int) -> int:
        """Return the number of nodes for this many devices."""
        return -(-num_devices // self.devices_per_node)

    def times(self, workload: Workload, num_devices: int) -> ModelTimes:
        """Predict from FLOPs how long the parts of a model take.

        The part before the units counts with the first unit, as for FLOPs.

        Args:
            workload: the costs of the model.
            num_devices: number of devices that all-reduce gradients together, in a ring.
        """
        speed, units = self.flops_per_second * self.efficiency, workload.unit_costs
        link = self.link_bytes_per_second
        if num_devices > self.devices_per_node:
            link = min(link, self.network_bytes_per_second)

        def part(flops: float, fixed: float) -> PartTimes:
            return PartTimes.of_forward(Seconds(fixed, flops / speed), workload.backward_forwards)

        return ModelTimes(
            PartTimes(),
            tuple(part(unit.forward_flops - unit.head.forward_flops, self.seconds_per_unit) for unit in units),
            part(units[-1].head.forward_flops, 0.0),
            ADAM_TRAFFIC / self.memory_bytes_per_second,
            2 * (num_devices - 1) / num_devices / link,
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
        # PCI Express only, without NVLink
        Device("l4-24g", 121 * TFLOPS, 24 * GIB, 300 * GB, 32 * GB, 12.5 * GB),
        Device("rtx4090-24g", 165 * TFLOPS, 24 * GIB, 1008 * GB, 32 * GB, 12.5 * GB),
    )
}
"""Name -> device. FLOP/s are for bf16 (V100: fp16) with accumulation in fp32."""


def device_named(
    name: str,
    efficiency: float | None = None,
    memory_gib: float | None = None,
    disk_gib: float | None = None,
    cache_max_gib: float | None = None,
) -> Device:
    """Return the device with this name, changed by the options of `hf-pipetransformer plan`.

    The cache may take a part of the usable disk, or `cache_max_gib`, but never more than the usable disk.

    Raises:
        ValueError: the device is not in the table, or a value is out of range.
    """
    check_cache(cache_max_gib, None)
    for option, value in (("efficiency", efficiency), ("memory_gib", memory_gib), ("disk_gib", disk_gib)):
        most = 1.0 if option == "efficiency" else None
        if value is not None and not 0 < value <= (most or value):
            at_most = f" and at most {most:g}" if most else ""
            raise ValueError(f"{option} is {value}, but must be above 0{at_most}.")
    if name not in DEVICES:
        raise ValueError(
            f"device={name!r} is not in the device table, which contains {', '.join(DEVICES)}. Use the most similar"
            " one and set memory_gib and efficiency."
        )
    device, usable = DEVICES[name], None if disk_gib is None else disk_gib * GIB * USABLE_DISK
    limit = None if usable is None else usable * SHARE_OF_USABLE
    if cache_max_gib is not None:
        limit = min(cache_max_gib * GIB, cache_max_gib * GIB if usable is None else usable)
    return replace(
        device,
        efficiency=efficiency or device.efficiency,
        memory_bytes=device.memory_bytes if memory_gib is None else memory_gib * GIB,
        host_disk_bytes=limit,
    )
