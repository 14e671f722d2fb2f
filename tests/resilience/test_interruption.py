"""Ctrl-C, as a terminal sends it to a launcher: one line, all gone within three seconds, no cache left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from distributed import launch_ranks
from selection import slow
from test_restarts import ROOT, TESTS, environment
from training_runs import Run, pipeline_trainer
from transformers import TrainerCallback

from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.resilience import exit
from hf_pipetransformer.resilience.interruption import TERMINATED, Interruption
from hf_pipetransformer.resilience.watchdog import progress
from hf_pipetransformer.resilience.watchdog.watchdog import EXIT_CODE

MOST_SECONDS = 3.0
"""On a machine with a core for each program."""
PROCESSES = 2


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    jobs: list[subprocess.Popen[str]] = []
    yield jobs
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def launch(launcher: str, port: int, folder: Path, *arguments: object) -> subprocess.Popen[str]:
    config = ROOT / "accelerate_configs/cpu_2.yaml"
    command = {
        "torchrun": ["-m", "torch.distributed.run", f"--nproc_per_node={PROCESSES}", f"--master_port={port}"],
        "accelerate": ["-m", "accelerate.commands.launch", f"--config_file={config}", f"--main_process_port={port}"],
    }[launcher]
    return subprocess.Popen(
        [sys.executable, *command, str(TESTS / "interrupted_job.py"), str(folder), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd=folder,
        start_new_session=True,  # the process group of a terminal's foreground job
    )


def steps_of(folder: Path) -> int:
    file = folder / "steps"
    return len(file.read_text().splitlines()) if file.exists() else 0


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def interrupt(job: subprocess.Popen[str], folder: Path, after: int) -> tuple[str, float]:
    """Press Ctrl-C after so many steps. Returns what was printed, and the seconds until all ranks were gone.

    A rank is gone when it has ended, whether or not its launcher has looked at it.
    """
    deadline = time.monotonic() + 120
    while steps_of(folder) < after:
        assert time.monotonic() < deadline and job.poll() is None, job.stdout and job.stdout.read()
        time.sleep(0.02)
    ranks = [p for p in psutil.Process(job.pid).children(recursive=True) if "interrupted_job" in " ".join(p.cmdline())]
    assert len(ranks) >= PROCESSES
    began = time.monotonic()
    os.killpg(job.pid, signal.SIGINT)
    while any(map(runs, ranks)):
        assert time.monotonic() < began + 30
        time.sleep(0.01)
    seconds = (time.monotonic() - began) / exit._patience()
    output, _ = job.communicate(timeout=60)
    print(output)
    assert job.returncode != 0
    return output, seconds


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.slow
def test_one_line_and_everybody_is_gone(
    launcher: str, saves: bool, tmp_path: Path, free_port: int, started: list[subprocess.Popen[str]]
) -> None:
    job = launch(launcher, free_port, tmp_path, 5 if saves else 0, 0)
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
    assert seconds < MOST_SECONDS


@pytest.mark.slow
def test_a_process_that_is_blocked_goes_as_well(
    tmp_path: Path, free_port: int, started: list[subprocess.Popen[str]]
) -> None:
    job = launch("torchrun", free_port, tmp_path, 0, 1)
    started.append(job)
    output, seconds = interrupt(job, tmp_path, after=6)
    assert output.count("Interrupted at step") == 1 and not (tmp_path / "_hf_pipetransformer_run_cache").exists()
    assert seconds < MOST_SECONDS


def test_a_signal_to_a_forked_process_is_not_the_parents() -> None:
    """A loader's worker inherits the descriptor that wakes the parent's thread."""
    with Interruption(has_peers=True, tell=lambda: None) as interruption:
        child = os.fork()
        if child == 0:
            with suppress(KeyboardInterrupt):
                time.sleep(30)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGINT)
        assert os.waitpid(child, 0)[1] == 0
        time.sleep(0.1)
        assert not interruption.is_asked


class Blocks(TrainerCallback):
    """A user's callback that waits for something that never comes, in a way that Python cannot interrupt."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and state.is_world_process_zero:
            terminate = f"import os, time; time.sleep(0.5); [os.kill(pid, {signal.SIGTERM:d}) for pid in {PIDS}]"
            subprocess.Popen([sys.executable, "-c", terminate])
            os.read(os.pipe()[0], 1)


PIDS: list[int] = []


def trains_until_sigterm(rank: int, world_size: int, folder: str) -> None:
    progress.DEFAULT_TIMEOUT = 1.0  # of one process, which nobody watches
    trainer = pipeline_trainer(Run(epochs=1), 1, folder, watchdog_timeout=1, ddp_timeout=600)
    PIDS[:] = [os.getpid()]
    if world_size > 1:
        PIDS[:] = [0] * world_size
        torch.distributed.all_gather_object(PIDS, os.getpid())
    trainer.add_callback(Blocks())
    trainer.train()


@pytest.mark.parametrize("world", [1, *slow(2)])
def test_sigterm_ends_a_job_whatever_it_waits_for(world: int, tmp_path: Path) -> None:
    """No step comes in which it could be saved, and nothing has a timeout below ten minutes."""
    first, *others = launch_ranks(trains_until_sigterm, world, str(tmp_path), timeout=90)
    seconds = r"finished nothing for \d+ s since \(in phase 'callbacks' at step 1\), so it ends without saving"
    assert first.exitcode == TERMINATED and re.search(seconds, first.log)
    assert "No checkpoint was saved" in first.log
    for other in others:  # by the signal, or because the first one has gone
        assert other.exitcode in (TERMINATED, EXIT_CODE) or isinstance(other.error, PeerFailedError)
