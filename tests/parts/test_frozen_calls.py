"""Frozen modules that the loss calls are computed once for each sample; weights are those of the stock Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from called_runs import (
    BATCH,
    EPOCHS,
    SAMPLES,
    Case,
    Distills,
    DistillsStates,
    Prefers,
    PrefersWithoutAdapters,
    classifier,
    frozen,
    language_model,
    pairs,
    texts,
    trained,
    with_adapters,
)

ROUNDING = 2e-6
"""Where a sample is in a batch of another width than when it was computed."""


def causal() -> list[dict[str, object]]:
    return texts(is_causal=True)


CASES = {
    "a classifier": Case(Distills, lambda: classifier(2), lambda: frozen(classifier(4))),
    "a language model": Case(Distills, lambda: language_model(1), lambda: frozen(language_model(4)), causal),
    "hidden states": Case(DistillsStates, lambda: classifier(2), lambda: frozen(classifier(4))),
    "a reference model": Case(Prefers, lambda: language_model(2), lambda: frozen(language_model(2)), pairs),
    "without adapters": Case(PrefersWithoutAdapters, with_adapters, None, pairs),
    "weights that require gradients": Case(Distills, lambda: classifier(2), lambda: classifier(4).eval()),
}
NAMES = {
    "a language model": "trainer.teacher.model",
    "a reference model": "trainer.teacher.model",
    "without adapters": "trainer.model.base_model.model.model",
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_stock_trainer(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected = trained(tmp_path / "stock", case, is_ours=False)
    ours = trained(tmp_path / "ours", case)
    print(ours.text)
    assert ours.difference(expected) <= ROUNDING
    assert f"Frozen, and called by the loss: {NAMES.get(name, 'trainer.teacher')}. The output" in ours.text
    times = 2 if case.rows is pairs else 1
    assert times * SAMPLES // 2 <= ours.num_read <= times * (EPOCHS - 1) * (SAMPLES - BATCH)
    assert not [path for path in (tmp_path / "ours").iterdir() if "cache" in path.name], "removed at the end"
