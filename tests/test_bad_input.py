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

How = Literal["marked", "raises", "long"]


class BadData(TrainingData):
    """Samples of which one is marked, cannot be read, or is too long."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.kind, case.samples)
        self.at, self.how, self.tokens = case.at, case.how, case.tokens

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if index != self.at:
            return sample
        if self.how == "raises":
            raise LookupError(f"row {index} cannot be read")
        words = sample["input_ids"]
        words = [MARK, *words[1:]] if self.how == "marked" else (words * self.tokens)[: self.tokens]
        return {**sample, "input_ids": words, **({"labels": words} if self.kind == "causal-lm" else {})}


class NanLoss:
    """Of a user's Trainer whose loss of the marked sample is NaN."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
        loss = super().compute_loss(model, inputs, *positional, **keywords)  # type: ignore[misc]
        return loss * float("nan") if (inputs["input_ids"] == MARK).any() and model.training else loss


class InfiniteGradient:
    """Of a user's Trainer whose loss of the marked sample has an infinite gradient in one number."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
        loss = super().compute_loss(model, inputs, *positional, **keywords)  # type: ignore[misc]
        if (inputs["input_ids"] == MARK).any() and model.training:
            return loss + _Steep.apply(self.model.classifier.bias)  # type: ignore[attr-defined]
        return loss


class _Steep(torch.autograd.Function):
    """Zero, and infinitely steep in the first number."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.shape = values.shape
        return values.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        steep = gradient.new_zeros(ctx.shape)
        steep[0] = gradient * float("inf")
        return steep


@dataclass(frozen=True)
class Case:
    """A training with something bad in it.

    Attributes:
        kind: of model and samples.
        model: by its name in the zoo; None: the kind's own.
        samples: in the training set.
        at: index of the bad one.
        how: it is bad.
        tokens: of the bad one, if it is long.
        trainer: a mixin with a user's overrides.
        evaluated: samples in the evaluation set.
        options: of the arguments.
    """

    kind: Kind = "text-classification"
    model: str | None = None
    samples: int = 12
    at: int | None = None
    how: How = "marked"
    tokens: int = LENGTH
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
        model=Run(case.kind, case.model).build_model(),
        args=arguments,
        train_dataset=BadData(case),
        eval_dataset=TrainingData(case.kind, case.evaluated, seed=9),
        data_collator=PadCollator(case.kind),
    )
    outcome = outcome_of(trainer)
    outcome.metrics = trainer.evaluate()
    outcome.notes["predictions"] = torch.from_numpy(trainer.predict(trainer.eval_dataset).predictions)
    return outcome


def stock(case: Case, processes: int = PROCESSES) -> Outcome:
    return run_ranks(train, 1, case, None, processes, timeout=SECONDS)[0]


def assert_as_stock(case: Case, stages: int, processes: int = PROCESSES) -> Outcome:
    """Losses, weights and predictions of every process are those of the stock Trainer, NaN and infinities included.

    Returns:
        The stock Trainer's.
    """
    expected = stock(case, processes)
    outcomes = run_ranks(train, processes, case, stages, processes, timeout=SECONDS)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.weights, outcomes[0].weights, rtol=0, atol=0, equal_nan=True)
        assert outcome.steps == expected.steps
        for found, wanted in (
            (outcome.losses, expected.losses),
            (outcome.gradient_norms, expected.gradient_norms),
            (outcome.weights, expected.weights),
            (outcome.notes["predictions"], expected.notes["predictions"]),
            (outcome.metrics["eval_loss"], expected.metrics["eval_loss"]),
        ):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4, equal_nan=True)
    return expected


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


def assert_same_error(errors: list[BaseException], kind: type[BaseException], words: str) -> None:
    assert {type(error) for error in errors} == {kind}, errors
    assert all(words in str(error) for error in errors), errors


def assert_one_failed(errors: list[BaseException], kind: type[BaseException], words: str) -> None:
    """One process raised it, and the other one says so."""
    own, told = sorted(errors, key=lambda error: isinstance(error, PeerFailedError))
    assert type(own) is kind and words in str(own), errors
    assert isinstance(told, PeerFailedError) and words in str(told), errors


both = pytest.mark.parametrize("stages", [1, 2])
pipeline_first = pytest.mark.parametrize("stages", [*slow(1), 2])


# ---------------------------------------------------------------------------------------------------------
# Few samples
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pipeline_first
@pytest.mark.parametrize("order", ["random", "sequential"])
def test_no_sample(order: str, stages: int) -> None:
    errors = errors_of(Case(samples=0, options={"train_sampling_strategy": order}), stages)
    assert_same_error(errors, ValueError, "empty")


@pipeline_first
@pytest.mark.parametrize("samples", [*slow(1, 2), 3])
def test_hardly_a_sample(stages: int, samples: int) -> None:
    """Also fewer than one batch of one process."""
    assert assert_as_stock(Case(samples=samples, options={"num_train_epochs": 2}), stages).steps == 2


@pipeline_first
def test_fewer_samples_than_processes(stages: int) -> None:
    assert_as_stock(Case(samples=3, options={"num_train_epochs": 2}), stages, processes=4)


@pipeline_first
def test_one_sample_to_evaluate(stages: int) -> None:
    expected = assert_as_stock(Case(evaluated=1), stages)
    assert expected.notes["predictions"].shape[0] == 1


@pipeline_first
def test_less_than_a_batch_where_the_last_one_is_left_out(stages: int) -> None:
    """Refused as the stock Trainer does."""
    case = Case(samples=3, options={"dataloader_drop_last": True})
    with pytest.raises(ValueError, match="max_steps"):
        stock(case)
    assert_same_error(errors_of(case, stages), ValueError, "max_steps")


@pytest.mark.slow
@pipeline_first
def test_less_than_a_batch_for_a_number_of_steps(stages: int) -> None:
    """Ends without a step, as the stock Trainer does."""
    case = Case(samples=3, evaluated=16, options={"dataloader_drop_last": True, "max_steps": 2})
    assert assert_as_stock(case, stages).steps == 0


# ---------------------------------------------------------------------------------------------------------
# Samples that cannot be used
# ---------------------------------------------------------------------------------------------------------


@pipeline_first
def test_longer_than_the_model_allows_from_the_first_sample_on(stages: int) -> None:
    """Everybody sees it before the first step."""
    first, second = errors_of(Case(at=0, how="long"), stages)
    assert type(first) is type(second) is ValueError and str(first) == str(second)
    assert "samples of 50 tokens" in str(first)


@both
def test_longer_than_the_model_allows_later(stages: int) -> None:
    """Those that run the row see it: one of two replicas; all stages, as each looks positions up."""
    errors = errors_of(Case(samples=24, at=LATE, how="long"), stages)
    own, other = sorted(errors, key=lambda error: isinstance(error, PeerFailedError))
    assert type(own) is ValueError and "samples of 50 tokens" in str(own) and "at most 40" in str(own)
    assert " ".join(str(own).split()) in str(other)  # in one line


@pytest.mark.slow
def test_longer_than_the_model_allows_where_slices_are_timed_on_it() -> None:
    case = Case("causal-lm", "gpt2", 24, at=LATE, how="long", tokens=400, options={"token_slices": "auto"})
    assert_one_failed(errors_of(case, 2), ValueError, "samples of 400 tokens, but GPT2LMHeadModel supports at most 40")


@both
@pytest.mark.parametrize("workers", [0, *slow(1)])
def test_unreadable_from_the_first_sample_on(stages: int, workers: int) -> None:
    case = Case(at=0, how="raises", options={"dataloader_num_workers": workers})
    assert_same_error(errors_of(case, stages), LookupError, "row 0 cannot be read")


@pytest.mark.parametrize("workers", [*slow(0), 1])
def test_unreadable_on_one_process(workers: int) -> None:
    case = Case(samples=24, at=LATE, how="raises", options={"dataloader_num_workers": workers})
    assert_one_failed(errors_of(case, 1), LookupError, f"row {LATE} cannot be read")


@pytest.mark.parametrize("workers", [0, *slow(1)])
def test_unreadable_on_both_processes(workers: int) -> None:
    """The stages of one pipeline read the same rows."""
    case = Case(samples=24, at=LATE, how="raises", options={"dataloader_num_workers": workers})
    assert_same_error(errors_of(case, 2), LookupError, f"row {LATE} cannot be read")


# ---------------------------------------------------------------------------------------------------------
# Numbers that are none
# ---------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("max_grad_norm", [1.0, *slow(0.0)])
@pytest.mark.parametrize("at", [5, *slow(9)], ids=["then", "last"])
@pytest.mark.parametrize("trainer", [NanLoss, InfiniteGradient])
def test_not_finite_in_one_step(trainer: type, at: int, max_grad_norm: float, stages: int) -> None:
    """Training goes on, and in the same weights the same numbers are NaN."""
    case = Case(at=at, trainer=trainer, options={"max_grad_norm": max_grad_norm})
    expected = assert_as_stock(case, stages)
    assert expected.steps == 3
    assert not all(weight.isfinite().all() for weight in expected.weights.values())
