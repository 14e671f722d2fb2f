"""Parameters stay the user's objects, and those that the user wants are trained, as by the stock Trainer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from distributed import run_ranks, run_ranks_expecting_error
from selection import few, slow
from torch import nn
from training_data import PadCollator
from training_runs import Outcome, Run, assert_same_training, outcome_of, pipeline_trainer
from transformers import Trainer, TrainerCallback, TrainingArguments

RUN = Run(samples=48, accumulation=1, epochs=3, per_device=4)  # of 4 processes; on two half as many steps' rows
LAYERS = "bert.encoder.layer."


# ------------------------------------------------------------------------------------------ unfreezing
class FreezeBelow(TrainerCallback):
    """Trains the layers from a number on, by epoch or step; the embeddings with layer 0.

    Args:
        event: at which it sets `requires_grad`.
        first_trained: by epochs (or, at events of a step, steps) that are done.
    """

    def __init__(self, event: str, first_trained: dict[int, int]) -> None:
        self.first_trained, self.is_by_step = first_trained, "step" in event
        setattr(self, event, self.apply)

    def apply(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        done = state.global_step if self.is_by_step else round(state.epoch or 0.0)
        if done in self.first_trained:
            train_from(model, self.first_trained[done])


def train_from(model: nn.Module, first: int) -> None:
    for name, parameter in model.named_parameters():
        layer = int(name[len(LAYERS) :].split(".")[0]) if name.startswith(LAYERS) else 99
        layer = -1 if ".embeddings." in name else layer
        parameter.requires_grad_(layer >= first)


CASES: dict[str, tuple[str, dict[int, int]]] = {
    "unfreeze at epochs": ("on_epoch_begin", {1: 2, 2: -1}),
    "unfreeze at an epoch's end": ("on_epoch_end", {1: 1}),
    "freeze and unfreeze at steps": ("on_step_begin", {2: -1, 4: 3, 6: 0}),
    "freeze at a step's end": ("on_step_end", {3: 99, 5: 1}),
}


def gradual(case: str, world: int) -> tuple[Run, nn.Module]:
    """The user's AdamW over all parameters, of which the head alone is trained at first."""
    model = RUN.build_model()
    train_from(model, 99)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    return Run(
        samples=48,
        per_device=16 // world,
        accumulation=1,
        epochs=3,
        keywords={"optimizers": (optimizer, None), "callbacks": [FreezeBelow(*CASES[case])]},
    ), model


def gradual_pipeline(rank: int, world_size: int, case: str, stages: int) -> Outcome:
    run, model = gradual(case, world_size)
    return outcome_of(pipeline_trainer(run, stages, model=model))


def gradual_reference(rank: int, world_size: int, case: str) -> Outcome:
    run, model = gradual(case, 1)
    arguments = TrainingArguments("reference", use_cpu=True, per_device_train_batch_size=16, **run.common_options())
    return outcome_of(
        Trainer(
            model=model,
            args=arguments,
            train_dataset=run.data(run.samples),
            data_collator=PadCollator(run.kind),
            **run.keywords,
        )
    )


@cache
def expected(case: str) -> Outcome:
    return run_ranks(gradual_reference, 1, case)[0]


LAYOUTS = {"K=1": (1, 1), "K=2": (2, 2), "R=2": (2, 1), "K=2, R=2": (4, 2)}


@pytest.mark.parametrize("layout", few(LAYOUTS, "K=2, R=2"))
@pytest.mark.parametrize("case", few(CASES, "freeze and unfreeze at steps"))
def test_callbacks_that_freeze_and_unfreeze_equal_the_stock_trainer(case: str, layout: str) -> None:
    world, stages = LAYOUTS[layout]
    outcomes = run_ranks(gradual_pipeline, world, case, stages)
    assert_same_training(outcomes, expected(case))


def thaw(rank: int, world_size: int, stages: int) -> None:
    run = Run(epochs=2, samples=32, keywords={"callbacks": [FreezeBelow("on_step_begin", {2: -1})]})
    pipeline_trainer(
        run, stages, freeze_policy="schedule", freeze_strategy="steps", freeze_steps=1, freeze_schedule={1: 1}
    ).train()


@pytest.mark.parametrize("stages", [*slow(1), 2])
def test_layers_of_the_freeze_policy_cannot_be_unfrozen(stages: int) -> None:
    for error in run_ranks_expecting_error(thaw, 2, stages, timeout=60):
        assert isinstance(error, ValueError) and "freeze policy has frozen" in str(error)


class TogglesInLoss:
    def compute_loss(self, model, inputs, *args, **kwargs):  # type: ignore[no-untyped-def]
        if self.state.global_step == 1:  # type: ignore[attr-defined]
            train_from(model, 3)
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]


def toggle(rank: int, world_size: int) -> None:
    pipeline_trainer(Run(epochs=2, samples=32, trainer=TogglesInLoss), 2).train()


def test_flags_that_change_within_a_step_are_refused_everywhere() -> None:
    for error in run_ranks_expecting_error(toggle, 2, timeout=60):
        assert isinstance(error, ValueError) and "outside a callback" in str(error)


# ------------------------------------------------------------------------------------------ identity
class Harmless(TrainerCallback):
    """Sets the flags of placeholders, too."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        for parameter in model.parameters():
            parameter.requires_grad_(True)


def hooked_model() -> nn.Module:
    """With hooks on parameters that scale gradients, before and after they are accumulated."""
    model = Run("causal-lm", model="llama-tied").build_model()
    for number, parameter in enumerate(model.parameters()):
        if number % 3 == 0:
            parameter.register_hook(lambda gradient: gradient * 0.5)
    return model


def hooked(rank: int, world_size: int, stages: int) -> tuple[Outcome, bool, bool]:
    run = Run(
        "causal-lm", model="llama-tied", samples=48, epochs=2, accumulation=1, keywords={"callbacks": [Harmless()]}
    )
    model = hooked_model()
    mine = list(model.parameters())
    trainer = pipeline_trainer(run, stages, model=model)
    before = trainer.evaluate()["eval_loss"]
    same_after_evaluation = all(a is b for a, b in zip(mine, model.parameters(), strict=True))
    outcome = outcome_of(trainer)
    assert before > 0
    held = dict(zip((name for name, _ in model.named_parameters()), mine, strict=True))
    is_trained = all(torch.equal(held[name], value) for name, value in outcome.weights.items())
    return outcome, same_after_evaluation, is_trained


def hooked_reference(rank: int, world_size: int) -> Outcome:
    run = Run("causal-lm", model="llama-tied", samples=48, epochs=2, accumulation=1)
    arguments = TrainingArguments("ref", use_cpu=True, per_device_train_batch_size=8, **run.common_options())
    return outcome_of(
        Trainer(hooked_model(), arguments, train_dataset=run.data(48), data_collator=PadCollator(run.kind))
    )


@pytest.mark.slow
def test_hooks_on_parameters_and_lists_of_parameters_hold() -> None:
    wanted = run_ranks(hooked_reference, 1)[0]
    for stages in (1, 2):
        results = run_ranks(hooked, 2, stages)
        assert_same_training([outcome for outcome, *_ in results], wanted)
        assert all(same and is_trained for _, same, is_trained in results)


# ------------------------------------------------------------------------------------------ buffers
class Masked(nn.Module):
    """Multiplies by random buffers, of which one is not saved with the model."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("saved", torch.rand(size) + 0.5)
        self.register_buffer("unsaved", torch.rand(size) + 0.5, persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.saved * self.unsaved


class ChangesMask(TrainerCallback):
    """As pruning does: from weights, where they are."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if state.global_step == 2:
            layer = model.bert.encoder.layer[0]
            if not getattr(layer.output.dense.bias, "is_elsewhere", False):
                layer.output.dropout.saved.copy_(1 + layer.output.dense.bias.detach().sign() / 2)


def masked(rank: int, world_size: int, stages: int) -> tuple[Outcome, dict[str, torch.Tensor]]:
    run = Run(
        samples=48, accumulation=1, epochs=2, per_device=8 // world_size, keywords={"callbacks": [ChangesMask()]}
    )
    model = run.build_model()
    torch.manual_seed(rank)  # no common seed
    model.bert.encoder.layer[0].output.dropout = Masked(16)
    model.dropout = Masked(16)
    if world_size > 1:
        outcome = outcome_of(pipeline_trainer(run, stages, model=model))
    else:
        arguments = TrainingArguments("ref", use_cpu=True, per_device_train_batch_size=8, **run.common_options())
        data, collator = run.data(run.samples), PadCollator(run.kind)
        outcome = outcome_of(
            Trainer(model, arguments, train_dataset=data, data_collator=collator, callbacks=[ChangesMask()])
        )
    return outcome, {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_are_those_of_one_process() -> None:
    """Random ones are process 0's at the start, and in the end the stage's that runs their module."""
    wanted, wanted_buffers = run_ranks(masked, 1, 1)[0]
    for stages in (1, 2):
        results = run_ranks(masked, 2, stages)
        assert_same_training([outcome for outcome, _ in results], wanted)
        for _, buffers in results:
            assert buffers.keys() == wanted_buffers.keys()
            assert all(torch.equal(buffers[name], value) for name, value in wanted_buffers.items())
