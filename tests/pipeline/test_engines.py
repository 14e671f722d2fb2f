"""The engine of each kind of training. The core needs no part that other trainings need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
from distributed import run_ranks, run_ranks_expecting_error
from training_runs import Run, outcome_of, pipeline_trainer
from transformers import TrainerCallback

import hf_pipetransformer

PARTS = ("parts.driven", "token_slices")


class OwnLoss:
    """A loss that is not known to add up."""

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Callback(TrainerCallback):
    """One that might call the model."""


def remove_parts() -> None:
    """From here on, these packages cannot be imported."""
    for part in PARTS:
        package = str(Path(hf_pipetransformer.__file__).parent.joinpath(*part.split(".")))
        for module in iter_modules([package]):
            sys.modules[f"hf_pipetransformer.{part}.{module.name}"] = None  # type: ignore[assignment]


def train_without_parts(rank: int, world_size: int, stages: int, run: Run, options: dict[str, Any]) -> None:
    remove_parts()
    trainer = pipeline_trainer(run, stages, **options)
    trainer.add_callback(Callback())
    outcome_of(trainer)
    trainer.evaluate()


@pytest.mark.slow
def test_the_trainer_is_imported_without_the_parts() -> None:
    code = "import sys; from hf_pipetransformer.run import run; print([m for m in sys.modules if m.startswith(%r)])"
    names = tuple(f"hf_pipetransformer.{part}" for part in PARTS)
    root = Path(hf_pipetransformer.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code % (names,)], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


RUN = Run(samples=16, epochs=1, evaluated=8)


@pytest.mark.parametrize("stages", [1, 2])
def test_other_trainings_run_without_the_parts(stages: int) -> None:
    """The trainings have a callback, or an evaluation and a user's loss that is declared to add up."""
    declared = Run(samples=16, epochs=1, evaluated=8, trainer=OwnLoss)
    run_ranks(train_without_parts, 2, stages, RUN, {})
    run_ranks(train_without_parts, 2, stages, declared, {"loss_reduction": "mean"})


ASKING: dict[str, tuple[Run, dict[str, Any]]] = {
    "token_slices": (Run("causal-lm", samples=16, epochs=1), {"token_slices": 2}),
    "loss_reduction": (Run(samples=16, epochs=1, trainer=OwnLoss), {}),
}


@pytest.mark.parametrize("argument", ASKING)
def test_a_training_that_asks_for_a_part_is_told_that_it_is_missing(argument: str) -> None:
    for error in run_ranks_expecting_error(train_without_parts, 2, 2, *ASKING[argument]):
        assert isinstance(error, ValueError), error
        assert argument in str(error) and "is not installed" in str(error)
