"""Weights that are mapped from a checkpoint: given back after use, and never where this process has changed them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pipetransformer.model.checkpoint_files import TensorLike
from hf_pipetransformer.model.mapped_weights import (
    FileMappings,
    tensors_in_file,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells which pages a process has written to"
)

LAYERS = 4
CONFIG = LlamaConfig(
    hidden_size=512,  # the kernel maps up to 64 KiB around a page that is read: little beside these weights
    intermediate_size=2048,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=100,
)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> LlamaForCausalLM:
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path)
    return LlamaForCausalLM.from_pretrained(tmp_path)


def test_from_pretrained_maps_weights(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """The premise: should transformers load in another way one day, lazy loading must be refused."""
    places = FileMappings().places_in(dict(model.named_parameters()))
    assert places.keys() == dict(model.named_parameters()).keys()
    assert {place.file for place in places.values()} == {tmp_path / "model.safetensors"}
    place = places[Q_PROJ]
    content = (tmp_path / "model.safetensors").read_bytes()[place.offset : place.offset + place.size]
    assert content == model.get_parameter(Q_PROJ).detach().numpy().tobytes() and place.is_private


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        tensors_in_file(tmp_path, [TensorLike(torch.Size([2**50]), torch.float32)])
