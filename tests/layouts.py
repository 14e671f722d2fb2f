"""Units, planners and layouts for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_pipetransformer.planning.costs import UnitCost
from hf_pipetransformer.planning.layout import Layout
from hf_pipetransformer.planning.planner import Planner, Request
from hf_pipetransformer.planning.unit_times import ModelTimes, PartTimes, Seconds

OF_DEVICES = ("times", "memory_budget_bytes", "autocasts")
"""Arguments of a `Planner`; all others are arguments of a `Request`."""


def unit(
    index: int,
    flops: float = 1.0,
    activation_bytes: int = 0,
    boundary_bytes: int = 0,
    parameters: dict[str, int] | None = None,
    trainable_bytes: int | None = None,
) -> UnitCost:
    own = {f"layer.{index}.weight": 100} if parameters is None else parameters
    return UnitCost(
        name=f"layer.{index}",
        forward_flops=flops,
        activation_bytes=activation_bytes,
        boundary_bytes=boundary_bytes,
        parameters=own,
        trainable_bytes=sum(own.values()) if trainable_bytes is None else trainable_bytes,
    )


UNITS = tuple(unit(i) for i in range(8))


def times_of(units: int, fixed: float = 0.0) -> ModelTimes:
    """A second a row forward, two backward."""
    part = PartTimes(Seconds(fixed, 1.0), Seconds(2 * fixed, 2.0))
    return ModelTimes(PartTimes(), (part,) * units, PartTimes())


def planner_of(k: Any, world_size: int = 8, units: Sequence[UnitCost] = UNITS, **options: Any) -> Planner:
    """Return the planner of a training that asks for K stages and has four samples on each device."""
    devices = {name: options.pop(name) for name in OF_DEVICES if name in options}
    request = Request(k, **{"rows_per_device": 4, **options})
    return Planner(unit_costs=tuple(units), world_size=world_size, request=request, **devices)


def layout_of(k: Any, world_size: int = 8, units: Sequence[UnitCost] = UNITS, **options: Any) -> Layout:
    """Return the layout with which such a training begins."""
    return planner_of(k, world_size, units, **options).first
