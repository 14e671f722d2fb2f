"""The claims of the CPU's tests on a CUDA device, and how often a step waits for the device.

`pytest -m gpu` runs them; without such a device they are skipped. `benchmarks/first_contact.py` does more.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest
import torch
from distributed import run_ranks
from first_contact import SIZES, difference, train
from host_copies import use_host_copies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FROZEN = 2 * SIZES["tiny"]["layers"] // 3
FREEZING = {"freeze_policy": "schedule", "freeze_schedule": {"0": FROZEN}}
OPTIONS = argparse.Namespace(use_cpu=False, model_size="tiny")
ONE_DEVICE = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def trained(rank: int, world_size: int, *trainings: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of several trainings, one after the other, in one process without a launcher."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    return [train(OPTIONS, **training) for training in trainings]


def staged(rank: int, world_size: int) -> dict[str, Any]:
    """Over gloo, by copies in the host's memory: NCCL refuses two processes on one device."""
    use_host_copies()
    stages = {"pipeline_parallel_size": 2, "num_microbatches": 4, "ddp_backend": "gloo"}
    return train(OPTIONS, True, dropout=0.0, processes=2, **stages)


def test_one_stage_has_the_losses_of_the_stock_trainer_in_fp32() -> None:
    """Equal, unless two of the stock Trainer's own trainings differ: kernels may add in another order each time."""
    runs = run_ranks(trained, 1, {"ours": False}, {"ours": False}, {"ours": True}, env=ONE_DEVICE)[0]
    stock, again, ours = (run["losses"] for run in runs)
    assert len(stock) == SIZES["tiny"]["steps"]
    assert difference(ours, stock) <= 10 * difference(again, stock) < 1e-4


def test_what_is_read_from_the_cache_trains_as_what_is_computed_in_bf16() -> None:
    training = {"ours": True, "precision": "bf16", "dropout": 0.0, "epochs": 3, **FREEZING}
    modes = ({**training, "activation_cache": mode} for mode in ("on", "off"))
    read, computed = run_ranks(trained, 1, *modes, env=ONE_DEVICE)[0]
    assert read["hit_rates"][-1] == 1.0
    assert difference(read["losses"], computed["losses"]) < 2e-2


@pytest.mark.parametrize("cache", ["not frozen", "off", "on"])
def test_a_step_waits_for_the_device_no_more_often_than_the_stock_trainers(cache: str) -> None:
    options = {} if cache == "not frozen" else {**FREEZING, "activation_cache": cache}
    common = {"precision": "bf16", "epochs": 3, "watched": {"counts_waits": True}}
    stock, ours = run_ranks(
        trained, 1, {"ours": False, **common}, {"ours": True, **common, **options}, env=ONE_DEVICE
    )[0]
    assert ours["waits_per_step"] <= stock["waits_per_step"], ours["waits"]


def test_two_stages_on_one_device() -> None:
    expected = run_ranks(trained, 1, {"ours": False, "dropout": 0.0}, env=ONE_DEVICE)[0][0]["losses"]
    for rank in run_ranks(staged, 2, env=ONE_DEVICE):
        assert difference(rank["losses"], expected) < 1e-3
