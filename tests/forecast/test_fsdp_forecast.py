"""Memory and seconds of devices that divide parameters, gradients and optimizer state, and autocast's copies."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from layouts import planner_of, times_of, unit

from hf_pipetransformer.forecast.fully_sharded import FullySharded
from hf_pipetransformer.planning.layout import Layout
from hf_pipetransformer.planning.planner import Planner

SIZES = (100, 200, 400, 100)
OUTSIDE = 50
"""Of the embeddings, which count with the first unit."""
UNITS = tuple(
    unit(
        i,
        parameters={f"layer.{i}.weight": size, **({} if i else {"embeddings": OUTSIDE})},
        activation_bytes=10,
    )
    for i, size in enumerate(SIZES)
)


def test_layers_and_what_is_outside_of_them() -> None:
    assert FullySharded(UNITS).parts == ((50, 50), *((size, size) for size in SIZES))
    shared = FullySharded(tuple(unit(i, parameters={"layer.0.weight": 100}) for i in range(2)))
    assert shared.parts == ((100, 100), (0, 0), (0, 0)), "ALBERT"
    adapters = FullySharded((unit(0, parameters={"layer.0.weight": 90, "head": 10}, trainable_bytes=20),))
    assert adapters.parts == ((10, 2), (90, 18))


def test_autocast_keeps_copies_of_each_forward() -> None:
    """The copies of a device's units are kept once for each micro-batch in flight."""
    copies = [{f"layer.{i}.weight": size // 2} for i, size in enumerate(SIZES)]
    copies[3]["head"] = 7
    units = tuple(
        dataclasses.replace(u, copies=c, parameters={**u.parameters, **({"head": 14} if "head" in c else {})})
        for u, c in zip(UNITS, copies, strict=True)
    )
    units = (*units[:2], dataclasses.replace(units[2], untrained_copies_bytes=3), units[3])

    def copied(planner: Planner, layout: Layout) -> list[int]:
        without = dataclasses.replace(planner, autocasts=False).stage_bytes(layout)
        return [size - less for size, less in zip(planner.stage_bytes(layout), without, strict=True)]

    def planner_with(k: int, **changes: Any) -> Planner:
        return planner_of(k, 4, units, rows_per_device=2, autocasts=True, **changes)

    for sharding in ("none", "optimizer"):
        one = planner_with(1, replica_sharding=sharding)
        assert copied(one, one.first) == [(100 + 200 + 400 + 100) // 2 + 7 + 3]
    assert copied(one, one.next(one.first, 3, 0)) == [100 // 2 + 7]
    two = planner_with(2)  # units 0 1 | 2 3; two micro-batches in flight in the first stage, one in the last
    assert two.first.num_microbatches == 4
    assert copied(two, two.first) == [2 * (100 + 200) // 2, (400 + 100) // 2 + 7 + 3]


@pytest.mark.parametrize(
    ("per_byte", "seconds"),
    [
        # all transfers hide behind computing, except the embeddings' and the first gather, at half of a reduction
        (0.004, 4 * 3 * 2 + 0.5 * 0.004 * (50 + 100 + 50)),
        # a gather before each pass and a reduction after the backward; the last layer stays for its backward
        (2.0, (50 + 100 + 50) + 800 + (2 * 700 + 100)),
    ],
)
def test_seconds_of_a_step(per_byte: float, seconds: float) -> None:
    """A row takes 1 forward and 2 backward; a batch has two rows; each device updates its quarter."""
    times = dataclasses.replace(times_of(4), reduce_seconds_per_byte=per_byte, update_seconds_per_byte=0.01)
    sharded = FullySharded(UNITS, times)
    assert sharded.predict(sharded.layout(4, 2)).seconds == pytest.approx(seconds + 850 * 0.01 / 4)
