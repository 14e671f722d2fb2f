"""User code that is hard to train exactly: equal to the stock Trainer in one process, or refused by name.

The cases are in `adversarial/cases/`. A case that fails today has `fails` in its decorator; see CONTRIBUTING.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from adversarial import runner
from adversarial.kit import CASES

IN_SHORT = (
    "attribute_private",
    "callback_sets_rate",
    "clips_all_parameters",
    "counter_in_objects",
    "data_row",
    "hook_on_inner_layer",
    "in_place",
    "many_calls_or_none",
    "negatives_by_accelerator",
    "parts_of_the_loss_in_log",
    "penalty_from_third_epoch",
    "pickled_in_each_epoch",
    "prompt_first",
    "sets_attribute",
)
"""Cases of `make test`: one or two for each reason for which cases fail, and some that pass."""


def _parameter(name: str, layout: str) -> object:
    marks: list[pytest.MarkDecorator] = [] if name in IN_SHORT else [pytest.mark.slow]
    if reason := CASES[name].fails.get(layout):
        marks.append(pytest.mark.xfail(strict=True, raises=runner.WrongOutcomeError, reason=reason))
    return pytest.param(name, layout, id=f"{name}-{layout}", marks=marks)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "layout"), [_parameter(case.name, layout) for case in CASES.values() for layout in case.layouts]
)
def test_equal_or_refused(name: str, layout: str, tmp_path: Path) -> None:
    runner.check(name, layout, tmp_path)
