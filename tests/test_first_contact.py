"""All steps of `benchmarks/first_contact.py` on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import first_contact
import pytest

ROOT = Path(first_contact.__file__).parents[1]


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
