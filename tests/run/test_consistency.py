"""What differs between the processes is named on all of them, before the first step."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from distributed import run_ranks
from training_data import PadCollator, TrainingData
from training_runs import Run, pipeline_trainer

ODD_ONE = 1  # the rank that is given something else
RUN = Run(samples=32, epochs=1, accumulation=1).with_options(max_steps=1)

DIFFERENCES = {
    "weights": None,  # may differ
    "architecture": "different models: process 0 has BertForSeq.* process 1 has AlbertForSeq",
    "frozen layer": r"different models: process 0 has .*([\d,]+) parameters, \1 trainable.* process 1 has",
    "precision": "different models",
    "dataset length": "different datasets: process 0 has 32 samples, process 1 has 31 samples",
    "dataset content": "different datasets: process 0 has first samples .*content",
    "noise": None,  # a collator's own generator is no difference
}


class Draws(PadCollator):
    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(samples)
        if np.random.default_rng().random() < 0.5:  # some rows lose their first word
            batch["input_ids"][:, 0] = 4
        return batch


def train(rank: int, world_size: int) -> dict[str, str | None]:
    """Why each training was refused."""
    found: dict[str, str | None] = dict.fromkeys(DIFFERENCES)
    for difference in DIFFERENCES:
        is_odd = rank == ODD_ONE
        run = Run(model="albert") if is_odd and difference == "architecture" else RUN
        model = run.build_model()
        if is_odd and difference == "weights":
            model.classifier.weight.data.zero_()
        if is_odd and difference == "frozen layer":
            model.bert.encoder.layer[0].requires_grad_(False)
        if is_odd and difference == "precision":
            model.bfloat16()
        trainer = pipeline_trainer(RUN, world_size, model=model)
        size = 31 if is_odd and difference == "dataset length" else 32
        trainer.train_dataset = TrainingData(RUN.kind, size, seed=is_odd and difference == "dataset content")
        if difference == "noise":
            trainer.data_collator = Draws(RUN.kind)
        try:
            trainer.train()
        except ValueError as error:
            found[difference] = str(error)
    return found


def test_every_process_raises_the_same_where_something_differs() -> None:
    first, second = run_ranks(train, 2)
    assert first == second
    for difference, message in DIFFERENCES.items():
        assert (first[difference] is None) == (message is None), difference
        assert message is None or re.search(message, str(first[difference])), first[difference]
