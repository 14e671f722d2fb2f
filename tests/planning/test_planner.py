"""The first layout of a training, and the next ones."""

from __future__ import annotations

from typing import Any

import pytest
from layouts import layout_of, planner_of, unit

from hf_pipetransformer.planning.layout import Layout
from hf_pipetransformer.planning.planner import Planner
from hf_pipetransformer.planning.tables import MIB


def largest(planner: Planner, layout: Layout | None = None) -> int:
    return max(planner.stage_bytes(layout or planner.first))


# ------------------------------------------------------------------------------------------ the first layout
@pytest.mark.parametrize("k", [1, 4, 8])
def test_auto_takes_the_smallest_pipeline_that_fits(k: int) -> None:
    first = planner_of("auto", memory_budget_bytes=largest(planner_of(k, num_microbatches=4 * k))).first
    assert (first.pipeline_parallel_size, first.data_parallel_size) == (k, 8 // k)


def test_auto_says_what_is_missing() -> None:
    units = tuple(unit(i, parameters={f"{i}": 10 * MIB}) for i in range(8))
    tight = {"units": units, "memory_budget_bytes": 20 * MIB}
    message = "with 8 stages and replica_sharding='none' the largest stage still needs 40 MiB, but a device has 20 MiB"
    for sharding in ("none", "auto"):
        with pytest.raises(ValueError, match=message):
            layout_of("auto", **tight, replica_sharding=sharding)


def test_more_micro_batches_where_only_that_makes_the_stages_fit() -> None:
    """More micro-batches than usual (2 K) fit, by counted bytes; the training was refused."""
    units = tuple(unit(k, activation_bytes=100) for k in range(8))
    options: dict[str, Any] = {"world_size": 2, "units": units, "rows_per_device": 12}
    assert layout_of(2, **options).num_microbatches == 4
    for m in (6, 8, 12):
        needed = largest(planner_of(2, **options, num_microbatches=m))
        fitting = planner_of(2, **options, memory_budget_bytes=needed)
        assert fitting.first.num_microbatches == m and largest(fitting) == needed
    too_small = layout_of(2, **options, memory_budget_bytes=needed - 1)
    assert too_small.num_microbatches == 4  # no number fits


# ------------------------------------------------------------------------------------------ after a freeze
def test_compression_takes_the_shortest_pipeline_that_fits() -> None:
    """The largest stage may need no more bytes than the largest one did at the start."""
    planner, sizes = planner_of(4, 4, num_microbatches=4), []
    layout = planner.first
    for frozen in range(1, 9):
        layout = planner.next(layout, frozen, 0)
        sizes.append(layout.pipeline_parallel_size)
        assert layout.num_frozen_layers == frozen
        if layout.pipeline_parallel_size < 4:
            assert largest(planner, layout) <= largest(planner)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 4 and sizes[-1] == 1


def test_cached_layers_cost_nothing_and_are_the_first_stages() -> None:
    planner = planner_of(2, 4, num_microbatches=4, is_elastic=False)
    layout = planner.next(planner.first, 4, 4)
    assert layout.stage_bounds == (0, 6, 8)  # two active units each
    assert "4 frozen, 4 cached" in planner.describe(layout)
    layout = planner.next(layout, 6, 4)
    assert layout.stage_bounds == (0, 7, 8)  # 0 x 4 + 1 x 2 + 3 | 3
    layout = planner.next(layout, 6, 0)
    assert layout.stage_bounds == (0, 6, 8)  # 1 x 6 | 3 x 2


def test_a_pipeline_too_long_for_what_is_left_counts_fewer_as_cached() -> None:
    planner = planner_of(4, 4, is_elastic=False)
    for cached in (5, 7):
        layout = planner.next(planner.first, 7, cached)
        assert (layout.stage_bounds, layout.num_cached_layers) == ((0, 5, 6, 7, 8), 5)


# ------------------------------------------------------------------------------------------ a chosen sharding
def sharding(layout: Layout) -> tuple[int, str]:
    return layout.pipeline_parallel_size, layout.replica_sharding


def choosing(budget: int | None, k: Any = "auto") -> Planner:
    """A planner for units of 100 bytes; a device needs 3,200 (none) or 2,000 (optimizer) with K = 1."""
    return planner_of(k, 4, rows_per_device=16, replica_sharding="auto", memory_budget_bytes=budget)


def test_shardings_considered() -> None:
    """Two stages need 1,600 bytes without sharding, 1,200 with a sharded optimizer state, and 800 in one replica."""
    planner = choosing(1300)
    assert [sharding(each) for each in planner.considered] == [(1, "optimizer"), (2, "optimizer"), (4, "none")]
    assert [planner.fits(each) for each in planner.considered] == [False, True, True]
    assert planner.first is planner.considered[1]
    given = choosing(1999, k=1)
    assert sharding(given.first) == (1, "optimizer") and not given.fits(given.first), "a given K is kept"
