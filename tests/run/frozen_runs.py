"""Models with parts that the user has frozen, and trainings of them with the stock Trainer and with ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from model_zoo import MODELS
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

SIZE, SAMPLES, BATCH, EPOCHS = 16, 14, 4, 3
READ = SAMPLES - BATCH
"""Samples read in an epoch: the first batch is computed, and compared with its stored outputs."""

Columns = dict[str, torch.Tensor]
Build = Callable[[], tuple[nn.Module, Columns]]
"""Makes a model, and its inputs for all samples."""


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def frozen(name: str, *parts: str) -> tuple[nn.Module, Columns]:
    """A model of the zoo with some frozen parts."""
    model = MODELS[name].build()
    for part in parts:
        model.get_submodule(part).requires_grad_(False)
    return model, {key: value for key, value in MODELS[name].batch(SAMPLES).items() if torch.is_tensor(value)}


def head_on_bert() -> tuple[nn.Module, Columns]:
    return frozen("bert-classification", "bert")


def lower_layers() -> tuple[nn.Module, Columns]:
    return frozen("bert-classification", "bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1")


def llava() -> tuple[nn.Module, Columns]:
    """The collator puts the images of all samples in a row."""
    model, columns = frozen("llava", "model.vision_tower")
    # transformers 5.24 returns the tower's output, with a None in it, which its own Trainer cannot gather
    model.config.keys_to_ignore_at_inference = ["past_key_values", "cache", "image_outputs"]
    return model, {**columns, "pixel_values": noise(SAMPLES, 1, 3, 8, 8)}


FROZEN: dict[str, Build] = {
    "a head on BERT": head_on_bert,
    "lower layers": lower_layers,
    "a whole list of layers": lambda: frozen("llama-classification", "model.embed_tokens", "model.layers"),
    "a vision tower": llava,
    "several outputs": lambda: frozen("segformer", "segformer"),
}


def collate(rows: list[Columns]) -> dict[str, Any]:
    batch: dict[str, Any] = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if "pixel_values" in batch and batch["pixel_values"].dim() == 5:
        batch["pixel_values"] = batch["pixel_values"].flatten(0, 1)
    return {**batch, "return_loss": True} if "labels" not in batch else batch


def cut(rows: list[Columns]) -> dict[str, Any]:
    """Pads to the longest of the batch, as most collators do."""
    batch = collate(rows)
    longest = int(batch["attention_mask"].sum(1).max())
    width = batch["input_ids"].shape[1]
    return {name: value[:, :longest] if value.shape[1:] == (width,) else value for name, value in batch.items()}


def cut_left(rows: list[Columns]) -> dict[str, Any]:
    batch = cut(rows)
    lengths = batch["attention_mask"].sum(1).tolist()
    for name in ("input_ids", "attention_mask"):
        batch[name] = torch.stack([row.roll(-n) for row, n in zip(batch[name], lengths, strict=True)])
    return batch


class Trained:
    """A training with the stock Trainer, or with ours, and the log lines about its cache."""

    def __init__(
        self,
        folder: Path,
        build: Build,
        callbacks: tuple[TrainerCallback, ...] = (),
        mixin: type = object,
        is_ours: bool = True,
        collator: Callable[[list[Columns]], dict[str, Any]] = collate,
        metrics: Callable[[Any], dict[str, float]] | None = None,
        resume_from_checkpoint: bool | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model, columns = build()
        rows = [{name: column[row] for name, column in columns.items()} for row in range(SAMPLES)]
        given = {
            "output_dir": str(folder),
            "per_device_train_batch_size": BATCH,
            "num_train_epochs": EPOCHS,
            "learning_rate": 1e-2,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "remove_unused_columns": False,
        }
        kind, arguments = (
            (PipeTransformerTrainer, PipeTransformerTrainingArguments) if is_ours else (Trainer, TrainingArguments)
        )
        if is_ours:
            given |= {"activation_cache": "on", "log_level": "info"}
        bases = (kind,) if mixin is object else (mixin, kind)
        self.trainer = trainer = type("Ours", bases, {})(
            self.model,
            arguments(**{**given, **options}),
            train_dataset=rows,
            eval_dataset=rows[:5],
            data_collator=collator,
            compute_metrics=metrics,
            callbacks=[*callbacks],
        )
        before = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        trainer.train(resume_from_checkpoint=resume_from_checkpoint)
        self.history = trainer.state.log_history
        self.weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        assert any(not torch.equal(before[name], weight) for name, weight in self.weights.items())

    def assert_same(self, other: Trained) -> None:
        for name, weight in other.weights.items():
            torch.testing.assert_close(self.weights[name], weight, atol=1e-6, rtol=1e-5, msg=name)
