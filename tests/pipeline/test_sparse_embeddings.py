"""Sparse gradients of embeddings are those of dense ones, and the modules are given back as they were."""

from __future__ import annotations

import pytest
from distributed import run_ranks
from selection import few
from torch import nn
from training_data import Kind
from training_runs import WORLD, Outcome, Run, assert_same_training, pipeline, reference

from hf_pipetransformer.pipeline import sparse_embeddings
from hf_pipetransformer.pipeline.sparse_embeddings import LARGE, SparseEmbeddings


def test_large_tables_of_this_stage_are_sparse_until_they_are_given_back() -> None:
    large, small, frozen, elsewhere = (nn.Embedding(n, 16) for n in (LARGE // 16, 8, LARGE // 16, LARGE // 16))
    frozen.weight.requires_grad_(False)
    tables = nn.ModuleList([large, small, frozen, elsewhere])
    sparse = SparseEmbeddings(tables, [large.weight, small.weight, frozen.weight])
    assert [table.sparse for table in tables] == [True, False, False, False]
    sparse.remove()
    assert not any(table.sparse for table in tables)


def small_tables_too(rank: int, world_size: int, run: Run, stages: int) -> Outcome:
    sparse_embeddings.LARGE = 1
    return pipeline(rank, world_size, run, stages)


@pytest.mark.parametrize("kind", few(("text-classification", "causal-lm", "seq2seq"), "causal-lm"))
def test_training_equals_one_process(kind: Kind) -> None:
    """Also where a dense gradient of a tied head is added, and over accumulated steps."""
    run = Run(kind)
    assert_same_training(run_ranks(small_tables_too, WORLD, run, WORLD), run_ranks(reference, 1, run)[0])
