"""Losses that compare the samples of a batch: as in one process, in one pipeline with micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_zoo import MODELS, without_dropout
from one_job import run_each
from selection import slow
from torch import nn
from training_runs import Run, assert_same_training, pipeline, reference
from transformers import BertModel

SCHEDULE = {"freeze_policy": "schedule", "freeze_schedule": {1: 1}}


class InfoNCE:
    """Pulls the embeddings of a class together, and apart from all others in the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
        labels = inputs["labels"]
        output = model(**{name: value for name, value in inputs.items() if name != "labels"})
        embeddings = F.normalize(output.last_hidden_state[:, 0], dim=-1)
        itself = torch.eye(len(embeddings))
        logs = (embeddings @ embeddings.T / 0.5 - 1e9 * itself).log_softmax(-1)
        positives = (labels[:, None] == labels).float() - itself
        loss = -((logs * positives).sum(1) / positives.sum(1).clamp(min=1)).mean()
        return (loss, output) if return_outputs else loss


class Embedding(Run):
    def build_model(self) -> nn.Module:
        config = MODELS["bert-classification"].build().config
        torch.manual_seed(0)
        return without_dropout(BertModel(config))


RUNS = {
    "contrastive": Embedding(trainer=InfoNCE).with_options(remove_unused_columns=False, label_names=["labels"]),
    "router loss": Run("causal-lm", model="mixtral-router-loss"),
}
RUNS = {name: replace(run, samples=83, per_device=16, accumulation=1) for name, run in RUNS.items()}


def cut(rank: int, world_size: int, name: str, options: dict[str, Any]) -> Any:
    run = replace(RUNS[name], per_device=64 // world_size)
    return pipeline(rank, world_size, run, world_size, "pipeline", **options)


@pytest.mark.parametrize("options", [{}, *slow(SCHEDULE)], ids=["trained", "frozen"])
def test_whole_batches_in_one_pipeline(options: dict[str, Any]) -> None:
    """With frozen layers, too: the process that they set free does not become a replica."""
    for name, outcomes in run_each(cut, 2, {name: (name, options) for name in RUNS}).items():
        expected = cut(0, 1, name, {**options, "use_cpu": True}) if options else reference(0, 1, RUNS[name])
        assert_same_training(outcomes, expected)
