"""Injects a fault into one process of a training, and describes the expected state afterwards.

A `Fault` happens where a process enters a phase (`progress.phase`), so it can be put anywhere
without a line for it in the library. Functions here run inside the ranks of `distributed.launch_ranks`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
from test_elastic_pipeline import MID_EPOCH, SHRINK, stages_by_frozen
from training_runs import Outcome, Run, outcome_of, pipeline_trainer
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.parts.prefix_cache.cache import writing
from hf_pipetransformer.progress import PROGRESS

Kind = Literal["kill", "stop", "hang", "busy", "raise", "corrupt", "cut", "stop_host", "term", "terms", "preempt"]

HANGS: tuple[Kind, ...] = ("hang", "busy")
EVERYONE = -1
"""In place of a rank: the fault happens on all ranks."""

PHASES = (
    ("start", 0),
    ("adapt", 4),
    ("data", 4),
    ("step", 4),
    ("all-reduce", 4),
    ("update", 4),
    ("freeze", 5),
    ("move", 5),
    ("drop", 5),
    ("build", 5),
    ("log", 4),
    ("evaluation", 5),
    ("prediction", 5),
    ("save", 5),
    ("publish", 5),
    ("cache", 5),
    ("end", 8),
)
"""Each phase of a training, and the step (as the process counts them there) at which a fault is put into it."""

RUN = Run(epochs=3).with_options(
    save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4
)
"""Nine steps; checkpoints after 2, 4, 6, 8 and the last, evaluations after 3, 6, 9; layers freeze after 2 and 5.

A step has two global batches (`gradient_accumulation_steps`).
"""
CACHED_RUN = replace(RUN, epochs=5)
CACHED_FREEZES = {2: 1, 8: 2}
COUNTED = {6: 1, 12: 2}
"""Steps done -> layers that count as cached in `CACHED_RUN`, which freezes by `CACHED_FREEZES`: a whole epoch lies
between. At the second freeze, where layers move and two stages become one, the first counts as cached already."""
STORE = "store"
"""If a job's folder has an entry of this name, that is its `activation_cache_dir`: it caches, for five epochs."""

WATCHDOG_TIMEOUT = 2
DDP_TIMEOUT = 60
DDP_TIMEOUT_WITH_A_HANG = 12


@dataclass(frozen=True)
class Fault:
    """A fault: its kind, its rank, and its time.

    Attributes:
        kind: "hang" sleeps, "busy" computes for ever, "corrupt" damages the newest checkpoint and kills, "cut" takes
            the host off the network, "stop_host" stops all ranks of the host. "term" is one SIGTERM, "terms" one at
            each phase from there on, "preempt" one to the launcher of the host.
        rank: rank of the process, or `EVERYONE`.
        phase: phase of the training.
        step: number of steps done.
        entry: number of times that the phase has been entered since then.
        caches: whether it happens in `CACHED_RUN`.
        sharding: the kind of replica sharding.
    """

    kind: Kind
    rank: int
    phase: str
    step: int
    entry: int = 1
    caches: bool = False
    sharding: str = "none"


@dataclass
class Report:
    """The report of a process that has reached the end of the training.

    Attributes:
        outcome: of the training.
        resumed_step: the step that it went on from.
        first_step_at: when the first new step was done, or the training's end if all were, by `time.time`.
        evaluations: the steps with an evaluation, also before the fault.
        hit_rates: of the cache, in each epoch but the last.
        cached: layers that counted as cached when it went on.
    """

    outcome: Outcome
    resumed_step: int
    first_step_at: float
    evaluations: list[int]
    hit_rates: list[float]
    cached: int


class FaultInjector:
    """Lets a fault happen in this process, once."""

    def __init__(self, fault: Fault, folder: Path, trainer: PipeTransformerTrainer) -> None:
        self._fault, self._folder, self._trainer = fault, folder, trainer
        self._entries = 0
        self._has_happened = False
        PROGRESS.on_enter = self.look
        if fault.phase == "cache":  # written by a thread of its own
            write = writing.StoreWriting._write

            def looked_at(writer: Any, *batch: Any) -> None:
                self.look("cache", PROGRESS.step)
                write(writer, *batch)

            writing.StoreWriting._write = looked_at  # type: ignore[method-assign]

    def look(self, phase: str, step: int) -> None:
        if self._has_happened:
            if self._fault.kind == "terms":
                self._term()
            return
        self._entries += phase == self._fault.phase and step >= self._fault.step
        if self._entries < self._fault.entry:
            return
        self._has_happened = True
        with suppress(FileExistsError), (self._folder / "fault").open("x") as file:  # of several, the first
            file.write(f"{time.time()} {step} {cached_layers(self._trainer)}")
        getattr(self, f"_{self._fault.kind}")()

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _hang(self) -> None:
        while True:
            time.sleep(1)

    def _busy(self) -> None:
        while True:
            pass

    def _raise(self) -> None:
        raise LookupError("injected")

    def _cut(self) -> None:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)

    def _stop_host(self) -> None:
        for other in psutil.Process(os.getppid()).children():
            if other.pid != os.getpid():
                other.suspend()
        self._stop()

    def _term(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    _terms = _term

    def _preempt(self) -> None:
        if os.environ["LOCAL_RANK"] == "0":
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(1)  # the launcher passes it on

    def _corrupt(self) -> None:
        newest = max(self._folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        with (newest / "optimizer.pt").open("r+b") as file:
            file.seek(100)
            file.write(b"\xff" * 16)
        self._kill()


def cached_layers(trainer: PipeTransformerTrainer) -> int:
    """The number of layers that count as cached in the current layout."""
    pipeline = trainer.pipeline
    return pipeline.current_layout.num_cached_layers if pipeline is not None and pipeline.is_placed else 0


class _FirstStep(TrainerCallback):
    def __init__(self, trainer: PipeTransformerTrainer) -> None:
        self._trainer = trainer
        self.resumed, self.cached, self.at = -1, 0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.resumed, self.cached = state.global_step, cached_layers(self._trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.at = self.at or time.time()

    on_train_end = on_step_end  # where all steps had been done


def global_rows(world_size: int) -> int:
    """The rows of a global batch: sixteen, if so many processes can share them."""
    return 16 if 16 % world_size == 0 else 4 * world_size


def trainer_with_fault(
    folder: str,
    rank: int,
    world_size: int,
    fault: Fault | None,
    max_steps: int = -1,
    caches: bool = False,
    sharding: str = "none",
) -> PipeTransformerTrainer:
    """An elastic training: as many stages as processes, up to four, then two, then one."""
    store = Path(folder, STORE)
    # the next attempt continues with the entries of the killed attempt
    goes_on = (fault is not None and fault.phase == "cache") or Path(folder, "_hf_pipetransformer_run_cache").exists()
    run = CACHED_RUN if caches or store.exists() else RUN.with_options(max_steps=max_steps)
    if caches:
        writing.PENDING_BATCHES = 1000  # no batch is dropped on a busy machine, so layers count as cached in time
    trainer = pipeline_trainer(
        replace(run, per_device=global_rows(world_size) // world_size),
        _stages(SHRINK[0], world_size),
        folder,
        freeze_policy="schedule",
        freeze_strategy="steps",
        freeze_steps=1,
        freeze_schedule=CACHED_FREEZES if caches else MID_EPOCH,
        activation_cache="on" if caches or goes_on or store.exists() else "off",
        activation_cache_dir=str(store) if store.exists() else None,
        watchdog_timeout=WATCHDOG_TIMEOUT,
        ddp_timeout=DDP_TIMEOUT_WITH_A_HANG if fault is not None and fault.kind in HANGS else DDP_TIMEOUT,
        replica_sharding=sharding,
    )
    stages_by_frozen(trainer, {frozen: _stages(stages, world_size) for frozen, stages in SHRINK.items()})
    if fault is not None and fault.rank in (rank, EVERYONE):
        FaultInjector(fault, Path(folder), trainer)
    return trainer


def _stages(most: int, world_size: int) -> int:
    return max(stages for stages in range(1, most + 1) if world_size % stages == 0)


def train(
    rank: int,
    world_size: int,
    folder: str,
    fault: Fault | None = None,
    max_steps: int = -1,
    caches: bool = False,
    sharding: str = "none",
) -> Report:
    """Train, or resume the training in the folder."""
    trainer = trainer_with_fault(folder, rank, world_size, fault, max_steps, caches, sharding)
    first = _FirstStep(trainer)
    trainer.add_callback(first)
    outcome = outcome_of(trainer, resume_from_checkpoint="last")
    log = trainer.state.log_history
    return Report(
        outcome,
        first.resumed,
        first.at,
        [entry["step"] for entry in log if "eval_loss" in entry],
        [entry["cache_hit_rate"] + entry["cache_older_hit_rate"] for entry in log if "cache_hit_rate" in entry],
        first.cached,
    )
