"""Memory and seconds of replicas that divide parameters, gradients and optimizer state."""

from __future__ import annotations

import dataclasses
from typing import Any

from test_plan import plan_of, times_of, unit

from hf_pipetransformer.planning.costs import HeadCost
from hf_pipetransformer.planning.full_sharding import Part, divide
from hf_pipetransformer.planning.plan import PipelinePlan
from hf_pipetransformer.planning.plan_choice import largest_bytes_with_whole_model

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


def full(k: int, world_size: int = 4, **changes: Any) -> PipelinePlan:
    return plan_of(k, world_size, UNITS, replica_sharding="full", rows_per_device=2, **changes)


def state_of(plan: PipelinePlan, stage: int) -> int:
    """What a device holds beside activations, of which one micro-batch of all samples is in flight."""
    rows = plan.rows_per_pipeline
    activations = sum(UNITS[u].activation_bytes for u in plan.units_of(stage) if u >= plan.num_frozen_layers) * rows
    return plan.stage_bytes(stage, rows=rows, num_microbatches=1) - activations


def test_layers_and_what_is_outside_of_them() -> None:
    divided = divide(UNITS, 0)
    assert divided.layers == tuple(Part(size, size) for size in SIZES)
    assert (divided.outside, divided.held_bytes) == (Part(50, 50), 0)
    frozen = divide(UNITS, 2)
    assert frozen.layers == (Part(), Part(), Part(400, 400), Part(100, 100))
    assert (frozen.outside, frozen.held_bytes) == (Part(), 350)
    shared = divide([unit(i, parameters={"layer.0.weight": 100}) for i in range(2)], 0)
    assert shared.layers == (Part(), Part()) and shared.outside == Part(100, 100), "ALBERT"
    adapters = divide([unit(0, parameters={"layer.0.weight": 90, "head": 10}, trainable_bytes=20)], 0)
    assert adapters.layers == (Part(90, 18),) and adapters.outside == Part(10, 2)


def test_one_stage_holds_its_part_two_gathered_layers_and_two_gradients() -> None:
    whole = (400 + 200 + OUTSIDE) + (2 * 400 + OUTSIDE)
    assert state_of(full(1), 0) == 850 * (1 + 1 + 2) // 4 + whole
    assert state_of(full(1, 1), 0) == 850 * 4, "nobody to divide with"


def test_one_stage_that_cannot_gather_layers_holds_what_a_stage_of_several_does() -> None:
    plan = full(1, runs_layers_in_order=False)
    assert state_of(plan, 0) == round(850 * (1 + 2) / 4) + 850 * 2
    assert state_of(plan, 0) > state_of(dataclasses.replace(plan, replica_sharding="optimizer"), 0)
    slow = dataclasses.replace(times_of(4), reduce_seconds_per_byte=2.0)  # a second a byte, gathered or scattered
    timed = dataclasses.replace(plan, times=slow)
    assert timed.predict(2, 1).seconds_at_end == (1 + 2) * 850
    together = [unit(i, parameters={"layer.0.weight": 100}) for i in range(2)]  # ALBERT: no layer has its own
    assert not plan_of(1, 4, tuple(together), replica_sharding="full").gathers_by_layer


def test_autocast_keeps_copies_of_each_forward() -> None:
    """Of a device's units in one stage, once for each micro-batch in flight; gathered layer by layer, of one layer."""
    copies = [{f"layer.{i}.weight": size // 2} for i, size in enumerate(SIZES)]
    copies[3]["head"] = 7
    units = tuple(
        dataclasses.replace(u, copies=c, parameters={**u.parameters, **({"head": 14} if "head" in c else {})})
        for u, c in zip(UNITS, copies, strict=True)
    )
    units = (*units[:2], dataclasses.replace(units[2], untrained_copies_bytes=3), units[3])

    def copied(plan: PipelinePlan, stage: int, m: int) -> int:
        rows = plan.rows_per_pipeline
        without = dataclasses.replace(plan, autocasts=False)
        return plan.stage_bytes(stage, rows=rows, num_microbatches=m) - without.stage_bytes(
            stage, rows=rows, num_microbatches=m
        )

    def plan_with(k: int, sharding: str, **changes: Any) -> PipelinePlan:
        return plan_of(k, 4, units, replica_sharding=sharding, rows_per_device=2, autocasts=True, **changes)

    whole = (100 + 200 + 400 + 100) // 2 + 7 + 3
    for sharding in ("none", "optimizer"):
        assert copied(plan_with(1, sharding), 0, 1) == whole
    assert copied(plan_with(1, "full"), 0, 1) == 400 // 2 + 7 + 3
    assert copied(plan_with(1, "full", runs_layers_in_order=False), 0, 1) == whole
    assert copied(plan_with(1, "full", num_frozen_layers=3), 0, 1) == 100 // 2 + 7
    two = plan_with(2, "full")  # units 0 1 | 2 3; two micro-batches in flight in the first stage, one in the last
    assert [copied(two, stage, 4) for stage in range(2)] == [2 * (100 + 200) // 2, (400 + 100) // 2 + 7 + 3]


def test_frozen_units_are_not_divided() -> None:
    assert state_of(full(1, num_frozen_layers=3), 0) == 750 + 100 * 4 // 4 + 100 + 2 * 100


def test_a_device_that_generates_has_the_whole_model_in_place_of_the_stage() -> None:
    plan = full(2)
    rows = plan.rows_per_pipeline
    m = plan.num_microbatches_for(rows)
    others = [plan.stage_bytes(s, rows=rows, num_microbatches=m) - gathered for s, gathered in enumerate((350, 500))]
    assert largest_bytes_with_whole_model(plan, 850) == 850 + max(others)


# -- seconds: of a row 1 forward and 2 backward, two rows in a batch of one stage ------------------------------------
def seconds(plan: PipelinePlan, m: int) -> float:
    return plan.predict(plan.rows_per_pipeline, m).seconds


def test_the_head_of_a_frozen_unit_is_divided() -> None:
    """It is gathered and reduced once for each batch, as there is no layer to gather."""
    units = (*UNITS[:3], dataclasses.replace(UNITS[3], head=HeadCost(0.5, 5, 30)))
    slow = dataclasses.replace(times_of(4), reduce_seconds_per_byte=2.0)
    plan = plan_of(1, 4, units, replica_sharding="full", rows_per_device=2, times=slow, num_frozen_layers=4)
    assert not plan.gathers_by_layer
    assert seconds(plan, 1) == 4 * 2 + (30 + 2 * 30)
    assert plan.stage_bytes(0, rows=2, num_microbatches=1) == 850 - 30 + round(30 * 3 / 4) + 30 + 30 + 5 * 2
