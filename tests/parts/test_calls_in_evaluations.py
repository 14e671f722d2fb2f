"""Frozen modules that the loss calls in evaluations are read from the second evaluation of a data set on."""

from __future__ import annotations

import re
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
    OnSampled,
    PrefersWithoutAdapters,
    Result,
    Rows,
    classifier,
    frozen,
    pairs,
    texts,
    trained,
    with_adapters,
)
from distributed import run_ranks
from torch import nn
from transformers import TrainerCallback

ROUNDING = 2e-6
NUM_EVALUATED = 10
EACH_EPOCH = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2}


def others() -> Rows:
    """Samples that the training does not have."""
    return [{**row, "input_ids": row["input_ids"].flip(0)} for row in texts()[:NUM_EVALUATED]]


class Changes(TrainerCallback):
    """The teacher's weights change before the last evaluation."""

    teacher: nn.Module

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.epoch >= EPOCHS - 0.5:
            with torch.no_grad():
                next(self.teacher.parameters()).mul_(1.5)


def follow(trainer: Any) -> None:
    callback = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Changes))
    callback.teacher = trainer.teacher


def distilling(mixin: type = Distills, **given: Any) -> Case:
    return Case(
        mixin, lambda: classifier(2), lambda: frozen(classifier(4)), options=EACH_EPOCH, eval_rows=others, **given
    )


CASES = {
    "a teacher": distilling(),
    "a teacher that changes": distilling(callback=Changes, prepare=follow),
    "on sampled tokens": distilling(OnSampled),
    "without adapters": Case(
        PrefersWithoutAdapters,
        with_adapters,
        None,
        pairs,
        options={**EACH_EPOCH, "label_names": ["input_ids"]},
        eval_rows=lambda: pairs()[::-2],
    ),
}
READ = {
    "a teacher": 2 * NUM_EVALUATED
    - 2 * 2,  # of the second and third evaluation, without the batches that are compared
    "a teacher that changes": NUM_EVALUATED - 2,
    "on sampled tokens": 0,
    "without adapters": 0,  # no step has called the model in evaluation mode
}


def num_read(result: Result) -> int:
    return sum(int(n) for n in re.findall(r"was read in evaluations for (\d+) of", result.text))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_stock_trainer(name: str, tmp_path: Path) -> None:
    expected = trained(tmp_path / "stock", CASES[name], is_ours=False)
    ours = trained(tmp_path / "ours", CASES[name])
    print(ours.text)
    assert len(ours.losses) == EPOCHS * SAMPLES // BATCH + EPOCHS
    assert ours.difference(expected) <= ROUNDING
    assert num_read(ours) == READ[name]
    assert not [path for path in (tmp_path / "ours").iterdir() if "cache" in path.name], "removed at the end"


def in_two_processes(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> Result:
    return trained(folder, CASES["a teacher"], **options)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_two_processes(stages: int, tmp_path: Path) -> None:
    expected = trained(tmp_path / "stock", CASES["a teacher"], is_ours=False)
    options = {
        "pipeline_parallel_size": stages,
        "per_device_train_batch_size": BATCH // 2,
        "per_device_eval_batch_size": 2,
        "activation_cache": "on",  # "auto" depends on times
    }
    ours = run_ranks(in_two_processes, 2, str(tmp_path / "ours"), options, timeout=200)
    print(ours[0].text)
    for result in ours:
        assert result.losses == pytest.approx(expected.losses, abs=1e-5)
    assert sum(map(num_read, ours)) > 0
