from __future__ import annotations

import random
from collections import Counter

import pytest

from hf_pipetransformer.data.node_order import order_by_node


@pytest.mark.parametrize(
    ("samples", "shares", "batch"), [(960, (4, 4), 48), (1003, (4, 4), 48), (960, (8, 4), 48), (64, (1, 1, 1, 1), 8)]
)
def test_each_node_meets_its_own_samples_again(samples: int, shares: tuple[int, ...], batch: int) -> None:
    seen = []
    for epoch in range(3):
        order = list(range(samples))
        random.Random(epoch).shuffle(order)
        arranged = order_by_node(order, shares, batch, samples, seed=7)
        assert Counter(arranged) == Counter(order)
        batches = [arranged[begin : begin + batch] for begin in range(0, samples, batch)]
        seen.append({row for rows in batches for row in rows[: len(rows) * shares[0] // sum(shares)]})
    for again in seen[1:]:
        assert len(again & seen[0]) >= 0.99 * len(seen[0])  # but for the last, odd batch


def test_one_node_has_the_ordinary_order() -> None:
    assert order_by_node([3, 1, 2, 0], (4,), 4, 4, seed=7) == [3, 1, 2, 0]


def test_samples_that_come_twice_stay() -> None:
    order = [0, 0, 0, 1, 2, 3, 3, 5]
    assert Counter(order_by_node(order, (1, 1), 2, 6, seed=0)) == Counter(order)
