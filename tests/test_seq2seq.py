"""The pair for sequence-to-sequence models: tokens and trainings of `Seq2SeqTrainer` in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks
from model_zoo import EOS, MODELS, PAD, without_dropout
from selection import slow
from torch import nn
from training_data import Kind, PadCollator, TrainingData
from training_runs import Outcome, Run, assert_same_training, largest_difference, outcome_of
from transformers import EvalPrediction, GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_pipetransformer import (
    PipeTransformerSeq2SeqTrainer,
    PipeTransformerSeq2SeqTrainingArguments,
    PipeTransformerTrainingArguments,
)
from hf_pipetransformer.run import generation

WORLD = 2
BATCH = 8  # samples of a step, over all processes
EVALUATED = 12  # for the same batches with one process, two and four, as the loss is a mean over batches
FILLED_UP = 11  # here samples fill up the last batches of several processes
STEPS = 4
KIND_OF: dict[str, Kind] = {"t5": "seq2seq", "llama": "causal-lm"}


class Metrics:
    """Notes the generated tokens; the metric is the share of the labels' tokens that their sample's output has."""

    def __init__(self) -> None:
        self.generated: list[list[list[int]]] = []

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        tokens = without_padding(prediction.predictions)
        labels = without_padding(prediction.label_ids)
        self.generated.append(tokens)
        hits = sum(token in row for row, wanted in zip(tokens, labels, strict=True) for token in wanted)
        return {"hits": hits / sum(map(len, labels))}


def without_padding(rows: Any) -> list[list[int]]:
    """The rows without padding: its length and token depend on the other rows of a batch."""
    return [[int(token) for token in row if token not in (PAD, -100)] for row in np.asarray(rows)]


class PadLeft(PadCollator):
    """Padding on the left, for a model that generates behind the last token of a row."""

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(samples)
        shifts = (batch["attention_mask"] == 0).sum(dim=1).tolist()
        batch = {
            name: torch.stack([row.roll(shift) for row, shift in zip(rows, shifts, strict=True)])
            for name, rows in batch.items()
        }
        # padding differs between replicas, and would be trained to predict the first token
        for row, shift in enumerate(shifts):
            batch["labels"][row, shift] = -100
        return batch


def build(name: str) -> nn.Module:
    """In float64: rounding must not decide which of two tokens is likelier."""
    return without_dropout(MODELS[name].build()).double()


def make(name: str, world_size: int, stages: int | None, folder: str, **options: Any) -> Any:
    """The stock trainer, or ours with so many stages."""
    kind = KIND_OF[name]
    common: dict[str, Any] = {
        **Run().common_options(),
        **{"output_dir": folder, "use_cpu": True, "per_device_train_batch_size": BATCH // world_size},
        **{"max_steps": STEPS, "predict_with_generate": True, "eval_strategy": "steps", "eval_steps": 2},
        **({"generation_max_length": 9} if kind == "seq2seq" else {}),
        **options,
    }
    args: Any = None
    if stages is None:
        args = Seq2SeqTrainingArguments(**common)
    else:
        args = PipeTransformerSeq2SeqTrainingArguments(pipeline_parallel_size=stages, num_microbatches=2, **common)
    model: Any = build(name)
    if kind == "causal-lm":
        model.generation_config = GenerationConfig(max_new_tokens=5, pad_token_id=PAD, eos_token_id=EOS)
    cls = Seq2SeqTrainer if stages is None else PipeTransformerSeq2SeqTrainer
    return cls(
        model=model,
        args=args,
        train_dataset=TrainingData(kind, 40),
        eval_dataset=TrainingData(kind, EVALUATED, seed=9),
        data_collator=(PadLeft if kind == "causal-lm" else PadCollator)(kind),
        compute_metrics=Metrics(),
    )


def with_generated(trainer: Seq2SeqTrainer) -> Outcome:
    """An outcome that also has the tokens of each sample in each evaluation, and the best checkpoint."""
    outcome = outcome_of(trainer)
    hits = [entry["eval_hits"] for entry in trainer.state.log_history if "eval_hits" in entry]
    best = trainer.state.best_model_checkpoint and Path(trainer.state.best_model_checkpoint).name
    outcome.notes = {"generated": trainer.compute_metrics.generated, "hits": hits, "best": best}
    return outcome


def assert_same(outcomes: list[Outcome], expected: Outcome) -> None:
    """Tokens are equal; losses and weights but for rounding."""
    assert_same_training(outcomes, expected)
    for outcome in outcomes:
        assert outcome.notes == expected.notes
        assert outcome.metrics.get("eval_loss") == pytest.approx(expected.metrics.get("eval_loss"), abs=1e-5)


def trained(rank: int, world_size: int, name: str, stages: int | None, folder: str, **options: Any) -> Outcome:
    return with_generated(make(name, world_size, stages, folder, **options))


@cache
def expected(name: str, beams: int, folder: str = "stock", **options: Any) -> Outcome:
    (outcome,) = run_ranks(trained, 1, name, None, folder, generation_num_beams=beams, **options)
    return outcome


# ---------------------------------------------------------------------------------------- evaluations in a training
def with_and_without(rank: int, world_size: int, name: str, beams: int) -> tuple[Outcome, Outcome]:
    options = {"generation_num_beams": beams}
    evaluated = trained(rank, world_size, name, 2, "pipeline", **options)
    return evaluated, trained(rank, world_size, name, 2, "without", eval_strategy="no", **options)


@pytest.mark.parametrize(("name", "beams", "world_size"), [*slow(("t5", 3, 4), ("llama", 3, 4)), ("llama", 1, 2)])
def test_tokens_are_those_of_one_process_and_training_goes_on(name: str, beams: int, world_size: int) -> None:
    """Two stages, each twice or once."""
    for outcome, other in run_ranks(with_and_without, world_size, name, beams):
        assert_same([outcome], expected(name, beams))
        assert len(outcome.notes["generated"]) == 2
        assert (
            len({tuple(row) for tokens in outcome.notes["generated"] for row in tokens}) > 3
        )  # not always the same ones
        assert outcome.losses == other.losses
        assert largest_difference(outcome.weights, other.weights)[0] == 0.0


BEST = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "hits"}


@pytest.mark.slow
def test_best_model_by_what_it_generates(tmp_path: Path) -> None:
    options = {**BEST, "greater_is_better": False}  # a checkpoint before the last
    wanted = expected("t5", 1, str(tmp_path / "stock"), **options)
    assert wanted.notes["best"] == "checkpoint-2"
    outcomes = run_ranks(trained, WORLD, "t5", 2, str(tmp_path), generation_num_beams=1, **options)
    assert_same(outcomes, wanted)


# ---------------------------------------------------------------------------------------- outside of train()
def predicted(rank: int, world_size: int, stages: int | None) -> tuple[list[list[int]], dict[str, float], int]:
    trainer = make("t5", world_size, stages, "predictions")
    data = TrainingData("seq2seq", FILLED_UP, seed=5)
    trainer.evaluate(data, max_length=5)
    found = trainer.predict(data, num_beams=2, max_length=7)
    metrics: Any = trainer.compute_metrics
    assert metrics.generated[1] == without_padding(found.predictions)
    trainer.compute_metrics = None
    several = trainer.predict(data, num_beams=2, num_return_sequences=2, max_length=7).predictions
    return metrics.generated, {"hits": found.metrics["test_hits"]}, len(several)


@pytest.mark.slow
def test_predictions_of_a_model_that_is_not_trained() -> None:
    """Samples that fill up the last batch are not among them."""
    ((tokens, metrics, several),) = run_ranks(predicted, 1, None)
    assert [max(map(len, of_one)) <= most for of_one, most in zip(tokens, (5, 7), strict=True)] == [True, True]
    for mine, mine_metrics, mine_several in run_ranks(predicted, WORLD, 2):
        assert (mine, mine_metrics) == (tokens, metrics)
        assert mine_several >= several == 2 * FILLED_UP


# ---------------------------------------------------------------------------------------- freezing and the cache
FREEZING = {
    "max_steps": 20,  # four epochs: the third and fourth read the outputs stored in the second
    "eval_steps": 9,
    "freeze_policy": "schedule",
    "freeze_schedule": {1: 3},
    "generation_num_beams": 1,
}


def hits_of_cache(rank: int, world_size: int, stages: int, cache: str, folder: str) -> tuple[Outcome, float]:
    trainer = make("t5", world_size, stages, folder, activation_cache=cache, **FREEZING)
    outcome = with_generated(trainer)
    return outcome, sum(entry.get("cache_hit_rate", 0.0) for entry in trainer.state.log_history)


@pytest.mark.slow
def test_frozen_layers_and_their_cache_do_not_change_what_is_generated(tmp_path: Path) -> None:
    ((wanted, _),) = run_ranks(hits_of_cache, 1, 1, "off", str(tmp_path / "off"))
    for outcome, hits in run_ranks(hits_of_cache, WORLD, 2, "on", str(tmp_path / "on")):
        assert_same([outcome], wanted)
        assert hits > 0


# ---------------------------------------------------------------------------------------- refusals


def with_little_memory(rank: int, world_size: int) -> None:
    """A training on a device with 100 bytes."""
    words = "every process generates with the whole T5ForConditionalGeneration"
    generation.device_budget = lambda device: 100  # type: ignore[assignment]
    generation.fits = lambda size, device: size < 100  # type: ignore[assignment]
    trainer = make("t5", world_size, 2, "small", max_steps=1)
    with pytest.raises(ValueError, match=words):
        trainer.train()
    assert trainer.state.global_step == 0, "before the first step"


@pytest.mark.slow
def test_refused_before_the_first_step_if_the_whole_model_does_not_fit() -> None:
    run_ranks(with_little_memory, WORLD)


def test_arguments_of_another_class(tmp_path: Path) -> None:
    args: Any = PipeTransformerTrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match="requires PipeTransformerSeq2SeqTrainingArguments"):
        PipeTransformerSeq2SeqTrainer(build("t5"), args)
