"""Users' losses, collators, models, callbacks, samplers and optimizers: equal to one process, or refused."""

from __future__ import annotations

import pytest
from user_code import kit, runner

PARTS = 2
"""Of a group, so that several workers share it."""


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
    "collator with its own generator",
    "supervised contrastive",
    "class weights in training only",
    "variance over the batch",
    "gradient penalty",
    "running mean of the loss in the trainer",
)
"""Those of `make test`: one for each question that is asked before the first step."""


@pytest.mark.timeout(300)
def test_one_of_each_kind():
    check([(case, "K2") for case in IN_SHORT])


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_what_is_easily_missed():
    """The others of these tests take minutes; these cases are what the examination before the first step is for."""
    unseen = [e for e in runner.entries_of() if kit.CASES[e[0]].make.__module__.endswith(".unseen")]
    check([e for e in unseen if e[0] not in IN_SHORT and (is_first(e) or e[1].startswith("DP2"))])
