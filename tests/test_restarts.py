"""A job that a launcher starts again goes on by itself: one restart, the same final weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Fault, Report
from test_faults import expected, steps_lost
from training_runs import assert_same_training

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PROCESSES = 4
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "torchrun-standalone": ["-m", "torch.distributed.run", "--standalone"],
    "torchrun-c10d": ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
    "accelerate": ["-m", "accelerate.commands.launch", f"--config_file={ROOT / 'accelerate_configs/cpu_4.yaml'}"],
}
FAULTS = {
    "torchrun": Fault("kill", 2, "step", 4),
    "torchrun-standalone": Fault("kill", 0, "move", 5),
    "torchrun-c10d": Fault("stop", 1, "save", 5),
    "accelerate": Fault("kill", 1, "publish", 5),
}


def environment() -> dict[str, str]:
    """Without what the launcher of these tests may have set."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "ACCELERATE"))}
    return {**mine, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def command(launcher: str, port: int) -> list[str]:
    options = [
        "--max_restarts=2",
        f"--{'num_processes' if launcher == 'accelerate' else 'nproc_per_node'}={PROCESSES}",
    ]
    if launcher in ("torchrun", "accelerate"):
        options.append(f"--{'main_process_port' if launcher == 'accelerate' else 'master_port'}={port}")
    return [sys.executable, *LAUNCHERS[launcher], *options]


def run_job(commands: Sequence[list[str]], folder: Path, fault: Fault, timeout: float) -> str:
    """Run launchers side by side, one for each host; returns what they printed."""
    (folder / "log").mkdir()
    job = [str(TESTS / "fault_job.py"), str(folder), fault.kind, str(fault.rank), fault.phase, str(fault.step)]
    jobs = []
    for number, launch in enumerate(commands):
        with (folder / "log" / str(number)).open("w") as log:
            jobs.append(
                subprocess.Popen(
                    launch + job, stdout=log, stderr=log, env=environment(), cwd=folder, start_new_session=True
                )
            )
    try:
        codes = [process.wait(timeout) for process in jobs]
    finally:
        for process in jobs:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    output = "".join(path.read_text() for path in sorted((folder / "log").iterdir()))
    print(output)
    assert codes == [0] * len(jobs)
    return output


def check(folder: Path, output: str, fault: Fault, record_property: Callable[[str, Any], None], how: str) -> None:
    assert f"rank {fault.rank} " in output and f"in phase {fault.phase!r}" in output
    attempts = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    # (where one host restarts because the other one does, its launcher does not count it)
    assert len(attempts) == 2 and attempts[0]["restarts"] == 0 and attempts[1]["restarts"] <= 1
    report: Report = torch.load(folder / "final.pt", weights_only=False)
    assert_same_training([report.outcome], expected())
    happened_at, step = (float(number) for number in (folder / "fault").read_text().split())
    lost = steps_lost(fault, int(step), report.resumed_step)
    assert 0 <= lost <= 2
    last = attempts[-1]
    row = {
        "fault": f"{fault.kind}, {how}",
        "phase": fault.phase,
        "rank": fault.rank,
        "restarts": len(attempts) - 1,
        "steps_lost": lost,
        "seconds_until_all_ended": round(last["started_at"] - happened_at, 2),
        "seconds_to_recover": round(report.first_step_at - happened_at, 2),
        "without_imports": round(report.first_step_at - happened_at - (last["imported_at"] - last["started_at"]), 2),
        "final weights": "equal",
    }
    record_property("fault", json.dumps(row))


@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=[] if name == "accelerate" else [pytest.mark.faults]) for name in LAUNCHERS]
)
def test_a_launcher_restarts_the_job_once(
    launcher: str, tmp_path: Path, free_port: int, record_property: Callable[[str, Any], None]
) -> None:
    fault = FAULTS[launcher]
    output = run_job([command(launcher, free_port)], tmp_path, fault, timeout=200)
    check(tmp_path, output, fault, record_property, launcher)
