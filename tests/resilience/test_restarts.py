"""A job that a launcher starts again goes on by itself: one restart, the same final weights. One that its launcher was
told to end (SIGTERM) goes on when it is started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import patient
from faults import EVERYONE, Fault, Report
from test_faults import Recorder, assert_nothing_lost, expected, row_of, steps_lost, when
from training_runs import Outcome

from hf_pipetransformer.run.checkpoint_folders import SAVING, latest_valid

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PROCESSES = 4
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "torchrun-c10d": ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
    "accelerate": ["-m", "accelerate.commands.launch", f"--config_file={ROOT / 'accelerate_configs/cpu_4.yaml'}"],
}
FAULTS = {
    "torchrun": Fault("kill", 2, "step", 4),
    "torchrun-c10d": Fault("stop", 1, "save", 5),
    "accelerate": Fault("kill", 1, "publish", 5),
}


def environment() -> dict[str, str]:
    """The environment without variables of these tests' launcher. Warnings are on; the tests hide them."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "ACCELERATE"))}
    mine["TRANSFORMERS_VERBOSITY"] = "warning"
    return {**mine, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def command(launcher: str, port: int, processes: int = PROCESSES, restarts: int = 2) -> list[str]:
    options = [
        f"--max_restarts={restarts}",
        f"--{'num_processes' if launcher == 'accelerate' else 'nproc_per_node'}={processes}",
    ]
    if launcher in ("torchrun", "accelerate"):
        options.append(f"--{'main_process_port' if launcher == 'accelerate' else 'master_port'}={port}")
    return [sys.executable, *LAUNCHERS[launcher], *options]


def run_job(commands: Sequence[list[str]], folder: Path, fault: Fault, timeout: float, succeeds: bool = True) -> str:
    """Run launchers side by side, one for each host. All must succeed, or all must fail. Returns their output."""
    logs = folder / f"log{len(list(folder.glob('log*')))}"
    logs.mkdir()
    job = [str(TESTS / "fault_job.py"), str(folder), fault.kind, str(fault.rank), fault.phase, str(fault.step)]
    jobs = []
    for number, launch in enumerate(commands):
        with (logs / str(number)).open("w") as log:
            jobs.append(
                subprocess.Popen(
                    launch + job, stdout=log, stderr=log, env=environment(), cwd=folder, start_new_session=True
                )
            )
    try:
        codes = [process.wait(patient(timeout)) for process in jobs]
    finally:
        for process in jobs:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output = "".join(path.read_text() for path in sorted(logs.iterdir()))
        print(output)
    assert [code == 0 for code in codes] == [succeeds] * len(jobs), codes
    return output


def attempts_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]


def final_report(folder: Path) -> Report:
    report: Report = torch.load(folder / "final.pt", weights_only=False)
    return report


def check(
    folder: Path, output: str, fault: Fault, record_property: Recorder, how: str, wanted: Outcome | None = None
) -> None:
    """Expect one restart and no lost step; write a row of the table.

    Args:
        wanted: the expected outcome; None: as one process.
    """
    attempts, report = attempts_of(folder), final_report(folder)
    # (where one host restarts because the other one does, its launcher does not count it)
    assert len(attempts) == 2 and attempts[0]["restarts"] == 0 and attempts[1]["restarts"] <= 1
    assert_nothing_lost([report], wanted or expected())
    _, step = when(folder)
    if fault.kind in ("term", "preempt"):
        assert f"Received SIGTERM and saved checkpoint-{report.resumed_step}." in output
        lost = 0
    else:
        lost = steps_lost(fault, step, report.resumed_step)
        assert 0 <= lost <= 2
    last = attempts[-1]
    seconds = report.first_step_at - when(folder)[0] - (last["imported_at"] - last["started_at"])
    more = {"restarts": len(attempts) - 1, "without_imports": round(seconds, 2)}
    row = row_of(fault, folder, last["started_at"], report.first_step_at, lost, f", {how}", **more)
    record_property("fault", row)


def assert_named(output: str, fault: Fault) -> None:
    """(Of a process that is gone, the others know the phase of its last beat.)"""
    assert re.search(rf"rank {fault.rank} \(host .*\).* could not be reached for", output)


def preempt(commands: Sequence[list[str]], folder: Path, timeout: float, record_property: Recorder, how: str) -> None:
    """Let every launcher get SIGTERM, as from a scheduler, and start the job again."""
    fault = Fault("preempt", EVERYONE, "step", 4)
    output = run_job(commands, folder, fault, timeout, succeeds=False)
    newest, problems = latest_valid(folder)
    assert newest is not None and not problems and not (folder / SAVING).exists()
    assert not (folder / "final.pt").exists()
    run_job(commands, folder, fault, timeout)
    assert newest.name == f"checkpoint-{final_report(folder).resumed_step}"
    check(folder, output, fault, record_property, how)


@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=[] if name == "accelerate" else [pytest.mark.faults]) for name in LAUNCHERS]
)
@pytest.mark.slow
def test_a_launcher_restarts_the_job_once(
    launcher: str, tmp_path: Path, free_port: int, record_property: Recorder
) -> None:
    fault = FAULTS[launcher]
    output = run_job([command(launcher, free_port)], tmp_path, fault, timeout=200)
    assert_named(output, fault)
    check(tmp_path, output, fault, record_property, launcher)


@pytest.mark.faults
def test_after_a_sigterm_to_one_process_the_launcher_restarts_the_job(
    tmp_path: Path, free_port: int, record_property: Recorder
) -> None:
    """The launcher knows no exit code that means "resume later"."""
    fault = Fault("term", 2, "build", 5)
    output = run_job([command("torchrun", free_port)], tmp_path, fault, timeout=200)
    check(tmp_path, output, fault, record_property, "torchrun")


@pytest.mark.faults
def test_a_job_whose_launcher_is_told_to_end_goes_on_when_it_is_started_again(
    tmp_path: Path, free_port: int, record_property: Recorder
) -> None:
    """(`test_hosts.py` has torchrun.)"""
    preempt([command("accelerate", free_port)], tmp_path, 200, record_property, "accelerate")
