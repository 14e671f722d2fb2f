"""Which ranks hold what under a plan. Pure: the same on every process."""

from __future__ import annotations

from collections.abc import Callable

from ..model.layer_stack import LayerStack
from ..model.placeholders import ParameterTable
from ..planning.plan import PipelinePlan
from .state import Holders


def holders_under(plan: PipelinePlan, stack: LayerStack) -> Holders:
    """The ranks that hold each parameter under a plan."""
    ranks: dict[str, list[int]] = {name: [] for name in stack.table.names}
    for stage in range(plan.pipeline_parallel_size):
        for name in stack.owned(*plan.stage_bounds[stage : stage + 2]):
            ranks[name].extend(plan.ranks_of_stage(stage))
    return {name: tuple(sorted(held)) for name, held in ranks.items()}


def source_of_buffers(table: ParameterTable, holders: Holders) -> Callable[[str], int]:
    """For a buffer's name the first of the ranks that run its module; 0 where no parameter tells.

    All processes have all buffers, but a callback may compute them from weights (a pruning mask), and of these a
    process has its own.
    """

    def source_of(buffer: str) -> int:
        module = buffer.rpartition(".")[0]
        while module:
            for name, ranks in holders.items():
                if any(alias.startswith(module + ".") for alias in table.aliases[name]):
                    return ranks[0]
            module = module.rpartition(".")[0]
        return 0

    return source_of
