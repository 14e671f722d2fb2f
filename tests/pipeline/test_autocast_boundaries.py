"""Under autocast, what travels between stages has the data type that the layer gives, and is not rounded for it.

A layer of BERT or Llama gives float32: its last operation adds a residual, or normalises. The next layer casts it for
its matrix products, but adds it to its own output as it is. So sending bfloat16 would halve the message, and change
gradients by 5e-3 of their norm, as much as computing in bfloat16 does (6e-3 to 9e-3, 12 layers of width 128).
"""

from __future__ import annotations

import pytest
import torch
from distributed import run_ranks
from training_runs import Outcome, Run, outcome_of, pipeline_trainer, weights_of

BATCH = 8
ROUNDING = 1e-6
"""Of gradients, relative: in float32."""
MODELS = (None, "electra", "albert")
"""BERT's layers return float32, ELECTRA's bfloat16 on the CPU; ALBERT has the same layer in both stages."""


def train(rank: int, world_size: int) -> list[Outcome]:
    """One step of each model, in as many stages as processes."""
    outcomes = []
    for model in MODELS:
        # one process casts a shared weight once, and sums the gradients of its uses in bf16; each stage its own ones
        torch.set_autocast_cache_enabled(model != "albert")
        run = Run(model=model, samples=40, per_device=BATCH // world_size, accumulation=1)
        # one step: a last digit of a weight decides how it is rounded to bfloat16 in the next one
        options = {"bf16": True, "max_steps": 1, "warmup_steps": 0, "num_microbatches": 1, "optim": "sgd"}
        outcomes.append(outcome_of(pipeline_trainer(run, world_size, use_cpu=True, **options)))
    return outcomes


def update(outcome: Outcome, model: str | None) -> torch.Tensor:
    """What plain SGD has changed, which is a multiple of the gradient."""
    before = weights_of(Run(model=model).build_model())
    return torch.cat([(outcome.weights[name] - before[name]).flatten() for name in before])


@pytest.mark.slow
def test_gradients_differ_by_float32s_rounding_only() -> None:
    (alone,) = run_ranks(train, 1)
    for outcomes in run_ranks(train, 2):
        for model, outcome, expected in zip(MODELS, outcomes, alone, strict=True):
            assert outcome.losses == expected.losses, model
            wanted = update(expected, model)
            assert (update(outcome, model) - wanted).norm() < ROUNDING * wanted.norm(), model
