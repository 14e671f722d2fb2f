"""Several trainings one after the other on the same processes: their start takes longer than a short training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed import run_ranks


def run_calls(world_size: int, calls: Mapping[str, Sequence[Any]], **options: Any) -> dict[str, list[Any]]:
    """The results of `fn(rank, world_size, *arguments)` on every rank, for the function and arguments of each call.

    `options` go to `run_ranks`.
    """
    results = run_ranks(_call, world_size, calls, **options)
    return {name: [found[name] for found in results] for name in calls}


def run_each(
    fn: Callable[..., Any], world_size: int, cases: Mapping[str, Sequence[Any]], **options: Any
) -> dict[str, list[Any]]:
    """`run_calls` of one function, with the arguments of each case."""
    return run_calls(world_size, {name: (fn, *arguments) for name, arguments in cases.items()}, **options)


def _call(rank: int, world_size: int, calls: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    return {name: fn(rank, world_size, *arguments) for name, (fn, *arguments) in calls.items()}
