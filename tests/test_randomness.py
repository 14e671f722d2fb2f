"""Global generators are seeded and put back; those that users' objects own are found and put back."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from model_zoo import MODELS
from training_data import PadCollator, TrainingData
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.randomness import global_state_kept, seeded


def draw():
    return random.random(), torch.rand(1).item(), numpy.random.rand(), numpy.random.randn()


def test_seeded_puts_all_generators_back_after_an_error_too():
    numpy.random.randn()  # keeps a second number for the next call
    with global_state_kept():
        expected = draw()
    with pytest.raises(KeyError), seeded(5):
        inside = draw()
        raise KeyError
    assert draw() == expected
    with seeded(5):
        assert draw() == inside


class MaskingCollator(PadCollator):
    """Makes its generator when it is first called, as `DataCollatorForLanguageModeling(seed=...)` does."""

    rng = None

    def __init__(self, kind, seen):
        super().__init__(kind)
        self.seen = seen

    def __call__(self, samples):
        if self.rng is None:
            self.rng = torch.Generator().manual_seed(42)
        batch = super().__call__(samples)
        drawn = torch.rand(batch["input_ids"].shape, generator=self.rng) < 0.15
        batch["input_ids"] = batch["input_ids"].masked_fill(drawn, 7)
        self.seen.append(batch["input_ids"])
        return batch


class NoisyData(TrainingData):
    def __init__(self, *args):
        super().__init__(*args)
        self.rng = numpy.random.default_rng(3)

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "labels": int(self.rng.integers(2))}


def test_what_is_looked_at_before_training_draws_nothing_from_users_generators(tmp_path):
    """The examination's samples and those of the training come from the same generators."""
    losses = []
    for trainer_class, arguments_class in (
        (Trainer, TrainingArguments),
        (PipeTransformerTrainer, PipeTransformerTrainingArguments),
    ):
        torch.manual_seed(0)
        trainer = trainer_class(
            MODELS["bert-classification"].build(),
            arguments_class(
                str(tmp_path), per_device_train_batch_size=4, max_steps=4, logging_steps=1, report_to=[], use_cpu=True
            ),
            train_dataset=NoisyData("text-classification", 16),
            data_collator=MaskingCollator("text-classification", []),
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
