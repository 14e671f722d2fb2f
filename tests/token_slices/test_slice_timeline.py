"""The order of slices in a step, and how long it takes."""

from __future__ import annotations

import pytest

from hf_pipetransformer.token_slices.slice_planning import SliceLatency, whole_rows
from hf_pipetransformer.token_slices.slice_timeline import (
    LEAST_GAIN_OF_CUTS,
    StageLatency,
    choose_slices,
    simulate_slices,
)


def latency(fixed: float, per_token: float) -> StageLatency:
    """The latency of a slice: its backward takes twice its forward."""
    return StageLatency(SliceLatency(fixed, per_token, 0.0, 0.0), SliceLatency(2 * fixed, 2 * per_token, 0.0, 0.0))


def test_rows_alone_may_be_cut_into_other_parts() -> None:
    """Six rows in five stages, too short to be cut: two parts are faster than all at once and than one by one."""
    stages = [latency(4.0, 1 / 16)] * 5
    at_once, one_by_one = whole_rows(6, 16, 1), whole_rows(6, 16, 6)
    plan = choose_slices(stages, 6, 16, 1, chooses_parts=True)
    assert plan.parts == whole_rows(6, 16, 2) and plan.stages == tuple(stages)
    for parts in (at_once, one_by_one):
        assert plan.seconds is not None and plan.seconds < 0.95 * simulate_slices(stages, parts).seconds
    assert choose_slices(stages, 6, 16, 1, chooses_parts=False).parts == at_once
    # no more rows at once are known to fit
    assert choose_slices(stages, 6, 16, 6, chooses_parts=True).parts == one_by_one


@pytest.mark.parametrize(("k", "rows", "is_cut"), [(2, 1, True), (2, 4, False)])
def test_sequences_are_cut_where_micro_batches_run_out(k: int, rows: int, is_cut: bool) -> None:
    """Two stages wait a fifth of the time with four rows, and half of it with one."""
    stages = [latency(0.02, 1e-3)] * k
    plan = choose_slices(stages, rows, 1024, rows, chooses_parts=True)
    uncut = simulate_slices(stages, whole_rows(rows, 1024, rows)).seconds
    assert (max(len(part.lengths) for part in plan.parts) > 1) is is_cut
    assert plan.seconds is not None
    assert plan.seconds < uncut * (1 - LEAST_GAIN_OF_CUTS) if is_cut else plan.seconds == uncut
