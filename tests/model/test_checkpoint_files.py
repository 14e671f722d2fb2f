"""Damaged checkpoints are refused by file, before anything is mapped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from model_zoo import MODELS

from hf_pipetransformer.model.checkpoint_files import tensors_in, weight_files

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    MODELS["llama"].build().save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_complete(sharded: Path) -> None:
    files = weight_files(sharded)
    assert {file.name for file in files} == {file.name for file in sharded.glob("*.safetensors")}
    tensors = [name for file in files for name in tensors_in(file)]
    assert sorted(tensors) == sorted(json.loads((sharded / INDEX).read_text())["weight_map"])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), rf"is missing; by {INDEX} it holds '.+'"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), r".[\d,]+ bytes. is truncated"),
        (lambda file: os.truncate(file, 20), r".20 bytes. is truncated, or no safetensors file"),
    ],
)
def test_a_damaged_shard_is_named(damage: Callable[[Path], None], words: str, sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    file = sharded / weight_map["model.layers.2.mlp.up_proj.weight"]
    damage(file)
    with pytest.raises(ValueError, match=f"{file.name} {words}"):
        weight_files(sharded)


def test_tensor_that_the_index_has_elsewhere(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks 'model\.norm\.weight'"):
        weight_files(sharded)


def test_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="safetensors files only"):
        weight_files(tmp_path)
