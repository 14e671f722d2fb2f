"""A run that is killed, or runs into a full disk, goes on from the newest whole checkpoint."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import RankDiedError, launch_ranks, run_ranks, run_ranks_expecting_error
from training_runs import Outcome, Run, assert_same_training, outcome_of, pipeline_trainer, reference
from transformers import Trainer, TrainerCallback

from hf_pipetransformer import preparation
from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.resilience import checkpoints, watchdog
from hf_pipetransformer.resilience.checkpoints import MANIFEST, SAVING, newest_whole
from hf_pipetransformer.resilience.preemption import EXIT_CODE, StopSignal

RUN = Run(samples=64, accumulation=1).with_options(save_strategy="steps", save_steps=2)


class Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self._step


def train_some(rank: int, world_size: int, folder: str, stages: int, stop: int = 6) -> None:
    trainer = pipeline_trainer(replace(RUN, per_device=16 // world_size), stages, folder)
    trainer.add_callback(Stop(stop))
    trainer.train()


def resume(rank: int, world_size: int, folder: str, stages: int, wanted: str | bool = True) -> Outcome:
    trainer = pipeline_trainer(replace(RUN, per_device=16 // world_size), stages, folder)
    return outcome_of(trainer, resume_from_checkpoint=wanted)  # type: ignore[arg-type]


def timed_and_resumed(rank: int, world_size: int, folder: str) -> list[bool]:
    """Whether a training timed the model's parts: the first, one that goes on with it, one of another batch size."""
    timings: list[bool] = []
    time_parts = preparation.time_parts

    def noted(*arguments: Any) -> Any:
        timings[-1] = True
        return time_parts(*arguments)

    preparation.time_parts = noted
    for per_device, wanted in ((8, None), (8, True), (4, True)):
        timings.append(False)
        trainer = pipeline_trainer(replace(RUN, per_device=per_device), 2, folder)
        trainer.add_callback(Stop(4))
        trainer.train(resume_from_checkpoint=wanted)
    return timings


def test_a_resumed_training_keeps_the_times_that_it_began_with(tmp_path: Path) -> None:
    assert run_ranks(timed_and_resumed, 2, str(tmp_path)) == [[True, False, True]] * 2
    (tmp_path / "checkpoint-4" / preparation.TIMES).write_text('{"times": []}')
    (tmp_path / "checkpoint-4" / MANIFEST).unlink()
    run_ranks(resume, 2, str(tmp_path), 2)  # whatever it says, they are measured again


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_ranks(reference, 1, RUN, str(tmp_path_factory.mktemp("reference")))[0]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    stages: int, tmp_path: Path, undisturbed: Outcome, capfd: Any
) -> None:
    run_ranks(train_some, 2, str(tmp_path), stages)
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert all((tmp_path / name / MANIFEST).exists() for name in names) and not (tmp_path / SAVING).exists()
    with (tmp_path / "checkpoint-6" / "optimizer.pt").open("r+b") as file:
        file.truncate(100)
    assert_same_training(run_ranks(resume, 2, str(tmp_path), stages), undisturbed)


def test_a_damaged_checkpoint_that_was_named_is_refused_everywhere(tmp_path: Path) -> None:
    run_ranks(train_some, 2, str(tmp_path), 2, stop=2)
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    for wanted in (str(tmp_path / "checkpoint-2"), True):
        errors = run_ranks_expecting_error(resume, 2, str(tmp_path), 2, wanted, timeout=60)
        assert all(isinstance(e, ValueError) and "optimizer.pt cannot be read" in str(e) for e in errors)


def killed_while_saving(rank: int, world_size: int, folder: str) -> None:
    """The second checkpoint is never finished on rank 0."""
    publish, count = checkpoints._checksum, 0

    def die(path: Path) -> int:
        nonlocal count
        count += "checkpoint-4" in str(path)
        if count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(path)

    checkpoints._checksum = die  # type: ignore[assignment]
    train_some(rank, world_size, folder, 2)


def test_killed_while_saving(tmp_path: Path, undisturbed: Outcome) -> None:
    outcomes = launch_ranks(killed_while_saving, 2, str(tmp_path), timeout=60)
    assert isinstance(outcomes[0].error, RankDiedError) and outcomes[1].error is not None
    assert (tmp_path / SAVING / "checkpoint-4").exists()
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-2", [])
    assert_same_training(run_ranks(resume, 2, str(tmp_path), 2), undisturbed)
    assert not (tmp_path / SAVING).exists()


def train_on_a_full_disk(rank: int, world_size: int, folder: str, what: str) -> None:
    real = torch.save
    saves = 0

    def save(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal saves
        saves += what in str(path)
        if what in str(path) and saves == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(value, path, *args, **kwargs)

    if what != "model":
        torch.save = save
    else:
        save_model = Trainer._save

        def fail(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
            if output_dir is not None and "checkpoint-4" in output_dir:
                raise OSError(errno.ENOSPC, "No space left on device")
            save_model(self, output_dir, state_dict)

        Trainer._save = fail  # type: ignore[method-assign]
    train_some(rank, world_size, folder, 2)


@pytest.mark.parametrize("what", ["model", "optimizer", "scheduler", "rng_state_1"])
def test_a_full_disk_ends_all_processes_and_leaves_the_checkpoint_before(
    what: str, tmp_path: Path, undisturbed: Outcome
) -> None:
    errors = run_ranks_expecting_error(train_on_a_full_disk, 2, str(tmp_path), what, timeout=60)
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, OSError)
        assert "checkpoint-4 could not be saved" in str(error) and "No space left" in str(error)
        assert "checkpoint-2 is the newest whole" in str(error)
    assert newest_whole(tmp_path)[0] == tmp_path / "checkpoint-2"
    assert_same_training(run_ranks(resume, 2, str(tmp_path), 2), undisturbed)


class SavesMore:
    """A user's trainer whose own file cannot be written by the process that writes."""

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
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-2", [])


class TermAt(TrainerCallback):
    """Sends SIGTERM to this process, as a scheduler would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def preempted(rank: int, world_size: int, folder: str, stages: int, who: tuple[int, ...]) -> int:
    before = signal.getsignal(signal.SIGTERM)
    run = replace(RUN, per_device=16 // world_size).with_options(save_strategy="no")
    trainer = pipeline_trainer(run, stages, folder)
    if rank in who:
        trainer.add_callback(TermAt(3))
    with pytest.raises(SystemExit) as leaving:
        trainer.train()
    assert trainer.state.global_step == 4
    assert signal.getsignal(signal.SIGTERM) == before
    return int(str(leaving.value.code))


@pytest.mark.parametrize(("world", "stages", "who"), [(1, 1, (0,)), (2, 1, (1,)), (2, 2, (0,)), (2, 2, (0, 1))])
def test_sigterm_saves_one_whole_checkpoint_and_leaves(
    world: int, stages: int, who: tuple[int, ...], tmp_path: Path, undisturbed: Outcome
) -> None:
    codes = run_ranks(preempted, world, str(tmp_path), stages, who)
    assert codes == [EXIT_CODE] * world
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert newest_whole(tmp_path) == (tmp_path / "checkpoint-4", []) and checkpoint.name == "checkpoint-4"
    assert_same_training(run_ranks(resume, world, str(tmp_path), stages), undisturbed)


def preempted_while_evaluating(rank: int, world_size: int, folder: str) -> None:
    """The stock loop would evaluate first, save only a better model, and remove all but the best in the end."""
    options = {
        "save_strategy": "best",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    trainer = pipeline_trainer(replace(RUN, per_device=8, options={}).with_options(**options), 2, folder)
    trainer.add_callback(TermAt(3))
    with pytest.raises(SystemExit):
        trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [2]


def test_sigterm_comes_before_everything_else(tmp_path: Path) -> None:
    run_ranks(preempted_while_evaluating, 2, str(tmp_path))
    assert newest_whole(tmp_path)[0] == tmp_path / "checkpoint-4"


def train_to_the_end(rank: int, world_size: int, folder: str) -> list[int]:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    trainer = pipeline_trainer(RUN.with_options(max_steps=2, save_strategy="no"), 1, folder)

    class AtTheEnd(TrainerCallback):
        def on_train_end(self, *_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append(0)

    trainer.add_callback(AtTheEnd())
    trainer.train()
    return seen


def test_sigterm_behind_the_last_step_is_delivered_when_training_ends(tmp_path: Path) -> None:
    assert run_ranks(train_to_the_end, 1, str(tmp_path)) == [[0, signal.SIGTERM]]


def resume_differently(rank: int, world_size: int, folder: str) -> int:
    trainer = pipeline_trainer(replace(RUN, per_device=8), 2, folder)
    trainer.train(resume_from_checkpoint=True if rank == 0 else None)
    return trainer.state.global_step


def test_the_first_process_says_where_to_go_on(tmp_path: Path) -> None:
    """The others may not see the checkpoints, or not yet."""
    run_ranks(train_some, 2, str(tmp_path), 2)
    assert run_ranks(resume_differently, 2, str(tmp_path)) == [8, 8]


def train_with_the_best(rank: int, world_size: int, folder: str) -> str | None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "runtime", "save_total_limit": 2}
    run = replace(RUN, per_device=16).with_options(**options, greater_is_better=True)
    trainer = pipeline_trainer(run, 1, folder)
    values = iter((3.0, 1.0, 1.0, 1.0))

    class FirstIsBest(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
            metrics["eval_runtime"] = next(values)

    trainer.add_callback(FirstIsBest())
    trainer.train()
    return trainer.state.best_model_checkpoint


def test_the_best_is_found_again_and_kept(tmp_path: Path) -> None:
    (best,) = run_ranks(train_with_the_best, 1, str(tmp_path))
    assert best == str(tmp_path / "checkpoint-2")
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-8"]


def lives(runs: Any) -> None:
    runs.set()
    time.sleep(60)


def test_a_process_that_is_forked_meanwhile_can_be_ended() -> None:
    fork = multiprocessing.get_context("fork")
    with StopSignal() as stop:
        runs = fork.Event()
        child = fork.Process(target=lives, args=(runs,))
        child.start()
        assert runs.wait(30)  # before, Python itself may lose a signal
        child.terminate()
        child.join(30)
        assert child.exitcode == -signal.SIGTERM and not stop.is_asked
