"""Copies between the host's memory and the device, beside the computation.

    a thread    reads into pinned memory     copies to the device, on the side stream
    main        step n is queued on the compute stream ........ step n + 1: waits for the copy, on the device

The host never waits for such a copy. On the CPU no copy is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....pipeline.devices import has_own_memory


@dataclass(frozen=True)
class Copied:
    """A tensor that is being copied.

    Attributes:
        tensor: the copy, which may not be complete yet.
        done: the event after which it is; None if it is complete.
    """

    tensor: torch.Tensor
    done: torch.Event | None = None

    def on_compute_stream(self) -> torch.Tensor:
        """The copy on the device, for operations that are queued from now on. Does not wait on the host."""
        if self.done is not None:
            stream = torch.accelerator.current_stream(self.tensor.device)
            stream.wait_event(self.done)
            self.tensor.record_stream(stream)  # the memory is the side stream's until then
        return self.tensor

    def on_host(self) -> torch.Tensor:
        """The copy in the host's memory. Waits until it is complete."""
        if self.done is not None:
            self.done.synchronize()
        return self.tensor


class SideStream:
    """Copies to and from one device, on a stream of their own.

    Args:
        device: the device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if has_own_memory(device) else None

    def empty_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory that can be copied without waiting: pinned, if the device has memory of its own."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._stream is not None)

    def to_device(self, tensor: torch.Tensor, dtype: torch.dtype) -> Copied:
        """Copy a tensor of `empty_on_host` to the device; the device converts it to `dtype`."""
        if self._stream is None:
            return Copied(tensor.to(self._device, dtype))
        with self._stream:
            # in two steps: to another data type the host would convert it, into memory that is not pinned
            copy = tensor.to(self._device, non_blocking=True).to(dtype)
            return Copied(copy, self._stream.record_event())

    def to_host(self, tensor: torch.Tensor, dtype: torch.dtype) -> Copied:
        """Copy a tensor of the device to the host, as it is at this point of the compute stream."""
        copy = self.empty_on_host(tensor.shape, dtype)
        if self._stream is None:
            return Copied(copy.copy_(tensor.detach()))
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            copy.copy_(tensor.detach().to(dtype), non_blocking=True)
            tensor.record_stream(self._stream)  # its memory must not be used again before
            return Copied(copy, self._stream.record_event())
