"""All stages of a pipeline train on the batch that its last stage, rank 0, has prepared."""

from __future__ import annotations

from unittest import mock

import numpy
import torch
from distributed import run_ranks
from model_zoo import MODELS, without_dropout
from training_data import PadCollator, TrainingData
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.run.batches import GlobalBatch

KIND = "text-classification"
MARK = 61  # a token of no sample


class Noting:
    """Notes what this process feeds the model: each training batch, when the step begins."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.fed = []
        self.prepared = []

    def training_step(self, *positional):
        share = GlobalBatch.share

        def noting(mine, pipeline, batch):
            self.prepared.append({name: value.clone() for name, value in batch.items()})
            batch = share(mine, pipeline, batch)
            self.fed.append({name: value.clone() for name, value in batch.items()})
            return batch

        with mock.patch.object(GlobalBatch, "share", noting):
            return super().training_step(*positional)


class PreparingInputs:
    """Exchanges the labels of some rows, by a generator of its own; in evaluation, what must not be applied twice."""

    rng = None

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        if self.model.training:
            self.rng = self.rng or numpy.random.default_rng(self.args.process_index)
            inputs["labels"] = inputs["labels"][self.rng.permutation(len(inputs["labels"]))]
        else:
            assert not (inputs["input_ids"] == MARK).any()
            inputs["input_ids"][:, 0] = MARK
        return inputs


class MaskingCollator(PadCollator):
    """Like `DataCollatorForLanguageModeling(seed=...)`; the generator is shared by training and evaluation."""

    def __init__(self, kind, seed):
        super().__init__(kind)
        self.rng = torch.Generator().manual_seed(seed)

    def __call__(self, samples):
        batch = super().__call__(samples)
        drawn = torch.rand(batch["input_ids"].shape, generator=self.rng) < 0.15
        return {**batch, "input_ids": batch["input_ids"].masked_fill(drawn, 7)}


def train(rank, world_size, folder):
    arguments = PipeTransformerTrainingArguments(
        folder,
        pipeline_parallel_size=world_size,
        per_device_train_batch_size=4,
        max_steps=6,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=3,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = type("Trained", (Noting, PreparingInputs, PipeTransformerTrainer), {})(
        without_dropout(MODELS["bert-classification"].build()),
        arguments,
        train_dataset=TrainingData(KIND, 29),
        eval_dataset=TrainingData(KIND, 11, seed=9),
        data_collator=MaskingCollator(KIND, 42),
    )
    trainer.train()
    return trainer.fed, trainer.prepared, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def stock(batches, folder):
    """The stock Trainer in one process on exactly these batches."""
    trainer = Trainer(
        without_dropout(MODELS["bert-classification"].build()),
        TrainingArguments(
            str(folder),
            per_device_train_batch_size=1,
            max_steps=6,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"number": n} for n in range(len(batches))],
        data_collator=lambda rows: dict(batches[rows[0]["number"]]),
    )
    trainer.args.remove_unused_columns = False
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(batches)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_all_stages_train_on_one_batch_whatever_draws(tmp_path):
    """A collator's own generator that evaluation moves on differently, and a `_prepare_inputs` that draws."""
    (first, prepared, losses), (second, others, _) = run_ranks(train, 2, str(tmp_path / "run"))
    assert len(first) == len(second) == 6
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    own, of_other = (
        [all(torch.equal(one[name], made[name]) for name in one) for one, made in zip(first, ways, strict=True)]
        for ways in (prepared, others)
    )
    assert all(own) and not all(of_other), "user code on rank 0 sees what is trained"
    torch.testing.assert_close(losses, stock(first, tmp_path / "stock"), rtol=0, atol=1e-5)
