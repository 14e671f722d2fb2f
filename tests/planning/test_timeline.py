from __future__ import annotations

import itertools

import pytest

from hf_pipetransformer.planning.timeline import simulate


@pytest.mark.parametrize(("k", "m"), list(itertools.product((1, 2, 4), (1, 2, 4, 8))))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_take_the_closed_form(k: int, m: int, schedule: str) -> None:
    """(M + K - 1) micro-batches one after the other; the bubble is (K - 1) / (M + K - 1)."""
    timeline = simulate([1.0] * k, [2.0] * k, m, schedule)
    assert timeline.seconds == 3 * (m + k - 1)
    assert timeline.bubble == pytest.approx((k - 1) / (m + k - 1))


@pytest.mark.parametrize(("k", "v", "rounds"), list(itertools.product((2, 4), (2, 3), (1, 2, 3))))
def test_virtual_stages_shorten_the_bubble(k: int, v: int, rounds: int) -> None:
    """The same work in V parts per stage: the bubble is (K - 1) / (V M + K - 1)."""
    m = k * rounds
    timeline = simulate([1.0 / v] * k * v, [2.0 / v] * k * v, m, "interleaved1f1b", v)
    assert timeline.bubble == pytest.approx((k - 1) / (v * m + k - 1))
    assert timeline.seconds == pytest.approx(3 * (m + (k - 1) / v))


@pytest.mark.parametrize(("k", "m"), [(2, 3), (2, 4), (2, 6), (4, 7), (4, 8), (4, 12)])
def test_gradients_of_weights_fill_the_bubble(k: int, m: int) -> None:
    """If F, B and W take equally long and M >= 2 K - 1, only the way to the last stage and back is waited for."""
    timeline = simulate([1.0] * 2 * k, [2.0] * 2 * k, m, "zbv", 2)
    assert timeline.seconds == 6 * m + k - 1
    assert timeline.bubble == pytest.approx((k - 1) / (6 * m + k - 1))
    at = {(span.kind, span.stage, span.part, span.micro_batch): span for span in timeline.spans}
    for stage, part, i in itertools.product(range(k), range(2), range(m)):
        assert at["forward", stage, part, i].end <= at["backward", stage, part, i].start
        assert at["backward", stage, part, i].end <= at["weights", stage, part, i].start
        if part == 1:  # the way back
            after = ("backward", stage - 1, 1, i) if stage else None
            assert after is None or at[after].end <= at["backward", stage, 1, i].start
            before = ("forward", stage + 1, 1, i) if stage + 1 < k else ("forward", stage, 0, i)
            assert at[before].end <= at["forward", stage, 1, i].start


def test_frozen_stages_only_go_forward() -> None:
    timeline = simulate([1.0, 1.0], [0.0, 2.0], 4)
    assert {span.kind for span in timeline.spans if span.stage == 0} == {"forward"}
    assert timeline.seconds == 1 + 4 * 3  # the second stage alone
