"""With two stages: frozen towers that run before all trained layers are read from the cache, others are computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from distributed import run_ranks
from frozen_runs import EPOCHS, SAMPLES, Build, Columns, Trained, frozen, llava, noise
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import (
    BertConfig,
    TrainerCallback,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

STAGES, TOTAL_BATCH = 2, 8
OPTIONS: dict[str, Any] = {"optim": "sgd", "logging_steps": 1}
"""Gradients that are rounding alone, such as those of a key's bias, would be as large as others with Adam."""
SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
PLAIN = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def captions() -> tuple[nn.Module, Columns]:
    """A trained text decoder over a frozen image encoder."""
    decoder = BertConfig(vocab_size=64, max_position_embeddings=32, is_decoder=True, add_cross_attention=True, **PLAIN)
    encoder = ViTConfig(image_size=8, patch_size=4, **PLAIN)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model: Any = VisionEncoderDecoderModel(config)
    model.encoder.requires_grad_(False)
    labels = torch.randint(2, 64, (SAMPLES, 6), generator=torch.Generator().manual_seed(3))
    return model, {"pixel_values": noise(SAMPLES, 3, 8, 8), "labels": labels}


READ: dict[str, tuple[str, Build]] = {
    "LLaVA": ("model.vision_tower", llava),
    "VisionEncoderDecoder": ("encoder", captions),
    "Whisper": ("model.encoder", lambda: frozen("whisper", "model.encoder")),
    "T5": ("encoder", lambda: frozen("t5", "encoder")),
    "CLIP's images": ("vision_model", lambda: frozen("clip", "vision_model")),
}
"""Models that call the frozen tower before all trained layers, with the tower's name."""
COMPUTED: dict[str, tuple[str, Build]] = {
    "CLIP's text": ("text_model", lambda: frozen("clip", "text_model")),
}
"""Models that call trained layers before the frozen tower."""


class Calls(TrainerCallback):
    """Counts, in each epoch, the calls of one linear layer of the tower that run on this process.

    A layer's own calls do not tell: a call of a layer that is read or is on another process computes nothing. The hook
    is Python's own, because one of the user's would turn the cache off.
    """

    def __init__(self, tower: str) -> None:
        self._tower, self.of_epochs = tower, list[int]()

    def on_epoch_begin(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        modules = model.get_submodule(self._tower).modules()
        self._linear, self._called = next(part for part in modules if isinstance(part, nn.Linear)), SimpleQueue[Any]()
        self._remove: Callable[[], None] = register_module_forward_pre_hook(self._called.put).remove

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._remove()
        called = [self._called.get() for _ in range(self._called.qsize())]
        self.of_epochs.append(sum(module is self._linear for module in called))


def train(rank: int, world_size: int, folder: str, kind: str) -> tuple[Any, ...]:
    """Losses, weights, and calls of the tower by epoch."""
    tower, build = {**READ, **COMPUTED}[kind]
    calls = Calls(tower)
    done = Trained(
        Path(folder),
        build,
        callbacks=(calls,),
        pipeline_parallel_size=STAGES,
        per_device_train_batch_size=TOTAL_BATCH // STAGES,
        **OPTIONS,
    )
    return [entry["loss"] for entry in done.history if "loss" in entry], done.weights, calls.of_epochs


def trained(folder: Path, kind: str) -> list[int]:
    """Train on two stages. Losses and weights equal the stock Trainer's in one process.

    Returns:
        Calls of the tower in each epoch, on both processes together.
    """
    _, build = {**READ, **COMPUTED}[kind]
    stock = Trained(folder / "stock", build, is_ours=False, per_device_train_batch_size=TOTAL_BATCH, **OPTIONS)
    expected = [entry["loss"] for entry in stock.history if "loss" in entry]
    ranks = run_ranks(train, STAGES, str(folder / "ours"), kind, timeout=240)
    for losses, weights, _ in ranks:
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, weight in stock.weights.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=1e-5, msg=name)
    return [sum(of_epoch) for of_epoch in zip(*(calls for _, _, calls in ranks), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", READ)
def test_a_tower_before_all_trained_layers_is_read(kind: str, tmp_path: Path) -> None:
    calls = trained(tmp_path, kind)
    assert len(calls) == EPOCHS
    assert 0 < max(calls[1:]) < calls[0] / 2, f"only checks of stored outputs run the tower: {calls}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_tower_after_a_trained_layer_is_computed(kind: str, tmp_path: Path) -> None:
    calls = trained(tmp_path, kind)
    assert calls[0] == calls[1] == calls[2] > 0
