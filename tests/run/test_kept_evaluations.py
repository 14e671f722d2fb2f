"""Evaluations after a training read the outputs that its own evaluations have stored. No file is left afterwards."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_runs import SIZE, Columns, Trained, head_on_bert, noise
from selection import slow
from torch import nn
from transformers import TrainerCallback

EVALUATES: dict[str, Any] = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "hf_pipetransformer")
    return caplog


def scale(model: nn.Module) -> None:
    """Scale the weights in a way that PyTorch does not count."""
    model.bert.encoder.layer[0].output.dense.weight.data.mul_(1.1)


def stores_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "cache" in path.name]


def train_again(trained: Trained) -> None:
    """Train with other frozen weights."""
    scale(trained.model)
    trained.trainer.train()


@pytest.mark.parametrize("how", ["", *slow("a training of other weights follows", "the best model is loaded")])
def test_evaluations_after_the_training_read_what_those_in_it_have_stored(
    how: str, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    """The model can be pickled in between, and the stored outputs are deleted with the trainer."""
    options = dict(EVALUATES)
    if how == "the best model is loaded":
        options |= {"load_best_model_at_end": True, "save_strategy": "epoch"}
    stock, ours = (
        Trained(tmp_path / name, head_on_bert, is_ours=name == "ours", **options) for name in ("stock", "ours")
    )
    if how == "a training of other weights follows":
        train_again(stock)
        train_again(ours)
    for _ in range(2):
        said.clear()
        expected, found = stock.trainer.evaluate(), ours.trainer.evaluate()
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)
        assert "was read in evaluations for 3 of 5 samples" in said.text, "the first batch is compared"
        torch.save(ours.model, tmp_path / "model.pt")
    scale(ours.model)
    scale(stock.model)
    expected, found = stock.trainer.evaluate(), ours.trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-6), "computed, as the weights are others"
    Trained(tmp_path / "ours", head_on_bert, **options).trainer.evaluate()  # in the same folder
    del ours
    gc.collect()
    assert stores_in(tmp_path / "ours") == []


class Scaled(nn.Module):
    """A frozen layer with a buffer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SIZE, 64), nn.GELU(), nn.Linear(64, SIZE)).requires_grad_(False)
        self.body.register_buffer("scale", torch.ones(1))
        self.body.forward = lambda x: self.body[2](self.body[1](self.body[0](x))) * self.body.scale
        self.head = nn.Linear(SIZE, 2)

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        scores = self.head(self.body(values))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def scaled() -> tuple[nn.Module, Columns]:
    return Scaled(), {"values": noise(14, SIZE), "labels": torch.arange(14) % 2}


class ReplacesABuffer(TrainerCallback):
    """Replaces a buffer in the middle of an evaluation after the training."""

    def __init__(self) -> None:
        self.is_on, self.count = False, 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.count += self.is_on
        if self.count == 2:
            model.body.scale = torch.full((1,), 7.0)


def test_a_buffer_that_is_replaced_in_an_evaluation(tmp_path: Path) -> None:
    losses = []
    for is_ours in (False, True):
        replaces = ReplacesABuffer()
        trained = Trained(tmp_path / str(is_ours), scaled, (replaces,), is_ours=is_ours, **EVALUATES)
        replaces.is_on = True
        losses.append(trained.trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


class Ends(TrainerCallback):
    """Raises an error, or stops the training, when the second epoch begins."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        self.error = error

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.epoch >= 2:
            control.should_training_stop = True
            if self.error is not None:
                raise self.error


def test_nothing_is_left_of_a_training_that_was_resumed(tmp_path: Path) -> None:
    options = {**EVALUATES, "save_strategy": "epoch", "num_train_epochs": 5}
    with pytest.raises(ArithmeticError):
        Trained(tmp_path, head_on_bert, (Ends(ArithmeticError),), **options)
    trained = Trained(tmp_path, head_on_bert, resume_from_checkpoint=True, **options)
    assert stores_in(tmp_path)
    del trained
    gc.collect()
    assert stores_in(tmp_path) == []


def evaluate_with_another_front(folder: Path) -> None:
    trained = Trained(folder, head_on_bert, (Ends(),), **EVALUATES)
    trained.model.bert.encoder.layer[3].requires_grad_(True)
    trained.trainer.evaluate()
    trained.trainer.evaluate()


def test_nothing_is_stored_after_a_training_that_was_stopped(tmp_path: Path) -> None:
    """The stopped training has epochs left, and an evaluation has another front."""
    evaluate_with_another_front(tmp_path)
    gc.collect()
    assert stores_in(tmp_path) == []
