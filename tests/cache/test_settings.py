"""What a frozen module is set to, in words for other trainings: the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from hf_pipetransformer.parts.prefix_cache.cache.values import held_by

DESCRIBES = """
import hashlib, torch
from transformers import (BertConfig, BertModel, CLIPConfig, CLIPModel, CLIPVisionConfig, LlamaConfig, LlamaModel,
    LlavaConfig, LlavaForConditionalGeneration, SegformerConfig, SegformerModel, T5Config, T5Model, ViTConfig,
    ViTModel, Wav2Vec2Config, Wav2Vec2Model, WhisperConfig, WhisperModel)
from hf_pipetransformer.parts.prefix_cache.cache.settings import Settings

small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
words, images = {**small, "vocab_size": 64}, {**small, "image_size": 16, "patch_size": 8}
heads = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
models = [
    BertModel(BertConfig(**words)),
    ViTModel(ViTConfig(**images)),
    LlamaModel(LlamaConfig(**words)),
    WhisperModel(WhisperConfig(vocab_size=64, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, **heads, **ends)),
    CLIPModel(CLIPConfig(text_config=words, vision_config=images)),
    LlavaForConditionalGeneration(
        LlavaConfig(text_config=LlamaConfig(**words), vision_config=CLIPVisionConfig(**images))
    ),
    T5Model(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)),
    SegformerModel(SegformerConfig(hidden_sizes=[8] * 4, num_attention_heads=[1, 1, 2, 2], depths=[1] * 4)),
    Wav2Vec2Model(Wav2Vec2Config(**small, conv_dim=(8, 8), conv_kernel=(3, 3), conv_stride=(2, 2),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)),
    torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32), 2),
]
models[0].gradient_checkpointing_enable()
for model in models:
    settings = Settings(list(model.modules()))
    assert settings.are_same()
    assert settings.described() == settings.described()
    print(type(model).__name__, hashlib.md5(settings.described().encode()).hexdigest())
"""


@pytest.mark.slow
def test_known_models_are_described_alike_in_every_process() -> None:
    root = Path(__file__).parents[2]

    def described(seed: str) -> list[str]:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", DESCRIBES]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()

    first = described("1")
    assert len(first) == 10
    assert described("2") == first


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(2, 2), {"by": [1.0, 2.0]}


class Blocks(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block() for _ in range(2))
        self.again = list(self.inner)
        vars(self).update(attributes)


def test_values_whose_changes_cannot_be_noticed_are_named() -> None:
    assert held_by(Blocks(size=SimpleNamespace(width=3), nothing=object())) is None
    for value, name in ((iter([1]), "list_iterator"), ([Block()], "Block")):
        assert name in str(held_by(Blocks(hidden=value)))
