"""A temporary file keeps tensors that nobody has in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hf_pipetransformer.pipeline.spill import SpillFile


def test_values_stay_when_the_tensor_is_gone(tmp_path: Path) -> None:
    values = [
        torch.randn(3, 5),
        torch.arange(7),
        torch.randn(1000, 3).bfloat16(),
        torch.empty(0, 4),
        torch.tensor(2.0),
    ]
    file = SpillFile(tmp_path / "new")
    numbers = [*file.reserve([values[0].to("meta")]), *file.reserve(values[1:])]
    assert numbers == list(range(5))
    for number, value in zip(numbers, values, strict=True):
        file.open(number).copy_(value)
    for number, value in zip(numbers, values, strict=True):
        found = file.open(number)
        assert found.dtype == value.dtype and torch.equal(found, value)
    assert list((tmp_path / "new").iterdir()) == []  # it has no name that could be left behind


def test_space_is_written_where_the_system_cannot_reserve_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no such call; a file with holes would end the process when the disk is full."""
    monkeypatch.delattr(os, "posix_fallocate")
    file = SpillFile(tmp_path)
    file.reserve([torch.empty(3 * 2**20), torch.empty(7)])
    status = os.fstat(file._file.fileno())
    assert status.st_blocks * 512 >= status.st_size > 12 * 2**20


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        SpillFile(tmp_path).reserve([torch.empty(2**50, device="meta")])
