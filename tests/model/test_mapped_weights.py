"""Weights that are mapped from a checkpoint: given back after use, and never where this process has changed them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pipetransformer.model.checkpoint_files import TensorLike
from hf_pipetransformer.model.mapped_weights import (
    FileMappings,
    into_memory,
    is_written,
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


def test_what_was_changed_is_known(model: LlamaForCausalLM) -> None:
    parameter, other = model.get_parameter(Q_PROJ), model.get_parameter("model.layers.3.mlp.up_proj.weight")
    assert not is_written(parameter)
    with torch.no_grad():
        parameter[100, 100] = 7.0
    model(input_ids=torch.arange(8)[None])
    assert is_written(parameter) and not is_written(other)


def test_into_memory(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Then the file may change; the parameters are the same objects, under both names of tied ones."""
    parameters = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    into_memory(model.parameters())
    assert not FileMappings().places_in(parameters)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name] and torch.equal(parameter, before[name])


def test_space_in_a_file_is_written_where_the_system_cannot_reserve_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has no such call; a file with holes would end the process when the disk is full."""
    monkeypatch.delattr(os, "posix_fallocate")
    written = 0

    def count(file: int, content: bytes, offset: int) -> int:
        nonlocal written
        assert offset == written
        written += len(content)
        os.ftruncate(file, written)
        return len(content)

    monkeypatch.setattr(os, "pwrite", count)
    like = TensorLike(torch.Size([3 * 2**20]), torch.float32)
    tensors = tensors_in_file(tmp_path, [like, TensorLike(torch.Size([0, 4]), torch.bool)])
    assert written == 12 * 2**20 and [tensor.shape for tensor in tensors] == [(3 * 2**20,), (0, 4)]


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        tensors_in_file(tmp_path, [TensorLike(torch.Size([2**50]), torch.float32)])
