"""How many of the frozen layers are cached: what a plan and a model allow, and what is faster than computing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .plan import PipelinePlan

WORTH_LOADING = 0.9
"""Loading must take less than this fraction of the time that computing takes."""


def most_cached_layers(plan: PipelinePlan, num_frozen: int, nodes: Sequence[str]) -> int:
    """Return the maximum number of units that may be cached under a plan.

    1. Cached units are frozen.
    2. The first stage holds all cached units, and every other stage needs one unit of its own.
    3. The outputs of the last unit can be used only if the first stage also has the head (K = 1). Rule 2 implies this.
    4. The outputs must be written to the store of the node that reads them, the first stage's.

    Args:
        plan: the plan in force.
        num_frozen: number of frozen units.
        nodes: name of each rank's node.
    """
    highest = plan.num_units - plan.pipeline_parallel_size + 1
    for replica in range(plan.data_parallel_size):
        here = [nodes[rank] for rank in plan.ranks_of_pipeline(replica)]
        near = next((stage for stage, node in enumerate(here) if node != here[0]), len(here))
        highest = min(highest, plan.stage_bounds[near])
    return min(num_frozen, highest)


def boundary_to_cache(allowed: Iterable[int], most: int) -> int:
    """Return the number of units to cache; 0 for none.

    Args:
        allowed: the numbers of bottom units whose output may be cached for this model.
        most: the result of `most_cached_layers`.
    """
    return max((boundary for boundary in allowed if boundary <= most), default=0)


def is_worth_loading(loading: float, computing: float, hidden: float = 0.0) -> bool:
    """Whether loading from the cache is enough faster than computing.

    Args:
        loading: seconds to load one sample from the store.
        computing: seconds to compute the cached layers for one sample.
        hidden: seconds of one sample's step during which the next batch is loaded without any waiting.
    """
    return loading - hidden < WORTH_LOADING * computing
