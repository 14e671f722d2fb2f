"""What all processes must call, called by some: at once an error that names both, on every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed import launch_ranks
from selection import slow
from training_data import TrainingData
from training_runs import Run, pipeline_trainer
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.parts.watchdog.watchdog import EXIT_CODE

PATIENCE = 600.0
"""Timeout of all that waits: whoever waits for it fails the test by `SECONDS`."""
SECONDS = 120
REMEDY = "Call it on every process, not on the main process alone."


class Alone(TrainerCallback):
    """Calls a method of the trainer on the main process only, as many scripts do."""

    def __init__(self, trainer: PipeTransformerTrainer, event: str, method: str, arguments: tuple[Any, ...]) -> None:
        setattr(self, event, self._call)
        self._trainer, self._method, self._arguments = trainer, method, arguments

    def _call(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and (state.global_step == 2 or state.global_step == state.max_steps):
            getattr(self._trainer, self._method)(*self._arguments)


def train(rank: int, world_size: int, stages: int, event: str, method: str, folder: Path) -> None:
    run = Run(samples=16, per_device=2, accumulation=1, epochs=1)
    trainer = pipeline_trainer(run, stages, str(folder / "run"), watchdog_timeout=PATIENCE, ddp_timeout=PATIENCE)
    arguments = {"evaluate": (), "predict": (TrainingData(run.kind, 4),), "save_model": (str(folder / "saved"),)}
    trainer.add_callback(Alone(trainer, event, method, arguments[method]))
    trainer.train()


@pytest.mark.parametrize(
    ("stages", "method", "event", "other"),
    [
        *slow(
            (2, "evaluate", "on_step_end", "is at the end of step 2"),
            (1, "save_model", "on_step_begin", "is in step 3"),
            (2, "predict", "on_train_end", "is at the end of train()"),
        ),
    ],
)
def test_on_the_main_process_only(stages: int, method: str, event: str, other: str, tmp_path: Path) -> None:
    """The mistake is found before the timeout, which is ten minutes here."""
    outcomes = launch_ranks(train, 2, stages, event, method, tmp_path, timeout=SECONDS)
    said = f"rank 0 called {method}() in Alone._call; rank 1 {other}. {REMEDY}"
    assert type(outcomes[0].error) is ValueError and str(outcomes[0].error) == said, outcomes[0]
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, PeerFailedError) or outcome.exitcode == EXIT_CODE
        assert said in f"{outcome.log}{outcome.error}"


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
            if case == "other" and rank == 0:
                trainer.evaluate()
            elif case == "other":
                trainer.save_model(f"{folder}/saved")
            control.should_save |= rank == 0 and case == "save"
            control.should_training_stop |= rank == 0 and case == "stop"

    trainer.add_callback(Mine())
    trainer.train()


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("other", "rank 0 called evaluate() in Mine.on_step_end; rank 1 called save_model() in Mine.on_step_end."),
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
    """The other processes have begun no other operation, and no process goes on: found after `watchdog_timeout`."""
    for outcome in launch_ranks(trains_and_waits, 2, case, str(tmp_path), timeout=SECONDS):
        assert said in f"{outcome.log}{outcome.error}"
