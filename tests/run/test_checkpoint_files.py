"""Damaged checkpoints are refused by file, before anything is mapped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from model_zoo import MODELS

from hf_pipetransformer.parts.lazy_loading.checkpoint_files import tensors_in, weight_files

INDEX = "model.safetensors.index.json"
SHARD = "THE SHARD"


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


def moved_in_the_index(file: Path) -> None:
    index = json.loads((file.parent / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    (file.parent / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), rf"{SHARD} is missing; by {INDEX} it holds '.+'"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), rf"{SHARD} .[\d,]+ bytes. is truncated"),
        (lambda file: os.truncate(file, 20), rf"{SHARD} .20 bytes. is truncated, or no safetensors file"),
        (moved_in_the_index, r"lacks 'model\.norm\.weight'"),
        (lambda file: [other.unlink() for other in file.parent.iterdir()], "safetensors files only"),
    ],
)
def test_what_is_damaged_is_named(damage: Callable[[Path], None], words: str, sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    file = sharded / weight_map["model.layers.2.mlp.up_proj.weight"]
    damage(file)
    with pytest.raises(ValueError, match=words.replace(SHARD, file.name)):
        weight_files(sharded)
