"""Each policy against a table made by hand; rules that every policy must keep, for any input."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_pipetransformer.argument_values import FREEZE_POLICIES
from hf_pipetransformer.parts.freezing.policies import (
    POLICIES,
    AdaptivePolicy,
    AlphaPolicy,
    AutoFreezePolicy,
    FreezeDecision,
    FreezePolicy,
    NeverFreeze,
    SchedulePolicy,
    make_policy,
    next_num_frozen,
)

Norms = tuple[float, ...] | None


def decision(
    index: int = 1,
    num_layers: int = 12,
    num_frozen: int = 0,
    epoch: float | None = None,
    global_step: int | None = None,
    norms: Norms = None,
    max_frozen: int | None = None,
) -> FreezeDecision:
    """Unless told otherwise: an epoch, and ten steps, per decision, and a head that can train alone."""
    return FreezeDecision(
        index,
        num_layers,
        num_frozen,
        index if epoch is None else epoch,
        10 * index if global_step is None else global_step,
        norms,
        num_layers if max_frozen is None else max_frozen,
    )


def run(policy: FreezePolicy, num_layers: int, decisions: int, norms: list[Norms] | None = None) -> list[int]:
    """f(1), f(2), ...; `norms` are those seen before each decision."""
    values, f = [], 0
    for t in range(1, decisions + 1):
        f = next_num_frozen(policy, decision(t, num_layers, f, norms=norms[t - 1] if norms else None))
        values.append(f)
    return values


# ------------------------------------------------------------------------------------ alpha
def test_alpha() -> None:
    assert run(AlphaPolicy(1 / 3), 12, 8) == [4, 7, 9, 10, 11, 11, 12, 12]
    # 10 (1 - 0.9) is 0.99999... or 1.00000...1 in floating point
    assert run(AlphaPolicy(0.1), 10, 10) == [1, 2, 3, 4, 5, 5, 6, 6, 7, 7]


# ------------------------------------------------------------------------------------ adaptive
def test_adaptive_is_equation_1() -> None:
    """L = 12, alpha = 1/3.

    T  f  bound f + ceil((12 - f)/3)  smallest active gradient (counted from 1)   f(T)
    1  0          4                     layer 2                                      2
    2  2          6  (5 1/3 up)         layer 9                                      6
    3  6          8                     layer 7                                      7
    4  7          9  (8 2/3 up)         layer 12                                     9
    """
    smallest_at = [2, 9, 7, 12]
    norms: list[Norms] = [tuple(0.1 if layer == m else 1.0 for layer in range(1, 13)) for m in smallest_at]
    assert run(AdaptivePolicy(1 / 3), 12, 4, norms) == [2, 6, 7, 9]


# ------------------------------------------------------------------------------------ autofreeze
def test_autofreeze() -> None:
    """L = 5.

    T  norms                  change since before, active   median   first at or above   f
    1  1    1    1    1   1   -                             -        -                   0
    2  .9   .8   .5   .4  .3  .1  .2  .5  .6  .7            .5       layer 3             2
    3  0    0    .4   .1  .3          .2  .75  0            .2       layer 3             2
    4  0    0    .4   .2  .6          0   1    1            1        layer 4             3
    """
    norms: list[Norms] = [
        (1.0, 1.0, 1.0, 1.0, 1.0),
        (0.9, 0.8, 0.5, 0.4, 0.3),
        (0.0, 0.0, 0.4, 0.1, 0.3),
        (0.0, 0.0, 0.4, 0.2, 0.6),
    ]
    assert run(AutoFreezePolicy(50), 5, 4, norms) == [0, 2, 2, 3]


# ------------------------------------------------------------------------------------ schedule
REFUSED = {
    "that maps each": {},
    "decreases from 0.75 layers at epoch 0 to 0.5 at epoch 1": {0: 0.75, 1: 0.5},
    "decreases from all layers": {0: "all", 1: 3},
    "several entries for the same epoch": {"1": 4, "1.0": "all"},
    "has 1.5 at epoch 0, but .* a share of all layers between 0 and 1": {0: 1.5},
    "or 'all'": {0: "most"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_schedule_refuses(words: str) -> None:
    with pytest.raises(ValueError, match="freeze_schedule.*" + words):
        make_policy("schedule", schedule=REFUSED[words])  # type: ignore[arg-type]


def test_schedule_beyond_the_model_is_refused_at_the_first_decision() -> None:
    with pytest.raises(ValueError, match="requests 13 frozen layers, but the model has 12"):
        next_num_frozen(SchedulePolicy({9: 13}), decision(0))
    with pytest.raises(ValueError, match="nothing to train: at most 11 can be frozen"):
        next_num_frozen(SchedulePolicy({9: 12}), decision(0, max_frozen=11))


def test_schedule_takes_all_layers_or_a_share_of_them() -> None:
    policy = SchedulePolicy({"0": 2, "3": "all"})  # what leaves something to train
    asked = [decision(t, max_frozen=11, epoch=float(t)) for t in range(5)]
    assert [next_num_frozen(policy, one) for one in asked] == [2, 2, 2, 11, 11]
    policy = SchedulePolicy({0: 1, 100: 4}, by="step")
    assert [policy.num_frozen(decision(epoch=7, global_step=step)) for step in (0, 99, 100, 1000)] == [1, 1, 4, 4]
    policy = SchedulePolicy({"0": 0.5, "2": 5, "3": 0.75})
    assert [policy.num_frozen(decision(epoch, num_layers=7)) for epoch in range(4)] == [3, 3, 5, 5]
    with pytest.raises(ValueError, match=r"decreases from 5 layers at epoch 0 to 3 at epoch 1"):
        SchedulePolicy({0: 5, 1: 0.5}).num_frozen(decision(0, num_layers=7))


# ------------------------------------------------------------------------------------ what holds for all
@given(
    num_layers=st.integers(1, 60),
    alpha=st.floats(1e-6, 1 - 1e-6),
    decisions=st.integers(1, 12),
    cap=st.none() | st.integers(1, 80),
    trainable_head=st.booleans(),
    data=st.data(),
)
def test_monotone_and_bounded(
    num_layers: int, alpha: float, decisions: int, cap: int | None, trainable_head: bool, data: st.DataObject
) -> None:
    most = num_layers if trainable_head else num_layers - 1
    steps = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True).map(sorted))
    layers = sorted(data.draw(st.lists(st.integers(0, most), min_size=len(steps), max_size=len(steps))))
    policies = [
        NeverFreeze(),
        AlphaPolicy(alpha),
        AdaptivePolicy(alpha),
        AutoFreezePolicy(data.draw(st.floats(0, 100))),
        SchedulePolicy(dict(zip(steps, layers, strict=True))),
    ]
    norm = st.floats(0, 1e30)
    observed = data.draw(st.lists(st.none() | st.tuples(*[norm] * num_layers), min_size=decisions, max_size=decisions))
    for policy in policies:
        f = 0
        for t, norms in enumerate(observed):
            following = next_num_frozen(policy, decision(t, num_layers, f, norms=norms, max_frozen=most), cap)
            assert f <= following <= min(most, cap or math.inf)
            f = following


class Whatever(FreezePolicy):
    """A user's policy with a given answer."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def num_frozen(self, decision: FreezeDecision) -> int:
        return self.answer  # type: ignore[return-value]


def test_a_users_policy_is_kept_within_bounds() -> None:
    for answer, expected in ((0, 3), (5, 5), (99, 11)):
        assert next_num_frozen(Whatever(answer), decision(4, num_frozen=3, max_frozen=11)) == expected
    for wrong in (None, 2.0, -1, True):
        with pytest.raises(ValueError, match=rf"Whatever.num_frozen returned {wrong!r} at decision 4"):
            next_num_frozen(Whatever(wrong), decision(4))


# ------------------------------------------------------------------------------------ names, arguments, ranks


def test_the_arguments_name_all_policies() -> None:
    assert tuple(POLICIES) == FREEZE_POLICIES
