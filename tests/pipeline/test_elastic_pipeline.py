"""Freezing and changing the layout in the middle of training: as one process with the same freeze points."""

from __future__ import annotations

import gc
import json
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks, run_ranks_expecting_error
from selection import few
from training_runs import (
    WORLD,
    Outcome,
    Run,
    StopAfter,
    assert_same_training,
    at_each_step,
    outcome_of,
    pipeline_trainer,
)
from training_runs import FreezeAt as FreezeAt
from training_runs import freezing_reference as reference
from training_runs import stages_by_frozen as stages_by_frozen

from hf_pipetransformer import FreezeDecision, FreezePolicy, PipeTransformerTrainer
from hf_pipetransformer.run.run import PipelineRun

RUNS = {
    "bert": Run(epochs=3),
    "llama-tied": Run("causal-lm", epochs=3),
    "bert-adafactor": Run("causal-lm", model="llama", epochs=3).with_options(optim="adafactor"),
}
MID_EPOCH = {2: 1, 5: 2}
"""Steps done -> frozen layers. An epoch has three steps."""
EPOCH_START = {3: 1, 6: 2}
SHRINK = {0: 4, 1: 2, 2: 1}
"""Frozen layers -> stages."""
GROW = {0: 1, 1: 2, 2: 4}
CHANGES = {"shrink": SHRINK, "grow": GROW}
BY_STEPS: dict[str, Any] = {"freeze_policy": "schedule", "freeze_strategy": "steps", "freeze_steps": 1}


@cache
def expected(name: str, mid_epoch: bool) -> Outcome:
    return run_ranks(reference, 1, RUNS[name], MID_EPOCH if mid_epoch else EPOCH_START)[0]


def elastic(
    rank: int,
    world_size: int,
    run: Run,
    schedule: dict[int, int],
    stages: dict[int, int],
    folder: str = "elastic",
    **options: Any,
) -> tuple[Outcome, list[dict[str, Any]]]:
    """The outcome, and the logged changes."""
    trainer = pipeline_trainer(
        run,
        stages[0],
        folder,
        freeze_schedule=schedule,
        activation_cache="off",  # whether it pays, and changes the plan, depends on the machine's load
        **{**BY_STEPS, **options},
    )
    stages_by_frozen(trainer, stages)
    outcome = outcome_of(trainer)
    return outcome, [entry for entry in trainer.state.log_history if "transform_seconds" in entry]


CASES = [
    ("bert", "mid-epoch", "shrink"),
    ("llama-tied", "epoch-start", "grow"),
]


@pytest.mark.parametrize(("name", "moment", "change"), few(CASES, CASES[0]))
def test_elastic_training_equals_one_process(name: str, moment: str, change: str, tmp_path: Path) -> None:
    """(4,1) -> (2,2) -> (1,4) and back up, with decay groups, warm-up, clipping and accumulation; it is recorded."""
    stages, mid_epoch = CHANGES[change], moment == "mid-epoch"
    schedule = MID_EPOCH if mid_epoch else EPOCH_START
    results = run_ranks(elastic, WORLD, RUNS[name], schedule, stages, str(tmp_path))
    assert_same_training([outcome for outcome, _ in results], expected(name, mid_epoch))
    for _, changes in results:
        assert [c["num_frozen_layers"] for c in changes] == [1, 2]
        assert [c["pipeline_parallel_size"] for c in changes] == [stages[1], stages[2]]
    lines = [json.loads(line) for line in (tmp_path / "pipeline_events.jsonl").read_text().splitlines()]
    steps = [("start", 0, 0), *(("transform", step, frozen) for step, frozen in schedule.items())]
    assert [(e["event"], e["global_step"], e["num_frozen_layers"]) for e in lines] == steps
    layouts = [(stages[frozen], WORLD // stages[frozen]) for frozen in range(3)]
    assert [(e["pipeline_parallel_size"], e["data_parallel_size"]) for e in lines] == layouts
    assert all(e["seconds"] > 0 and (e["bytes_moved"] > 0 or change == "grow") for e in lines[1:])  # all hold all then
    assert lines[1]["stage_bounds"][-1] == lines[1]["num_layers"]


def left_of_a_plan(rank: int, world_size: int) -> list[bool]:
    """Whether anything that has run a plan is there behind a change of the layout, though nobody collects garbage."""
    trainer = pipeline_trainer(Run(epochs=2), 1, freeze_schedule={2: 1}, activation_cache="off", **BY_STEPS)
    stages_by_frozen(trainer, {0: 1, 1: 2})
    parts: list[weakref.ref[Any]] = []
    left: list[bool] = []

    def look(run: PipelineRun) -> None:
        placed = run.pipeline.placed
        assert placed is not None
        if parts and parts[0]() is not placed:
            left.append(any(part() is not None for part in parts))
        reducer = [placed.wrapped.reducer] if placed.wrapped is not None else []  # DDP's buckets
        parts[:] = [weakref.ref(part) for part in (placed, placed.messages, placed.gradients, *reducer)]

    at_each_step(trainer, before=look)
    gc.disable()
    trainer.train()
    return left


@pytest.mark.slow
def test_nothing_of_a_plan_outlives_it() -> None:
    assert run_ranks(left_of_a_plan, 2) == [[False]] * 2


# ------------------------------------------------------------------------------------------ resuming
def interrupt_and_resume(rank: int, world_size: int, run: Run, folder: str) -> Outcome:
    trainer = _scheduled(run, folder, save_strategy="steps", save_steps=2)
    trainer.add_callback(StopAfter(4))
    trainer.train()
    return outcome_of(_scheduled(run, folder), resume_from_checkpoint=f"{folder}/checkpoint-4")


def _scheduled(run: Run, folder: str, **options: Any) -> PipeTransformerTrainer:
    trainer = pipeline_trainer(run, WORLD, folder, freeze_schedule=MID_EPOCH, **{**BY_STEPS, **options})
    stages_by_frozen(trainer, SHRINK)
    return trainer


@pytest.mark.slow
def test_resumes_with_what_was_frozen(tmp_path: Path) -> None:
    """Saved with one layer frozen on 2 x 2; goes on there, and freezes the second layer at its step."""
    outcomes = run_ranks(interrupt_and_resume, WORLD, RUNS["bert"], str(tmp_path))
    assert_same_training(outcomes, expected("bert", True))


# ------------------------------------------------------------------------------------------ policies
class ByRank(FreezePolicy):
    """What must not be: every rank decides for itself."""

    needs_gradient_norms = False

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def num_frozen(self, decision: FreezeDecision) -> int:
        return min(self.rank, decision.index)


def disagree(rank: int, world_size: int) -> None:
    pipeline_trainer(Run(epochs=2, keywords={"freeze_policy": ByRank(rank)}), 2).train()


def test_ranks_that_disagree_are_refused() -> None:
    errors = run_ranks_expecting_error(disagree, 2, timeout=60)
    assert {type(error) for error in errors} == {ValueError}
    assert "different numbers of frozen layers" in str(errors[0])


def frozen_by(rank: int, world_size: int, policy: str) -> list[list[int]]:
    found = []
    for stages in (2, 1):
        trainer = pipeline_trainer(Run(epochs=4), stages, freeze_policy=policy)
        trainer.train()
        found.append([e["num_frozen_layers"] for e in trainer.state.log_history if "transform_seconds" in e])
    return found


@pytest.mark.slow
def test_policies_decide_alike_in_every_layout() -> None:
    """Gradient norms are of the whole model, with stages and replicas, and with replicas alone."""
    decisions = [frozen for found in run_ranks(frozen_by, WORLD, "adaptive") for frozen in found]
    assert decisions[0] and all(frozen == decisions[0] for frozen in decisions)
