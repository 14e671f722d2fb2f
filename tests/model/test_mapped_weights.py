"""Weights that are mapped from a checkpoint: given back after use, and never where this process has changed them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from file_pages import resident_bytes
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pipetransformer.model import mapped_weights
from hf_pipetransformer.model.mapped_weights import (
    FileMappings,
    TensorLike,
    give_back,
    giving_back,
    into_memory,
    is_written,
    tensors_in_file,
)
from hf_pipetransformer.model.placeholders import set_values

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
LARGEST = 4 * CONFIG.hidden_size * CONFIG.intermediate_size
LAYER = 4 * (4 * CONFIG.hidden_size**2) + 3 * LARGEST
"""Bytes of the largest weight, and of a layer's."""


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


def test_a_model_runs_in_the_memory_of_its_largest_weights(model: LlamaForCausalLM, tmp_path: Path) -> None:
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    found = []
    for layer in model.model.layers:
        for module in (layer.mlp.down_proj, layer):
            module.register_forward_hook(lambda *_: found.append(resident_bytes(tmp_path)))
    with giving_back(model):
        loss = model(**batch).loss
        assert resident_bytes(tmp_path) < LARGEST
        loss.backward()  # reads weights again
        assert resident_bytes(tmp_path) > LAYER
    assert resident_bytes(tmp_path) < LARGEST and 0 < max(found) < LAYER
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
    with giving_back(model):
        model(input_ids=torch.arange(8)[None])
    give_back(parameter)
    give_back(other)
    assert parameter[100, 100] == 7.0
    assert torch.equal(other, before)


def test_nothing_is_given_back_where_the_kernel_does_not_tell_what_was_changed(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_weights, "PAGES", tmp_path / "missing")
    parameter = model.get_parameter(Q_PROJ)
    with torch.no_grad():
        parameter[100, 100] = 7.0
    with giving_back(model):
        model(input_ids=torch.arange(8)[None])
    assert parameter[100, 100] == 7.0 and resident_bytes(tmp_path) > LAYERS * LAYER


@pytest.mark.slow
def test_into_memory(model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight by weight. Then the file may change; the parameters are the same objects."""
    parameters = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with giving_back(model):
        pass
    found = []

    def look(*arguments: Any) -> None:
        found.append(resident_bytes(tmp_path))
        set_values(*arguments)

    monkeypatch.setattr(mapped_weights, "set_values", look)
    into_memory(model.parameters())
    assert 0 < max(found) < LAYER
    assert not FileMappings().places_in(parameters)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name] and torch.equal(parameter, before[name])


def test_what_is_passed_on_does_not_add_up(tmp_path: Path) -> None:
    """A thread frees the pages and loses no value; it ends with the tensors."""
    before = threading.active_count()
    tensors = tensors_in_file(tmp_path, [TensorLike(torch.Size([2**20]), torch.float32)] * 4, are_passed_on=True)
    pages = FileMappings().place_of(tensors[0])
    assert pages is not None and threading.active_count() == before + 1
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert soon(lambda: resident_bytes(pages.file) == 0)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
    assert soon(lambda: resident_bytes(pages.file) == 0)
    del tensor, tensors
    assert soon(lambda: threading.active_count() == before)


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it is true within a minute."""
    return any(condition() or time.sleep(0.01) for _ in range(6000))


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        tensors_in_file(tmp_path, [TensorLike(torch.Size([2**50]), torch.float32)])
