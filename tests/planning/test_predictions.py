from __future__ import annotations

import dataclasses

from layouts import planner_of, times_of, unit

from hf_pipetransformer.planning.costs import Cost, step_flops
from hf_pipetransformer.planning.planner import Planner
from hf_pipetransformer.planning.tables import MIB


def bytes_of(planner: Planner) -> list[int]:
    return planner.stage_bytes(planner.first)


# -- memory --------------------------------------------------------------------------------------------------


def test_stage_bytes_adds_up() -> None:
    units = tuple(unit(i, activation_bytes=10, boundary_bytes=3) for i in range(4))
    planner = planner_of(2, 2, units, rows_per_device=8, num_microbatches=8)
    # stage 0 of 2: two units; 16 rows as 8 micro-batches of 2 rows, 2 of them in flight
    weights, gradients, adam = 200, 200, 400
    activations = 2 * 10 * (2 * 2)
    gradients_received = 3 * 16
    first, last = bytes_of(planner)
    assert first == weights + gradients + adam + activations + gradients_received
    # the last stage keeps one micro-batch and receives activations
    assert last == weights + gradients + adam + 2 * 10 * 2 + 3 * 16


def test_the_head_is_trained_when_all_units_are_frozen() -> None:
    """2 of the last unit's 3 FLOPs, 5 of its 15 bytes of activations, 30 of its 100 of weights are the head's."""
    last = dataclasses.replace(unit(3, flops=3.0, activation_bytes=15), head=Cost(2.0, 5, 30))
    units = (unit(0), unit(1), unit(2), last)
    assert step_flops(units, 3) == [1, 1, 1, 3 * 3]
    assert step_flops(units, 4) == [1, 1, 1, 1 + 3 * 2]
    assert step_flops(units, 4, 4) == [0, 0, 0, 3 * 2]
    times = dataclasses.replace(times_of(4), update_seconds_per_byte=1.0)
    planner = planner_of(2, 2, units, rows_per_device=8, num_microbatches=8, times=times)
    layout = planner.in_stages(2, num_frozen=4)
    weights, trained = 100 * len(layout.units_of(1)), 30
    assert planner.stage_bytes(layout)[1] == weights + 3 * trained + 5 * 2
    assert planner.predict(layout).seconds_at_end == trained


# -- text ----------------------------------------------------------------------------------------------------


def test_plan_prints_a_table() -> None:
    units = tuple(unit(i, parameters={f"{i}": 3 * MIB}, activation_bytes=MIB) for i in range(4))
    planner = planner_of(2, 4, units, num_microbatches=6)
    assert planner.describe(planner.first) == "\n".join(
        (
            "2 stages × 2 pipelines = 4 ranks, 4 units",
            "stage  units  first unit  parameters MiB  training MiB  FLOPs %",
            "    0  0-1    layer.0                6.0          32.0     50.0",
            "    1  2-3    layer.2                6.0          28.0     50.0",
            "8 samples a pipeline and step; schedule 1f1b with 4 micro-batches; bubble 20.0 % if stages are equal",
        )
    )
