"""Distributes one stage's batch to the other stages of its pipeline.

A collator or a `_prepare_inputs` that draws from its own random generator makes a different batch on each process. So
all stages train on the batch that the last one has prepared, where user code computes the loss. In an evaluation each
stage's process has samples of its own, and each sends them to the others:

control group    lengths, structure (pickled), tensors on the CPU     one message, as long as the longest one so far
pipeline group   tensors on the device                                one message, if there are any

The stage that sends continues at once; the others wait for the batch, as they do for its activations.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist

from .chunks import as_bytes

FIRST_CAPACITY = 4096
"""Length of the first message in bytes; a longer batch is sent in two parts, and makes later messages as long."""
ALIGNMENT = 64
"""Alignment of each tensor in a message, in bytes."""

_LENGTHS = 4 * 8


class _Refused:
    """Sent in place of a batch that cannot be sent, with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _Writer(pickle.Pickler):
    """Pickles a batch without its tensors, which are kept apart."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.places: dict[int, tuple[Any, ...]] = {}  # by tensor: its buffer and offset, size, dtype and shape
        self.tensors: tuple[list[tuple[int, torch.Tensor]], ...] = ([], [])  # on the CPU, on the device
        self.lengths = [0, 0]

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_quantized or value.is_meta:
            return None
        if id(value) not in self.places:
            where = int(value.device.type != "cpu")
            dense = value.detach().resolve_conj().resolve_neg().contiguous()
            start = self.lengths[where]
            self.tensors[where].append((start, dense))
            self.lengths[where] = _aligned(start + dense.nbytes)
            self.places[id(value)] = (where, start, dense.nbytes, dense.dtype, tuple(dense.shape))
        return self.places[id(value)]


class _Reader(pickle.Unpickler):
    def __init__(self, content: bytes, buffers: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(io.BytesIO(content))
        self._buffers = buffers
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        if pid not in self._made:
            where, start, size, dtype, shape = pid
            # `.data`: an in-place change of one tensor leaves the version counters of the others unchanged
            self._made[pid] = self._buffers[where][start : start + size].view(dtype).view(shape).data
        return self._made[pid]


class BatchChannel:
    """Sends batches from one stage to the other stages of its pipeline.

    Args:
        source: global rank of the stage that sends.
        control: the pipeline's processes, in a group on the CPU.
        group: the same processes, in a group for tensors on the device.
        device: the device of this process.
    """

    def __init__(
        self, source: int, control: dist.ProcessGroup | None, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._source = source
        self._is_source = dist.get_rank() == source
        self._control = control
        self._group = group
        self._device = device
        self._capacity = FIRST_CAPACITY
        self._under_way: list[tuple[Any, torch.Tensor]] = []  # buffers must be kept until they are sent

    def share(self, mine: Any) -> Any:
        """Return the sending stage's value on all stages. Collective over the pipeline.

        Args:
            mine: mappings, sequences and any values that can be pickled, with tensors anywhere. The sending stage's
                value is used, and that stage gets back the very object.

        Raises:
            ValueError: on all stages, if the value holds something that cannot be sent to another process.
        """
        if self._is_source:
            refused = self._send(mine)
            if refused is not None:
                self._wait()  # the other stages must receive the reason before this process ends
                raise ValueError(refused.reason)
            return mine
        value = self._receive()
        if isinstance(value, _Refused):
            raise ValueError(value.reason)
        return value

    # ------------------------------------------------------------------------------------ inside
    def _send(self, value: Any) -> _Refused | None:
        self._wait()
        refused = None
        try:
            writer, content = _written(value)
        except Exception as error:  # an object may raise any error while it is pickled
            refused = _Refused(
                "The batch contains a value that cannot be sent to the pipeline's other stages"
                f" ({type(error).__name__}: {error}). Return only tensors and plain values from the data collator and"
                " _prepare_inputs, or set pipeline_parallel_size=1."
            )
            writer, content = _written(refused)
        first = _aligned(_LENGTHS + len(content))
        total = first + writer.lengths[0]
        message = torch.empty(max(total, self._capacity), dtype=torch.uint8)
        message[:_LENGTHS].view(torch.int64)[:] = torch.tensor([len(content), first, total, writer.lengths[1]])
        message[_LENGTHS : _LENGTHS + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        _fill(message[first:], writer.tensors[0])
        self._broadcast(message[: self._capacity], self._control)
        if total > self._capacity:
            self._broadcast(message[self._capacity : total], self._control)
        self._grow(total)
        if writer.lengths[1]:
            on_device = torch.empty(writer.lengths[1], dtype=torch.uint8, device=self._device)
            _fill(on_device, writer.tensors[1])
            self._broadcast(on_device, self._group)
        return refused

    def _wait(self) -> None:
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _broadcast(self, part: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        self._under_way.append((dist.broadcast(part, self._source, group=group, async_op=True), part))

    def _receive(self) -> Any:
        message = torch.empty(self._capacity, dtype=torch.uint8)
        dist.broadcast(message, self._source, group=self._control)
        size, first, total, on_device = message[:_LENGTHS].view(torch.int64).tolist()
        if total > self._capacity:
            rest = torch.empty(total - self._capacity, dtype=torch.uint8)
            dist.broadcast(rest, self._source, group=self._control)
            message = torch.cat([message, rest])
        self._grow(total)
        buffer = torch.empty(on_device, dtype=torch.uint8, device=self._device)
        if on_device:
            dist.broadcast(buffer, self._source, group=self._group)
        content = message[_LENGTHS : _LENGTHS + size].numpy().tobytes()
        return _Reader(content, (message[first:], buffer)).load()

    def _grow(self, total: int) -> None:
        self._capacity = max(self._capacity, 1 << (total - 1).bit_length())


def _written(value: Any) -> tuple[_Writer, bytes]:
    file = io.BytesIO()
    writer = _Writer(file)
    writer.dump(value)
    return writer, file.getvalue()


def _fill(buffer: torch.Tensor, tensors: list[tuple[int, torch.Tensor]]) -> None:
    for start, tensor in tensors:
        buffer[start : start + tensor.nbytes] = as_bytes(tensor)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
