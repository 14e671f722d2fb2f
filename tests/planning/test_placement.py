from __future__ import annotations

import itertools

import pytest

from hf_pipetransformer.planning.placement import Placement


def test_virtual_stages_are_laid_out_as_drawn() -> None:
    assert [Placement(2, 2).held_by(stage) for stage in range(2)] == [(0, 2), (1, 3)]
    assert [Placement(2, 2, is_v_shaped=True).held_by(stage) for stage in range(2)] == [(0, 3), (1, 2)]
    assert [Placement(3, 3, is_v_shaped=True).held_by(stage) for stage in range(3)] == [
        (0, 5, 6),
        (1, 4, 7),
        (2, 3, 8),
    ]


@pytest.mark.parametrize(("k", "v", "is_v_shaped"), [*itertools.product((1, 2, 4), (1, 2, 3), (False, True))])
def test_part_of_a_stage(k: int, v: int, is_v_shaped: bool) -> None:
    """Virtual stage i is part i // K of its stage, which is what torch's order of work numbers."""
    placement = Placement(k, v, is_v_shaped)
    for stage in range(k):
        assert [index // k for index in placement.held_by(stage)] == list(range(v))
        assert all(placement.stage_of(index) == stage for index in placement.held_by(stage))
        assert placement.position_of(placement.position_of(stage)) == stage
    assert placement.position_of(placement.loss_stage) == 0
    if is_v_shaped:
        ways = [placement.stage_of(index) for index in range(placement.last + 1)]
        assert all(abs(b - a) <= 1 for a, b in itertools.pairwise(ways))
