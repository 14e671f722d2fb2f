"""Which ranks hold which parameters, optimizer state and buffers. Pure functions: the same result on every process.

Replicas that divide the optimizer state (ZeRO-1) divide it by whole parameters: the largest parameter goes first, to
the replica that has the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ..model.layer_stack import LayerStack
from ..model.placeholders import ParameterTable
from ..planning.layout import Layout
from .virtual_stages import names_of_stage

Holders = Mapping[str, tuple[int, ...]]
"""Parameter name -> the ranks that hold the parameter, ascending. The same on every process."""


def holders_under(layout: Layout, stack: LayerStack) -> Holders:
    """The ranks that hold each parameter under a layout."""
    ranks: dict[str, list[int]] = {name: [] for name in stack.table.names}
    for stage in range(layout.pipeline_parallel_size):
        for name in names_of_stage(layout, stack, stage):
            ranks[name].extend(layout.ranks_of_stage(stage))
    return {name: tuple(sorted(held)) for name, held in ranks.items()}


def updaters_under(layout: Layout, stack: LayerStack, names: Collection[str]) -> Holders:
    """The ranks that update each parameter, and have its optimizer state, under a layout.

    All ranks that hold a parameter update it, or one replica of each stage that holds it.

    Args:
        layout: the layout.
        stack: the units of the model.
        names: the parameters that the optimizer updates.
    """
    if not layout.shards_optimizer:
        return {name: ranks for name, ranks in holders_under(layout, stack).items() if name in names}
    table = stack.table
    updaters: dict[str, list[int]] = {name: [] for name in table.names if name in names}
    for stage in range(layout.pipeline_parallel_size):
        loads = dict.fromkeys(layout.ranks_of_stage(stage), 0)
        held = names_of_stage(layout, stack, stage)
        for name in sorted(filter(held.__contains__, updaters), key=lambda name: -table[name].nbytes):
            rank = min(loads, key=loads.__getitem__)
            loads[rank] += table[name].nbytes
            updaters[name].append(rank)
    return {name: tuple(sorted(ranks)) for name, ranks in updaters.items()}


def source_of_buffers(
    table: ParameterTable, holders: Holders, stages: Sequence[int], changed: Sequence[Collection[str]]
) -> Callable[[str], int]:
    """Return a function from a buffer's name to the rank that has its value.

    All processes have all buffers. But a callback may compute buffers from weights (a pruning mask), and each process
    has only its own weights. So the rank is the one that holds the parameters of the buffer's module, or of the
    nearest module around it with parameters. If these are on several stages, it is the lowest stage that has changed
    the buffer: code before the layers runs on all stages, but only the lowest one has all that it reads.

    Args:
        table: the model's parameters.
        holders: the ranks that hold each parameter.
        stages: the ranks of the first replica in the order of stages.
        changed: for each rank, the buffers that it has changed since they were equal on all ranks.
    """

    def source_of(buffer: str) -> int:
        module, beside = buffer.rpartition(".")[0], list[tuple[int, ...]]()
        while module and not beside:
            names = (n for n in holders if any(alias.startswith(module + ".") for alias in table.aliases[n]))
            beside = [holders[name] for name in names]
            module = module.rpartition(".")[0]
        if len({rank for ranks in beside for rank in ranks if rank in stages}) != 1:
            for rank in stages:
                if buffer in changed[rank]:
                    return rank
        return beside[0][0] if beside else 0

    return source_of
