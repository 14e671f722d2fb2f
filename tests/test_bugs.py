"""One test for each fault that was found and mended."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch.utils.data import IterableDataset
from training_data import PadCollator, StreamedData, TrainingData
from training_runs import (
    Outcome,
    Run,
    assert_same_training,
    outcome_of,
    pipeline_trainer,
    reference_trainer,
    with_layerdrop,
)
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

RUN = Run(samples=32, epochs=1, accumulation=1)


# ------------------------------------------------------------------------------------------ data
class Relabelled(IterableDataset):
    """A stream that wraps another one in `.dataset`, as users do."""

    def __init__(self, dataset: IterableDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({**sample, "labels": 1 - sample["labels"]} for sample in self.dataset)


def short_stream(rank: int, world_size: int) -> Outcome:
    """Two passes of steps with 32, 32 and 10 samples: the last one of each has one micro-batch of 16 at most, not two.

    In a stream around the stream, which shall not be unwrapped.
    """
    run = Run(streamed=True, per_device=4 * world_size).with_options(max_steps=6)
    trainer: Any = reference_trainer(run) if world_size == 1 else pipeline_trainer(run, 2)
    trainer.train_dataset = Relabelled(StreamedData(run.kind, 74))
    return outcome_of(trainer)


def test_the_last_step_of_a_stream_has_its_own_samples_only() -> None:
    """The step accumulates fewer micro-batches; the stock Trainer adds them to the next pass's first step."""
    assert_same_training(run_ranks(short_stream, 2), run_ranks(short_stream, 1)[0])


# ------------------------------------------------------------------------------------------ with one stage
def full_eval(rank: int, world_size: int, cls: type, arguments_cls: type) -> Outcome:
    run = Run("causal-lm", samples=32, epochs=1).with_options(use_cpu=True, bf16_full_eval=True)
    rows = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    arguments = arguments_cls("out", **rows, **run.common_options())
    return outcome_of(cls(run.build_model(), arguments, PadCollator("causal-lm"), train_dataset=run.data(32)))


@pytest.mark.slow
def test_what_is_left_to_the_stock_trainer_trains_as_it_does() -> None:
    """`average_tokens_across_devices` was switched off there, too, and changed the losses."""
    expected = run_ranks(full_eval, 2, Trainer, TrainingArguments)
    ours = run_ranks(full_eval, 2, PipeTransformerTrainer, PipeTransformerTrainingArguments)
    assert_same_training(ours, expected[0], tolerance=0)


def sums_with_skipped_layers(rank: int, world_size: int) -> float:
    run = Run("seq2seq", samples=32, accumulation=1, epochs=1)
    outcome = outcome_of(pipeline_trainer(run, 1, model=with_layerdrop(), learning_rate=1e-2))
    return sum(float(weight.double().sum()) for weight in outcome.weights.values())


@pytest.mark.slow
def test_replicas_of_one_stage_may_skip_layers_at_random() -> None:
    """DDP was told that each step reaches all parameters, as the probe did, and failed in the second one."""
    one, other = run_ranks(sums_with_skipped_layers, 2)
    assert one == other


# ------------------------------------------------------------------------------------------ behind a training
def parameters_left(rank: int, world_size: int) -> int:
    freezing = {"freeze_policy": "schedule", "freeze_schedule": {0: 1}}
    trainer = pipeline_trainer(RUN, world_size, **freezing)
    trainer.train()
    parameters = [weakref.ref(parameter) for parameter in trainer.model.parameters()]
    del trainer
    gc.collect()
    return sum(parameter() is not None for parameter in parameters)


def test_a_trained_model_is_freed() -> None:
    """Counting what its layers save for the backward had made a circle in C++, which no garbage collector sees."""
    assert run_ranks(parameters_left, 2) == [0, 0]


# ------------------------------------------------------------------------------------------ the cache in predictions
class KeepsTypesBack:
    def compute_loss(self, model, inputs, *args, **kwargs):  # type: ignore[no-untyped-def]
        inputs = {name: value for name, value in inputs.items() if name != "token_type_ids"}
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]


class WithoutLabels(TrainingData):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: value for name, value in super().__getitem__(index).items() if name != "labels"}


def collate_with_types(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = PadCollator("text-classification")([{"labels": 0, **sample} for sample in samples])
    batch["token_type_ids"] = (torch.arange(batch["input_ids"].shape[1]) % 2).expand_as(batch["input_ids"]).clone()
    return batch if "labels" in samples[0] else {name: value for name, value in batch.items() if name != "labels"}


def predictions(rank: int, stages: int, cache: str, folder: str) -> list[Any]:
    """The predictions of a model for samples without labels, in each epoch."""
    found: list[Any] = []

    class Predicts(TrainerCallback):
        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            found.append(trainer.predict(WithoutLabels("text-classification", 8)).predictions)

    run = Run(samples=16, epochs=3, accumulation=1, per_device=8 // stages, trainer=KeepsTypesBack)
    options = {"freeze_policy": "schedule", "freeze_schedule": {0: 2}, "elastic": False, "use_cpu": True}
    trainer = pipeline_trainer(run, stages, folder, activation_cache=cache, **options)
    trainer.data_collator = collate_with_types
    trainer.add_callback(Predicts())
    trainer.train()
    return found


@pytest.mark.slow
def test_an_input_that_the_loss_keeps_back_counts_where_no_loss_is_computed(tmp_path: Any) -> None:
    """The input is no part of the keys, and the model gets it in predictions without labels, on all stages."""
    expected = predictions(0, 1, "off", str(tmp_path / "alone"))
    for found in run_ranks(predictions, 2, "on", str(tmp_path / "two")):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------ accumulation
def test_a_router_loss_is_averaged_over_accumulated_batches(tmp_path: Path) -> None:
    """The loss was added up: the model's own term was counted once for each accumulated batch."""
    losses = []
    for accumulation in (1, 2):
        run = Run("causal-lm", "mixtral-router-loss", 8, per_device=8 // accumulation, accumulation=accumulation)
        trainer = pipeline_trainer(run, 1, str(tmp_path / str(accumulation)), use_cpu=True)
        losses.append(outcome_of(trainer).losses[0])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)  # the term of the halves differs slightly from the whole's


# ------------------------------------------------------------------------------------------ resuming
def cached_layers(rank: int, world_size: int, folder: str, cache: str, resumes: bool) -> list[int]:
    """Layers that count as cached before each step."""
    seen: list[int] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(trainer._placed.current_layout.num_cached_layers)

    run = Run(samples=32, per_device=4, accumulation=1, epochs=4)
    freezing = {"freeze_policy": "schedule", "freeze_schedule": {1: 2}, "elastic": False}
    where = {"activation_cache": cache, "activation_cache_dir": f"{folder}/cache" if cache == "on" else None}
    trainer = pipeline_trainer(run, 2, folder, save_strategy="steps", save_steps=1, **freezing, **where)
    trainer.add_callback(Look())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-11" if resumes else None)
    return seen


@pytest.mark.slow
def test_a_job_that_goes_on_counts_layers_as_cached_where_it_has_its_cache_only(tmp_path: Path) -> None:
    first = run_ranks(cached_layers, 2, str(tmp_path), "on", False)[0]
    assert first[10] == 2, first
    assert run_ranks(cached_layers, 2, str(tmp_path), "on", True)[0] == [2] * 5
    assert run_ranks(cached_layers, 2, str(tmp_path), "off", True)[0] == [0] * 5
