"""Trainings with cached layers, for tests. Functions here run inside the ranks of `distributed.run_ranks`."""

from __future__ import annotations

import pickle
from typing import Any

from distributed import run_ranks
from test_elastic_pipeline import reference, stages_by_frozen
from training_runs import Outcome, Run, outcome_of, pipeline_trainer

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.parts.prefix_cache.cache import writing

EPOCH_START = {3: 1, 6: 2, 9: 3}
"""Steps done -> frozen layers. An epoch has three steps."""
MID_EPOCH = {2: 1, 7: 2}
SHRINK = {0: 4, 1: 2, 2: 2, 3: 1}
"""Frozen layers -> stages."""
RUNS = {
    "bert": Run(epochs=6),
    "streamed": Run(epochs=6, streamed=True).with_options(max_steps=18),
}


def trainer_of(
    run: Run, stages: dict[int, int], table: dict[int, int], folder: str = "cached", **options: Any
) -> PipeTransformerTrainer:
    writing.PENDING_BATCHES = 1000  # no batch is dropped on a busy machine, so rows can be counted
    trainer = pipeline_trainer(
        run,
        stages[0],
        folder,
        freeze_policy="schedule",
        freeze_strategy="steps",
        freeze_steps=1,
        freeze_schedule=table,
        **{"activation_cache": "on", **options},
    )
    stages_by_frozen(trainer, stages)
    return trainer


def cached(
    rank: int, world_size: int, run: Run, stages: dict[int, int], table: dict[int, int], **options: Any
) -> tuple[Outcome, list[dict[str, Any]]]:
    trainer = trainer_of(run, stages, table, **options)
    outcome = outcome_of(trainer)
    return outcome, [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry]


_expected: dict[bytes, Outcome] = {}


def expected_of(run: Run, table: dict[int, int]) -> Outcome:
    """One process with the same freeze points. Many tests ask for the same."""
    key = pickle.dumps((run, table))
    if key not in _expected:
        (_expected[key],) = run_ranks(reference, 1, run, table)
    return _expected[key]


def hit_rates(epochs: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Hit rates, to a twentieth: a process that loses a race for a place in the store loses a row, for one epoch."""
    return [(round(e["cache_hit_rate"] * 20) / 20, round(e["cache_older_hit_rate"] * 20) / 20) for e in epochs]
