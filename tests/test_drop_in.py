"""Where the stock Trainer works, a `PipeTransformerTrainer` in its place does the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
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

from hf_pipetransformer import LayerFreezeCallback

RUN = Run(samples=40, epochs=1, accumulation=1, per_device=16)


def alone(run: Run, folder: str = "pipeline") -> Any:
    """K = 1 in this process, on the reference's batches."""
    return pipeline_trainer(replace(run, per_device=64), 1, folder, use_cpu=True)


# ------------------------------------------------------------------------------------------ loaders
class ShardsItself:
    """Each process reads a part of the samples that it has chosen itself, as Ray Data's loaders do."""

    def get_train_dataloader(self):  # type: ignore[no-untyped-def]
        here = range(self.args.process_index, len(self.train_dataset), self.args.world_size)
        samples = [self.train_dataset[index] for index in here]
        return DataLoader(samples, batch_size=4, collate_fn=self.data_collator)  # type: ignore[arg-type]


OF_ITS_OWN = replace(RUN, per_device=4, epochs=4).with_options(remove_unused_columns=False)


def with_a_loader_of_its_own(rank: int, world_size: int, folder: str) -> list[Outcome]:
    """Outcomes of the stock Trainer (DDP on several processes), and of this one with one stage, freezing and cache."""
    run = replace(OF_ITS_OWN, trainer=ShardsItself).with_options(average_tokens_across_devices=False)
    outcomes = []
    for make in (reference_trainer, lambda run: pipeline_trainer(run, 1, folder, use_cpu=True, activation_cache="on")):
        trainer = make(run)
        trainer.add_callback(schedule())
        outcomes.append(outcome_of(trainer))
    hits = [entry["cache_hit_rate"] for entry in trainer.state.log_history if "cache_hit_rate" in entry]
    assert hits[-1:] == [1.0]
    return outcomes


@pytest.mark.slow
def test_a_training_loader_of_the_users_own_does_with_one_stage(tmp_path: Path) -> None:
    for expected, outcome in run_ranks(with_a_loader_of_its_own, 2, str(tmp_path)):
        assert_same_training([outcome], expected)


class Stream:
    """Batches without a length, on one process less than on the other."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class Unequal(ShardsItself):
    wrap: Any = list

    def get_train_dataloader(self):  # type: ignore[no-untyped-def]
        return self.wrap(list(super().get_train_dataloader())[: 4 - self.args.process_index])


class UnequalStreams(Unequal):
    wrap = Stream


def with_unequal_loaders(rank: int, world_size: int) -> None:
    for mixin, when in ((Unequal, ":"), (UnequalStreams, " at step 4:")):
        trainer = pipeline_trainer(replace(OF_ITS_OWN, trainer=mixin).with_options(max_steps=20), 1)
        with pytest.raises(ValueError, match=f"have different numbers of batches{when} process 0 has"):
            trainer.train()


@pytest.mark.slow
def test_loaders_of_different_lengths_are_refused_by_all_processes() -> None:
    run_ranks(with_unequal_loaders, 2)


GROUPED = replace(RUN, samples=300, epochs=2).with_options(train_sampling_strategy="group_by_length")
"""Its sampler draws from the global generator."""


@pytest.mark.slow
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


def averaging_later(rank: int, world_size: int) -> Outcome:
    trainer = pipeline_trainer(replace(RUN, kind="causal-lm", per_device=32), 2)
    trainer.args.average_tokens_across_devices = True
    return outcome_of(trainer)


@pytest.mark.slow
def test_averaging_tokens_set_later_does_not_double_the_loss() -> None:
    assert_same_training(run_ranks(averaging_later, 2), reference(0, 1, replace(RUN, kind="causal-lm")))


# ------------------------------------------------------------------------------------------ trained twice
def schedule() -> LayerFreezeCallback:
    """Freezes Bert's bottom layers, from the second epoch on."""
    return LayerFreezeCallback({"name": "schedule", "schedule": {1: 2}})


def train_twice(trainer: Any) -> list[Outcome]:
    """The callback comes between; the optimizer's state stays, as under the stock Trainer."""
    first = outcome_of(trainer)
    trainer.add_callback(schedule())
    return [first, outcome_of(trainer)]


def frozen_the_second_time(rank: int, world_size: int) -> list[Outcome]:
    run = replace(RUN, samples=128, epochs=2, per_device=32)
    return train_twice(pipeline_trainer(run, 2, activation_cache="on", use_cpu=True))


@pytest.mark.slow
def test_a_freeze_callback_may_come_between_two_trainings() -> None:
    expected = train_twice(reference_trainer(replace(RUN, samples=128, epochs=2)))
    for outcomes in run_ranks(frozen_the_second_time, 2):
        for outcome, wanted in zip(outcomes, expected, strict=True):
            assert_same_training([outcome], wanted)
