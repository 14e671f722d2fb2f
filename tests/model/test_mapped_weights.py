"""Weights that are mapped from a checkpoint: given back after use, and never where this process has changed them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pipetransformer.model.mapped_weights import FileMappings, into_memory, is_written, release, releasing

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells which pages a process has written to"
)

LAYERS = 6
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


def resident_bytes(file: Path) -> int:
    """Bytes of a file's mappings that are in this process's memory."""
    total, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            is_of_file = line.endswith(str(file))
        elif first == "Rss:" and is_of_file:
            total += int(line.split()[1]) * 1024
    return total


def test_from_pretrained_maps_weights(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """The premise: should transformers load in another way one day, lazy loading must be refused."""
    places = FileMappings().places_in(dict(model.named_parameters()))
    assert places.keys() == dict(model.named_parameters()).keys()
    assert {place.file for place in places.values()} == {tmp_path / "model.safetensors"}
    place = places[Q_PROJ]
    content = (tmp_path / "model.safetensors").read_bytes()[place.offset : place.offset + place.size]
    assert content == model.get_parameter(Q_PROJ).detach().numpy().tobytes() and place.is_private


def test_a_model_runs_in_the_memory_of_a_layer(model: LlamaForCausalLM, tmp_path: Path) -> None:
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, resident_bytes(tmp_path / "model.safetensors"))

    with releasing(model):
        for module in model.model.layers:
            module.register_forward_hook(look)
        loss = model(**batch).loss
        loss.backward()
    assert 0 < most < layer < LAYERS * layer
    assert resident_bytes(tmp_path / "model.safetensors") < layer
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    again(**batch).loss.backward()
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter.grad, gradients[name])


def test_what_was_changed_is_not_given_back(model: LlamaForCausalLM) -> None:
    parameter = model.get_parameter(Q_PROJ)
    other = model.get_parameter("model.layers.3.mlp.up_proj.weight")
    before = other.detach().clone()
    assert not is_written(parameter)
    with torch.no_grad():
        parameter[100, 100] = 7.0
    assert is_written(parameter) and not is_written(other)
    with releasing(model):
        model(input_ids=torch.arange(8)[None])
    release(parameter)
    release(other)
    assert parameter[100, 100] == 7.0
    assert torch.equal(other, before)


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
