"""What all processes must call, called by some: at once an error that names both, on every process."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import RankOutcome, launch_ranks, run_ranks
from selection import slow
from training_data import TrainingData
from training_runs import Run, pipeline_trainer
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer, load_lazily
from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.resilience.watchdog import EXIT_CODE, PROGRESS, Watchdog

PATIENCE = 600.0
"""Timeout of all that waits: whoever waits for it fails the test by `SECONDS`."""
SECONDS = 120
REMEDY = "Call it on every process, not on the main process alone."

LAYOUTS: dict[str, dict[str, Any]] = {
    "1F1B": {"pipeline_parallel_size": 2},
    "DDP": {"pipeline_parallel_size": 1},
    "ZBV": {"pipeline_parallel_size": 2, "pipeline_schedule": "zbv"},
    "lazy": {"pipeline_parallel_size": 2},
}


class Alone(TrainerCallback):
    """Calls a method of the trainer on the main process only, as many scripts do."""

    def __init__(self, trainer: PipeTransformerTrainer, event: str, method: str, arguments: tuple[Any, ...]) -> None:
        setattr(self, event, self._call)
        self._trainer, self._method, self._arguments = trainer, method, arguments

    def _call(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and (state.global_step == 2 or state.global_step == state.max_steps):
            getattr(self._trainer, self._method)(*self._arguments)


def train(rank: int, world_size: int, layout: str, event: str, method: str, folder: Path) -> None:
    run = Run(samples=16, per_device=2, accumulation=1, epochs=1)
    options = {"watchdog_timeout": PATIENCE, "ddp_timeout": PATIENCE, "disable_tqdm": True, **LAYOUTS[layout]}
    model = None
    if layout == "lazy":
        model = load_lazily(type(run.build_model()), folder / "model")
    stages = options.pop("pipeline_parallel_size")
    trainer = pipeline_trainer(run, stages, str(folder / "run"), model, **options)
    arguments = {"evaluate": (), "predict": (TrainingData(run.kind, 4),), "save_model": (str(folder / "saved"),)}
    trainer.add_callback(Alone(trainer, event, method, arguments[method]))
    trainer.train()


def assert_both_are_named(outcomes: list[RankOutcome], method: str, event: str, other: str) -> None:
    said = f"rank 0 called {method}() in Alone._call; rank 1 {other}. {REMEDY}"
    assert type(outcomes[0].error) is ValueError and str(outcomes[0].error) == said, outcomes[0]
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, PeerFailedError) or outcome.exitcode == EXIT_CODE
        assert said in f"{outcome.log}{outcome.error}"


@pytest.mark.parametrize("layout", ["1F1B", *slow("DDP", "ZBV", "lazy")])
@pytest.mark.parametrize("method", ["evaluate", *slow("save_model", "predict")])
def test_on_the_main_process_only(layout: str, method: str, tmp_path: Path) -> None:
    """It takes no timeout: ten minutes here."""
    Run(samples=16).build_model().save_pretrained(tmp_path / "model")
    outcomes = launch_ranks(train, 2, layout, "on_step_end", method, tmp_path, timeout=SECONDS)
    assert_both_are_named(outcomes, method, "on_step_end", "is at the end of step 2")


@pytest.mark.parametrize(
    ("event", "other"),
    slow(("on_step_begin", "is in step 3"), ("on_train_end", "is at the end of train()")),
)
def test_wherever_the_others_have_got_to(event: str, other: str, tmp_path: Path) -> None:
    outcomes = launch_ranks(train, 2, "1F1B", event, "evaluate", tmp_path, timeout=SECONDS)
    assert_both_are_named(outcomes, "evaluate", event, other)


def trains_and_waits(rank: int, world_size: int, case: str, folder: str) -> None:
    """One process does something alone in the middle of what all do together."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "ddp_timeout": PATIENCE}
    run = Run(samples=32, per_device=2, accumulation=1).with_options(**options)
    trainer = pipeline_trainer(run, 2, folder, watchdog_timeout=2)

    class Mine(TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if rank == 0 and case == "prediction":
                trainer.evaluate()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save |= rank == 0 and case == "save"
            control.should_training_stop |= rank == 0 and case == "stop"

    trainer.add_callback(Mine())
    trainer.train()


@pytest.mark.parametrize(
    ("case", "said"),
    [
        *slow(("prediction", "rank 0 called evaluate() in Mine.on_prediction_step; rank 1 waits in phase '")),
        *slow(("save", "rank 0 saves a checkpoint (control.should_save); rank 1 is in step 2. All processes must")),
        *slow(
            (
                "stop",
                "rank 0 has ended the epoch (control.should_epoch_stop or should_training_stop, or its data); rank",
            )
        ),
    ],
)
def test_alone_amid_what_all_do(case: str, said: str, tmp_path: Path) -> None:
    """The others have begun nothing else, but nobody goes on: known after `watchdog_timeout`."""
    for outcome in launch_ranks(trains_and_waits, 2, case, str(tmp_path), timeout=SECONDS):
        assert said in f"{outcome.log}{outcome.error}"


# ---------------------------------------------------------------------------------------------------------
# The watchdog alone
# ---------------------------------------------------------------------------------------------------------


def watch(rank: int) -> Watchdog:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = ProcessMesh(timedelta(seconds=60))
    return Watchdog(rank, mesh.gather_objects, PATIENCE, limit=PATIENCE)


def meet(rank: int, world_size: int, calls: list[list[str | None]]) -> str:
    with watch(rank) as watchdog:
        for round_of_all in calls:
            call = round_of_all[rank]
            if call is None:
                PROGRESS.begin_round("is in step 7")
                dist.all_reduce(torch.zeros(1))
            else:
                time.sleep(0.3 * rank)  # later than the first look of the others
                watchdog.meet(f"called {call}")
    return "done"


def test_all_meet_many_times() -> None:
    """Also from other places of the user's code."""
    calls = [["evaluate()"] * 3, ["save_model()"] * 3, [f"evaluate() in Callback{rank}.on_log" for rank in range(3)]]
    assert run_ranks(meet, 3, calls) == ["done"] * 3


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (["evaluate()", "save_model()"], "rank 0 called evaluate(); rank 1 called save_model()."),
        ([None, "evaluate() in Mine.on_log"], "rank 1 called evaluate() in Mine.on_log; rank 0 is in step 7."),
    ],
)
def test_others_do_something_else(last: list[str | None], said: str) -> None:
    outcomes = launch_ranks(meet, 2, [["evaluate()"] * 2, last], timeout=60)
    assert all(said in f"{outcome.log}{outcome.error}" for outcome in outcomes)
    raised = [outcome.error for call, outcome in zip(last, outcomes, strict=True) if call is not None]
    assert all(type(error) is ValueError for error in raised)


def gone_on(rank: int, world_size: int) -> None:
    """One waits in its first round, the other, whose first round was something else, in its second."""
    with watch(rank) as watchdog:
        if rank == 1:
            PROGRESS.begin_round("is in step 1")
        watchdog.meet("called evaluate()" if rank == 0 else "called save_model()")


@pytest.mark.slow
def test_two_that_wait_in_different_rounds() -> None:
    for outcome in launch_ranks(gone_on, 2, timeout=60):
        assert type(outcome.error) is ValueError or isinstance(outcome.error, PeerFailedError)
        assert "rank 0 called evaluate(); rank 1 called save_model()." in str(outcome.error)
