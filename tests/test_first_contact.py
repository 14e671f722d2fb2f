"""`benchmarks/first_contact.py`: its bookkeeping, and all its steps on the CPU and on the tests' accelerator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import fake_device
import first_contact
import psutil
import pytest
import torch
from first_contact_runs import SIZES
from first_contact_steps import STEPS

ROOT = Path(first_contact.__file__).parents[1]

WORKER = """
    import json, os, subprocess, sys, time
    request = json.load(open(sys.argv[1]))
    json.dump({"figures": {"folder": request["folder"]}, "checks": {"holds": request["step"] != "cache"}},
              open(sys.argv[2], "w"))
    if request["step"] == "machine":
        raise ValueError("this step fails")
    if request["step"] == "parity":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(os.environ["CHILD"], "w").write(str(child.pid))
        time.sleep(60)
    if request["step"] == "overflow":
        before = json.load(open(os.environ["RESULTS"]))["steps"]
        assert list(before) == ["machine", "parity", "cache"]
"""
"""A step that raises, one that hangs with a process of its own, one whose check does not hold, and one that passes."""


def run_with(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    worker, output = folder / "worker.py", folder / "results.json"
    worker.write_text(textwrap.dedent(WORKER))
    monkeypatch.setattr(first_contact, "WORKER", worker)
    monkeypatch.setenv("CHILD", str(folder / "child"))
    monkeypatch.setenv("RESULTS", str(output))
    code = first_contact.main(["--output", str(output), *arguments])
    return code, json.loads(output.read_text())


def runs(pid: int) -> bool:
    """Whether the process is there, and not only waits for somebody to ask how it ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_fails_is_recorded_and_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_contact, "LEAST_SECONDS", 0.1)
    wanted = ("machine", "parity", "cache", "overflow")
    code, results = run_with(monkeypatch, tmp_path, "--minutes", "0.4", "--steps", *wanted)
    steps = results["steps"]
    assert code == 1
    assert {name: step["status"] for name, step in steps.items()} == {
        "machine": "error",
        "parity": "timed out",
        "cache": "failed",
        "overflow": "passed",
    }
    assert "ValueError: this step fails" in steps["machine"]["error"]
    assert all("folder" in step["figures"] for step in steps.values())  # also of those that were ended
    assert steps["parity"]["seconds"] < 24
    assert not runs(int((tmp_path / "child").read_text()))  # what the step had started has ended with it
    assert not any(Path(step["figures"]["folder"]).exists() for step in steps.values())
    assert results["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert results["date"] and results["options"]["minutes"] == 0.4


def test_each_step_has_a_function() -> None:
    assert list(first_contact.STEPS) == list(STEPS)
    assert set(first_contact.MODEL_SIZES) == {"auto", *SIZES}


def results_of(folder: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """The results of the script, in a process of its own; it has failed if a step has."""
    output = folder / "results.json"
    paths = (environment.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, first_contact.__file__, "--output", str(output), "--minutes", "10", *arguments]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    results = json.loads(output.read_text())
    broken = {name: step for name, step in results["steps"].items() if step["status"] != "passed"}
    assert run.returncode == 0 and not broken, json.dumps(broken, indent=1)
    return results


@pytest.mark.slow
@pytest.mark.timeout(650)
@pytest.mark.faults  # it kills a process, and takes minutes
def test_all_steps_on_the_cpu(tmp_path: Path) -> None:
    steps = results_of(tmp_path, "--use_cpu")["steps"]
    figures = {name: step["figures"] for name, step in steps.items()}
    assert list(steps) == list(first_contact.STEPS)
    assert figures["machine"]["device"] == "cpu" and figures["machine"]["model"]["layers"] == SIZES["tiny"].layers
    assert figures["parity"]["ours_differs_from_stock_by"] == 0.0
    for frozen in SIZES["tiny"].frozen:
        cached = figures["cache"][f"f{frozen}"]
        assert cached["cache"]["cached_layers"] == frozen and cached["read_ms"] > 0 < cached["uncached_ms"]
    assert figures["overflow"]["ours"]["skipped"].count(True) == 1
    assert figures["three_stages"]["stage_bounds"][1] <= figures["three_stages"]["frozen_layers"]
    assert [end["exit_code"] for end in figures["two_stages"]["processes"]] == [0, 0]
    assert figures["killed_rank"]["processes"][1]["exit_code"] == -9
    assert len(figures["epochs"]["a"]["epoch_seconds"]) == len(figures["epochs"]["g"]["epoch_seconds"]) == 3


REGISTERING = """
    import fake_device, os, pathlib, torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    fake_device.register(pathlib.Path(os.environ["FAKE_DEVICE"]))
    try:
        torch.empty(1).pin_memory()
    except NotImplementedError:  # the device has no pinned memory
        torch.Tensor.pin_memory = lambda self, *_: self
    if "RANK" in os.environ:
        PartialState._prepare_backend = lambda self, *_, **__: ("gloo", DistributedType.MULTI_GPU)
"""
"""What each Python of the script runs first (`sitecustomize`), so that Accelerate knows the device."""


@pytest.mark.slow
@pytest.mark.timeout(650)
@pytest.mark.skipif(fake_device.compiler() is None, reason="there is no C++ compiler")
def test_steps_on_a_device_that_behaves_like_an_accelerator(tmp_path: Path) -> None:
    """With it, what processes send each other is copied through the host's memory, as on one GPU."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(REGISTERING))
    steps = results_of(
        tmp_path,
        *("--model_size", "tiny"),
        *("--steps", "machine", "cache", "overflow", "two_stages", "three_stages"),
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(Path(fake_device.__file__).parent)]),
        FAKE_DEVICE=str(fake_device.build()),
        **fake_device.ENVIRONMENT,
    )["steps"]
    assert steps["machine"]["figures"]["device"] == "fake"
    assert steps["two_stages"]["checks"]["stages_need_less_memory"]
    assert steps["cache"]["figures"]["f4"]["read_peak_bytes"] < steps["cache"]["figures"]["f4"]["fill_peak_bytes"]
