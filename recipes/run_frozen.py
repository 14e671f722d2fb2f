#!/usr/bin/env python
"""Trains a model with a frozen part. The frozen part runs once for each sample: no freeze policy, no other argument.

`--kind` chooses the frozen part, frozen in the usual way:

    head        a new head on a backbone (BERT)              model.base_model.requires_grad_(False)
    speech      a speech model's encoder (Whisper)           model.freeze_encoder()
    image-text  the vision tower of a language model (LLaVA) model.model.vision_tower.requires_grad_(False)
    captioning  the encoder of a captioner (ViT + GPT-2)     model.encoder.requires_grad_(False)

The data is random and of the sizes that the model asks for: put your own in place of `rows_for`.

    python recipes/run_frozen.py --kind speech --do_train --num_train_epochs 4 --log_level info
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    CLIPVisionConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    PretrainedConfig,
    TrainerCallback,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    WhisperConfig,
)

from hf_pipetransformer import PipeTransformerTrainer

from common import ModelArguments, parse_arguments, print_summary, start, train

WORDS = 64
"""Size of a small model's vocabulary."""


KINDS = ("head", "speech", "image-text", "captioning")


@dataclass
class FrozenArguments:
    """The frozen part, and the amount of random data."""

    kind: str = field(default="head", metadata={"help": "The frozen part.", "choices": list(KINDS)})
    generated_data: int = field(default=128, metadata={"help": "Number of samples."})


class EpochTimes(TrainerCallback):
    """The seconds of each epoch: the first one computes the frozen part, the others read it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter())

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.seconds[-1] = time.perf_counter() - self.seconds[-1]


def small_config(kind: str) -> PretrainedConfig:
    width: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    image = {"image_size": 64, "patch_size": 8}
    if kind == "head":
        return AutoConfig.for_model("bert", vocab_size=WORDS, num_hidden_layers=6, **width)
    if kind == "speech":
        sizes = {"encoder_layers": 6, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
        tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        frames = {"num_mel_bins": 16, "max_source_positions": 100, "max_target_positions": 32}
        return WhisperConfig(vocab_size=WORDS, d_model=128, suppress_tokens=None, **sizes, **tokens, **frames)
    if kind == "image-text":
        vision = CLIPVisionConfig(num_hidden_layers=6, **width, **image)
        text = LlamaConfig(vocab_size=WORDS, num_hidden_layers=1, **width)
        return LlavaConfig(vision_config=vision, text_config=text, image_token_id=WORDS - 1)
    decoder = GPT2Config(vocab_size=WORDS, n_embd=128, n_layer=1, n_head=4, add_cross_attention=True)
    encoder = ViTConfig(num_hidden_layers=6, **width, **image)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


def frozen_model(kind: str, model_args: ModelArguments) -> nn.Module:
    classes: dict[str, Any] = {
        "head": AutoModelForSequenceClassification,
        "speech": AutoModelForSpeechSeq2Seq,
        "image-text": AutoModelForImageTextToText,
        "captioning": VisionEncoderDecoderModel,
    }
    name = model_args.model_name_or_path
    if name is not None:
        model: Any = classes[kind].from_pretrained(name)
    elif kind == "captioning":
        model = VisionEncoderDecoderModel(small_config(kind))
    else:
        model = classes[kind].from_config(small_config(kind))
    freeze: dict[str, Callable[[], Any]] = {
        "head": lambda: model.base_model.requires_grad_(False),
        "speech": lambda: model.freeze_encoder(),
        "image-text": lambda: model.model.vision_tower.requires_grad_(False),
        "captioning": lambda: model.encoder.requires_grad_(False),
    }
    freeze[kind]()
    return model


def rows_for(kind: str, config: Any, count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Random samples of the sizes that a model asks for."""
    draw = torch.Generator().manual_seed(seed)

    def words(length: int, below: int) -> torch.Tensor:
        return torch.randint(3, below, (count, length), generator=draw)

    if kind == "head":
        columns = {"input_ids": words(32, config.vocab_size), "labels": words(1, 1000)[:, 0] % config.num_labels}
    elif kind == "speech":
        shape = count, config.num_mel_bins, 2 * config.max_source_positions
        columns = {"input_features": torch.randn(shape, generator=draw), "labels": words(16, config.vocab_size)}
    else:
        vision = config.vision_config if kind == "image-text" else config.encoder
        images = torch.randn(count, 3, vision.image_size, vision.image_size, generator=draw)
        if kind == "captioning":
            columns = {"pixel_values": images, "labels": words(16, config.decoder.vocab_size)}
        else:
            text = words(16, config.text_config.vocab_size - 1)
            patches = (vision.image_size // vision.patch_size) ** 2
            ids = torch.cat([torch.full((count, patches), config.image_token_id), text], 1)
            labels = torch.cat([torch.full((count, patches), -100), text], 1)
            columns = {"input_ids": ids, "pixel_values": images, "labels": labels}
    return [{name: column[row] for name, column in columns.items()} for row in range(count)]


def main(arguments: list[str] | None = None) -> dict[str, float]:
    model_args, data_args, training_args = parse_arguments(
        sys.argv[1:] if arguments is None else arguments, FrozenArguments
    )
    start(training_args)
    model = frozen_model(data_args.kind, model_args)
    rows = rows_for(data_args.kind, model.config, data_args.generated_data, training_args.seed)
    times = EpochTimes()
    trainer = PipeTransformerTrainer(model, training_args, train_dataset=rows, callbacks=[times])
    results = train(trainer)
    print_summary(trainer, results)
    if trainer.is_world_process_zero() and times.seconds:
        print("Seconds of each epoch:", ", ".join(f"{seconds:.2f}" for seconds in times.seconds))
    return results


if __name__ == "__main__":
    record(main)()  # a launcher then shows the error itself
