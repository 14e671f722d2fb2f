"""The samples by which all trainings that share a store name the function of their frozen layers.

    folder/
      samples-<hash>.pt     of the first training of this model here: a few samples, collated

What frozen layers give for a few samples is part of a generation's name. If each training took samples of its own
dataset, those on other parts of it (the folds of a cross validation) would never find each other's entries.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash

from .activation_files import open_private


def agreed_samples(
    folder: Path, description: str, samples: Mapping[str, Any], ignored: Collection[str]
) -> Mapping[str, Any]:
    """Return the samples that a folder has for a model; these, if it has none, and then they are kept there.

    Two trainings that begin at the same moment may each keep their own: then they do not find each other's entries.

    Args:
        folder: of the store.
        description: of the model.
        samples: a few samples of this training's dataset, collated, on the CPU.
        ignored: names of inputs that frozen layers do not read.
    """
    path = folder / f"samples-{xxhash.xxh3_128_hexdigest(repr((description, _shape(samples, ignored))).encode())}.pt"
    with suppress(OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError):
        with open(open_private(path, os.O_RDONLY), "rb") as file:
            found = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
        if isinstance(found, dict) and _shape(found, ignored) == _shape(samples, ignored):
            return found
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):  # without the file, other datasets get other generations
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            new.unlink(missing_ok=True)
            with open(open_private(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                torch.save(dict(samples), file)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
    return samples


def _shape(samples: Mapping[str, Any], ignored: Collection[str]) -> list[tuple[Any, ...]]:
    """What two sets of samples have in common that the same model may be called on: names, types, sizes of images."""
    return [
        (name, str(value.dtype), value.dim(), tuple(value.shape[1:]) if value.is_floating_point() else ())
        if isinstance(value, torch.Tensor)
        else (name, repr(value))
        for name, value in sorted(samples.items())
        if name not in ignored
    ]
