"""Replicas that divide the optimizer state train as one process does, and hold no more than their part of it."""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_runs import EPOCH_START, SHRINK, cached, expected_of
from cached_runs import RUNS as CACHED_RUNS
from distributed import run_ranks, run_ranks_expecting_error
from selection import slow
from training_runs import (
    WORLD,
    MeasureMemory,
    Outcome,
    Run,
    StopAfter,
    assert_same_training,
    outcome_of,
    pipeline,
    pipeline_trainer,
    reference,
    reference_trainer,
    scale_gradients,
)
from transformers import TrainerCallback

MODELS = {
    "bert": Run("text-classification"),
    "llama-tied": Run("causal-lm"),
    "adafactor": Run("causal-lm").with_options(optim="adafactor"),  # needs whole matrices
    "no-accumulation-no-clipping": Run(accumulation=1).with_options(max_grad_norm=0.0),
}


@cache
def expected(name: str) -> Outcome:
    return run_ranks(reference, 1, MODELS[name])[0]


# ------------------------------------------------------------------------------------------ as one process
Case = tuple[str, int, dict[str, Any]]
"""Name of a run, stages, further arguments."""
OTHERS: list[Case] = [
    ("adafactor", 2, {}),
    ("no-accumulation-no-clipping", 1, {}),
    ("llama-tied", 2, {"token_slices": 2}),  # without DDP: gradients are averaged after the step
]


def in_turn(rank: int, world_size: int, cases: list[Case]) -> list[Outcome]:
    return [
        pipeline(rank, world_size, MODELS[name], stages, replica_sharding="optimizer", **options)
        for name, stages, options in cases
    ]


@pytest.mark.parametrize("cases", [[("bert", 1, {})], *slow(OTHERS)], ids=["short", "others"])
def test_equals_one_process(cases: list[Case]) -> None:
    """Six steps with accumulation and clipping on 1 x 4 and on 2 x 2."""
    everyone = run_ranks(in_turn, WORLD, cases, timeout=240)
    for case, *outcomes in zip(cases, *everyone, strict=True):
        print(case)
        assert_same_training(outcomes, expected(case[0]))


@pytest.mark.slow
def test_elastic_training_with_cached_layers_equals_one_process() -> None:
    """(4,1) -> (2,2) -> (1,4): the states of frozen layers go, the others are divided anew."""
    run = CACHED_RUNS["bert"]
    results = run_ranks(cached, WORLD, run, SHRINK, EPOCH_START, replica_sharding="optimizer", timeout=240)
    assert_same_training([outcome for outcome, _ in results], expected_of(run, EPOCH_START))
    for _, epochs in results:
        assert epochs[-1]["cache_hit_rate"] + epochs[-1]["cache_older_hit_rate"] > 0.9


# ------------------------------------------------------------------------------------------ checkpoints
def train_some(rank: int, world_size: int, folder: str, resumes: bool) -> Outcome:
    """A training; in one process, the stock Trainer's."""
    run = MODELS["llama-tied"].with_options(save_strategy="steps", save_steps=2)
    sharded = {"stages": 2, "replica_sharding": "optimizer"}
    trainer: Any = (reference_trainer if world_size == 1 else partial(pipeline_trainer, **sharded))(run, folder=folder)
    if not resumes:
        trainer.add_callback(StopAfter(4))
    return outcome_of(trainer, resume_from_checkpoint=f"{folder}/checkpoint-4" if resumes else None)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, WORLD), *slow((WORLD, 1))])
def test_resumes_what_the_stock_trainer_has_saved_and_the_other_way_round(
    before: int, after: int, tmp_path: Path
) -> None:
    """Interrupted between two batches."""
    run_ranks(train_some, before, str(tmp_path), False)
    assert_same_training(run_ranks(train_some, after, str(tmp_path), True), expected("llama-tied"))


# ------------------------------------------------------------------------------------------ memory
def held_bytes(rank: int, world_size: int) -> dict[str, int]:
    trainer = pipeline_trainer(Run("causal-lm", model="llama"), 1, replica_sharding="optimizer")
    trainer.add_callback(measure := MeasureMemory())
    trainer.train()
    return {**measure.held[-1], "whole": sum(p.nbytes for p in trainer.model.parameters())}


def test_a_replica_holds_its_part_only() -> None:
    everyone = run_ranks(held_bytes, WORLD)
    whole = everyone[0]["whole"]
    assert sum(rank["optimizer"] for rank in everyone) == 2 * whole, "Adam's two moments"
    assert max(rank["optimizer"] for rank in everyone) <= 1.1 / WORLD * 2 * whole


# ------------------------------------------------------------------------------------------ a gradient scaler
def scaled(rank: int, world_size: int, stages: int) -> tuple[list[bool], list[float], dict[str, torch.Tensor]]:
    """fp16's scaler on the CPU; in the second step an element that the last replica, or stage, updates overflows.

    With two stages, the first one has no trained parameter, and no gradient at all.
    """
    run = Run(epochs=1, accumulation=1)
    model = run.build_model()
    for part in (model.bert.embeddings, *model.bert.encoder.layer[:2]) if stages > 1 else ():
        part.requires_grad_(False)
    trainer = pipeline_trainer(run, stages, model=model, replica_sharding="optimizer" if stages == 1 else "none")
    scale_gradients(trainer)
    skipped: list[bool] = []
    norms: list[float] = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in having_gradients(trainer))))

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            skipped.append(trainer.accelerator.optimizer_step_was_skipped)

    step = trainer.training_step

    def overflowing(*args: Any) -> Any:
        loss = step(*args)
        if trainer.state.global_step == 1:
            for last in having_gradients(trainer)[-1:]:
                last.grad.view(-1)[-1] = float("inf")
        return loss

    trainer.training_step = overflowing
    trainer.add_callback(Watch())
    outcome = outcome_of(trainer)
    return skipped, norms, outcome.weights


def having_gradients(trainer: Any) -> list[torch.Tensor]:
    here = [p for p in trainer.model.parameters() if not getattr(p, "is_elsewhere", False)]
    return [parameter for parameter in here if parameter.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_an_overflow_in_one_part_skips_the_step_on_all_processes(stages: int) -> None:
    (skipped, norms, weights), *others = run_ranks(scaled, 2, stages)
    assert skipped[:3] == [False, True, False]
    assert all(norm <= 1.001 for norm, skip in zip(norms, skipped, strict=True) if not skip), "unscaled and clipped"
    for theirs, _, their_weights in others:
        assert theirs == skipped
        assert all(torch.equal(weights[name], their_weights[name]) for name in weights)


# ------------------------------------------------------------------------------------------ refusals
class ScheduleFree(torch.optim.SGD):
    def eval(self) -> None:
        """Would move all weights."""


def with_schedule_free(rank: int, world_size: int) -> None:
    trainer = pipeline_trainer(Run(), 1, replica_sharding="optimizer")
    trainer.optimizer = ScheduleFree(trainer.model.parameters(), lr=0.1)
    trainer.train()


def test_an_optimizer_that_changes_all_weights_is_refused() -> None:
    errors = run_ranks_expecting_error(with_schedule_free, 2)
    assert all(type(error) is ValueError and "replica_sharding='optimizer'" in str(error) for error in errors)
