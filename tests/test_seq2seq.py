"""The pair for sequence-to-sequence models: tokens and trainings of `Seq2SeqTrainer` in one process."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks, run_ranks_expecting_error
from model_zoo import EOS, MODELS, PAD, without_dropout
from selection import slow
from torch import nn
from training_data import Kind, PadCollator, TrainingData
from training_runs import largest_difference, weights_of
from transformers import EvalPrediction, GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from hf_pipetransformer import (
    PipeTransformerSeq2SeqTrainer,
    PipeTransformerSeq2SeqTrainingArguments,
    PipeTransformerTrainer,
    UnsupportedModelError,
)
from hf_pipetransformer.pipeline import devices
from hf_pipetransformer.run import evaluation

WORLD = 2
BATCH = 8  # samples of a step, over all processes
EVALUATED = 11  # an odd number: samples fill up the last batches of several processes
STEPS = 4
KIND_OF: dict[str, Kind] = {"t5": "seq2seq", "bart": "seq2seq", "llama": "causal-lm"}
GREEDY: dict[str, Any] = {}
BEAMS = {"generation_num_beams": 3}


@dataclasses.dataclass
class Outcome:
    """What a training leaves behind, and what its evaluations have generated."""

    generated: list[list[list[int]]]  # of each evaluation, the tokens of each sample
    metrics: list[dict[str, float]]  # of each evaluation, without times
    weights: dict[str, torch.Tensor]
    losses: list[float]
    best: str | None


class Metrics:
    """Notes the generated tokens, and gives the share of the labels' tokens that are among those of their sample."""

    def __init__(self) -> None:
        self.generated: list[list[list[int]]] = []

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        tokens = without_padding(prediction.predictions)
        labels = without_padding(prediction.label_ids)
        self.generated.append(tokens)
        hits = sum(token in row for row, wanted in zip(tokens, labels, strict=True) for token in wanted)
        return {"hits": hits / sum(map(len, labels))}


def without_padding(rows: Any) -> list[list[int]]:
    """To how many tokens a row is padded, and with what, depends on the rows beside it."""
    return [[int(token) for token in row if token not in (PAD, -100)] for row in np.asarray(rows)]


def build(name: str) -> nn.Module:
    """In float64, so that rounding cannot decide which of two tokens is the likelier one."""
    return without_dropout(MODELS[name].build()).double()


def make(name: str, world_size: int, stages: int | None, folder: str, **options: Any) -> Seq2SeqTrainer:
    """The stock trainer, or ours with so many stages."""
    kind = KIND_OF[name]
    common: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": BATCH // world_size,
        "per_device_eval_batch_size": 3,
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "adam_epsilon": 1e-4,
        "predict_with_generate": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 42,
        **({"generation_max_length": 9} if kind == "seq2seq" else {}),
        **options,
    }
    if stages is None:
        cls: Any = Seq2SeqTrainer
        args: Any = Seq2SeqTrainingArguments(**common)
    else:
        cls = PipeTransformerSeq2SeqTrainer
        args = PipeTransformerSeq2SeqTrainingArguments(pipeline_parallel_size=stages, num_microbatches=2, **common)
    model: Any = build(name)
    if kind == "causal-lm":
        model.generation_config = GenerationConfig(max_new_tokens=5, pad_token_id=PAD, eos_token_id=EOS)
    return cls(
        model=model,
        args=args,
        train_dataset=TrainingData(kind, 40),
        eval_dataset=TrainingData(kind, EVALUATED, seed=9),
        data_collator=PadCollator(kind),
        compute_metrics=Metrics(),
    )


def outcome_of(trainer: Seq2SeqTrainer, checkpoint: str | None = None) -> Outcome:
    trainer.train(resume_from_checkpoint=checkpoint)
    log = trainer.state.log_history
    metrics: Any = trainer.compute_metrics
    return Outcome(
        metrics.generated,
        [{k: entry[k] for k in ("eval_loss", "eval_hits")} for entry in log if "eval_loss" in entry],
        weights_of(trainer.model),
        [entry["loss"] for entry in log if "loss" in entry],
        trainer.state.best_model_checkpoint and Path(trainer.state.best_model_checkpoint).name,
    )


def assert_same(outcomes: list[Outcome], expected: Outcome) -> None:
    """Tokens are equal; losses and weights but for rounding."""
    for outcome in outcomes:
        assert outcome.generated == expected.generated
        for mine, theirs in zip(outcome.metrics, expected.metrics, strict=True):
            assert mine["eval_hits"] == pytest.approx(theirs["eval_hits"], abs=1e-9)
            # the stock mean over batches, of which the last one is filled up
            assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=2e-3)
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-4)  # rounded to four digits
        assert largest_difference(outcome.weights, expected.weights)[0] < 1e-5
        assert outcome.best == expected.best


def trained(rank: int, world_size: int, name: str, stages: int | None, folder: str, **options: Any) -> Outcome:
    return outcome_of(make(name, world_size, stages, folder, **options))


@cache
def expected(name: str, beams: int, folder: str = "stock", **options: Any) -> Outcome:
    (outcome,) = run_ranks(trained, 1, name, None, folder, generation_num_beams=beams, **options)
    return outcome


# ---------------------------------------------------------------------------------------- evaluations in a training
@pytest.mark.parametrize(
    ("name", "beams", "world_size"),
    [("t5", 1, 2), ("t5", 3, 2), ("llama", 1, 2), *slow(("bart", 3, 2), ("llama", 3, 2), ("t5", 3, 4))],
)
def test_tokens_are_those_of_one_process_and_training_goes_on_as_without(name: str, beams: int, world_size: int) -> None:
    """Two stages, each once or twice."""
    outcomes = run_ranks(trained, world_size, name, 2, "pipeline", generation_num_beams=beams)
    assert_same(outcomes, expected(name, beams))
    assert len(outcomes[0].generated) == 2
    assert len({tuple(row) for tokens in outcomes[0].generated for row in tokens}) > 3  # not always the same ones
    without = run_ranks(trained, world_size, name, 2, "without", eval_strategy="no")
    for outcome, other in zip(outcomes, without, strict=True):
        assert outcome.losses == other.losses
        assert largest_difference(outcome.weights, other.weights)[0] == 0.0
