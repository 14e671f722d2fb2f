"""All stages of a pipeline train on the batch that its last stage, rank 0, has prepared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from distributed import run_ranks
from training_data import PadCollator
from training_runs import Run, losses_of, pipeline_trainer, reference_trainer

from hf_pipetransformer.run.batches import GlobalBatch

MARK = 61  # a token of no sample
STEPS, ROWS = 6, 16
RUN = Run(samples=29, accumulation=1).with_options(max_steps=STEPS)
Batches = list[dict[str, torch.Tensor]]


class PreparingInputs:
    """Shuffles labels by a generator of its own; in evaluation, makes a change that must not be made twice.

    The batches that this process has prepared are noted, and the batches that it feeds the model.
    """

    rng: Any = None
    prepared: Batches
    fed: Batches

    def _prepare_inputs(self: Any, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)  # type: ignore[misc]
        if self.model.training:
            self.rng = self.rng or numpy.random.default_rng(self.args.process_index)
            inputs["labels"] = inputs["labels"][self.rng.permutation(len(inputs["labels"]))]
        else:
            assert not (inputs["input_ids"] == MARK).any()
            inputs["input_ids"][:, 0] = MARK
        return inputs

    def training_step(self, *positional: Any) -> torch.Tensor:
        share = GlobalBatch.share

        def noting(mine: Any, pipeline: Any, batch: Any) -> Any:
            self.prepared.append({name: value.clone() for name, value in batch.items()})
            batch = share(mine, pipeline, batch)
            self.fed.append({name: value.clone() for name, value in batch.items()})
            return batch

        with mock.patch.object(GlobalBatch, "share", noting):
            return super().training_step(*positional)  # type: ignore[misc]


class MaskingCollator(PadCollator):
    """Like `DataCollatorForLanguageModeling(seed=...)`; the generator is shared by training and evaluation."""

    def __init__(self, kind: Any, seed: int) -> None:
        super().__init__(kind)
        self.rng = torch.Generator().manual_seed(seed)

    def __call__(self, samples: Any) -> Any:
        batch = super().__call__(samples)
        drawn = torch.rand(batch["input_ids"].shape, generator=self.rng) < 0.15
        return {**batch, "input_ids": batch["input_ids"].masked_fill(drawn, 7)}


def train(rank: int, world_size: int, folder: str) -> tuple[Batches, Batches, list[float]]:
    run = replace(RUN, trainer=PreparingInputs).with_options(eval_strategy="steps", eval_steps=2)
    trainer: Any = pipeline_trainer(run, world_size, folder)
    trainer.data_collator = MaskingCollator(RUN.kind, 42)
    trainer.prepared, trainer.fed = [], []
    trainer.train()
    return trainer.fed, trainer.prepared, losses_of(trainer)


def stock(batches: Batches, folder: str) -> list[float]:
    """The stock Trainer in one process on exactly these batches; its own samples are ignored."""
    trainer: Any = reference_trainer(RUN.with_options(remove_unused_columns=False), folder)
    trainer.train_dataset = [{"number": number} for number in range(STEPS) for _ in range(ROWS)]
    trainer.data_collator = lambda rows: dict(batches[rows[0]["number"]])
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer.train()
    return losses_of(trainer)


def test_all_stages_train_on_one_batch_whatever_draws(tmp_path: Path) -> None:
    """A collator's own generator that evaluation moves on differently, and a `_prepare_inputs` that draws."""
    (first, prepared, losses), (second, others, _) = run_ranks(train, 2, str(tmp_path / "run"))
    assert len(first) == len(second) == STEPS
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    own, of_other = (
        [all(torch.equal(one[name], made[name]) for name in one) for one, made in zip(first, ways, strict=True)]
        for ways in (prepared, others)
    )
    assert all(own) and not all(of_other), "user code on rank 0 sees what is trained"
    torch.testing.assert_close(losses, stock(first, str(tmp_path / "stock")), rtol=0, atol=1e-5)
