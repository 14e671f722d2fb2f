"""Frozen modules that the loss calls are computed once for each sample; weights are those of the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from called_runs import (
    BATCH,
    EPOCHS,
    SAMPLES,
    Case,
    Distills,
    DistillsStates,
    Prefers,
    PrefersWithoutAdapters,
    Result,
    classifier,
    frozen,
    language_model,
    pairs,
    texts,
    trained,
    with_adapters,
)
from distributed import run_ranks

ROUNDING = 2e-6
"""Where a sample is in a batch of another width than when it was computed."""


def causal() -> list[dict[str, object]]:
    return texts(is_causal=True)


CASES = {
    "a classifier": Case(Distills, lambda: classifier(2), lambda: frozen(classifier(4))),
    "a language model": Case(Distills, lambda: language_model(2), lambda: frozen(language_model(4)), causal),
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


# ------------------------------------------------------------------------------------------ two processes
def in_two_processes(rank: int, world_size: int, folder: str, name: str, options: dict[str, Any]) -> Result:
    return trained(Path(folder) / "two", CASES[name], **options)


TWO: list[tuple[str, dict[str, Any]]] = [
    ("a classifier", {"pipeline_parallel_size": 2}),
    ("a language model", {"pipeline_parallel_size": 2}),
    ("a reference model", {"pipeline_parallel_size": 2}),
    ("a classifier", {}),
    ("without adapters", {"pipeline_parallel_size": 2}),
    ("without adapters", {}),
]


@pytest.mark.parametrize(("name", "options"), TWO)
def test_two_processes(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """In two stages the process that computes the loss reads; of two replicas each reads its samples."""
    options = {**options, "per_device_train_batch_size": BATCH // 2}
    results = run_ranks(in_two_processes, 2, str(tmp_path), name, options, timeout=200)
    expected = trained(tmp_path / "stock", CASES[name], is_ours=False)
    for result in results:
        print(result.text)
        assert result.losses == pytest.approx(expected.losses, abs=1e-5)
        for of, weight in expected.weights.items():
            torch.testing.assert_close(result.weights[of], weight, atol=5e-6, rtol=1e-5, msg=of)
    is_read = name != "without adapters" or "pipeline_parallel_size" not in options
    assert (max(result.num_read for result in results) > 0) is is_read
