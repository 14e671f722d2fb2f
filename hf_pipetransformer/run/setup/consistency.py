"""Check before the first step that all processes were given the same model and the same data."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ...model.nested import as_bytes
from ...pipeline.mesh import ProcessMesh

_PLAIN = (str, bytes, int, float, bool, type(None))
"""Types whose `repr` shows their value rather than their memory address."""


def check_same_everywhere(
    mesh: ProcessMesh, model: nn.Module, sample: Mapping[str, Any], rows: Sequence[Any] = ()
) -> None:
    """Compare the model and the first samples over the processes. Collective over all processes.

    The values of weights are not compared, because they are made equal later. A collator may draw random numbers, so
    a batch of the same samples may differ: the stages of a pipeline use the batch of its last stage.

    Args:
        mesh: the processes.
        model: the model before it is split.
        sample: the first samples of the data, collated.
        rows: the same samples before collation.

    Raises:
        ValueError: model or samples differ. Every process raises it; the message names the difference, the processes
            and the value on each of them.
    """
    shapes = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    _compare(
        mesh,
        "models",
        f"{type(model).__name__} with {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{trainable:,} trainable (layout {zlib.crc32(repr(shapes).encode()):08x})",
    )
    batch, content = zlib.crc32(_content_of(sample)), zlib.crc32(_content_of(list(rows)))
    is_drawn = bool(rows) and len(set(mesh.gather_objects(batch))) > 1
    _compare(mesh, "datasets", f"first samples {sorted(sample)} (content {content if is_drawn else batch:08x})")


def check_same_size(mesh: ProcessMesh, dataset: Any) -> None:
    """Compare the lengths of a dataset over the processes. Collective over all processes.

    Raises:
        ValueError: the lengths differ. Every process raises it; the message names the processes and the lengths.
    """
    _compare(mesh, "datasets", f"{len(dataset):,} samples" if isinstance(dataset, Sized) else type(dataset).__name__)


def _compare(mesh: ProcessMesh, what: str, mine: str) -> None:
    found = mesh.gather_objects(mine)
    for rank, value in enumerate(found):
        if value != found[0]:
            raise ValueError(
                f"The processes were given different {what}: process 0 has {found[0]}, process {rank} has {value}."
                " Pass the same model and the same complete dataset on every process; the trainer distributes the"
                " samples."
            )


def _content_of(value: Any) -> bytes:
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in fields(value)}
    if isinstance(value, torch.Tensor):
        return as_bytes(value.detach().cpu().to_dense().contiguous()).numpy().tobytes()
    if isinstance(value, np.ndarray) or hasattr(value, "__array_interface__"):  # images have one
        array = np.asarray(value)
        return _content_of(array.tolist()) if array.dtype.hasobject else array.tobytes()
    if isinstance(value, Mapping):
        return b"".join(_content_of(part) for name in sorted(value, key=str) for part in (name, value[name]))
    if isinstance(value, (list, tuple)):
        return repr(value).encode() if all(isinstance(v, _PLAIN) for v in value) else b"".join(map(_content_of, value))
    return (repr(value) if isinstance(value, _PLAIN) else type(value).__name__).encode()
