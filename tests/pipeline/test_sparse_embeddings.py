"""Sparse gradients of embeddings are those of dense ones, and the modules are given back as they were."""

from __future__ import annotations

import pytest
import torch
from distributed import run_ranks
from selection import few
from torch import nn
from training_runs import WORLD, Outcome, Run, assert_same_training, pipeline, reference

from hf_pipetransformer.pipeline import sparse_embeddings
from hf_pipetransformer.pipeline.sparse_embeddings import LARGE, SparseEmbeddings


def test_gradients_over_micro_batches_are_the_dense_ones():
    table = nn.Embedding(LARGE // 16, 16)
    model = nn.ModuleDict({"large": table, "small": nn.Embedding(8, 16)})
    micro_batches = torch.randint(0, 50, (4, 3, 7))  # most words come more than once

    def backward() -> None:
        for ids in micro_batches:
            model["large"](ids).square().sum().backward()
            model["small"](ids % 8).square().sum().backward()

    backward()
    dense = table.weight.grad
    model.zero_grad()
    sparse = SparseEmbeddings(model, list(model.parameters()))
    assert table.sparse and not model["small"].sparse
    backward()
    assert table.weight.grad.is_sparse
    sparse.finish_step()
    assert not table.weight.grad.is_sparse
    torch.testing.assert_close(table.weight.grad, dense, rtol=1e-5, atol=1e-5)
    sparse.remove()
    assert not table.sparse


def test_only_what_this_stage_trains():
    elsewhere, frozen, own = (nn.Embedding(LARGE // 16, 16) for _ in range(3))
    frozen.weight.requires_grad_(False)
    SparseEmbeddings(nn.ModuleList([elsewhere, frozen, own]), [frozen.weight, own.weight])
    assert [module.sparse for module in (elsewhere, frozen, own)] == [False, False, True]


def small_tables_too(rank: int, world_size: int, run: Run, stages: int) -> Outcome:
    sparse_embeddings.LARGE = 1
    return pipeline(rank, world_size, run, stages)


@pytest.mark.parametrize("kind", few(("text-classification", "causal-lm", "seq2seq"), "causal-lm"))
def test_training_equals_one_process(kind):
    """Also where a dense gradient of a tied head is added, and over accumulated steps."""
    run = Run(kind)
    assert_same_training(run_ranks(small_tables_too, WORLD, run, WORLD), run_ranks(reference, 1, run)[0])
