"""How many of the frozen layers a plan can cache."""

from __future__ import annotations

import pytest

from hf_pipetransformer.planning.cached_layers import most_cached_layers
from hf_pipetransformer.planning.costs import UnitCost
from hf_pipetransformer.planning.plan_choice import make_plan


@pytest.mark.parametrize(
    ("stages", "nodes", "highest"),
    [
        (1, "aaaa", 8),
        (2, "aaaa", 7),
        (4, "aaaa", 5),  # three stages follow the first one
        (2, "aabb", 7),
        (4, "aabb", 4),  # the third stage is on another node than the first
        (4, "aaab", 2),
    ],
)
def test_how_far_up_frozen_layers_can_be_cached(stages: int, nodes: str, highest: int) -> None:
    units = [UnitCost(f"layer.{k}", 1.0, 0, 0, {f"layer.{k}": 4}, 4) for k in range(8)]
    plan = make_plan(units, 4, stages, rows_per_device=4, memory_budget_bytes=None)
    assert most_cached_layers(plan, 8, nodes) == highest
