"""Where the stock Trainer works, a `PipeTransformerTrainer` in its place does the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch.utils.data import DataLoader
from training_runs import (
    Outcome,
    Run,
    StopAfter,
    assert_same_training,
    outcome_of,
    pipeline_trainer,
    reference,
    reference_trainer,
)
from transformers import TrainerCallback

from hf_pipetransformer import LayerFreezeCallback

RUN = Run(samples=40, epochs=1, accumulation=1, per_device=16)


def alone(run: Run, folder: str = "pipeline") -> Any:
    """K = 1 in this process, on the reference's batches."""
    return pipeline_trainer(replace(run, per_device=64), 1, folder, use_cpu=True)


class MakesItsOptimizer:
    def create_optimizer(self, model=None):  # type: ignore[no-untyped-def]
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        return self.optimizer


class GivesBatches:
    """Its evaluation has batches, and no data set."""

    def get_eval_dataloader(self, eval_dataset=None):  # type: ignore[no-untyped-def]
        samples = [self.eval_dataset[index] for index in range(12)]
        return [self.data_collator(samples[start : start + 4]) for start in (0, 4, 8)]


MADE_BEFORE = (None, MakesItsOptimizer)


def made_before(rank: int, world_size: int) -> list[Outcome]:
    outcomes = []
    for mixin in MADE_BEFORE:
        trainer = pipeline_trainer(replace(RUN, per_device=32, trainer=mixin), 2)
        trainer.create_optimizer()
        outcomes.append(outcome_of(trainer))
    return outcomes


def test_stages_adopt_an_optimizer_over_the_whole_model() -> None:
    expected = [reference(0, 1, replace(RUN, trainer=mixin)) for mixin in MADE_BEFORE]
    for outcomes in run_ranks(made_before, 2):
        for outcome, wanted in zip(outcomes, expected, strict=True):
            assert_same_training([outcome], wanted)


# ------------------------------------------------------------------------------------------ evaluation, loaders
def evaluated_in_batches(rank: int, world_size: int) -> float:
    run = replace(RUN, trainer=GivesBatches).with_options(remove_unused_columns=False)
    trainer = pipeline_trainer(run, 2) if world_size > 1 else alone(run)
    return trainer.evaluate()["eval_loss"]


def test_stages_evaluate_batches_that_have_no_dataset() -> None:
    expected = evaluated_in_batches(0, 1)
    assert run_ranks(evaluated_in_batches, 2) == [pytest.approx(expected, abs=1e-5)] * 2


class ShardsItself:
    """Each process reads a part of the samples that it has chosen itself, as Ray Data's loaders do."""

    def get_train_dataloader(self):  # type: ignore[no-untyped-def]
        here = range(self.args.process_index, len(self.train_dataset), self.args.world_size)
        samples = [self.train_dataset[index] for index in here]
        return DataLoader(samples, batch_size=4, collate_fn=self.data_collator)  # type: ignore[arg-type]


OF_ITS_OWN = replace(RUN, per_device=4, epochs=4).with_options(remove_unused_columns=False)


def with_a_loader_of_its_own(rank: int, world_size: int, folder: str) -> list[Outcome]:
    """The stock Trainer's outcome, which is DDP's on several processes, and that of each process with all of K = 1."""
    run = replace(OF_ITS_OWN, trainer=ShardsItself).with_options(average_tokens_across_devices=False)
    outcomes = []
    for make in (reference_trainer, lambda run: pipeline_trainer(run, 1, folder, use_cpu=True, activation_cache="on")):
        trainer = make(run)
        trainer.add_callback(schedule())
        outcomes.append(outcome_of(trainer))
    hits = [entry["cache_hit_rate"] for entry in trainer.state.log_history if "cache_hit_rate" in entry]
    assert hits[-1:] == [1.0]
    return outcomes


def test_a_training_loader_of_the_users_own_does_with_one_stage(tmp_path: Path) -> None:
    for expected, outcome in run_ranks(with_a_loader_of_its_own, 2, str(tmp_path)):
        assert_same_training([outcome], expected)


def with_unequal_loaders(rank: int, world_size: int) -> list[str]:
    """The refusals of loaders with a length, and of loaders without one."""

    class Unequal(ShardsItself):
        def get_train_dataloader(self):  # type: ignore[no-untyped-def]
            return list(super().get_train_dataloader())[: 4 - rank]

    class UnequalStreams(Unequal):
        def get_train_dataloader(self):  # type: ignore[no-untyped-def]
            return Stream(super().get_train_dataloader())

    messages = []
    for mixin in (Unequal, UnequalStreams):
        trainer = pipeline_trainer(replace(OF_ITS_OWN, trainer=mixin).with_options(max_steps=20), 1)
        with pytest.raises(ValueError) as caught:
            trainer.train()
        messages.append(str(caught.value))
    return messages


class Stream:
    """Batches without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_loaders_of_different_lengths_are_refused_by_all_processes() -> None:
    for messages in run_ranks(with_unequal_loaders, 2):
        for message, when in zip(messages, (":", " at step 4:"), strict=True):
            assert f"have different numbers of batches{when} process 0 has" in message


GROUPED = replace(RUN, samples=300, epochs=2).with_options(train_sampling_strategy="group_by_length")
"""Its sampler draws from the global generator."""


def test_an_order_from_the_global_generator_is_the_stock_trainers_also_after_an_interruption(tmp_path: Path) -> None:
    run, folder = GROUPED.with_options(save_strategy="steps", save_steps=2), str(tmp_path)
    undisturbed = outcome_of(alone(GROUPED))
    assert_same_training([undisturbed], reference(0, 1, GROUPED))
    trainer = alone(run, folder)
    trainer.add_callback(StopAfter(7))  # within the second epoch of five steps
    trainer.train()
    resumed = outcome_of(alone(run, folder), str(tmp_path / "checkpoint-6"))
    assert resumed.losses == undisturbed.losses


# ------------------------------------------------------------------------------------------ arguments set later
def test_arguments_that_are_set_later_do_what_they_do_in_the_stock_trainer() -> None:
    outcomes = []
    for make in (reference_trainer, alone):
        trainer = make(replace(RUN, samples=150))
        trainer.args.per_device_train_batch_size, trainer.args.num_train_epochs = 7, 2
        trainer.args.dataloader_drop_last = True
        outcomes.append(outcome_of(trainer))
    assert_same_training(outcomes[1:], outcomes[0])


def averaging_later(rank: int, world_size: int) -> list[Outcome]:
    outcomes = []
    for stages in (1, 2):
        run = Run(kind="causal-lm", samples=40, epochs=1, accumulation=1, per_device=32)
        trainer = pipeline_trainer(run, stages)
        trainer.args.average_tokens_across_devices = True
        outcomes.append(outcome_of(trainer))
    return outcomes


def test_averaging_tokens_set_later_does_not_double_the_loss() -> None:
    expected = reference(0, 1, Run(kind="causal-lm", samples=40, epochs=1, accumulation=1, per_device=16))
    for outcomes in run_ranks(averaging_later, 2):
        assert_same_training(outcomes, expected)


# ------------------------------------------------------------------------------------------ trained twice
FROZEN = 2


class FreezeByHand(TrainerCallback):
    """Bert's bottom layers, from the second epoch on."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if round(state.epoch) == 1:
            bert = kwargs["model"].bert
            for module in (bert.embeddings, *bert.encoder.layer[:FROZEN]):
                module.requires_grad_(False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].requires_grad_(True)


def schedule() -> LayerFreezeCallback:
    return LayerFreezeCallback({"name": "schedule", "schedule": {1: FROZEN}})


def train_twice(trainer: Any, callback: TrainerCallback) -> list[Outcome]:
    """The callback comes between; the optimizer's state stays, as under the stock Trainer."""
    first = outcome_of(trainer)
    trainer.add_callback(callback)
    return [first, outcome_of(trainer)]


def frozen_the_second_time(rank: int, world_size: int, run: Run) -> list[Outcome]:
    return train_twice(pipeline_trainer(run, 2, activation_cache="on", use_cpu=True), schedule())


def test_a_freeze_callback_may_come_between_two_trainings() -> None:
    run = replace(RUN, samples=128, epochs=2)
    expected = train_twice(reference_trainer(run), FreezeByHand())
    for outcomes in run_ranks(frozen_the_second_time, 2, replace(run, per_device=32)):
        for outcome, wanted in zip(outcomes, expected, strict=True):
            assert_same_training([outcome], wanted)
