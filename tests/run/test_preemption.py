"""A run that a scheduler ends saves one whole checkpoint first; resumed from it, it equals an undisturbed run."""

from __future__ import annotations

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
from checkpointed_runs import RUN, resume, undisturbed
from distributed import run_ranks
from one_job import run_calls, run_each
from training_runs import assert_same_training, outcome_of, pipeline_trainer
from transformers import TrainerCallback

from hf_pipetransformer.parts.preemption.stop_signal import EXIT_CODE, StopSignal
from hf_pipetransformer.run.checkpoint_folders import latest_valid


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
    assert latest_valid(Path(folder)) == (Path(folder, "checkpoint-4"), [])
    assert len(list(Path(folder).glob("checkpoint-*"))) == 1
    return int(str(leaving.value.code))


def preempted_with_a_worker(rank: int, world_size: int, folder: str) -> int:
    """The signal goes to the process group, as launchers send it."""

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


def preempted_at_the_end(rank: int, world_size: int, folder: str) -> int:
    """One process gets the signal after the last step."""
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


def test_sigterm_saves_one_whole_checkpoint_and_leaves_on_one_process(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("between", "worker")]
    calls = {
        "between": (preempted, folders[0], 1, (0,)),
        "resumed": (resume, folders[0], 1),
        "worker": (preempted_with_a_worker, folders[1]),
    }
    found = run_calls(1, calls)
    assert found["between"] == found["worker"] == [EXIT_CODE]
    assert_same_training(found["resumed"], undisturbed())
    assert latest_valid(tmp_path / "worker") == (tmp_path / "worker" / "checkpoint-4", [])


@pytest.mark.slow
def test_sigterm_saves_one_whole_checkpoint_and_leaves_on_two_stages(tmp_path: Path) -> None:
    """Saving comes before everything else; after the last step no training is lost."""
    between, evaluating, end = (str(tmp_path / name) for name in ("between", "evaluating", "end"))
    calls = {
        "between": (preempted, between, 2, (1,)),
        "resumed": (resume, between, 2),
        "evaluating": (preempted_while_evaluating, evaluating),
        "end": (preempted_at_the_end, end),
    }
    found = run_calls(2, calls)
    assert found["between"] == found["end"] == [EXIT_CODE] * 2
    assert latest_valid(tmp_path / "evaluating")[0] == tmp_path / "evaluating" / "checkpoint-4"
    assert latest_valid(tmp_path / "end") == (tmp_path / "end" / "checkpoint-8", [])
    assert_same_training([*found["resumed"], *run_ranks(resume, 2, end, 2)], undisturbed())


def train_evaluating(rank: int, world_size: int, folder: str, when: str, term_at: int | None = None) -> Any:
    """A training with learning rates that each evaluation but the first lowers. Layers freeze by the epoch."""
    run = replace(RUN, per_device=8, epochs=3).with_options(
        eval_strategy=when,
        eval_steps=4,
        save_strategy="steps",
        save_steps=3,
        metric_for_best_model="loss",
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"mode": "max", "patience": 0, "factor": 0.1},
        warmup_steps=0,
        freeze_policy="alpha",
        activation_cache="off",
    )
    trainer = pipeline_trainer(run, 2, folder)
    if term_at is not None:
        trainer.add_callback(TermAt(term_at))
    try:
        outcome = outcome_of(trainer, resume_from_checkpoint="last")
    except SystemExit:
        state = json.loads(Path(folder, f"checkpoint-{trainer.state.global_step}", "trainer_state.json").read_text())
        return trainer.state.global_step, [e["step"] for e in state["log_history"] if "eval_loss" in e]
    evaluated = [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    return outcome, evaluated, trainer.state.best_model_checkpoint


@pytest.mark.slow
def test_an_evaluation_that_sigterm_left_out_is_made_up_for(tmp_path: Path) -> None:
    """The signal comes at the end of the first epoch, and of the last: later steps depend on the evaluation."""
    for when, term_at in (("steps", 3), ("epoch", 11)):
        whole, cut = (str(tmp_path / when / name) for name in ("whole", "cut"))
        cases = {"whole": (whole, when), "cut": (cut, when, term_at), "again": (cut, when)}
        found = run_each(train_evaluating, 2, cases)
        wanted, evaluated, best = found["whole"][0]
        assert [step for step, _ in evaluated] == [4, 8, 12] and len(set(wanted.learning_rates)) > 1
        assert found["cut"] == [(term_at + 1, list(range(4, term_at, 4)))] * 2
        outcome, again, best_again = found["again"][0]
        assert_same_training([outcome], wanted)
        torch.testing.assert_close(again, evaluated, rtol=0, atol=1e-4)
        assert best is None or Path(best_again).name == Path(best).name


class Note(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)


@pytest.mark.slow
def test_sigterm_when_only_the_best_model_is_to_be_loaded_repeats_no_step(tmp_path: Path) -> None:
    """`save_total_limit=1` would delete all checkpoints but the best one when that is loaded, also the last one."""
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
    resumed = pipeline_trainer(run, 1, str(tmp_path))
    resumed.add_callback(note := Note())
    assert_same_training([outcome_of(resumed, resume_from_checkpoint=True)], expected)  # type: ignore[arg-type]
    assert note.steps == []


MODELS_ONLY = replace(RUN, per_device=8).with_options(save_only_model=True)


def preempted_with_models_only(rank: int, world_size: int, folder: str) -> None:
    trainer = pipeline_trainer(MODELS_ONLY, 2, folder)
    trainer.add_callback(TermAt(4))
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.args.save_only_model


@pytest.mark.slow
def test_models_alone_are_told_and_sigterm_saves_all(tmp_path: Path, capfd: Any) -> None:
    run_ranks(preempted_with_models_only, 2, str(tmp_path))
    assert not (tmp_path / "checkpoint-4" / "optimizer.pt").exists()
    assert_same_training(run_ranks(resume, 2, str(tmp_path), 2), undisturbed())  # from checkpoint-5
    assert "contains only the model" not in capfd.readouterr().err
    run_ranks(resume, 2, str(tmp_path), 2, str(tmp_path / "checkpoint-4"))
    said = capfd.readouterr()
    assert "checkpoint-4 contains only the model" in said.out + said.err


def lives(runs: Any) -> None:
    runs.set()
    time.sleep(60)


def test_a_process_that_is_forked_meanwhile_can_be_ended() -> None:
    fork = multiprocessing.get_context("fork")
    with StopSignal() as stop:
        runs = fork.Event()
        child = fork.Process(target=lives, args=(runs,))
        child.start()
        assert runs.wait(30)
        for _ in range(30):  # Python itself may lose a signal in a process that was forked a moment ago
            child.terminate()
            child.join(1)
            if child.exitcode is not None:
                break
        assert child.exitcode == -signal.SIGTERM and not stop.is_asked
