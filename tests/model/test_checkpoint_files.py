"""Damaged checkpoints are refused by file and tensor, before anything is mapped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_zoo import MODELS

from hf_pipetransformer.model.checkpoint_files import check_file, weight_files

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    MODELS["llama"].build().save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_complete(sharded: Path) -> None:
    files = weight_files(sharded)
    assert {file.name for file in files} == {file.name for file in sharded.glob("*.safetensors")}
    tensors = [name for file in files for name in check_file(file)]
    assert sorted(tensors) == sorted(json.loads((sharded / INDEX).read_text())["weight_map"])


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def test_missing(sharded: Path) -> None:
    file = shard_of(sharded, "model.layers.2.mlp.up_proj.weight")
    tensors = list(check_file(file))
    file.unlink()
    with pytest.raises(ValueError, match=f"{file.name} is missing; by {INDEX} it holds '({'|'.join(tensors)})'"):
        weight_files(sharded)


def test_truncated(sharded: Path) -> None:
    file = shard_of(sharded, "model.layers.2.mlp.up_proj.weight")
    last = max(check_file(file).items(), key=lambda item: item[1]["data_offsets"][1])[0]
    size = file.stat().st_size
    with file.open("r+b") as content:
        content.truncate(size - 1)
    with pytest.raises(ValueError, match=rf"{file.name} is truncated: it has {size - 1:,} .*{size:,}. '{last}'"):
        weight_files(sharded)


def test_no_header(sharded: Path) -> None:
    file = shard_of(sharded, "model.norm.weight")
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match=f"{file.name} .20 bytes. has no complete safetensors header"):
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
