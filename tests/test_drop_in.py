"""Where the stock Trainer works, a `PipeTransformerTrainer` in its place does the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks
from selection import slow
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
from transformers import BertForSequenceClassification, TrainerCallback

from hf_pipetransformer import LayerFreezeCallback, UnsupportedModelError

RUN = Run(samples=40, epochs=1, accumulation=1, per_device=16)
ALONE = RUN.with_options(max_steps=3)  # a global batch of 64, or of one process's 16


def alone(run: Run, folder: str = "pipeline") -> Any:
    """K = 1 in this process, on the reference's batches."""
    return pipeline_trainer(replace(run, per_device=64), 1, folder, use_cpu=True)


# ------------------------------------------------------------------------------------------ the user's own methods
class StepsItself:
    def training_step(self, model, inputs, num_items_in_batch=None):  # type: ignore[no-untyped-def]
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class PredictsItself:
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):  # type: ignore[no-untyped-def]
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            outputs = model(**inputs)
        return outputs.loss, outputs.logits, inputs["labels"]


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


@pytest.mark.parametrize("mixin", [StepsItself, PredictsItself, MakesItsOptimizer, GivesBatches])
def test_methods_of_the_users_own_do_on_one_process_what_they_do_in_the_stock_trainer(mixin: type) -> None:
    run = replace(ALONE, trainer=mixin).with_options(eval_strategy="epoch", remove_unused_columns=False)
    expected, trainer = reference(0, 1, run), alone(run)
    trainer.evaluate()
    outcome = outcome_of(trainer)
    assert_same_training([outcome], expected)
    assert outcome.metrics["eval_loss"] == pytest.approx(expected.metrics["eval_loss"], abs=1e-5)


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
def batches_alone(rank: int, world_size: int) -> list[float]:
    trainer = pipeline_trainer(replace(RUN, trainer=GivesBatches).with_options(remove_unused_columns=False), 2)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return [before, trainer.evaluate()["eval_loss"]]


def test_stages_evaluate_batches_that_have_no_dataset() -> None:
    run = replace(RUN, trainer=GivesBatches)
    trainer = alone(run.with_options(remove_unused_columns=False))
    for losses in run_ranks(batches_alone, 2):
        assert losses[0] == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-5)


class ShufflesItself:
    """Its training has a loader of its own."""

    def get_train_dataloader(self):  # type: ignore[no-untyped-def]
        generator = torch.Generator().manual_seed(3)
        options = {"batch_size": 5, "shuffle": True, "generator": generator, "collate_fn": self.data_collator}
        return DataLoader(self.train_dataset, **options)


def test_a_training_loader_of_the_users_own_does_in_one_process() -> None:
    run = replace(ALONE, epochs=2, trainer=ShufflesItself).with_options(remove_unused_columns=False, max_steps=11)
    assert_same_training([outcome_of(alone(run))], reference(0, 1, run))


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


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_training_loader_of_the_users_own_does_with_one_stage(world_size: int, tmp_path: Path) -> None:
    for expected, outcome in run_ranks(with_a_loader_of_its_own, world_size, str(tmp_path)):
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


def test_an_order_that_is_drawn_from_the_global_generator_is_the_stock_trainers() -> None:
    assert_same_training([outcome_of(alone(GROUPED))], reference(0, 1, GROUPED))


def test_such_an_order_is_the_same_after_an_interruption(tmp_path: Path) -> None:
    run, folder = GROUPED.with_options(save_strategy="steps", save_steps=2), str(tmp_path)
    undisturbed = outcome_of(alone(GROUPED))
    trainer = alone(run, folder)
    trainer.add_callback(StopAfter(7))  # within the second epoch of five steps
    trainer.train()
    resumed = outcome_of(alone(run, folder), str(tmp_path / "checkpoint-6"))
    assert resumed.losses == undisturbed.losses


class ReadsLoader(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        loader = train_dataloader
        self.seen = [loader.total_batch_size, loader.total_dataset_length, type(loader.sampler).__name__, len(loader)]
        self.seen += [loader.batch_sampler.batch_size, loader.batch_sampler.drop_last, len(loader.dataset)]


def test_callbacks_read_the_training_loader_as_accelerates() -> None:
    mine, stock = ReadsLoader(), ReadsLoader()
    trainer = alone(ALONE)
    trainer.add_callback(mine)
    trainer.train()
    reference(0, 1, replace(ALONE, keywords={"callbacks": [stock]}))
    assert mine.seen == stock.seen


# ------------------------------------------------------------------------------------------ arguments set later
@pytest.mark.parametrize(
    "changed",
    [
        {"per_device_train_batch_size": 7},
        *slow({"train_sampling_strategy": "group_by_length"}, {"num_train_epochs": 2, "dataloader_drop_last": True}),
    ],
)
def test_arguments_that_are_set_later_do_what_they_do_in_the_stock_trainer(changed: dict[str, Any]) -> None:
    run = replace(RUN, samples=150)
    outcomes = []
    for make in (reference_trainer, alone):
        trainer = make(run)
        for name, value in changed.items():
            setattr(trainer.args, name, value)
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


def frozen_the_second_time(rank: int, world_size: int, run: Run, stages: int, cache: str) -> list[Outcome]:
    trainer = pipeline_trainer(run, stages, activation_cache=cache, use_cpu=True)
    outcomes = train_twice(trainer, schedule())
    (callback,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, LayerFreezeCallback)]
    assert callback.num_frozen == FROZEN
    return outcomes


@pytest.mark.parametrize(("world_size", "stages", "cache"), [(1, 1, "on"), *slow((4, 4, "on"))])
def test_a_freeze_callback_may_come_between_two_trainings(world_size: int, stages: int, cache: str) -> None:
    run = replace(RUN, samples=128, epochs=2)
    expected = train_twice(reference_trainer(run), FreezeByHand())
    mine = replace(run, per_device=64 // world_size)
    for outcomes in run_ranks(frozen_the_second_time, world_size, mine, stages, cache):
        for outcome, wanted in zip(outcomes, expected, strict=True):
            assert_same_training([outcome], wanted)


# ------------------------------------------------------------------------------------------ with frozen layers
class CallsTwice:
    """R-Drop."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
        one, two = model(**inputs), model(**inputs)
        logs = [output.logits.log_softmax(-1) for output in (one, two)]
        difference = F.kl_div(*logs, log_target=True, reduction="batchmean")
        loss = (one.loss + two.loss) / 2 + difference
        return (loss, one) if return_outputs else loss


class CallsAPart:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
        whole = getattr(model, "model", model)  # a pipeline's
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        logits = whole.classifier(whole.bert(**inputs).pooler_output)
        loss = F.cross_entropy(logits, labels)
        return (loss, {"logits": logits}) if return_outputs else loss


class AsksWhetherItTrains(BertForSequenceClassification):
    def forward(self, input_ids=None, labels=None, **inputs):  # type: ignore[no-untyped-def]
        smoothing = 0.3 if self.training else 0.0
        logits = self.classifier(self.bert(input_ids, **inputs).pooler_output)
        return {"loss": F.cross_entropy(logits, labels, label_smoothing=smoothing), "logits": logits}


class HasSuchAModel:
    def __init__(self, model=None, **keywords):  # type: ignore[no-untyped-def]
        model.__class__ = AsksWhetherItTrains
        super().__init__(model=model, **keywords)


@pytest.mark.parametrize("mixin", [CallsTwice, CallsAPart, HasSuchAModel])
def test_what_surrounds_frozen_layers_does_what_it_does_in_the_stock_trainer(mixin: type) -> None:
    run = replace(RUN, samples=128, epochs=3, trainer=mixin).with_options(activation_cache="on")
    trainer = alone(run)
    trainer.add_callback(schedule())
    expected = reference_trainer(replace(run, options={}))
    expected.add_callback(FreezeByHand())
    assert_same_training([outcome_of(trainer)], outcome_of(expected))


def test_what_surrounds_frozen_layers_does_the_same_with_a_callback_in_the_stock_trainer() -> None:
    run = replace(RUN, samples=128, trainer=CallsTwice)
    outcomes = []
    for callback in (FreezeByHand(), schedule()):
        trainer = reference_trainer(run)
        trainer.add_callback(callback)
        outcomes.append(outcome_of(trainer))
    assert_same_training(outcomes[1:], outcomes[0])


class Flat(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(1000, 8), torch.nn.Linear(8, 2)

    def forward(self, input_ids, labels, **others):  # type: ignore[no-untyped-def]
        logits = self.head(self.embedding(input_ids).mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_one_stage_is_no_advice_where_there_is_one_already() -> None:
    trainer = pipeline_trainer(replace(ALONE, per_device=64), 1, model=Flat(), use_cpu=True)
    trainer.add_callback(schedule())
    with pytest.raises(UnsupportedModelError, match=r"with frozen layers: .* or freeze nothing") as caught:
        trainer.train()
    assert "pipeline_parallel_size" not in str(caught.value)


def cut_anew(rank: int, world_size: int) -> list[list[Outcome]]:
    """Trained twice, in one stage and then in two, or the other way round."""
    found = []
    for stages, then in ((2, 1), (1, 2)):
        trainer = pipeline_trainer(replace(RUN, per_device=32), stages)
        first = outcome_of(trainer)
        trainer.args.pipeline_parallel_size = then
        found.append([first, outcome_of(trainer)])
    return found


@pytest.mark.slow
def test_the_optimizers_state_goes_to_where_the_next_training_wants_it() -> None:
    trainer = reference_trainer(RUN)
    expected = [outcome_of(trainer), outcome_of(trainer)]
    for found in run_ranks(cut_anew, 2):
        for outcomes in found:
            for outcome, wanted in zip(outcomes, expected, strict=True):
                assert_same_training([outcome], wanted)
