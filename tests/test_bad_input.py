"""Data that is missing, too long, broken, or that a model cannot learn from: an error everywhere, or as the stock
Trainer does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from distributed import RankDiedError, RankTimeoutError, launch_ranks, run_ranks
from selection import slow
from torch import nn
from training_data import Kind, PadCollator, TrainingData
from training_runs import Outcome, Run, outcome_of
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.resilience.watchdog import EXIT_CODE

PROCESSES = 2
SECONDS = 60
LATE = 22
"""A sample behind those that are looked at before the first step."""
MARK = 61  # a token of no other sample
LENGTH = 50  # tokens, where the models have 40 positions
KIND: Kind = "text-classification"

How = Literal["marked", "raises", "long"]


class BadData(TrainingData):
    """Samples of which one is marked, cannot be read, or is too long."""

    def __init__(self, case: Case) -> None:
        super().__init__(KIND, case.samples)
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


class NanLoss:
    """Of a user's Trainer whose loss of the marked sample is NaN."""

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
    how: How = "marked"
    trainer: type | None = None
    evaluated: int = 4
    options: dict[str, Any] = field(default_factory=dict)


def train(rank: int, world_size: int, case: Case, stages: int | None, processes: int = PROCESSES) -> Outcome:
    """Run the case in pipelines of `stages`; None: with the stock Trainer, and the global batch of `processes`."""
    rows = 2 if stages is not None else 2 * processes
    options = {
        **{"per_device_train_batch_size": rows, "num_train_epochs": 1, "train_sampling_strategy": "sequential"},
        **{"report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 3e-3, "adam_epsilon": 1e-4},
        **{"logging_steps": 1, "logging_nan_inf_filter": False, "save_strategy": "no", "seed": 42},
        **case.options,
    }
    arguments: Any
    cls: type[Trainer] = Trainer if stages is None else PipeTransformerTrainer
    if stages is None:
        arguments = TrainingArguments("stock", **options)
    else:
        arguments = PipeTransformerTrainingArguments("own", pipeline_parallel_size=stages, **options)
    if case.trainer is not None:
        cls = type(case.trainer.__name__, (case.trainer, cls), {})
    trainer = cls(
        model=Run(KIND).build_model(),
        args=arguments,
        train_dataset=BadData(case),
        eval_dataset=TrainingData(KIND, case.evaluated, seed=9),
        data_collator=PadCollator(KIND),
    )
    outcome = outcome_of(trainer)
    outcome.metrics = trainer.evaluate()
    outcome.notes["predictions"] = torch.from_numpy(trainer.predict(trainer.eval_dataset).predictions)
    return outcome


def train_all(rank: int, world_size: int, names: list[str], stages: int | None, processes: int) -> list[Outcome]:
    return [train(rank, world_size, CASES[name], stages, processes) for name in names]


def errors_in_turn(rank: int, world_size: int, names: list[str], stages: int | None) -> list[tuple[type, str]]:
    """What each of the cases raises on this process."""
    found = []
    for name in names:
        with pytest.raises(Exception) as caught:
            train(rank, world_size, REFUSED[name], stages)
        found.append((caught.type, str(caught.value)))
    return found


def errors_of(case: Case, stages: int) -> list[BaseException]:
    """What each process raised, or has said before it left because it could not raise it."""
    errors: list[BaseException] = []
    for outcome in launch_ranks(train, PROCESSES, case, stages, timeout=SECONDS):
        if outcome.exitcode == EXIT_CODE:
            errors.append(PeerFailedError(outcome.log))
            continue
        assert outcome.error is not None and not isinstance(outcome.error, RankTimeoutError | RankDiedError)
        errors.append(outcome.error)
    return errors


def assert_one_failed(errors: list[BaseException], kind: type[BaseException], *words: str) -> None:
    """One process raised it, and the other one says so, in one line."""
    own, told = sorted(errors, key=lambda error: isinstance(error, PeerFailedError))
    assert type(own) is kind and isinstance(told, PeerFailedError), errors
    assert all(word in str(own) and word in str(told) for word in words), errors


# ---------------------------------------------------------------------------------------------------------
# As the stock Trainer does
# ---------------------------------------------------------------------------------------------------------
def not_finite(trainer: type, at: int, max_grad_norm: float) -> Case:
    return Case(at=at, trainer=trainer, options={"max_grad_norm": max_grad_norm})


CASES = {
    "one sample": Case(samples=1, options={"num_train_epochs": 2}),
    "three samples": Case(samples=3, options={"num_train_epochs": 2}),
    "one to evaluate": Case(evaluated=1),
    "no whole batch": Case(samples=3, evaluated=16, options={"dataloader_drop_last": True, "max_steps": 2}),
    "NaN": not_finite(NanLoss, 5, 1.0),
    "infinite at the end": not_finite(InfiniteLoss, 9, 0.0),
}
STEPS = {"one sample": 2, "three samples": 2, "no whole batch": 0}


@pytest.mark.parametrize(
    ("processes", "names"), [(2, list(CASES)), *slow((4, ["three samples"]))], ids=["all", "fewer than processes"]
)
def test_as_the_stock_trainer(processes: int, names: list[str]) -> None:
    """Losses, weights and predictions of every process, NaN and infinities included; training goes on after them."""
    stages = 2
    (wanted,) = run_ranks(train_all, 1, names, None, processes, timeout=2 * SECONDS)
    everyone = run_ranks(train_all, processes, names, stages, processes, timeout=4 * SECONDS)
    for number, name in enumerate(names):
        print(name)
        expected, outcomes = wanted[number], [found[number] for found in everyone]
        assert expected.steps == STEPS.get(name, 3)
        assert CASES[name].trainer is None or not all(w.isfinite().all() for w in expected.weights.values())
        assert expected.notes["predictions"].shape[0] == CASES[name].evaluated
        for outcome in outcomes:
            torch.testing.assert_close(outcome.weights, outcomes[0].weights, rtol=0, atol=0, equal_nan=True)
            assert outcome.steps == expected.steps
            for found, value in (
                (outcome.losses, expected.losses),
                (outcome.gradient_norms, expected.gradient_norms),
                (outcome.weights, expected.weights),
                (outcome.notes["predictions"], expected.notes["predictions"]),
                (outcome.metrics["eval_loss"], expected.metrics["eval_loss"]),
            ):
                torch.testing.assert_close(found, value, rtol=0, atol=1e-4, equal_nan=True)


# ---------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------
REFUSED = {
    "less than a batch": Case(samples=3, options={"dataloader_drop_last": True}),  # by the stock Trainer, too
    "none": Case(samples=0, options={"train_sampling_strategy": "random"}),
    "long": Case(at=0, how="long"),
    "unreadable by a worker": Case(at=0, how="raises", options={"dataloader_num_workers": 1}),
}
ERRORS: dict[str, tuple[type[Exception], str]] = {
    "less than a batch": (ValueError, "max_steps"),
    "none": (ValueError, "empty"),
    "long": (ValueError, "samples of 50 tokens"),
    "unreadable by a worker": (LookupError, "row 0 cannot be read"),
}


def test_before_the_first_step_everybody_sees_it() -> None:
    names = list(REFUSED)
    first, second = run_ranks(errors_in_turn, PROCESSES, names, 2, timeout=3 * SECONDS)
    for name, (kind, text), other in zip(names, first, second, strict=True):
        expected, words = ERRORS[name]
        assert kind is other[0] is expected and words in text and words in other[1], name
    ((stock, text),) = run_ranks(errors_in_turn, 1, names[:1], None)[0]
    assert stock is ValueError and "max_steps" in text


@pytest.mark.parametrize("stages", [*slow(1), 2])
def test_longer_than_the_model_allows_later(stages: int) -> None:
    """Those that run the row see it: one of two replicas; all stages, as each looks positions up."""
    errors = errors_of(Case(samples=24, at=LATE, how="long"), stages)
    assert_one_failed(errors, ValueError, "samples of 50 tokens", "at most 40")


def test_unreadable_later() -> None:
    """By a worker; the stages of one pipeline read the same rows."""
    for error in errors_of(Case(samples=24, at=LATE, how="raises", options={"dataloader_num_workers": 1}), 2):
        assert type(error) is LookupError and f"row {LATE} cannot be read" in str(error)
