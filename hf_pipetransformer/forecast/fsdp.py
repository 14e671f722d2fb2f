"""What plain FSDP would take on the same devices: the rival of a pipeline where a model does not fit one device.

Parameters, gradients and optimizer state are divided among all N devices, and gathered layer by layer
(`planning.full_sharding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..planning.costs import UnitCost
from ..planning.full_sharding import divide, pass_seconds, state_bytes
from ..planning.unit_times import ModelTimes


@dataclass(frozen=True)
class FsdpRun:
    """A training by plain FSDP in which nothing is frozen.

    Attributes:
        num_devices: number of devices N.
        num_microbatches: number of parts in which each device runs its samples (gradient accumulation).
        step_seconds: time of a step.
        seconds: time of the training; infinite if it does not fit.
        largest_bytes: memory of a device.
        missing_bytes: memory that a device lacks; 0 if it fits.
    """

    num_devices: int
    num_microbatches: int
    step_seconds: float
    seconds: float
    largest_bytes: int
    missing_bytes: int

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0


def fsdp_run(
    costs: Sequence[UnitCost],
    times: ModelTimes,
    num_devices: int,
    rows_per_device: int,
    num_steps: int,
    budget: int | None,
) -> FsdpRun:
    """Predict a training by FSDP, with as few micro-batches as fit.

    Args:
        costs: costs of the model's units.
        times: times of the model's parts; its all-reduce is one over all these devices.
        num_devices: N.
        rows_per_device: samples of a device in a step.
        num_steps: number of steps of the training.
        budget: memory of a device in bytes; None if unknown, in which case everything fits.
    """
    for m in (m for m in range(1, rows_per_device + 1) if rows_per_device % m == 0):
        needed = _device_bytes(costs, num_devices, rows_per_device // m)
        if budget is None or needed <= budget:
            break
    missing = 0 if budget is None else max(needed - budget, 0)
    step = m * _pass_seconds(costs, times, rows_per_device / m) + _update_seconds(costs, times, num_devices)
    return FsdpRun(num_devices, m, step, float("inf") if missing else step * num_steps, needed, missing)


def _device_bytes(costs: Sequence[UnitCost], num_devices: int, rows: int) -> int:
    state = state_bytes(divide(costs), num_devices)
    return state + sum(cost.activation_bytes for cost in costs) * rows


def _pass_seconds(costs: Sequence[UnitCost], times: ModelTimes, rows: float) -> float:
    """Forward and backward of a micro-batch; a layer's transfers take place while a neighbour computes.

    What precedes the units computes its backward with the first one, and the head computes with the last one.
    """
    forward = [unit.forward.of(rows) for unit in times.units]
    backward = [unit.backward.of(rows) for unit in times.units]
    backward[0] += times.prologue.backward.of(rows)
    forward[-1] += times.head.forward.of(rows)
    backward[-1] += times.head.backward.of(rows)
    computing = list(zip(forward, backward, strict=True))
    return times.prologue.forward.of(rows) + sum(pass_seconds(computing, divide(costs), times.reduce_seconds_per_byte))


def _update_seconds(costs: Sequence[UnitCost], times: ModelTimes, num_devices: int) -> float:
    trainable = sum(cost.trainable_bytes for cost in costs)
    return times.update_seconds_per_byte * trainable / num_devices
