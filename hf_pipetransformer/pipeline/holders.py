"""Which ranks hold which parameters and buffers under a plan. Pure functions: the same result on every process."""

from __future__ import annotations

from collections.abc import Callable

from ..model.layer_stack import LayerStack
from ..model.placeholders import ParameterTable
from ..planning.layout import Layout
from .state import Holders
from .virtual_stages import names_of_stage


def holders_under(plan: Layout, stack: LayerStack) -> Holders:
    """The ranks that hold each parameter under a plan."""
    ranks: dict[str, list[int]] = {name: [] for name in stack.table.names}
    for stage in range(plan.pipeline_parallel_size):
        for name in names_of_stage(plan, stack, stage):
            ranks[name].extend(plan.ranks_of_stage(stage))
    return {name: tuple(sorted(held)) for name, held in ranks.items()}


def source_of_buffers(table: ParameterTable, holders: Holders) -> Callable[[str], int]:
    """Return a function from a buffer's name to the first rank that runs its module (0 if no parameter shows it).

    All processes have all buffers. But a callback may compute buffers from weights (a pruning mask), and each process
    has only its own weights.
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
