"""Checks the files of a safetensors checkpoint by their headers, without reading a weight.

If a mapped file is shorter than its header says, reading the missing part ends the process with a SIGBUS. So the
files are checked before they are mapped, and again before the first of them is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ...file_formats import WEIGHT_INDEX, read_json
from ...model.mapped_weights import TensorLike

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point dtypes by their names in safetensors; other dtypes only need to be distinct from them."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, after a check that no tensor is missing.

    Raises:
        ValueError: there is no file; or a file is missing, incomplete or unreadable, or lacks a tensor. The message
            names the file.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        tensors_in(folder / SAFE_WEIGHTS_NAME)
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
    headers: dict[str, Mapping[str, TensorLike]] = {}
    for tensor, file in file_of.items():
        if file not in headers:
            if not (folder / file).is_file():
                raise ValueError(
                    f"{folder / file} is missing; by {index.name} it holds {tensor!r} (and"
                    f" {sum(other == file for other in file_of.values()) - 1} more tensors). Copy it again."
                )
            headers[file] = tensors_in(folder / file)
        if tensor not in headers[file]:
            raise ValueError(f"{folder / file} lacks {tensor!r}, which it holds by {index.name}. Copy both again.")
    return [folder / file for file in headers]


def tensors_in(file: Path) -> dict[str, TensorLike]:
    """Shapes and dtypes of the tensors in a safetensors file, after a check of its length.

    Raises:
        ValueError: the file has another length, or is no safetensors file. The message names the file.
    """
    size = file.stat().st_size
    try:
        if not file.is_file():
            raise OSError("it is not a regular file")
        with safe_open(file, framework="pt") as content:
            slices = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
            return {
                name: TensorLike(torch.Size(found.get_shape()), DTYPES.get(found.get_dtype(), torch.uint8))
                for name, found in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{file} ({size:,} bytes) is truncated, or no safetensors file ({error}). Copy it again."
        ) from error
