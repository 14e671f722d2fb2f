from __future__ import annotations

from dataclasses import replace

from layouts import layout_of

from hf_pipetransformer.planning.layout import Layout


def test_ranks_are_laid_out_as_drawn() -> None:
    """
                stage 0   stage 1   stage 2   stage 3
    replica 0   rank 3    rank 2    rank 1    rank 0
    replica 1   rank 7    rank 6    rank 5    rank 4
    """
    layout = layout_of(4)
    assert [layout.ranks_of_pipeline(r) for r in range(2)] == [(3, 2, 1, 0), (7, 6, 5, 4)]
    assert [layout.ranks_of_stage(s) for s in range(4)] == [(3, 7), (2, 6), (1, 5), (0, 4)]
    assert [layout.stage_of(rank) for rank in range(8)] == [3, 2, 1, 0, 3, 2, 1, 0]
    assert [layout.replica_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [list(layout.units_of(s)) for s in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_virtual_stages_are_laid_out_as_drawn() -> None:
    """Stage 0 has units 0 1 and 4 5, stage 1 the others."""
    layout = layout_of(2, schedule="interleaved1f1b", virtual_pipeline_parallel_size=2)
    assert (layout.stage_bounds, layout.num_virtual_stages) == ((0, 2, 4, 6, 8), 2)
    assert [layout.ranges_of(s) for s in range(2)] == [(range(2), range(4, 6)), (range(2, 4), range(6, 8))]
    assert [layout.units_of(s) for s in range(2)] == [(0, 1, 4, 5), (2, 3, 6, 7)]

    v_shaped = layout_of(2, schedule="zbv", virtual_pipeline_parallel_size=2)
    assert [v_shaped.units_of(s) for s in range(2)] == [(0, 1, 6, 7), (2, 3, 4, 5)]
    assert [v_shaped.ranks_of_pipeline(r) for r in range(2)] == [(0, 1), (2, 3)], "the loss is on rank 0"


def test_number_of_microbatches() -> None:
    """Of 24 samples the rule makes 4, of which each has 6; smaller ones where only these fit."""
    layout = Layout(2, 1, (0, 4, 8), rows_per_device=12)
    assert (layout.rows_per_pipeline, layout.num_microbatches) == (24, 4)

    def with_at_most(rows: int) -> Layout:
        return replace(layout, most_rows=rows)

    assert [with_at_most(rows).num_microbatches for rows in (6, 4, 3, 2, 1)] == [4, 6, 8, 12, 4]
    assert [with_at_most(3).num_microbatches_for(rows) for rows in (24, 12, 10, 7)] == [8, 4, 5, 7]
