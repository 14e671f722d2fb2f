"""Users' losses, collators, models, callbacks, samplers and optimizers: equal to one process, or refused."""

from __future__ import annotations

import pytest
from user_code import kit, runner

PARTS = 2
"""Parts of a group of cases: several workers share a group."""


def check(entries):
    findings = runner.examine(entries)
    assert [finding.entry for finding in findings] == entries
    failed = [f"{f.case} [{f.layout}]: {f.verdict}: {f.reason}\n{f.trace}" for f in findings if not f.is_expected]
    assert not failed, "\n\n".join(failed)


def is_first(entry: runner.Entry) -> bool:
    """Whether it is the case's pipeline, or first, layout: the others take more than twice as long together."""
    layouts = kit.CASES[entry[0]].layouts
    return entry[1] == ("K2" if "K2" in layouts else layouts[0])


@pytest.mark.faults  # minutes, on a quiet machine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("group", kit.GROUPS)
@pytest.mark.parametrize("in_first", [True, False], ids=["", "other layouts"])
def test_equal_or_refused(group, part, in_first):
    check([entry for entry in runner.entries_of(groups=[group]) if is_first(entry) is in_first][part::PARTS])


IN_SHORT = (
    "mixup inside forward",
    "noise and deep supervision in training",
    "ema teacher updated in forward",
    "supervised contrastive",
    "class weights in training only",
    "variance over the batch",
    "gradient penalty",
    "running mean of the loss in the trainer",
    "l2 of trainable parameters",
    "counter in a closure",
)
"""One case for each question that the trainer examines before the first step."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
def test_one_of_each_kind(part):
    check([(case, "K2") for case in IN_SHORT[part::PARTS]])


# ---------------------------------------------------------------------------------------------------------
# The comparison itself
# ---------------------------------------------------------------------------------------------------------


def verdict(ranks, reference=None, expect="exact"):
    case = kit.Case("c", "", "loss", lambda _: None, ("K2",), expect, "reason")
    reference = reference or runner.Outcome(losses=[1.0, 0.5], steps=2)
    return runner.judge(case, kit.LAYOUTS["K2"], reference, ranks)


def outcome(**changes):
    return runner.Outcome(**{"losses": [1.0, 0.5], "steps": 2, **changes})


def refusal(steps=0):
    return runner.Outcome(error="ValueError: the reason is this", is_refusal=True, steps=steps)


def test_verdicts():
    assert verdict([outcome(), outcome()]).verdict == "equal"
    assert verdict([outcome(), outcome(losses=[1.0, 0.501])]).verdict == "SILENTLY DIFFERENT"
    assert verdict([outcome(), outcome(steps=1)]).verdict == "SILENTLY DIFFERENT"
    assert verdict([outcome(losses=[1.0, float("nan")])]).verdict == "SILENTLY DIFFERENT"
    assert verdict([refusal(), refusal()]).verdict == "refused"
    assert verdict([refusal(2), refusal(2)]).verdict == "stopped"
    assert verdict([refusal(), outcome()]).verdict == "crash"
    assert verdict([refusal(), runner.Outcome(error="it was still running", is_hang=True)]).verdict == "crash"
    assert verdict([runner.Outcome(error="it was still running", is_hang=True)] * 2).verdict == "hang"
    assert verdict([outcome()], runner.Outcome(error="KeyError: labels")).verdict == "no reference"


def test_what_is_expected():
    assert verdict([refusal()], expect="exact").is_expected
    assert not verdict([refusal()], expect="equal").is_expected
    other = runner.Outcome(error="ValueError: something else", is_refusal=True)
    assert not verdict([other], expect="refused").is_expected
