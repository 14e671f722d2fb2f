"""How many of the frozen layers are cached: what a plan allows, what a model allows, and what pays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .plan import PipelinePlan

WORTH_LOADING = 0.9
"""Loading must take less than this share of the time that computing takes."""


def most_cached_layers(plan: PipelinePlan, num_frozen: int, nodes: Sequence[str]) -> int:
    """How many units at most may be cached under a plan.

    1. They are frozen.
    2. Cached units are the first stage's, and every other stage needs one unit of its own.
    3. What the last unit gives can only be used where the first stage has the head, too (K = 1). That is 2 again.
    4. What is put must lie in the store of the node that reads it, the first stage's.

    Args:
        plan: in force.
        num_frozen: units that are frozen.
        nodes: name of each rank's node.
    """
    highest = plan.num_units - plan.pipeline_parallel_size + 1
    for replica in range(plan.data_parallel_size):
        here = [nodes[rank] for rank in plan.ranks_of_pipeline(replica)]
        near = next((stage for stage, node in enumerate(here) if node != here[0]), len(here))
        highest = min(highest, plan.stage_bounds[near])
    return min(num_frozen, highest)


def boundary_to_cache(allowed: Iterable[int], most: int) -> int:
    """How many units are cached; 0: none.

    Args:
        allowed: numbers of units of which this model's output may be kept.
        most: `most_cached_layers`.
    """
    return max((boundary for boundary in allowed if boundary <= most), default=0)


def is_worth_loading(loading: float, computing: float) -> bool:
    """Whether the cache pays.

    Args:
        loading: seconds that a row takes from the store.
        computing: seconds that its cached layers take.
    """
    return loading < WORTH_LOADING * computing
