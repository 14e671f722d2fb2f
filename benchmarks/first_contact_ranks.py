#!/usr/bin/env python
"""Trainings of `first_contact.py` by several processes, all on one device; `python first_contact_ranks.py JOB.json`
is one of them.

They are started without a launcher, which would end all of them when one has failed: what is looked at is how each of
them ends by itself, and when.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from first_contact_runs import Losses, Memory, Observer, Setting, Size, Training
from host_copies import use_host_copies
from transformers import Trainer

POLL_SECONDS = 0.02
LOG_TAIL = 2000
"""Characters of a process's output that are kept."""


@dataclass(frozen=True)
class Job:
    """What the processes of a pipeline do.

    Attributes:
        setting: device, size of model and batches.
        training: with K = the number of processes.
        output_dir: of the Trainer.
        resume_from: a checkpoint, if one is gone on with.
        kills: (rank, step) of the process that is killed before this step, if one is.
    """

    setting: Setting
    training: Training
    output_dir: str
    resume_from: str | None = None
    kills: tuple[int, int] | None = None

    @classmethod
    def read(cls, path: Path) -> Job:
        values = json.loads(path.read_text())
        setting = values.pop("setting")
        return cls(
            setting=Setting(**{**setting, "size": Size(**setting["size"])}),
            training=Training(**values.pop("training")),
            **values,
        )


@dataclass(frozen=True)
class RankEnd:
    """How one process has ended.

    Attributes:
        exit_code: minus the signal's number where one has killed it; None if it had to be killed in the end.
        seconds: from the start of all until it had ended.
        report: what it has written: "losses", "device", "setup_bytes" and "training_bytes" (`Memory`); or "error" and
            "message".
        log: the end of its output.
    """

    exit_code: int | None
    seconds: float
    report: dict[str, Any]
    log: str

    def raise_for_error(self, rank: int) -> None:
        """Raise if the process did not end as it should."""
        if self.exit_code != 0:
            said = f"{self.report['error']}: {self.report['message']}" if "error" in self.report else self.log
            raise RuntimeError(f"rank {rank} ended with exit code {self.exit_code}: {said}")


def run_job(job: Job, limit_seconds: float) -> list[RankEnd]:
    """Start a process for each stage and wait until all have ended; at the limit, those that are left are killed."""
    world_size = job.training.stages
    folder = Path(job.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    path.write_text(json.dumps(asdict(job)))
    timeout = timedelta(seconds=limit_seconds)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    processes: list[subprocess.Popen[bytes]] = []
    began = time.monotonic()
    ended: dict[int, tuple[int | None, float]] = {}
    try:
        for rank in range(world_size):
            with (folder / f"rank{rank}.log").open("wb") as log:
                environment = {**os.environ, **_environment(rank, world_size, store.port)}
                command = [sys.executable, __file__, str(path)]
                processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        while len(ended) < world_size and time.monotonic() < began + limit_seconds:
            for rank, process in enumerate(processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = process.returncode, time.monotonic() - began
            time.sleep(POLL_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [_end_of(folder, rank, *ended.get(rank, (None, time.monotonic() - began))) for rank in range(world_size)]


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """That of torchrun."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is in the process that starts them
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _end_of(folder: Path, rank: int, exit_code: int | None, seconds: float) -> RankEnd:
    report = folder / f"rank{rank}.json"
    log = (folder / f"rank{rank}.log").read_text(errors="replace")
    return RankEnd(exit_code, seconds, json.loads(report.read_text()) if report.exists() else {}, log[-LOG_TAIL:])


# ---------------------------------------------------------------------------------------------------------
# In a process
# ---------------------------------------------------------------------------------------------------------
class Kills(Observer):
    """Kills its own process before a step, as the system does when memory runs out."""

    def __init__(self, step: int) -> None:
        self._steps_left = step

    def before_step(self, trainer: Trainer) -> None:
        if self._steps_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._steps_left -= 1


def main() -> None:
    """Train as one process of a job, and write what became of it beside the job's file."""
    path = Path(sys.argv[1])
    job, rank = Job.read(path), int(os.environ["RANK"])
    report = path.with_name(f"rank{rank}.json")
    try:
        report.write_text(json.dumps(train(job, rank)))
    except Exception as error:
        report.write_text(json.dumps({"error": type(error).__name__, "message": str(error)}))
        raise


def train(job: Job, rank: int) -> dict[str, Any]:
    """Train as one stage. Collective over all processes of the job."""
    device = job.setting.device
    training = job.training
    if device.type != "cpu":
        use_host_copies()
        training = training.with_options(ddp_backend="gloo")
    losses, memory = Losses(), Memory(device)
    observers: list[Observer] = [losses, memory]
    if job.kills is not None and job.kills[0] == rank:
        observers.append(Kills(job.kills[1]))
    trainer = training.trainer(job.setting, job.output_dir, observers, num_processes=training.stages)
    trainer.train(resume_from_checkpoint=job.resume_from)
    return {
        "losses": losses.values,
        "setup_bytes": memory.setup_bytes,
        "training_bytes": memory.training_bytes,
        "device": str(trainer.args.device),
    }


if __name__ == "__main__":
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    main()
