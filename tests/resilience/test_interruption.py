"""Ctrl-C, as a terminal sends it to a launcher: one line, all gone, no cache left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from distributed import patient, slowness
from test_restarts import TESTS, command, environment

MOST_SECONDS = 30.0
"""Until the launcher has ended, too. A launcher kills processes that have not ended after 30 seconds."""
PROCESSES = 2


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    jobs: list[subprocess.Popen[str]] = []
    yield jobs
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def launch(launcher: str, port: int, folder: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *command(launcher, port, PROCESSES, restarts=0),
            str(TESTS / "interrupted_job.py"),
            str(folder),
            *map(str, arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd=folder,
        start_new_session=True,  # the process group of a terminal's foreground job
    )


def interrupt(job: subprocess.Popen[str], folder: Path, after: int) -> tuple[str, float]:
    """Press Ctrl-C after some steps. Returns the output, and the seconds until the launcher had ended."""
    deadline = time.monotonic() + patient(200)
    file = folder / "steps"
    while not file.exists() or len(file.read_text().splitlines()) < after:
        assert time.monotonic() < deadline and job.poll() is None, job.stdout and job.stdout.read()
        time.sleep(0.02)
    began = time.monotonic()
    os.killpg(job.pid, signal.SIGINT)
    output, _ = job.communicate(timeout=patient(60))
    print(output)
    assert job.returncode != 0
    return output, time.monotonic() - began


@pytest.mark.parametrize(("launcher", "saves"), [("torchrun", True), ("accelerate", False)])
@pytest.mark.slow
def test_one_line_and_everybody_is_gone(
    launcher: str, saves: bool, tmp_path: Path, free_port: int, started: list[subprocess.Popen[str]]
) -> None:
    job = launch(launcher, free_port, tmp_path, 5 if saves else 0)
    started.append(job)
    output, seconds = interrupt(job, tmp_path, after=12)
    (line,) = re.findall(r".*Interrupted at step .*", output)
    cache = tmp_path / "_hf_pipetransformer_run_cache"
    if saves:
        saved = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("checkpoint-*")]
        assert f"Resume from {tmp_path}/checkpoint-{max(saved)}." in line
        assert f"The activation cache is kept in {cache}" in line and cache.is_dir()
    else:
        assert f"No checkpoint was saved. The activation cache in {cache} was removed." in line
        assert not cache.exists()
    assert "hf_pipetransformer/" not in output, "a process has printed a traceback"
    assert seconds < MOST_SECONDS * slowness()
