"""Mistakes in data, metric and checkpoint, on one process: found before anything is trained; valid trainings run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import MODELS
from torch import nn
from torch.utils.data import IterableDataset
from transformers import BertConfig, BertModel, TrainerCallback, default_data_collator
from transformers.modeling_outputs import BaseModelOutput

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

SAMPLES = [{"input_ids": [row + 1, row + 2, row + 3], "target": row % 2} for row in range(8)]
LABELLED = [{"input_ids": sample["input_ids"], "labels": sample["target"]} for sample in SAMPLES]


class Linear(nn.Module):
    """A user's model. `calls` counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.calls = nn.Linear(3, 2), 0

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(input_ids.float())


class WithOptionalLabels(Linear):
    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        logits = self.logits(input_ids)
        return {"loss": nn.functional.cross_entropy(logits, labels.view(-1)), "logits": logits}


class WithLabels(Linear):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.logits(input_ids)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class WithTuple(Linear):
    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> tuple[torch.Tensor, ...]:
        logits = self.logits(input_ids)
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


class WithoutLabels(Linear):
    """A model that makes its own targets, as in pretraining."""

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.logits(input_ids).square().mean(),)


class WithReturnLoss(Linear):
    def forward(self, input_ids: torch.Tensor, return_loss: bool | None = None) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.logits(input_ids))


class WithBug(Linear):
    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        mask: Any = None
        return {"loss": (self.logits(input_ids) * mask).mean()}


def bert() -> nn.Module:
    return MODELS["bert-classification"].build()


def headless() -> nn.Module:
    return BertModel(BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))


def trainer_of(
    model: nn.Module, samples: Any = SAMPLES, kind: type = PipeTransformerTrainer, **options: Any
) -> PipeTransformerTrainer:
    keywords = {name: options.pop(name) for name in KEYWORDS if name in options}
    arguments = PipeTransformerTrainingArguments(
        "out", per_device_train_batch_size=4, max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, **options
    )
    keywords.setdefault("data_collator", default_data_collator)
    return kind(model=model, args=arguments, train_dataset=samples, **keywords)


KEYWORDS = ("compute_loss_func", "compute_metrics", "data_collator", "eval_dataset", "callbacks")


# ------------------------------------------------------------------------------------------ labels
class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(SAMPLES)


HINTS = ["no 'labels'", "'input_ids', 'target'", "rename_column('target', 'labels')", "label_names"]


@pytest.mark.parametrize(
    ("model", "samples", "words"),
    [
        (bert, SAMPLES, HINTS),
        (WithOptionalLabels, SAMPLES, [*HINTS, "NoneType"]),
        (WithLabels, SAMPLES, [*HINTS, "required positional argument"]),
        (WithTuple, SAMPLES, [*HINTS, "[4, 2]"]),
        (bert, Stream(), ["no 'labels'", "batch has 'input_ids'", "rename_column('...', 'labels')"]),
        (headless, SAMPLES, ["BertModel returned no loss", "takes no labels", "AutoModelFor"]),
        (WithReturnLoss, SAMPLES, ["return_loss=True"]),
    ],
)
def test_missing_labels(model: Any, samples: Any, words: list[str]) -> None:
    """The first step's error says which; the loss has been asked for once, as by the stock Trainer."""
    trainer = trainer_of(model(), samples)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        trainer.train()
    assert all(word in str(caught.value) for word in words), caught.value
    assert trainer.state.global_step == 0 and getattr(trainer.model, "calls", 1) <= 1
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())


class OwnLoss(PipeTransformerTrainer):
    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(input_ids=inputs["input_ids"]).logits, inputs["target"])


def making_labels(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = default_data_collator(samples)
    return {**batch, "labels": batch["input_ids"][:, 0] % 2}


def mean_of_logits(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    assert labels is None
    return outputs[0].mean()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (bert, {"kind": OwnLoss, "remove_unused_columns": False}),
        (bert, {"data_collator": making_labels}),
        (bert, {"samples": [{**sample, "label": sample["target"]} for sample in SAMPLES]}),
        (WithTuple, {"compute_loss_func": mean_of_logits}),
        (WithoutLabels, {}),
    ],
)
def test_trainings_without_a_column_of_labels(model: Any, options: dict[str, Any]) -> None:
    trainer = trainer_of(model(), **options)
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("samples", [SAMPLES, LABELLED])
def test_other_errors_are_the_users(samples: Any) -> None:
    with pytest.raises(TypeError, match="NoneType"):
        trainer_of(WithBug(), samples).train()


# ------------------------------------------------------------------------------------------ the metric
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
TWO = {"a": LABELLED[:4], "b": LABELLED[4:]}


def accuracy(_: Any) -> dict[str, float]:
    return {"accuracy": 1.0}


class AddsAccuracy(TrainerCallback):
    def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
        metrics["eval_accuracy"] = 1.0


@pytest.mark.parametrize(
    ("wanted", "data", "words"),
    [
        ("accuracy", LABELLED, ["eval_loss.", "'accuracy'"]),
        ("loss", TWO, ["eval_a_loss, eval_b_loss"]),
        ("eval_c_loss", TWO, ["metric_for_best_model='eval_c_loss'", "eval_a_loss, eval_b_loss"]),
    ],
)
def test_a_metric_that_no_evaluation_has(wanted: str, data: Any, words: list[str]) -> None:
    trainer = trainer_of(bert(), LABELLED, eval_dataset=data, metric_for_best_model=wanted, **EVALUATED)
    with pytest.raises(ValueError) as caught:
        trainer.train()
    assert all(word in str(caught.value) for word in words), caught.value
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("wanted", "data", "keywords"),
    [
        ("eval_loss", LABELLED, {}),
        ("b_loss", TWO, {}),
        ("runtime", LABELLED, {}),
        ("accuracy", LABELLED, {"compute_metrics": accuracy}),
        ("accuracy", LABELLED, {"callbacks": [AddsAccuracy()]}),
    ],
)
def test_metrics_that_there_are(wanted: str, data: Any, keywords: dict[str, Any]) -> None:
    options = {**EVALUATED, **keywords}
    trainer = trainer_of(bert(), LABELLED, eval_dataset=data, metric_for_best_model=wanted, **options)
    trainer.train()
    assert trainer.state.best_global_step is not None


@pytest.mark.parametrize("scheduler", ["linear", "reduce_lr_on_plateau"])
def test_a_metric_that_the_first_evaluation_lacks(scheduler: str) -> None:
    """The step that was trained is kept, and resumed with the right name."""
    options = {**EVALUATED, "compute_metrics": accuracy, "lr_scheduler_type": scheduler, "eval_dataset": LABELLED}
    with pytest.raises(ValueError, match=r"'acuracy' .* eval_loss, eval_accuracy\. Did you mean 'eval_accuracy'\?"):
        trainer_of(bert(), LABELLED, metric_for_best_model="acuracy", **options).train()
    trainer = trainer_of(bert(), LABELLED, metric_for_best_model="accuracy", **options)
    trainer.train(resume_from_checkpoint="out/checkpoint-1")
    assert [entry["step"] for entry in trainer.state.log_history if "eval_accuracy" in entry] == [1, 2]


# ------------------------------------------------------------------------------------------ the checkpoint
def test_a_checkpoint_that_is_not_there() -> None:
    """The message names the newest one that is."""

    def resume(wanted: Any) -> str:
        trainer = trainer_of(bert(), LABELLED, save_strategy="steps", save_steps=1)
        with pytest.raises(ValueError) as caught:
            trainer.train(resume_from_checkpoint=wanted)
        assert trainer.state.global_step == 0
        return str(caught.value)

    assert "'out/checkpoint-7' does not exist, and out contains no valid checkpoint" in resume("out/checkpoint-7")
    assert "output_dir='out' contains no checkpoint" in resume(True)
    trainer_of(bert(), LABELLED, save_strategy="steps", save_steps=1).train()
    Path("other").mkdir()
    message = resume("out/checkpoint-7")
    assert "does not exist. The newest valid checkpoint in out is checkpoint-2. Pass 'out/checkpoint-2'" in message
    message = resume("other")
    assert "The newest valid checkpoint in out is checkpoint-2" in message and "trainer_state.json" in message


def test_a_checkpoint_that_is_not_there_for_the_stock_trainer() -> None:
    trainer = trainer_of(bert(), LABELLED, auto_find_batch_size=True)
    with pytest.raises(ValueError, match="'out/checkpoint-7' does not exist, and out contains no valid checkpoint"):
        trainer.train(resume_from_checkpoint="out/checkpoint-7")
