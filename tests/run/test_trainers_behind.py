"""Overrides in the trainer of another library, the second base after `PipeTransformerTrainer`, run as in stock."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

SAMPLES, BATCH = 20, 4


class Steps:
    """As TRL's GKD, which puts generated words in place of the batch's."""

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
        inputs["input_ids"] = inputs["input_ids"].flip(1)
        return super().training_step(model, inputs, *rest)  # type: ignore[misc]


class Samples:
    def get_batch_samples(self, *given: Any) -> Any:
        batches, number = super().get_batch_samples(*given)  # type: ignore[misc]
        for batch in batches:
            batch["input_ids"] = batch["input_ids"].flip(1)
        return batches, number


class LargerBatches:
    """As TRL's GRPO, whose loader yields the batches of several steps at once."""

    def get_train_dataloader(self: Any) -> Any:
        given = {"sampler_fn": self._get_train_sampler, "is_training": True}
        return self._get_dataloader(self.train_dataset, "Training", 2 * self._train_batch_size, **given)


class DropsLast:
    def get_train_dataloader(self: Any) -> Any:
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch_size=3, drop_last=True, collate_fn=self.data_collator)
        )


class Batches:
    """An object of one's own that is no `DataLoader`."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


class NoLoader:
    def get_train_dataloader(self: Any) -> Any:
        return Batches(DataLoader(self.train_dataset, batch_size=3, collate_fn=self.data_collator))


class WithAbstractBase(Steps, ABC):
    pass


OVERRIDES = {kind.__name__: kind for kind in (Steps, Samples, LargerBatches, DropsLast, NoLoader, WithAbstractBase)}


def trained(folder: str, name: str, is_ours: bool, **options: Any) -> tuple[int, dict[str, torch.Tensor]]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    )
    library: type = type("LibrarysTrainer", (OVERRIDES[name], Trainer), {"__module__": "library.trainer"})
    bases = (PipeTransformerTrainer, library) if is_ours else (library,)
    arguments: Any = PipeTransformerTrainingArguments if is_ours else TrainingArguments
    usual = {"per_device_train_batch_size": BATCH, "learning_rate": 0.05, "optim": "sgd", "num_train_epochs": 2}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    rows = [{"input_ids": torch.arange(5 + number, 13 + number), "labels": number % 2} for number in range(SAMPLES)]
    trainer = type("Both", bases, {})(
        model=model, args=arguments(folder, **{**usual, **quiet, **options}), train_dataset=rows
    )
    trainer.train()
    return trainer.state.global_step, {name: weight.detach().clone() for name, weight in model.named_parameters()}


def assert_equal(ours: Any, stock: Any) -> None:
    assert ours[0] == stock[0]
    for name, weight in stock[1].items():
        torch.testing.assert_close(ours[1][name], weight, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("name", OVERRIDES)
def test_one_process(name: str, tmp_path: Path) -> None:
    stock = trained(str(tmp_path / "stock"), name, is_ours=False)
    assert_equal(trained(str(tmp_path / "ours"), name, is_ours=True), stock)


def in_stages(rank: int, world_size: int, folder: str, name: str) -> Any:
    options = {"pipeline_parallel_size": world_size, "per_device_train_batch_size": BATCH // world_size}
    return trained(folder, name, is_ours=True, **options)


@pytest.mark.parametrize("name", ["Steps", "Samples", "LargerBatches"])
def test_two_stages(name: str, tmp_path: Path) -> None:
    stock = trained(str(tmp_path / "stock"), name, is_ours=False)
    for ours in run_ranks(in_stages, 2, str(tmp_path / "ours"), name, timeout=120):
        assert_equal(ours, stock)


def test_methods_of_a_users_class_come_first() -> None:
    class Users(Steps, PipeTransformerTrainer):
        pass

    order = [kind.__name__ for kind in Users.__mro__]
    assert order[:4] == ["Users", "Steps", "PipeTransformerTrainer", "LastOverrides"]
    assert order[4] == "Trainer"
