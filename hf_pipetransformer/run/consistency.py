"""Check before the first step that all processes were given the same model and the same data."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..model.nested import as_bytes
from ..pipeline.mesh import ProcessMesh

TRIES = 16
"""Number of times that samples are collated to find random inputs; a collator may change only some each time."""
_PLAIN = (str, bytes, int, float, bool, type(None))
"""Types whose `repr` shows their value rather than their memory address."""


def check_same_everywhere(
    mesh: ProcessMesh,
    model: nn.Module,
    sample: Mapping[str, Any],
    draw: Callable[[], Mapping[str, Any]] | None = None,
    rows: Sequence[Any] = (),
) -> None:
    """Compare the model and the first samples over the processes. Collective over all processes.

    The values of weights are not compared, because they are made equal later. Inputs that a collator draws from a
    generator of its own, and that therefore differ between processes, are not compared either: the stages of a
    pipeline use the values that its last stage has drawn.

    Args:
        mesh: the processes.
        model: the model before it is split.
        sample: the first samples of the data, collated.
        draw: collates the samples again, with other random numbers.
        rows: the samples before collation; compared if the collator draws random numbers.

    Raises:
        ValueError: model or samples differ. Every process raises it; the message names what differs, the processes
            and what each of them has.
    """
    shapes = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    _compare(
        mesh,
        "models",
        f"{type(model).__name__} with {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{trainable:,} trainable (layout {zlib.crc32(repr(shapes).encode()):08x})",
    )
    everyone = mesh.gather_objects(_checksums_of(sample))
    are_same = all(theirs == everyone[0] for theirs in everyone)
    drawn: set[str] = set()
    if not are_same and draw is not None:
        mine: set[str] = set()
        with suppress(Exception):  # a process that raised here would keep the others waiting
            tries = [_checksums_of(draw()) for _ in range(TRIES)]
            mine = {name for name in sample if len({one.get(name) for one in tries}) > 1}
        drawn = set().union(*mesh.gather_objects(mine))
    left = {name: sample[name] for name in sample if name not in drawn}
    content = zlib.crc32(repr(sorted(_checksums_of(left).items())).encode())
    if drawn:
        content = zlib.crc32(_content_of(list(rows)), content)
    _compare(mesh, "datasets", f"first samples {sorted(sample)} (content {content:08x})")


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


def _checksums_of(sample: Mapping[str, Any]) -> dict[str, int]:
    return {key: zlib.crc32(_content_of(value)) for key, value in sample.items()}


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
