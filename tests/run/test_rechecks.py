"""What users' code begins to do after the first step: it is seen, and said by all processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import run_ranks, run_ranks_expecting_error
from torch import nn
from training_runs import Run, assert_same_training, outcome_of, pipeline_trainer
from transformers import TrainerCallback

from hf_pipetransformer.errors import UnsupportedModelError
from hf_pipetransformer.model.loss_scaling import EXACT
from hf_pipetransformer.run.rechecks import Rechecks, keeper_of_placeholders, loss_has_changed
from hf_pipetransformer.run.run import WRITTEN_TO_PLACEHOLDER


def test_when_it_is_looked_again() -> None:
    rechecks = Rechecks()
    due = [step for step in range(100) if rechecks.is_due(step, step / 40)]
    assert due == [*range(8), 15, 31, 40, 41, 63, 80, 81]
    assert not rechecks.is_due(99, 2.5)  # once in a step


# ------------------------------------------------------------------------------------------ the loss
class BeginsLater:
    """A contrastive term from the third step on."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        outputs = model(**inputs)
        if self.state.global_step < 2:  # type: ignore[attr-defined]
            return outputs.loss
        return outputs.loss + (outputs.logits @ outputs.logits.T).logsumexp(-1).mean()


class Steady(BeginsLater):
    """Terms that are means over rows may come and go."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        outputs = model(**inputs)
        return outputs.loss * (1 + self.state.global_step) + 0.1 * outputs.logits.square().mean()  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyError("labels")])
def test_a_recheck_that_fails_is_told(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> Any:
        raise error

    pipeline: Any = SimpleNamespace(model=nn.Linear(1, 1), losses_of_parts_and_whole=fail)
    found = loss_has_changed(pipeline, {}, (), fail, (), EXACT)
    if isinstance(error, KeyError):
        assert found == "recomputing it fails (KeyError: 'labels')"
    else:
        assert found is None and "The loss is not rechecked: there is not enough memory" in caplog.text


def trained(rank: int, world_size: int, mixin: type | None, callback: TrainerCallback | None = None) -> Any:
    trainer = pipeline_trainer(Run(samples=48, accumulation=1, per_device=4, trainer=mixin), 2, num_microbatches=4)
    if callback is not None:
        trainer.add_callback(callback)
    return outcome_of(trainer)


def test_a_term_that_begins_later_stops_the_training() -> None:
    errors = run_ranks_expecting_error(trained, 2, BeginsLater)
    for error in errors:
        assert isinstance(error, UnsupportedModelError) and "in step 3 its loss is not the same function" in str(error)
    assert len({str(error) for error in errors}) == 1


@pytest.mark.slow
def test_a_factor_that_changes_does_not() -> None:
    outcomes = run_ranks(trained, 2, Steady)
    expected = run_ranks(alone, 1, Steady)[0]
    assert_same_training(outcomes, expected)


def alone(rank: int, world_size: int, mixin: type | None) -> Any:
    return outcome_of(pipeline_trainer(Run(samples=48, accumulation=1, per_device=8, trainer=mixin), 1))


# ------------------------------------------------------------------------------------------ callbacks
class Averages(TrainerCallback):
    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        for name, parameter in model.named_parameters():
            self.average[name] = parameter.detach().clone()


class Writes(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-1, 1)


@pytest.mark.parametrize(
    ("callback", "words"),
    [(Averages, "Averages.average keeps copies"), (Writes, "wrote to parameters of the model")],
)
def test_callbacks_that_need_all_weights_are_named(callback: type, words: str) -> None:
    for error in run_ranks_expecting_error(trained, 2, None, callback()):
        assert type(error) is ValueError and words in str(error) and "pipeline_parallel_size=1" in str(error)


def test_a_callback_may_keep_the_model_itself() -> None:
    missing = nn.Parameter(torch.full((2, 3), float("nan")))
    diverged = nn.Parameter(torch.full((2, 3), float("nan")))
    model = nn.ParameterList([missing, diverged])
    keeper = Averages()
    keeper.model = model  # type: ignore[attr-defined]
    assert keeper_of_placeholders([keeper], model, [missing]) is None
    keeper.average["weight"] = missing.detach().clone()
    assert keeper_of_placeholders([keeper], model, [missing]) == "Averages.average"
    keeper.average["weight"] = missing.data  # the placeholder itself
    assert keeper_of_placeholders([keeper], model, [missing]) is None
    keeper.average["inside"] = SimpleNamespace(shadow=[missing.detach().clone()])
    assert keeper_of_placeholders([keeper], model, [missing]) == "Averages.average"


def test_torch_says_the_same_of_a_write_to_a_placeholder() -> None:
    """`trainer.WRITTEN_TO_PLACEHOLDER` is recognised by its words."""
    with pytest.raises(RuntimeError, match=WRITTEN_TO_PLACEHOLDER):
        torch.zeros(()).expand(3).add_(1)


# ------------------------------------------------------------------------------------------ steps
class Twice:
    """Sharpness-aware minimisation, in its outline."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *rest: Any) -> torch.Tensor:
        super().training_step(model, dict(inputs), *rest)  # type: ignore[misc]
        self.model.zero_grad()  # type: ignore[attr-defined]
        return super().training_step(model, inputs, *rest)  # type: ignore[misc]


def stepped_twice(rank: int, world_size: int, stages: int) -> Any:
    run = Run(samples=48, accumulation=1, per_device=8 // world_size, trainer=Twice)
    return outcome_of(pipeline_trainer(run, stages))


def test_a_batch_is_trained_on_twice_where_there_is_one_stage() -> None:
    expected = run_ranks(alone, 1, None)[0]
    assert_same_training(run_ranks(stepped_twice, 1, 1), expected)
    for error in run_ranks_expecting_error(stepped_twice, 2, 2):
        assert type(error) is ValueError and "called twice for one batch" in str(error)
