"""The line that says which schedule was chosen; `test_voice.py` has the others."""

from __future__ import annotations

from layouts import planner_of

from hf_pipetransformer.planning.costs import UnitCost
from hf_pipetransformer.run.sentences import describe_schedules

UNITS = tuple(UnitCost(f"layer.{k}", 1.0, 0, 0, {f"layer.{k}.weight": 4}, 4) for k in range(6))


def test_a_chosen_schedule() -> None:
    """Six layers in two stages with two micro-batches, and devices on which nothing fits."""
    asked = {"schedule": "auto", "num_microbatches": 2}
    assert describe_schedules(planner_of(2, 4, UNITS, **asked).schedule_choice) == (
        "pipeline_schedule='auto' is interleaved1f1b with 3 virtual stages. Predicted steps by FLOPs, in relation to"
        " 1f1b: 1f1b 1.00, interleaved1f1b with 2 virtual stages 0.89, interleaved1f1b with 3 virtual stages 0.78, zbv"
        " with 2 virtual stages 0.78. Each of these must be 10% faster than the one before."
    )
    small = planner_of(2, 4, UNITS, **asked, memory_budget_bytes=1)
    assert "1f1b 1.00 (does not fit), interleaved1f1b with" in describe_schedules(small.schedule_choice)
