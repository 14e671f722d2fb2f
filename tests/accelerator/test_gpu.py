"""On a CUDA device: what the other tests show on the CPU, and how often a step waits for the device.

`pytest -m gpu` runs them; without such a device they are skipped. `benchmarks/first_contact.py` does more.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from first_contact_ranks import Job, run_job
from first_contact_runs import SIZES, WARM_UP, Losses, Setting, Synchronisations, Training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = SIZES["tiny"]
FROZEN = SIZE.frozen[1]
FREEZING = {"freeze_policy": "schedule", "freeze_schedule": {"0": FROZEN}}
ONE_DEVICE = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def alone() -> Setting:
    """What trains on the device in this process, which has no launcher."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    return Setting(SIZE, False, ".")


def trained(rank: int, world_size: int, *trainings: Training) -> list[tuple[list[float], dict[str, Any]]]:
    """The losses of trainings one after the other, and what they have recorded of the cache."""
    setting, outcomes = alone(), []
    for training in trainings:
        losses = Losses()
        outcome = training.run(setting, [losses])
        outcomes.append((losses.values, outcome.cache))
    return outcomes


def waits(rank: int, world_size: int, training: Training) -> tuple[float, dict[str, int]]:
    """How often a step of the last epoch waits for the device, and where."""
    setting = alone()
    counter = Synchronisations((training.epochs - 1) * SIZE.steps + WARM_UP, SIZE.steps - WARM_UP - 1)
    training.run(setting, [counter])
    return counter.per_step, dict(counter.sites)


def largest_difference(values: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(values, expected, strict=True))


def test_one_stage_has_the_losses_of_the_stock_trainer_in_fp32() -> None:
    """Equal, unless two of the stock Trainer's own trainings differ: kernels may add in another order each time."""
    runs = run_ranks(trained, 1, Training(0), Training(0), Training(1), env=ONE_DEVICE)[0]
    (stock, _), (again, _), (ours, _) = runs
    assert len(stock) == SIZE.steps
    assert largest_difference(ours, stock) <= 10 * largest_difference(again, stock) < 1e-4


def test_what_is_read_from_the_cache_trains_as_what_is_computed_in_bf16() -> None:
    training = Training(1, "bf16", dropout=0.0, epochs=3, options=FREEZING)
    cached, computed = (training.with_options(activation_cache=mode) for mode in ("on", "off"))
    (read, record), (expected, _) = run_ranks(trained, 1, cached, computed, env=ONE_DEVICE)[0]
    assert record["cached_layers"] == FROZEN and record["epochs"][-1]["cache_hit_rate"] == 1.0
    assert len(read) == 3 * SIZE.steps and largest_difference(read, expected) < 2e-2


@pytest.mark.parametrize("cache", ["not frozen", "off", "on"])
def test_a_step_waits_for_the_device_no_more_often_than_the_stock_trainers(cache: str) -> None:
    options = {} if cache == "not frozen" else {**FREEZING, "activation_cache": cache}
    stock, _ = run_ranks(waits, 1, Training(0, "bf16", epochs=3), env=ONE_DEVICE)[0]
    ours, sites = run_ranks(waits, 1, Training(1, "bf16", epochs=3, options=options), env=ONE_DEVICE)[0]
    assert ours <= stock, sites


def test_two_stages_on_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gloo, by copies in the host's memory: NCCL refuses two processes on one device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ONE_DEVICE["CUDA_VISIBLE_DEVICES"])
    training = Training(2, dropout=0.0, options={"num_microbatches": 4})
    ends = run_job(Job(Setting(SIZE, False, str(tmp_path)), training, str(tmp_path)), limit_seconds=200)
    ((expected, _),) = run_ranks(trained, 1, Training(0, dropout=0.0), env=ONE_DEVICE)[0]
    for rank, end in enumerate(ends):
        end.raise_for_error(rank)
        assert end.report["device"] == "cuda:0"
        assert largest_difference(end.report["losses"], expected) < 1e-3
