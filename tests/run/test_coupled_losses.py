"""A loss of a whole batch in its parts: the balance of a router's experts, over several stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from distributed import run_ranks
from training_runs import Outcome, Run, assert_same_training, pipeline

FREEZING = {"freeze_policy": "schedule", "freeze_schedule": {1: 1}, "use_cpu": True}
RUN = Run("causal-lm", model="mixtral-router-loss", samples=83, accumulation=1).with_options(**FREEZING)


def train(rank: int, world_size: int) -> Outcome:
    return pipeline(rank, world_size, replace(RUN, per_device=64 // world_size), world_size)


@pytest.mark.slow
def test_whole_batches_in_one_pipeline() -> None:
    """If layers freeze, the freed process does not become a replica."""
    assert_same_training(run_ranks(train, 2), train(0, 1))
