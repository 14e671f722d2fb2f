"""Batch normalisation: what normalises by the batch, and what leaves its running statistics alone."""

from __future__ import annotations

import torch
from torch import nn

from hf_pipetransformer.model.batch_statistics import normalised_by_batch, running_statistics_kept


class StaysInEval(nn.BatchNorm1d):
    """As users freeze it."""

    def train(self, mode: bool = True) -> StaysInEval:
        return super().train(False)


def test_a_batch_normalisation_is_named_if_it_trains() -> None:
    found = normalised_by_batch(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train())
    assert found is not None and found.startswith("'1' is a BatchNorm1d")
    assert normalised_by_batch(nn.Sequential(nn.BatchNorm1d(3)).eval()) is None
    assert normalised_by_batch(nn.Sequential(StaysInEval(3)).train()) is None
    assert normalised_by_batch(nn.Sequential(nn.LayerNorm(3)).train()) is None


def test_without_running_statistics_eval_mode_normalises_by_the_batch_too() -> None:
    assert normalised_by_batch(nn.BatchNorm1d(3, track_running_stats=False).eval()) is not None


def test_running_statistics_are_kept_and_modes_restored() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), StaysInEval(3), nn.Dropout()).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with running_statistics_kept(model):
        model(torch.randn(4, 3))
        assert model[2].training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert [module.training for module in model] == [True, False, True]
    model(torch.randn(4, 3))
    assert not torch.equal(model[0].running_mean, before["0.running_mean"])
