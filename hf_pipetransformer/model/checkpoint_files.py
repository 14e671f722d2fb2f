"""Checks the files of a safetensors checkpoint by their headers, without reading a weight.

A mapped file that is shorter than its header says would end the process with a SIGBUS when the missing part is read.
So the files are checked before they are mapped, and again before the first of them is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..file_formats import OBJECT, TENSORS, WEIGHT_INDEX, checked, read_json
from ..own_files import open_regular

LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, of which each tensor has been checked to be there.

    Raises:
        ValueError: there are none; or a file is missing, incomplete or unreadable, or lacks a tensor. The message
            names the file and a tensor.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        check_file(folder / SAFE_WEIGHTS_NAME)
        return [folder / SAFE_WEIGHTS_NAME]
    if not index.is_file():
        raise ValueError(
            f"{folder} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}, and weights are loaded lazily"
            " from safetensors files only. Convert the checkpoint (load it with from_pretrained and call"
            " save_pretrained), or load the model with from_pretrained."
        )
    try:
        file_of: Mapping[str, str] = read_json(index, WEIGHT_INDEX)["weight_map"]
    except ValueError as error:
        raise ValueError(f"{index} cannot be read ({error}). Copy the checkpoint again.") from error
    headers: dict[str, Mapping[str, Any]] = {}
    for tensor, file in file_of.items():
        if file not in headers:
            if not (folder / file).is_file():
                raise ValueError(
                    f"{folder / file} is missing; by {index.name} it holds {tensor!r} (and"
                    f" {sum(other == file for other in file_of.values()) - 1} more tensors). Copy it again."
                )
            headers[file] = check_file(folder / file)
        if tensor not in headers[file]:
            raise ValueError(f"{folder / file} lacks {tensor!r}, which it holds by {index.name}. Copy both again.")
    return [folder / file for file in headers]


def check_file(file: Path) -> Mapping[str, Any]:
    """Check that a safetensors file is as long as its header says, and return the header: tensor -> description.

    Raises:
        ValueError: it is not. The message names the file and the first tensor that is not complete.
    """
    size = file.stat().st_size
    with open(open_regular(file), "rb") as content:
        length = int.from_bytes(content.read(LENGTH_BYTES), "little")
        text = content.read(length) if length <= size else b""
    try:
        header: dict[str, Any] = json.loads(text)
        checked(header, OBJECT, file.name).pop("__metadata__", None)
        checked(header, TENSORS, file.name)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} ({size:,} bytes) has no complete safetensors header. Copy it again.") from error
    end_of = {name: LENGTH_BYTES + length + entry["data_offsets"][1] for name, entry in header.items()}
    cut_off = [name for name, end in sorted(end_of.items(), key=lambda item: item[1]) if end > size]
    if cut_off:
        raise ValueError(
            f"{file} is truncated: it has {size:,} bytes and should have {max(end_of.values()):,}. {cut_off[0]!r} is"
            f" the first of {len(cut_off)} tensors that are not complete. Copy the file again."
        )
    return header
