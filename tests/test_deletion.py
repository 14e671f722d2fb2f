"""Where parts cannot be imported, a training that asks for none runs; the argument that asks for one is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deletion_job import ASKS, PARTS

JOB = Path(__file__).with_name("deletion_job.py")
ONES = [*(f"parts.{name}" for name in PARTS), "token_slices"]
ARGUMENT = {
    "parts.driven": "loss_reduction",
    "parts.freezing": "freeze_policy='alpha'",
    "parts.front": "activation_cache='on'",
    "parts.loss_effects": "an overridden compute_loss",
    "parts.prefix_cache": "activation_cache='on'",
    "parts.watchdog": "watchdog_timeout=20.0",
    "token_slices": "token_slices",
}


def trained_without(folder: Path, *names: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, str(JOB), str(folder), *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    lines = [line for line in job.stdout.splitlines() if line.startswith('{"')]
    assert job.returncode == 0 and lines, job.stderr[-3000:]
    results: dict[str, dict[str, Any]] = json.loads(lines[-1])
    return results


def check(results: dict[str, dict[str, Any]], wanted: float) -> None:
    for name, result in results.items():
        for weights in (*result["one"], *result["two"]):
            assert isinstance(weights, float), (name, weights)
            assert weights == pytest.approx(wanted, abs=1e-5), name
        assert (name in ASKS) == bool(result["asked"])
        for answer in result["asked"]:
            assert str(answer).startswith("ValueError: ") and ARGUMENT[name] in str(answer), (name, answer)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plain_training_needs_no_part(tmp_path: Path) -> None:
    results = trained_without(tmp_path, "none", "all")
    check({"all": results["all"]}, results["none"]["one"][0])
    for modules in results["none"]["loaded"]:  # nothing is frozen, and the loss is of transformers
        assert {"front", "frozen_calls", "prefix_cache.part"}.isdisjoint(modules) and "records.part" in modules


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("some", [ONES[:5], ONES[5:]], ids=["first", "others"])
def test_each_part_can_be_deleted(some: list[str], tmp_path: Path) -> None:
    results = trained_without(tmp_path, "none", *some)
    wanted = results.pop("none")["one"][0]
    check(results, wanted)
