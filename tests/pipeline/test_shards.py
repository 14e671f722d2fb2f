"""Replicas divide a stage's parameters: every element has one owner, parts are even, cuts are aligned."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hf_pipetransformer.pipeline.shards import (
    CUT_ELEMENTS,
    Size,
    divided_evenly,
    divided_whole,
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
