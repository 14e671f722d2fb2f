"""What a freeze policy makes of a training's cost, by hand."""

from __future__ import annotations

import pytest

from hf_pipetransformer.freezing import AlphaPolicy, SchedulePolicy
from hf_pipetransformer.freezing.schedule_cost import frozen_in_epochs, plain_epochs


def test_alpha_over_four_epochs_by_hand() -> None:
    frozen = frozen_in_epochs(AlphaPolicy(1 / 3), 6, 6, 4, 10)
    assert frozen == [0, 2, 4, 5]
    # three for each active layer, one for each that is frozen and was not in the epoch before
    assert plain_epochs(frozen, 6, caches=True) == pytest.approx((18 + 12 + 2 + 6 + 2 + 3 + 1) / 18)
    assert plain_epochs(frozen, 6, caches=False) == pytest.approx((18 + 12 + 2 + 6 + 4 + 3 + 5) / 18)


def test_what_is_frozen_in_the_last_epoch_is_not_read() -> None:
    frozen = frozen_in_epochs(SchedulePolicy({1: 3}), 6, 6, 2, 10, max_frozen_layers=2)
    assert frozen == [0, 2]
    assert plain_epochs(frozen, 6, caches=True) == plain_epochs(frozen, 6, caches=False) == pytest.approx(32 / 18)
