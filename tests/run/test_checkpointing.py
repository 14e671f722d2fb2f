"""A run that is killed, or runs into a full disk, goes on from the newest whole checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpointed_runs import RUN, resume, train_some, undisturbed
from distributed import RankDiedError, launch_ranks, run_ranks, run_ranks_expecting_error
from one_job import run_each
from selection import slow
from training_runs import (
    Outcome,
    assert_same_training,
    pipeline_trainer,
)
from transformers import (
    TrainerState,
)

from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.parts.watchdog import watchdog
from hf_pipetransformer.run import checkpoint_folders, resuming
from hf_pipetransformer.run.checkpoint_folders import MANIFEST, SAVING, latest_valid


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    run_ranks(train_some, 2, str(folder), 2)
    return folder


@pytest.fixture
def trained(made_once: Path, tmp_path: Path) -> Path:
    """What six steps of two stages have left: checkpoints of steps 2, 4 and 6."""
    return Path(shutil.copytree(made_once, tmp_path, dirs_exist_ok=True))


def resume_as_rank_0_says(rank: int, world_size: int, folder: str) -> Outcome:
    """The others may not see the checkpoints, or not yet."""
    return resume(rank, world_size, folder, 2, rank == 0)


@pytest.mark.slow
def test_a_damaged_checkpoint_gives_way_to_the_one_before(trained: Path, capfd: Any) -> None:
    names = sorted(path.name for path in trained.glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert all((trained / name / MANIFEST).exists() for name in names) and not (trained / SAVING).exists()
    with (trained / "checkpoint-6" / "optimizer.pt").open("r+b") as file:
        file.truncate(100)
    assert_same_training(run_ranks(resume_as_rank_0_says, 2, str(trained)), undisturbed())
    said = capfd.readouterr()
    assert "newer checkpoints are damaged (checkpoint-6: optimizer.pt has 100 bytes" in said.out + said.err


class Planted:
    """A pickle that runs code when it is loaded."""

    def __init__(self, trace: str) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._trace,)


@pytest.mark.parametrize("name", ["optimizer.pt", *slow("rng_state_1.pth")])
def test_code_in_a_checkpoint_is_not_run(name: str, trained: Path) -> None:
    torch.save({"state": Planted(str(trained / "trace"))}, trained / "checkpoint-6" / name)
    (trained / "checkpoint-6" / MANIFEST).write_text("{}")
    outcomes = launch_ranks(resume, 2, str(trained), 2, timeout=60)
    assert any("Weights only load failed" in str(outcome.error) for outcome in outcomes)
    assert not (trained / "trace").exists()


def resume_damaged(rank: int, world_size: int, folder: str) -> list[str]:
    """The errors where the damaged one is named, and where it is the only one."""
    errors = []
    for wanted in (f"{folder}/checkpoint-2", True):
        with pytest.raises(ValueError) as error:
            resume(rank, world_size, folder, 2, wanted)
        errors.append(str(error.value))
        torch.distributed.barrier()
        for step in (4, 6) if rank == 0 else ():
            shutil.rmtree(f"{folder}/checkpoint-{step}", ignore_errors=True)
        torch.distributed.barrier()
    return errors


def test_a_damaged_checkpoint_that_was_named_or_is_the_only_one_is_refused_everywhere(trained: Path) -> None:
    (trained / "checkpoint-2" / "optimizer.pt").unlink()
    for errors in run_ranks(resume_damaged, 2, str(trained)):
        assert all("optimizer.pt cannot be read" in error for error in errors)


def killed_while_saving(rank: int, world_size: int, folder: str) -> None:
    """The second checkpoint is never finished on rank 0."""
    publish, count = checkpoint_folders._checksum, 0

    def die(path: Path) -> int:
        nonlocal count
        count += "checkpoint-4" in str(path)
        if count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(path)

    checkpoint_folders._checksum = die  # type: ignore[assignment]
    train_some(rank, world_size, folder, 2)


@pytest.mark.slow
def test_killed_while_saving(tmp_path: Path) -> None:
    outcomes = launch_ranks(killed_while_saving, 2, str(tmp_path), timeout=60)
    assert isinstance(outcomes[0].error, RankDiedError) and outcomes[1].error is not None
    assert (tmp_path / SAVING / "checkpoint-4").exists()
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-2", [])
    assert_same_training(run_ranks(resume, 2, str(tmp_path), 2), undisturbed())
    assert not (tmp_path / SAVING).exists()


# ------------------------------------------------------------------------------------ a disk that is full
def saving(name: str) -> Callable[..., bool]:
    return lambda value, path, *_, **__: name in Path(str(path)).name


BEST: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
FULL: dict[str, tuple[Any, str, Callable[..., bool], int]] = {
    "optimizer": (torch, "save", saving("optimizer"), 2),
    "rng_state_1": (torch, "save", saving("rng_state_1"), 2),
    "the last": (TrainerState, "save_to_json", lambda self, path: "checkpoint-4" in path, 1),
}
"""The function that fails, at which call, and at the how many-th of these."""


def train_on_a_full_disk(rank: int, world_size: int, folder: str, what: str) -> OSError:
    owner, name, is_it, count = FULL[what]
    real, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += is_it(*args, **kwargs)
        if is_it(*args, **kwargs) and calls == count:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    # "the last": models only are saved, and the best one is known: the stock Trainer then waits for all halfway
    options = {"save_only_model": True, "metric_for_best_model": "loss", **BEST} if what == "the last" else {}
    trainer = pipeline_trainer(replace(RUN.with_options(**options), per_device=8), 2, folder)
    with mock.patch.object(owner, name, failing), pytest.raises(OSError) as error:
        trainer.train()
    return error.value


@pytest.mark.slow
def test_a_full_disk_ends_all_processes_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """All processes say that the second checkpoint failed, also behind a save's last collective. No file is left."""
    found = run_each(train_on_a_full_disk, 2, {what: (str(tmp_path / what), what) for what in FULL})
    for what, errors in found.items():
        for error in errors:
            assert "checkpoint-4 could not be saved" in str(error) and "No space left" in str(error), what
            assert "checkpoint-2 is the latest valid" in str(error), what
        folder = tmp_path / what
        assert latest_valid(folder) == (folder / "checkpoint-2", []) and not (folder / SAVING).exists()
    assert_same_training(run_ranks(resume, 2, str(tmp_path / "optimizer"), 2), undisturbed())
    assert latest_valid(tmp_path / "optimizer") == (tmp_path / "optimizer" / "checkpoint-8", [])


class SavesMore:
    """A user's trainer; the process that saves cannot write the trainer's own file."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        if self.is_world_process_zero() and "checkpoint-4" in str(output_dir):  # type: ignore[attr-defined]
            raise FileNotFoundError("no template")


def save_more(rank: int, world_size: int, folder: str) -> None:
    run = replace(RUN, per_device=16 // world_size, trainer=SavesMore)
    pipeline_trainer(run, 2, folder).train()


def test_an_error_of_a_users_save_model_ends_all_processes(tmp_path: Path) -> None:
    first, second = launch_ranks(save_more, 2, str(tmp_path), timeout=60)
    assert isinstance(first.error, FileNotFoundError)
    # where its collective does not fail at once, the watchdog ends it
    assert isinstance(second.error, PeerFailedError) or second.exitcode == watchdog.EXIT_CODE
    said = f"{second.log}\n{second.error}"
    assert "rank 0 failed in phase 'save' at step 3: FileNotFoundError: no template" in said
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-2", [])


def best_on_one_disk(rank: int, world_size: int, folder: str) -> None:
    if rank == 1:
        resuming.WEIGHT_FILES = ()  # it sees none of them
    pipeline_trainer(replace(RUN, per_device=8).with_options(**BEST), 2, folder).train()


@pytest.mark.slow
def test_a_best_model_that_some_processes_lack_is_refused_by_all(tmp_path: Path) -> None:
    """Else its first stages would be put together with others' last weights."""
    errors = run_ranks_expecting_error(best_on_one_disk, 2, str(tmp_path), timeout=60)
    assert len(errors) == 2
    assert all(isinstance(e, ValueError) and "processes [1] cannot see the weights" in str(e) for e in errors)
