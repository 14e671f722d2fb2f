"""The time that each unit of a model takes on this machine, measured on a few real samples.

Operation counts suffice to split a model of equal layers, but they do not show how long a step takes, how much a small
micro-batch loses to the fixed cost of its calls, or what embeddings and the optimizer cost. So before the model is
split, each process runs it a few times and builds the graph of one unit at a time: this needs no more memory than the
weights, one unit's activations and one unit's gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn

from ..model.batch_statistics import running_statistics_kept
from ..model.layer_range import Carry, Unit
from ..model.layer_stack import LayerStack, loss_outputs, output_tensors
from ..model.micro_batch import Batch, batch_rows, slice_rows
from ..model.nested import tensors_of
from ..model.placeholders import evaluation_mode
from ..randomness import global_state_kept

REPETITIONS = 3
"""Number of repetitions of each measurement, of which the median is used. The very first run is discarded."""
UNITS_OF_A_KIND = 3
"""Number of units of one kind that are run with a graph; the others of that kind are assumed to take as long."""
UPDATE_SAMPLE_ELEMENTS = 2**22
"""Number of elements for timing the optimizer: too many for the caches; a smaller model fits into them itself."""


@dataclass(frozen=True)
class Seconds:
    """A time that grows with the number of samples of a micro-batch: `fixed + per_row * rows`."""

    fixed: float = 0.0
    per_row: float = 0.0

    def of(self, rows: float) -> float:
        return self.fixed + self.per_row * rows

    @classmethod
    def through(cls, rows: tuple[int, int], seconds: tuple[float, float]) -> Seconds:
        """Fit the line through two measurements, without negative coefficients, which only noise can cause."""
        (few, many), (short, long) = rows, seconds
        if few == many:
            return cls(0.0, long / many)
        per_row = min(max((long - short) / (many - few), 0.0), long / many)
        return cls(max(long - per_row * many, 0.0), per_row)


@dataclass(frozen=True)
class PartTimes:
    """Times of one part of a model for one micro-batch.

    Attributes:
        forward: time without a graph, which is the cost of a frozen part.
        backward: time that training adds to that.
    """

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()


@dataclass(frozen=True)
class ModelTimes:
    """Times of a whole model on one device.

    Attributes:
        prologue: the part before the units (embeddings, masks). Every stage repeats its forward; the first stage also
            runs its backward.
        units: the units in execution order.
        head: the part after the units, including the loss.
        update_seconds_per_byte: seconds per byte of trainable parameters for clipping and an AdamW step.
        reduce_seconds_per_byte: seconds per byte of an all-reduce over all processes; 0 for one process.
    """

    prologue: PartTimes
    units: tuple[PartTimes, ...]
    head: PartTimes
    update_seconds_per_byte: float = 0.0
    reduce_seconds_per_byte: float = 0.0


def measure_times(stack: LayerStack, batch: Batch, reduce_seconds_per_byte: float = 0.0) -> ModelTimes:
    """Time the parts of a complete model on all samples of `batch`, and on a quarter of them.

    The model's weights, gradients and modes and the state of the random generators are restored.

    Args:
        stack: the model's units.
        batch: keyword arguments of the model, on its device.
        reduce_seconds_per_byte: seconds per byte of an all-reduce, measured by the caller.
    """
    many = batch_rows(batch)
    few = max(many // 4, 1)
    device = next(stack.model.parameters()).device
    clock = _Clock(device)
    before = {name: stack.table[name].grad for name in stack.table.names}
    stack.runner.install()
    try:
        with global_state_kept():
            measured = [_Measurement(stack, slice_rows(batch, 0, rows), clock) for rows in (few, many)]
    finally:
        stack.runner.remove()
        for name, gradient in before.items():
            stack.table[name].grad = gradient

    num_elements = sum(parameter.numel() for parameter in stack.model.parameters())

    def line(get: Callable[[_Measurement], float]) -> Seconds:
        return Seconds.through((few, many), (get(measured[0]), get(measured[1])))

    def part(get: Callable[[_Measurement], tuple[float, float]]) -> PartTimes:
        return PartTimes(line(lambda m: get(m)[0]), line(lambda m: get(m)[1]))

    return ModelTimes(
        part(lambda m: m.prologue),
        tuple(part(lambda m, k=k: m.units[k]) for k in range(stack.num_units)),  # type: ignore[misc]
        part(lambda m: m.head),
        _update_seconds_per_byte(min(num_elements, UPDATE_SAMPLE_ELEMENTS), clock),
        reduce_seconds_per_byte,
    )


def slowest(everyone: Sequence[ModelTimes]) -> ModelTimes:
    """The times of the process that takes longest for a sample, so that all processes use the same times."""

    def of_sample(times: ModelTimes) -> float:
        parts = (times.prologue, *times.units, times.head)
        return sum(part.forward.of(1) + part.backward.of(1) for part in parts)

    return max(everyone, key=of_sample)


class _Measurement:
    """Forward and backward seconds of each part for one number of samples."""

    prologue: tuple[float, float]
    units: list[tuple[float, float]]
    head: tuple[float, float]

    def __init__(self, stack: LayerStack, batch: Batch, clock: _Clock) -> None:
        self._stack, self._batch, self._clock = stack, batch, clock
        last = stack.num_units
        carries: list[Carry] = [{}]

        def note(unit: Unit, output: Any) -> None:
            tensors = tuple(t.detach() for t in tensors_of(output))
            carries.append({**carries[-1], unit.stack: tensors})

        with evaluation_mode(stack.model), torch.no_grad():
            stack.runner.trace(batch, note)
            passes = [self._forward_times() for _ in range(REPETITIONS)]
        forward = [median(times) for times in zip(*passes, strict=True)]
        prologue, of_units, head = forward[0], forward[1:-1], forward[-1]
        alike: dict[Any, list[int]] = {}
        for k, unit in enumerate(stack.units):
            kind = (type(unit.module), tuple(parameter.shape for parameter in unit.module.parameters()))
            alike.setdefault(kind, []).append(k)
        with _training_mode(stack.model), torch.enable_grad():
            # includes the forward of the part before the units, without its backward
            self.head = (head, max(self._training_time(last, carries[last]) - prologue - head, 0.0))
            self.units = [(0.0, 0.0)] * last
            for members in alike.values():
                # not the first unit, whose graph may include the part before it; the last unit includes the head
                chosen = [k for k in members if 0 < k < last - 1] or members
                trained = [self._training_time(k, carries[k]) for k in chosen[:UNITS_OF_A_KIND]]
                once = median(of_units[k] for k in members)
                rest = max(median(trained) - once - (sum(self.head) if chosen == [last - 1] else 0.0), 0.0)
                for k in members:
                    self.units[k] = (once, rest)
            with_embeddings = self._training_time(0, {}) - sum(self.units[0]) - (sum(self.head) if last == 1 else 0.0)
            self.prologue = (prologue, max(with_embeddings - prologue, 0.0))

    def _forward_times(self) -> list[float]:
        """Seconds of a forward: prologue, each unit, head."""
        marks = [self._clock.mark()]
        mark = partial(_append, marks, self._clock)
        with self._stack.runner.telling_entries(mark):
            self._stack.runner.trace(self._batch, mark)
        marks.append(self._clock.mark())
        gaps = self._clock.gaps(marks)  # prologue, unit, between, unit, ..., head
        return [gaps[0] + sum(gaps[2:-1:2]), *gaps[1:-1:2], gaps[-1]]

    def _training_time(self, k: int, carry: Carry) -> float:
        """Seconds of the forward with a graph and the backward of unit k alone, from the entry of the unit.

        The first unit is timed together with the part before it, the last unit together with the head; k = L times the
        head, together with the forward of the part before the units.
        """
        stack, clock = self._stack, self._clock
        times = []
        for _ in range(REPETITIONS):
            carry = {s: tuple(t.detach().requires_grad_(t.is_floating_point()) for t in ts) for s, ts in carry.items()}
            marks = [clock.mark()]
            with stack.runner.telling_entries(partial(_append, marks, clock)):
                if k < stack.num_units - 1:
                    outputs = list(stack.runner.run(k, k + 1, carry, self._batch)[stack.units[k].stack])
                else:
                    with stack.runner.to_the_end(k, carry):
                        outputs = loss_outputs(output_tensors(stack.model(**stack.runner.arguments(self._batch))))
            # the second mark is the unit's entry
            begin = marks[1] if 0 < k < stack.num_units else marks[0]
            scalars = [output.float().sum() for output in outputs if output.requires_grad]
            if scalars:
                torch.stack(scalars).sum().backward()
            times.append(clock.gaps([begin, clock.mark()])[0])
            for parameter in stack.model.parameters():
                parameter.grad = None
        return median(times)


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in training mode, but batch normalisation layers keep their running statistics."""
    with evaluation_mode(model):
        model.train()
        with running_statistics_kept(model):
            yield


def _append(marks: list[Any], clock: _Clock, *_: Any) -> None:
    marks.append(clock.mark())


class _Clock:
    """Marks points in time on a device, which may still be working when a call returns.

    On an accelerator without timed events each mark waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._has_events = device.type != "cpu" and _times_events(device)

    def mark(self) -> Any:
        if self._has_events:
            event = torch.Event(self.device, enable_timing=True)
            event.record()
            return event
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def gaps(self, marks: Sequence[Any]) -> list[float]:
        """Seconds between the marks."""
        if not self._has_events:
            return [b - a for a, b in pairwise(marks)]
        torch.accelerator.synchronize(self.device)
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def _times_events(device: torch.device) -> bool:
    """Whether an accelerator can say how much time lies between two of its events."""
    try:
        events = [torch.Event(device, enable_timing=True) for _ in range(2)]
        for event in events:
            event.record()
        torch.accelerator.synchronize(device)
        events[0].elapsed_time(events[1])
    except RuntimeError:
        return False
    return True


def _update_seconds_per_byte(elements: int, clock: _Clock) -> float:
    """Seconds per byte of clipping and a step of the Trainer's default, fused AdamW (a fifth of plain AdamW)."""
    device = clock.device
    parameter = nn.Parameter(torch.zeros(elements, device=device))
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer = torch.optim.AdamW([parameter], fused=True)
    except RuntimeError:  # there is none for this device
        optimizer = torch.optim.AdamW([parameter])
    times = []
    for _ in range(REPETITIONS + 1):
        marks = [clock.mark()]
        nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()
        marks.append(clock.mark())
        times.append(clock.gaps(marks)[0])
    return median(times[1:]) / parameter.nbytes
