"""Replicas divide a stage's parameters: every element has one owner, parts are even, cuts are aligned."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hf_pipetransformer.pipeline.shards import (
    CUT_ELEMENTS,
    Segment,
    Size,
    divided_evenly,
    divided_whole,
    joined,
    segments_of,
)

SIZES = st.lists(st.tuples(st.integers(0, 5_000), st.sampled_from([2, 4, 8])), min_size=1, max_size=30)


def named(sizes: list[tuple[int, int]]) -> dict[str, Size]:
    return {f"p{number}": Size(*size) for number, size in enumerate(sizes)}


@given(SIZES, st.integers(1, 8))
def test_each_element_is_in_one_even_part(drawn, parts):
    sizes = named(drawn)
    divided = divided_evenly(sizes, parts)
    for name, size in sizes.items():
        spans = [part[name] for part in divided if name in part]
        assert spans[0][0] == 0 and spans[-1][1] == size.elements
        assert all(stop == start for (_, stop), (start, _) in pairwise(spans))
        assert all(cut % CUT_ELEMENTS == 0 for _, cut in spans[:-1])
    total = sum(size.num_bytes for size in sizes.values())
    for part in divided:
        held = sum((stop - start) * sizes[name].element_bytes for name, (start, stop) in part.items())
        assert abs(held - total / parts) <= 2 * CUT_ELEMENTS * 8


@given(SIZES, st.integers(1, 8))
def test_each_parameter_is_in_one_part_of_an_optimizer_that_needs_whole_ones(drawn, parts):
    sizes = named(drawn)
    divided = divided_whole(sizes, parts)
    assert sorted(name for part in divided for name in part) == sorted(sizes)
    loads = [sum(sizes[name].num_bytes for name in part) for part in divided]
    assert max(loads) - min(loads) <= max(size.num_bytes for size in sizes.values())


def test_segments_are_what_nobody_cuts():
    before, after = {0: (0, 100), 1: (100, 300)}, {0: (0, 200), 2: (200, 300)}
    assert list(segments_of(before, after)) == [
        Segment((0, 100), ((0,), (0,))),
        Segment((100, 200), ((1,), (0,))),
        Segment((200, 300), ((1,), (2,))),
    ]
    assert list(segments_of({3: (0, 0)})) == [Segment((0, 0), ((3,),))], "a parameter without elements"


def test_joined_leaves_what_is_not_cut():
    shards = {"cut": {1: (0, 64), 3: (64, 100)}, "whole": {2: (0, 50)}, "everywhere": {0: (0, 9), 1: (0, 9)}}
    expected = {"cut": {1: (0, 100)}, "whole": {2: (0, 50)}, "everywhere": {0: (0, 9), 1: (0, 9)}}
    assert joined(shards, {"cut": 100, "whole": 50, "everywhere": 9}) == expected
