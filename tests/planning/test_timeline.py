from __future__ import annotations

import pytest

from hf_pipetransformer.planning.timeline import simulate


@pytest.mark.parametrize(("k", "m"), [(1, 4), (2, 1), (4, 8)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_take_the_closed_form(k: int, m: int, schedule: str) -> None:
    """(M + K - 1) micro-batches one after the other; the bubble is (K - 1) / (M + K - 1)."""
    timeline = simulate([1.0] * k, [2.0] * k, m, schedule)
    assert timeline.seconds == 3 * (m + k - 1)
    assert timeline.bubble == pytest.approx((k - 1) / (m + k - 1))


@pytest.mark.parametrize(("k", "v", "rounds"), [(2, 2, 1), (4, 3, 2)])
def test_virtual_stages_shorten_the_bubble(k: int, v: int, rounds: int) -> None:
    """The same work in V parts per stage: the bubble is (K - 1) / (V M + K - 1)."""
    m = k * rounds
    timeline = simulate([1.0 / v] * k * v, [2.0 / v] * k * v, m, "interleaved1f1b", v)
    assert timeline.bubble == pytest.approx((k - 1) / (v * m + k - 1))
    assert timeline.seconds == pytest.approx(3 * (m + (k - 1) / v))


@pytest.mark.parametrize(("k", "m"), [(2, 3), (4, 12)])
def test_gradients_of_weights_fill_the_bubble(k: int, m: int) -> None:
    """If F, B and W take equally long and M >= 2 K - 1, only the way to the last stage and back is waited for."""
    timeline = simulate([1.0] * 2 * k, [2.0] * 2 * k, m, "zbv", 2)
    assert timeline.seconds == 6 * m + k - 1
    assert timeline.bubble == pytest.approx((k - 1) / (6 * m + k - 1))


def test_frozen_stages_only_go_forward() -> None:
    timeline = simulate([1.0, 1.0], [0.0, 2.0], 4)
    assert {span.kind for span in timeline.spans if span.stage == 0} == {"forward"}
    assert timeline.seconds == 1 + 4 * 3  # the second stage alone
