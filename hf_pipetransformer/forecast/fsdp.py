"""What plain FSDP would take on the same devices: the rival of a pipeline where a model does not fit one device.

Parameters, gradients and optimizer state are divided among all N devices (FSDP's full sharding, ZeRO-3; Zhao et al.,
VLDB 2023). A unit's parameters are gathered before its forward and before its backward, and its gradient is reduced
and scattered after it, while its neighbours compute:

    computes    |--- forward 0 ---|--- forward 1 ---| ... |------ backward 1 ------|------ backward 0 ------|
    transfers   |-- gather 1 --|   |-- gather 2 --|   ...  |- gather 0 -|- reduce 2 -|        |- reduce 1 -|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..planning.costs import UnitCost
from ..planning.plan import ADAM_BYTES_PER_PARAMETER_BYTE
from ..planning.unit_times import ModelTimes

GATHERS_AHEAD = 1
"""Units whose parameters are gathered while another one computes."""
SHARE_OF_A_REDUCTION = 0.5
"""A gather, or a reduction that scatters, takes this share of an all-reduce of as many bytes in a ring."""


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
    parameters = sum({name: size for cost in costs for name, size in cost.parameters.items()}.values())
    trainable = min(sum(cost.trainable_bytes for cost in costs), parameters)
    sharded = parameters + trainable * (1 + ADAM_BYTES_PER_PARAMETER_BYTE)
    gathered = max(sum(cost.parameters.values()) for cost in costs)
    largest_gradient = max(cost.trainable_bytes for cost in costs)
    activations = sum(cost.activation_bytes for cost in costs) * rows
    return round(sharded / num_devices) + (1 + GATHERS_AHEAD) * gathered + largest_gradient + activations


def _pass_seconds(costs: Sequence[UnitCost], times: ModelTimes, rows: float) -> float:
    """Forward and backward of a micro-batch; each unit's transfers take place while a neighbour computes."""
    transfer = [SHARE_OF_A_REDUCTION * times.reduce_seconds_per_byte * sum(cost.parameters.values()) for cost in costs]
    ends = times.prologue, times.head
    seconds = transfer[0] + sum(part.forward.of(rows) + part.backward.of(rows) for part in ends)
    for unit, moving in zip(times.units, transfer, strict=True):
        seconds += max(unit.forward.of(rows), moving) + max(unit.backward.of(rows), 2 * moving)
    return seconds


def _update_seconds(costs: Sequence[UnitCost], times: ModelTimes, num_devices: int) -> float:
    trainable = sum(cost.trainable_bytes for cost in costs)
    return times.update_seconds_per_byte * trainable / num_devices
