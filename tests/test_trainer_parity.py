"""A pipeline trains as one process does: losses, gradient norms, learning rates, steps, final weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from distributed import run_ranks
from training_data import KINDS
from training_runs import WORLD, Outcome, Run, assert_same_training, pipeline, reference

MODELS_OF_KIND = {
    "bert": Run("text-classification"),
    "bert-question-answering": Run("question-answering"),
    "llama-tied": Run("causal-lm"),
    "gpt2-tied": Run("causal-lm", model="gpt2"),
    "vit": Run("image-classification"),
    "t5": Run("seq2seq"),
}


@cache
def expected(name: str) -> Outcome:
    return run_ranks(reference, 1, MODELS_OF_KIND[name])[0]


@pytest.mark.parametrize(("stages", "schedule"), [(4, "1f1b"), (4, "gpipe"), (2, "1f1b"), (2, "gpipe"), (1, "1f1b")])
@pytest.mark.parametrize("name", list(MODELS_OF_KIND))
def test_equals_one_process(name: str, stages: int, schedule: str) -> None:
    """Two epochs, six optimizer steps: accumulation, clipping, decay groups, warm-up, dynamic padding, odd last batch."""
    outcomes = run_ranks(pipeline, WORLD, MODELS_OF_KIND[name], stages, pipeline_schedule=schedule)
    assert expected(name).steps >= 5
    assert_same_training(outcomes, expected(name))
