"""The lines that a training logs."""

from __future__ import annotations

from dataclasses import replace

from hf_pipetransformer.pipeline.elastic_pipeline import Transformation
from hf_pipetransformer.planning.costs import UnitCost
from hf_pipetransformer.planning.plan import PipelinePlan
from hf_pipetransformer.planning.plan_choice import choose_schedule, make_plan
from hf_pipetransformer.run.sentences import (
    NotComputed,
    describe_change,
    describe_end,
    describe_schedules,
    describe_start,
)

UNITS = tuple(UnitCost(f"layer.{k}", 1.0, 0, 0, {f"layer.{k}.weight": 4}, 4) for k in range(6))


def plan(stages: int, frozen: int = 0, cached: int = 0, sharding: str = "none") -> PipelinePlan:
    return make_plan(
        UNITS,
        4,
        stages,
        rows_per_device=4,
        memory_budget_bytes=None,
        num_frozen_layers=frozen,
        num_cached_layers=cached,
        replica_sharding=sharding,
    )


def test_a_start() -> None:
    assert describe_start("Bert", plan(4), "nothing freezes", "off (because)", "") == (
        "Bert in 4 stages (1+1+2+2 layers) x 1 replica; 8 micro-batches of 2 samples, schedule 1f1b; nothing"
        " freezes; activation cache: off (because)."
    )
    assert describe_start("Bert", plan(1), None, None, "slices are chosen") == (
        "Bert in 1 stage (6 layers) x 4 replicas; slices are chosen by measured times, so another run may differ by"
        " rounding."
    )


def test_a_chosen_schedule() -> None:
    """Six layers in two stages with two micro-batches, and devices on which nothing fits."""
    few = replace(plan(2), num_microbatches=2)
    assert describe_schedules(choose_schedule(few, 2)) == (
        "pipeline_schedule='auto' is interleaved1f1b with 3 virtual stages. Predicted steps by FLOPs, in relation to"
        " 1f1b: 1f1b 1.00, interleaved1f1b with 2 virtual stages 0.89, interleaved1f1b with 3 virtual stages 0.78, zbv"
        " with 2 virtual stages 0.78. Each of these must be 10% faster than the one before."
    )
    small = replace(few, memory_budget_bytes=1)
    assert "1f1b 1.00 (does not fit), interleaved1f1b with" in describe_schedules(choose_schedule(small, 2))


def test_a_change() -> None:
    change = Transformation(plan(4), plan(2, 2, 2), {"move": 0.1}, 0)
    assert describe_change(change, 7, 0.5, 2**21) == (
        "Step 7: 2 of 6 layers frozen, 2 of them cached; 4 stages (1+1+2+2 layers) x 1 replica -> 2 stages"
        " (4+2 layers) x 2 replicas, 2.0 MiB moved in 0.500 s."
    )


def test_an_end() -> None:
    line = describe_end(20, {"steps": 3.0, "preparing": 1.25, "other": 0.01}, NotComputed(200, 50, 25), 1, "out")
    assert line.startswith("Trained 20 steps in 4.3 s (steps 3.0 s, preparing 1.2 s). Not computed: 25.0% of the")
    assert "12.5% of their forward passes, with 1 change of the layout. Events: out/pipeline_events.jsonl" in line
    assert "Not computed" not in describe_end(20, {"steps": 3.0}, None, 0, "out")
