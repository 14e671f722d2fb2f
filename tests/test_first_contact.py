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

ROOT = Path(first_contact.__file__).parents[1]
WORKER = """
    import json, os, subprocess, sys, time
    name, record = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--step", "--record"))
    json.dump({"figures": {"step": name}, "checks": {"holds": name != "cache"}}, open(record, "w"))
    if name == "machine":
        raise ValueError("this step fails")
    if name == "parity":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(os.environ["CHILD"], "w").write(str(child.pid))
        time.sleep(60)
"""
"""A step that raises, one that hangs with a process of its own, one whose check does not hold, and one that passes."""


def run_with(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    worker, output = folder / "worker.py", folder / "results.json"
    worker.write_text(textwrap.dedent(WORKER))
    monkeypatch.setenv("CHILD", str(folder / "child"))
    monkeypatch.setattr(first_contact, "__file__", str(worker))
    monkeypatch.setattr(sys, "argv", ["first_contact.py", "--out", str(output), *arguments])
    return first_contact.main(), json.loads(output.read_text())


def runs(pid: int) -> bool:
    """Whether the process is there, and not only waits for somebody to ask how it ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_what_fails_is_recorded_and_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_contact, "LEAST_SECONDS", 0.1)
    wanted = ("machine", "parity", "cache", "overflow")
    code, results = run_with(monkeypatch, tmp_path, "--minutes", "0.2", "--steps", *wanted)
    steps = results["steps"]
    assert code == 1
    assert {name: step["status"] for name, step in steps.items()} == {
        "machine": "error",
        "parity": "timed out",
        "cache": "failed",
        "overflow": "passed",
    }
    assert "ValueError: this step fails" in steps["machine"]["error"]
    assert all(step["figures"] == {"step": name} for name, step in steps.items())  # also of those that were ended
    assert not runs(int((tmp_path / "child").read_text()))  # what the step had started has ended with it
    assert results["date"] and results["options"]["minutes"] == 0.2


# ---------------------------------------------------------------------------------------------------------
# All steps
# ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.timeout(650)
@pytest.mark.faults  # it takes minutes
def test_all_steps_on_the_cpu(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    command = [sys.executable, first_contact.__file__, "--out", str(output), "--minutes", "10", "--use_cpu"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False)
    steps = json.loads(output.read_text())["steps"]
    broken = {name: step for name, step in steps.items() if step["status"] != "passed"}
    assert run.returncode == 0 and not broken, json.dumps(broken, indent=1)
    figures = {name: step["figures"] for name, step in steps.items()}
    assert list(figures) == list(first_contact.NAMES)
    assert figures["machine"]["device"] == "cpu"
    assert figures["parity"]["ours_differs_from_stock_by"] == 0.0
    assert figures["cache"]["f4"]["on"]["hit_rates"][-1] == 1.0


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


IN_STAGES_OR_ALONE = """
    import argparse, json, os, sys
    import first_contact

    options = argparse.Namespace(model_size="tiny", use_cpu=False)
    if "RANK" in os.environ:
        first_contact.as_rank(options, {"folder": sys.argv[1], "arguments": {}, "driven": True})
    else:
        watched = {"compute_loss": first_contact.of_the_user}
        found = first_contact.train(options, True, dropout=0.0, watched=watched)
        json.dump(found, open(os.path.join(sys.argv[1], "alone.json"), "w"))
"""
"""What the step `two_stages` trains on a device with a loss of the user's."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(fake_device.compiler() is None, reason="there is no C++ compiler")
def test_two_stages_on_a_device_that_behaves_like_an_accelerator(tmp_path: Path) -> None:
    """With it, what processes send each other is copied through the host's memory, as on one GPU."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(REGISTERING))
    script = tmp_path / "in_stages_or_alone.py"
    script.write_text(textwrap.dedent(IN_STAGES_OR_ALONE))
    folders = (tmp_path, Path(fake_device.__file__).parent, ROOT, ROOT / "benchmarks")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **fake_device.ENVIRONMENT}
    environment["FAKE_DEVICE"] = str(fake_device.build())
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]):
        subprocess.run([sys.executable, *launcher, str(script), str(tmp_path)], env=environment, check=True)
    alone, *ranks = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "rank0", "rank1"))
    for rank in ranks:
        assert first_contact.difference(rank["losses"], alone["losses"]) < first_contact.LARGEST_DIFFERENCE
        assert 0 < max(rank["peak_bytes"]) < max(alone["peak_bytes"]), "of the device's memory"
