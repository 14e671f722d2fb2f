"""Data that is missing, too long, broken, or that a model cannot learn from: an error everywhere, or as the stock
Trainer does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
from distributed import RankDiedError, RankTimeoutError, launch_ranks, run_ranks
from torch import nn
from training_data import TrainingData
from training_runs import WORLD, Outcome, Run, outcome_of, pipeline_trainer, reference_trainer

from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.parts.watchdog.watchdog import EXIT_CODE

SECONDS = 60
LATE = 22
"""A sample behind those that are looked at before the first step."""
MARK = 61  # a token of no other sample
LENGTH = 50  # tokens, where the models have 40 positions

RUN = Run(epochs=1, accumulation=1, per_device=2).with_options(
    train_sampling_strategy="sequential", per_device_eval_batch_size=8
)


class NanLoss:
    """A mixin for a user's Trainer: the loss of the marked sample is NaN."""

    factor = float("nan")

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
        loss = super().compute_loss(model, inputs, *positional, **keywords)  # type: ignore[misc]
        return loss * self.factor if (inputs["input_ids"] == MARK).any() and model.training else loss


class InfiniteLoss(NanLoss):
    factor = float("inf")


@dataclass(frozen=True)
class Case:
    """A training with something bad in it.

    Attributes:
        samples: in the training set.
        at: index of the bad one.
        how: it is bad.
        trainer: a mixin with a user's overrides.
        evaluated: samples in the evaluation set.
        options: of the arguments.
    """

    samples: int = 12
    at: int | None = None
    how: Literal["marked", "raises", "long"] = "marked"
    trainer: type | None = None
    evaluated: int = 4
    options: dict[str, Any] = field(default_factory=dict)


class BadData(TrainingData):
    """Samples; one of them is marked, cannot be read, or is too long."""

    def __init__(self, case: Case) -> None:
        super().__init__(RUN.kind, case.samples)
        self.at, self.how = case.at, case.how

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if index != self.at:
            return sample
        if self.how == "raises":
            raise LookupError(f"row {index} cannot be read")
        words = sample["input_ids"]
        words = [MARK, *words[1:]] if self.how == "marked" else (words * LENGTH)[:LENGTH]
        return {**sample, "input_ids": words}


def train(rank: int, world_size: int, case: Case) -> Outcome:
    """Run the case in two stages; in one process with the stock Trainer, and the same global batch."""
    run = replace(RUN.with_options(**case.options), trainer=case.trainer)
    if world_size == 1:
        trainer: Any = reference_trainer(replace(run, per_device=2 * run.per_device // WORLD))
    else:
        trainer = pipeline_trainer(run, 2)
    trainer.train_dataset, trainer.eval_dataset = BadData(case), TrainingData(RUN.kind, case.evaluated, seed=9)
    outcome = outcome_of(trainer)
    outcome.metrics = trainer.evaluate()
    outcome.notes["predictions"] = torch.from_numpy(trainer.predict(trainer.eval_dataset).predictions)
    return outcome


def train_all(rank: int, world_size: int) -> list[Outcome]:
    return [train(rank, world_size, case) for case in CASES.values()]


# ---------------------------------------------------------------------------------------------------------
# As the stock Trainer does
# ---------------------------------------------------------------------------------------------------------
CASES = {
    "one sample": Case(samples=1, options={"num_train_epochs": 2}),
    "three samples": Case(samples=3, options={"num_train_epochs": 2}),
    "one to evaluate": Case(evaluated=1),
    "no whole batch": Case(samples=3, evaluated=16, options={"dataloader_drop_last": True, "max_steps": 2}),
    "NaN": Case(at=5, trainer=NanLoss, options={"max_grad_norm": 1.0}),
    "infinite at the end": Case(at=9, trainer=InfiniteLoss, options={"max_grad_norm": 0.0}),
}
STEPS = {"one sample": 2, "three samples": 2, "no whole batch": 0}


@pytest.mark.slow
def test_as_the_stock_trainer() -> None:
    """Losses, weights and predictions of every process, NaN and infinities included; training goes on after them."""
    (wanted,) = run_ranks(train_all, 1, timeout=2 * SECONDS)
    everyone = run_ranks(train_all, 2, timeout=4 * SECONDS)
    for number, (name, case) in enumerate(CASES.items()):
        print(name)
        expected = wanted[number]
        assert expected.steps == STEPS.get(name, 3)
        assert case.trainer is None or not all(w.isfinite().all() for w in expected.weights.values())
        assert expected.notes["predictions"].shape[0] == case.evaluated
        for outcome in (found[number] for found in everyone):
            torch.testing.assert_close(outcome.weights, everyone[0][number].weights, rtol=0, atol=0, equal_nan=True)
            assert outcome.steps == expected.steps
            for mine, wanted_one in (
                (outcome.losses, expected.losses),
                (outcome.gradient_norms, expected.gradient_norms),
                (outcome.weights, expected.weights),
                (outcome.notes["predictions"], expected.notes["predictions"]),
                (outcome.metrics["eval_loss"], expected.metrics["eval_loss"]),
            ):
                torch.testing.assert_close(mine, wanted_one, rtol=0, atol=1e-4, equal_nan=True)


# ---------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------
REFUSED: dict[str, tuple[Case, type[Exception], str]] = {
    "less than a batch": (Case(samples=3, options={"dataloader_drop_last": True}), ValueError, "max_steps"),
    "none": (Case(samples=0, options={"train_sampling_strategy": "random"}), ValueError, "empty"),
    "long": (Case(at=0, how="long"), ValueError, "samples of 50 tokens"),
    "unreadable by a worker": (
        *(Case(at=0, how="raises", options={"dataloader_num_workers": 1}), LookupError, "row 0 cannot be read"),
    ),
}


def errors_in_turn(rank: int, world_size: int) -> None:
    for name, (case, kind, words) in REFUSED.items():
        if world_size > 1 or name == "less than a batch":  # which the stock Trainer refuses, too
            with pytest.raises(kind, match=words) as caught:
                train(rank, world_size, case)
            assert caught.type is kind


def test_before_the_first_step_everybody_sees_it() -> None:
    for world_size in (2, 1):
        run_ranks(errors_in_turn, world_size, timeout=3 * SECONDS)


def errors_of(case: Case) -> list[BaseException]:
    """What each process raised, or has said before it left because it could not raise it."""
    errors: list[BaseException] = []
    for outcome in launch_ranks(train, 2, case, timeout=SECONDS):
        if outcome.exitcode == EXIT_CODE:
            errors.append(PeerFailedError(outcome.log))
            continue
        assert outcome.error is not None and not isinstance(outcome.error, RankTimeoutError | RankDiedError)
        errors.append(outcome.error)
    return errors


def test_later_one_process_sees_it_and_the_other_one_says_so_in_one_line() -> None:
    own, told = sorted(errors_of(Case(samples=24, at=LATE, how="long")), key=lambda e: isinstance(e, PeerFailedError))
    assert type(own) is ValueError and isinstance(told, PeerFailedError)
    assert all(words in str(e) for e in (own, told) for words in ("samples of 50 tokens", "at most 40"))


def test_unreadable_later() -> None:
    """By a worker; the stages of one pipeline read the same rows."""
    for error in errors_of(Case(samples=24, at=LATE, how="raises", options={"dataloader_num_workers": 1})):
        assert type(error) is LookupError and f"row {LATE} cannot be read" in str(error)
