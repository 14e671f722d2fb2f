"""A run that is killed, or runs into a full disk, goes on from the newest whole checkpoint."""

from __future__ import annotations

import builtins
import errno
import json
import multiprocessing
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import RankDiedError, launch_ranks, run_ranks, run_ranks_expecting_error
from selection import few, slow
from training_runs import (
    Outcome,
    Run,
    assert_same_training,
    largest_difference,
    outcome_of,
    pipeline_trainer,
    reference,
)
from transformers import (
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
)

from hf_pipetransformer import PipeTransformerTrainingArguments
from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.resilience import checkpoint_folders, watchdog
from hf_pipetransformer.resilience.checkpoint_folders import KEPT, MANIFEST, SAVING, STATE, latest_valid
from hf_pipetransformer.resilience.stop_signal import EXIT_CODE, StopSignal
from hf_pipetransformer.run import checkpointing, cutting, resuming
from hf_pipetransformer.run.checkpointing import PipelineState

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


@pytest.mark.slow
def test_times_that_cannot_be_read_are_measured_again(tmp_path: Path) -> None:
    run_ranks(train_some, 2, str(tmp_path), 2, stop=4)
    (tmp_path / "checkpoint-4" / cutting.TIMES).write_text('{"times": []}')
    (tmp_path / "checkpoint-4" / MANIFEST).write_text("{}")
    run_ranks(resume, 2, str(tmp_path), 2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_ranks(reference, 1, RUN, str(tmp_path_factory.mktemp("reference")))[0]


@pytest.mark.parametrize("stages", [*slow(1), 2])
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
    said = capfd.readouterr()
    assert "newer checkpoints are damaged (checkpoint-6: optimizer.pt has 100 bytes" in said.out + said.err


def test_what_is_left_of_a_checkpoint_is_damaged(tmp_path: Path) -> None:
    """However it was removed: the stock Trainer removes file by file."""
    assert PipelineState.__name__ == KEPT
    run_ranks(train_some, 2, str(tmp_path), 2, stop=4)
    (tmp_path / "checkpoint-4" / MANIFEST).unlink()
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-2", [f"checkpoint-4: {MANIFEST} is missing"])


@pytest.mark.slow
def test_a_checkpoint_whose_weights_somebody_has_sharded_is_resumed_with_a_warning(
    tmp_path: Path, undisturbed: Outcome, capfd: Any
) -> None:
    run_ranks(train_some, 1, str(tmp_path), 1)
    checkpoint = tmp_path / "checkpoint-6"
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    model.save_pretrained(checkpoint, max_shard_size="10KB")
    shards = sorted(checkpoint.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert_same_training(run_ranks(resume, 1, str(tmp_path), 1, str(checkpoint)), undisturbed)
    said = capfd.readouterr()
    assert "whose weight files were replaced (model.safetensors is missing)" in said.out + said.err
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"checkpoint-6: .*model\.safetensors cannot be read"):
        resume(0, 1, str(tmp_path), 1, str(checkpoint))


class Planted:
    """What a pickle can do to whoever loads it."""

    def __init__(self, trace: str) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._trace,)


@pytest.mark.parametrize("name", ["optimizer.pt", *slow("scheduler.pt", "rng_state_1.pth")])
def test_code_in_a_checkpoint_is_not_run(name: str, tmp_path: Path) -> None:
    run_ranks(train_some, 2, str(tmp_path), 2, stop=2)
    torch.save({"state": Planted(str(tmp_path / "trace"))}, tmp_path / "checkpoint-2" / name)
    (tmp_path / "checkpoint-2" / MANIFEST).write_text("{}")
    outcomes = launch_ranks(resume, 2, str(tmp_path), 2, timeout=60)
    assert any("Weights only load failed" in str(outcome.error) for outcome in outcomes)
    assert not (tmp_path / "trace").exists()


def resume_noting_loads(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    real, noted = torch.load, []

    def load(path: Any, **options: Any) -> Any:
        if str(path).endswith("optimizer.pt"):
            noted.append(options)
        return real(path, **options)

    torch.load = load
    resume(rank, world_size, folder, 2)
    return noted


@pytest.mark.slow
def test_the_optimizer_of_the_whole_model_is_never_on_a_device(tmp_path: Path) -> None:
    run_ranks(train_some, 2, str(tmp_path), 2, stop=2)
    expected = [{"map_location": "cpu", "mmap": True, "weights_only": True}]
    assert run_ranks(resume_noting_loads, 2, str(tmp_path)) == [expected] * 2


def test_a_damaged_checkpoint_that_was_named_is_refused_everywhere(tmp_path: Path) -> None:
    run_ranks(train_some, 2, str(tmp_path), 2, stop=2)
    (tmp_path / "checkpoint-2" / "optimizer.pt").unlink()
    for wanted in (str(tmp_path / "checkpoint-2"), True):
        errors = run_ranks_expecting_error(resume, 2, str(tmp_path), 2, wanted, timeout=60)
        assert all(isinstance(e, ValueError) and "optimizer.pt cannot be read" in str(e) for e in errors)


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


def test_killed_while_saving(tmp_path: Path, undisturbed: Outcome) -> None:
    outcomes = launch_ranks(killed_while_saving, 2, str(tmp_path), timeout=60)
    assert isinstance(outcomes[0].error, RankDiedError) and outcomes[1].error is not None
    assert (tmp_path / SAVING / "checkpoint-4").exists()
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-2", [])
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


def assert_told_and_resumed(errors: list[BaseException], folder: Path, undisturbed: Outcome) -> None:
    """All processes say that the second checkpoint is not there, and the next job goes on from the first."""
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, OSError)
        assert "checkpoint-4 could not be saved" in str(error) and "No space left" in str(error)
        assert "checkpoint-2 is the latest valid" in str(error)
    assert latest_valid(folder) == (folder / "checkpoint-2", []) and not (folder / SAVING).exists()
    assert_same_training(run_ranks(resume, 2, str(folder), 2), undisturbed)
    assert latest_valid(folder) == (folder / "checkpoint-8", [])


@pytest.mark.parametrize("what", few(("model", "optimizer", "scheduler", "rng_state_1"), "optimizer"))
def test_a_full_disk_ends_all_processes_and_leaves_the_checkpoint_before(
    what: str, tmp_path: Path, undisturbed: Outcome
) -> None:
    errors = run_ranks_expecting_error(train_on_a_full_disk, 2, str(tmp_path), what, timeout=60)
    assert_told_and_resumed(errors, tmp_path, undisturbed)


def train_without_room_for_the_state(rank: int, world_size: int, folder: str) -> None:
    """Models only are saved, and the best one is known: the stock Trainer then waits for all processes halfway."""
    real = TrainerState.save_to_json

    def save(self: TrainerState, path: str) -> None:
        if rank == 0 and "checkpoint-4" in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, path)

    TrainerState.save_to_json = save  # type: ignore[method-assign]
    best = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "load_best_model_at_end": True}
    run = replace(RUN.with_options(save_only_model=True, **best), per_device=8)
    pipeline_trainer(run, 2, folder).train()


def test_an_error_behind_the_last_collective_of_a_save_reaches_all_processes(tmp_path: Path) -> None:
    errors = run_ranks_expecting_error(train_without_room_for_the_state, 2, str(tmp_path), timeout=60)
    assert len(errors) == 2
    assert all("checkpoint-4 could not be saved" in str(error) and "No space left" in str(error) for error in errors)


ROOM = 20
"""Characters of a file for which there is room when the disk is full: what stands there is no JSON."""


def train_with_little_room(rank: int, world_size: int, folder: str, name: str, count: int) -> None:
    """For the second checkpoint's file of that name, when it is opened for the `count`-th time."""
    opened = 0

    def with_little_room(opens: Any) -> Any:
        def open_(path: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal opened
            file = opens(path, *args, **kwargs)
            if Path(str(path)).name == name and "checkpoint-4" in str(path) and "w" in file.mode:
                opened += 1
                if opened == count:
                    file.write = until_full(file.write)
            return file

        return open_

    # `Path.write_text` calls `Path.open`, which does not call the other one
    builtins.open = with_little_room(open)
    Path.open = with_little_room(Path.open)  # type: ignore[method-assign]
    train_some(rank, world_size, folder, 2)


def until_full(write: Any) -> Any:
    room = ROOM

    def write_some(text: str) -> int:
        nonlocal room
        write(text[:room])
        room -= len(text)
        if room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(text)

    return write_some


@pytest.mark.parametrize(
    ("name", "count"),
    [(STATE, 1), (STATE, 2), (cutting.TIMES, 1), (MANIFEST, 1)],
    ids=["state", "state-with-its-name", "times", "manifest"],
)
@pytest.mark.slow
def test_a_disk_that_is_full_when_a_checkpoint_gets_its_name(
    name: str, count: int, tmp_path: Path, undisturbed: Outcome
) -> None:
    """The stock Trainer writes the state; with the final name of the best checkpoint it is written once more."""
    errors = run_ranks_expecting_error(train_with_little_room, 2, str(tmp_path), name, count, timeout=60)
    assert all("rank 0: OSError" in str(error) for error in errors)
    assert_told_and_resumed(errors, tmp_path, undisturbed)


def killed_on_a_full_disk(rank: int, world_size: int, folder: str) -> None:
    """Before anybody has tidied up."""
    if rank == 0:
        checkpointing.remove_incomplete = lambda folder: (  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL) if list(Path(folder, SAVING).glob("*/*.json")) else None
        )
    train_with_little_room(rank, world_size, folder, MANIFEST, 1)


@pytest.mark.slow
def test_half_a_manifest_is_not_taken_for_a_whole_one(tmp_path: Path, undisturbed: Outcome) -> None:
    outcomes = launch_ranks(killed_on_a_full_disk, 2, str(tmp_path), timeout=60)
    assert isinstance(outcomes[0].error, RankDiedError) and outcomes[1].error is not None
    unfinished = tmp_path / SAVING / "checkpoint-4"
    assert (unfinished / MANIFEST).stat().st_size == ROOM
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-2", [])
    unfinished.rename(tmp_path / "checkpoint-4")  # as somebody might who looks for what is left
    newest, (problem,) = latest_valid(tmp_path)
    assert newest == tmp_path / "checkpoint-2" and f"checkpoint-4: {MANIFEST} cannot be read" in problem
    assert_same_training(run_ranks(resume, 2, str(tmp_path), 2), undisturbed)


def fail_to_rotate(rank: int, world_size: int, folder: str) -> None:
    def rotate(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "not yours")

    checkpointing.rotate = rotate  # type: ignore[attr-defined]
    train_some(rank, world_size, folder, 2)


@pytest.mark.slow
def test_what_fails_behind_a_saved_checkpoint_is_told_apart(tmp_path: Path) -> None:
    for error in run_ranks_expecting_error(fail_to_rotate, 2, str(tmp_path), timeout=60):
        assert "checkpoint-2 was saved, but older" in str(error) and "rank 0: PermissionError" in str(error)
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-2", [])


def looks_like_another_node(rank: int, world_size: int, folder: str) -> None:
    """The second process is the first of its node, and is shown rank 0's files too late."""
    if rank == 1:
        PipeTransformerTrainingArguments.local_process_index = property(lambda self: 0)  # type: ignore[assignment]
        checkpointing.STATE = checkpointing.MANIFEST = "not-yet-to-be-seen"
    train_some(rank, world_size, folder, 2, stop=2)


def test_a_node_does_not_take_a_shared_folder_for_its_own(tmp_path: Path) -> None:
    run_ranks(looks_like_another_node, 2, str(tmp_path))
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-2", [])
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()


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
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-2", [])


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


@pytest.mark.parametrize(
    ("world", "stages", "who"), [(1, 1, (0,)), *slow((2, 1, (1,))), (2, 2, (0,)), *slow((2, 2, (0, 1)))]
)
def test_sigterm_saves_one_whole_checkpoint_and_leaves(
    world: int, stages: int, who: tuple[int, ...], tmp_path: Path, undisturbed: Outcome
) -> None:
    codes = run_ranks(preempted, world, str(tmp_path), stages, who)
    assert codes == [EXIT_CODE] * world
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-4", []) and checkpoint.name == "checkpoint-4"
    assert_same_training(run_ranks(resume, world, str(tmp_path), stages), undisturbed)


def preempted_with_a_worker(rank: int, world_size: int, folder: str) -> int:
    """As launchers do it: the signal goes to the process group."""

    class TermTheGroup(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                # from elsewhere: to its parent a worker listens
                subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], start_new_session=True, check=True)
                time.sleep(1)  # a worker that has ended is noticed

    run = replace(RUN, per_device=16).with_options(dataloader_num_workers=1, dataloader_persistent_workers=True)
    trainer = pipeline_trainer(run, 1, folder)
    trainer.add_callback(TermTheGroup())
    with pytest.raises(SystemExit) as leaving:
        trainer.train()
    return int(str(leaving.value.code))


def test_sigterm_to_the_process_group_leaves_the_loaders_workers_alone(tmp_path: Path) -> None:
    assert run_ranks(preempted_with_a_worker, 1, str(tmp_path)) == [EXIT_CODE]
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-4", [])


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
    assert latest_valid(tmp_path)[0] == tmp_path / "checkpoint-4"


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


def train_evaluating(rank: int, world_size: int, folder: str, when: str, term_at: int | None = None) -> Any:
    """Its learning rates depend on the evaluations: each one but the first lowers them."""
    run = replace(RUN, per_device=8, epochs=3).with_options(
        eval_strategy=when,
        eval_steps=4,
        save_strategy="steps",
        save_steps=3,
        metric_for_best_model="loss",
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"mode": "max", "patience": 0, "factor": 0.1},
        warmup_steps=0,
    )
    trainer = pipeline_trainer(run, 2, folder)
    if term_at is not None:
        trainer.add_callback(TermAt(term_at))
    try:
        outcome = outcome_of(trainer, resume_from_checkpoint="last")
    except SystemExit:
        return None
    evaluated = [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    return outcome, evaluated, trainer.state.best_model_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("when", ["steps", "epoch"])
@pytest.mark.parametrize("term_at", [3, 11])
def test_an_evaluation_that_sigterm_left_out_is_made_up_for(when: str, term_at: int, tmp_path: Path) -> None:
    """At the end of the first epoch, and of the last: what comes after depends on it."""
    wanted, evaluated, best = run_ranks(train_evaluating, 2, str(tmp_path / "whole"), when)[0]
    assert [step for step, _ in evaluated] == [4, 8, 12] and len(set(wanted.learning_rates)) > 1
    folder = tmp_path / "cut"
    assert run_ranks(train_evaluating, 2, str(folder), when, term_at) == [None] * 2
    state = json.loads((folder / f"checkpoint-{term_at + 1}" / "trainer_state.json").read_text())
    assert [e["step"] for e in state["log_history"] if "eval_loss" in e] == list(range(4, term_at, 4))
    outcome, again, best_again = run_ranks(train_evaluating, 2, str(folder), when)[0]
    assert_same_training([outcome], wanted)
    torch.testing.assert_close(again, evaluated, rtol=0, atol=1e-4)
    assert best is None or Path(best_again).name == Path(best).name


def killed_before_evaluating(rank: int, world_size: int, folder: str) -> None:
    """Behind the checkpoint of the epoch's last step."""
    watchdog.PROGRESS.on_enter = lambda phase, step: (
        os.kill(os.getpid(), signal.SIGKILL) if phase == "evaluation" else None
    )
    run = RUN.with_options(save_steps=4, eval_strategy="epoch")
    pipeline_trainer(replace(run, per_device=8), 2, folder).train()


def resume_evaluating(rank: int, world_size: int, folder: str) -> list[int]:
    trainer = pipeline_trainer(replace(RUN, per_device=8).with_options(eval_strategy="epoch"), 2, folder)
    trainer.train(resume_from_checkpoint="last")
    return [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]


@pytest.mark.slow
def test_an_epochs_evaluation_is_made_up_for_whatever_left_it_out(tmp_path: Path) -> None:
    launch_ranks(killed_before_evaluating, 2, str(tmp_path), timeout=60)
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-4", [])
    assert run_ranks(resume_evaluating, 2, str(tmp_path)) == [[4, 8]] * 2


def ended(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> tuple[Outcome, list[int]]:
    """With "last"; the steps that this job has done."""
    steps: list[int] = []

    class Note(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.append(state.global_step)

    trainer = pipeline_trainer(replace(RUN, per_device=8).with_options(**options), 2, folder)
    trainer.add_callback(Note())
    return outcome_of(trainer, resume_from_checkpoint="last"), steps


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"max_steps": 6}, {"num_train_epochs": 1.5}, {}], ids=["max", "epochs", "whole"])
def test_a_training_that_has_ended_does_no_step_more(options: dict[str, Any], tmp_path: Path) -> None:
    """Also where its last step lies inside an epoch (of four)."""
    first, again = (run_ranks(ended, 2, str(tmp_path), options) for _ in range(2))
    last = 6 if options else 8
    for (outcome, steps), (more, further) in zip(first, again, strict=True):
        assert steps == list(range(1, last + 1)) and further == []
        assert more.steps == last and more.losses == outcome.losses
        assert largest_difference(more.weights, outcome.weights)[0] == 0
    assert latest_valid(tmp_path)[0] == tmp_path / f"checkpoint-{last}"


def preempted_at_the_end(rank: int, world_size: int, folder: str) -> int:
    """By a signal to one process, when no step is left that would see to it."""
    run = replace(RUN, per_device=8).with_options(save_strategy="no")
    trainer = pipeline_trainer(run, 2, folder)

    class WithTheLastMetrics(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if rank == 1 and "train_runtime" in logs:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer.add_callback(WithTheLastMetrics())
    with pytest.raises(SystemExit) as leaving:
        trainer.train()
    assert not trainer.pipeline.is_placed  # type: ignore[union-attr]
    return int(str(leaving.value.code))


@pytest.mark.slow
def test_sigterm_behind_the_last_step_loses_no_training(tmp_path: Path, undisturbed: Outcome) -> None:
    assert run_ranks(preempted_at_the_end, 2, str(tmp_path)) == [EXIT_CODE] * 2
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-8", [])
    assert_same_training(run_ranks(resume, 2, str(tmp_path), 2), undisturbed)


@pytest.mark.slow
def test_sigterm_when_only_the_best_model_is_to_be_loaded_repeats_no_step(tmp_path: Path) -> None:
    """With `save_total_limit=1` all other checkpoints would go then, the last one, too."""
    options = {"load_best_model_at_end": True, "save_total_limit": 1, "metric_for_best_model": "eval_loss"}
    run = RUN.with_options(eval_strategy="steps", eval_steps=2, greater_is_better=True, use_cpu=True, **options)
    run = replace(run, per_device=16)
    expected = outcome_of(pipeline_trainer(run, 1, str(tmp_path / "undisturbed")))
    trainer = pipeline_trainer(run, 1, str(tmp_path))

    class WhenAllIsEvaluated(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == state.max_steps:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer.add_callback(WhenAllIsEvaluated())
    with pytest.raises(SystemExit) as leaving:
        trainer.train()
    assert leaving.value.code == EXIT_CODE and trainer.state.best_global_step < trainer.state.max_steps
    steps = Steps()
    resumed = pipeline_trainer(run, 1, str(tmp_path))
    resumed.add_callback(steps)
    assert_same_training([outcome_of(resumed, resume_from_checkpoint=True)], expected)  # type: ignore[arg-type]
    assert steps.count == 0


class Steps(TrainerCallback):
    count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count += 1


def preempted_with_models_only(rank: int, world_size: int, folder: str) -> None:
    run = replace(RUN, per_device=8).with_options(save_only_model=True)
    trainer = pipeline_trainer(run, 2, folder)
    trainer.add_callback(TermAt(4))
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.args.save_only_model


@pytest.mark.slow
def test_models_alone_are_told_and_sigterm_saves_all(tmp_path: Path, undisturbed: Outcome, capfd: Any) -> None:
    run_ranks(preempted_with_models_only, 2, str(tmp_path))
    assert not (tmp_path / "checkpoint-4" / "optimizer.pt").exists()
    assert_same_training(run_ranks(resume, 2, str(tmp_path), 2), undisturbed)  # from checkpoint-5
    assert "contains only the model" not in capfd.readouterr().err
    run_ranks(resume, 2, str(tmp_path), 2, str(tmp_path / "checkpoint-4"))
    said = capfd.readouterr()
    assert "checkpoint-4 contains only the model" in said.out + said.err


def owed_with_models_only(rank: int, world_size: int, folder: str, evaluates: bool) -> list[int]:
    """The steps that were evaluated by a job that goes on."""
    run = replace(RUN, per_device=8).with_options(save_only_model=True, eval_strategy="steps", eval_steps=5)
    trainer = pipeline_trainer(run, 2, folder)
    trainer.add_callback(TermAt(4))
    with pytest.raises(SystemExit):
        trainer.train()
    trainer = pipeline_trainer(run if evaluates else run.with_options(eval_strategy="no"), 2, folder)
    if not evaluates:
        trainer.eval_dataset = None
    trainer.train(resume_from_checkpoint=True)
    return [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.slow
def test_what_sigterm_saved_stays_whole_when_its_evaluation_is_made_up_for(evaluates: bool, tmp_path: Path) -> None:
    assert run_ranks(owed_with_models_only, 2, str(tmp_path), evaluates) == [[5, 8] if evaluates else []] * 2
    assert (tmp_path / "checkpoint-5" / "optimizer.pt").exists()


def resume_with_more_callbacks(rank: int, world_size: int, folder: str) -> list[str]:
    run = replace(RUN, per_device=8).with_options(
        eval_strategy="steps", eval_steps=2, metric_for_best_model="loss", load_best_model_at_end=True
    )
    trainer = pipeline_trainer(run, 2, folder, freeze_policy="alpha", activation_cache="off")
    for patience in (30, 40):
        trainer.add_callback(EarlyStoppingCallback(patience))
    trainer.train(resume_from_checkpoint=True)
    return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]


@pytest.mark.slow
def test_callbacks_may_be_added_on_resuming(tmp_path: Path) -> None:
    """The checkpoint that is gone on with has nothing of them; the next ones have, of two alike in their order."""
    run_ranks(train_some, 2, str(tmp_path), 2, stop=2)
    names = run_ranks(resume_with_more_callbacks, 2, str(tmp_path))[0]
    assert names.count("EarlyStoppingCallback") == 2
    saved = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert saved["LayerFreezeCallback"]["attributes"]["memory"]["num_decisions"] == 1
    assert [s["args"]["early_stopping_patience"] for s in saved["EarlyStoppingCallback"]] == [30, 40]


def best_on_one_disk(rank: int, world_size: int, folder: str) -> None:
    if rank == 1:
        resuming.WEIGHT_FILES = ()  # it sees none of them
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    pipeline_trainer(replace(RUN, per_device=8).with_options(**options), 2, folder).train()


@pytest.mark.slow
def test_a_best_model_that_some_processes_lack_is_refused_by_all(tmp_path: Path) -> None:
    """Else its first stages would be put together with others' last weights."""
    errors = run_ranks_expecting_error(best_on_one_disk, 2, str(tmp_path), timeout=60)
    assert len(errors) == 2
    assert all(isinstance(e, ValueError) and "processes [1] cannot see the weights" in str(e) for e in errors)


def resume_differently(rank: int, world_size: int, folder: str) -> int:
    trainer = pipeline_trainer(replace(RUN, per_device=8), 2, folder)
    trainer.train(resume_from_checkpoint=True if rank == 0 else None)
    return trainer.state.global_step


@pytest.mark.slow
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


@pytest.mark.slow
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
