"""The time of each unit of a model, measured on a few real samples. Forecasts derive it from a device table.

Operation counts suffice to split a model of equal layers. They do not predict the time of a step, nor whether loading
the outputs of frozen layers is faster than computing them. So before the model is split, each process runs it a few
times without a graph, which needs hardly more memory than the weights. A backward counts as two forwards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from ..model.layer_stack import LayerStack
from ..model.micro_batch import Batch, batch_rows, slice_rows
from ..model.placeholders import evaluation_mode
from ..randomness import global_state_kept
from .costs import FORWARDS_OF_A_BACKWARD

REPETITIONS = 3
"""Number of repetitions of each measurement. The median counts; the very first run is discarded."""


@dataclass(frozen=True)
class Seconds:
    """A time that grows with the number of samples of a micro-batch: `fixed + per_row * rows`."""

    fixed: float = 0.0
    per_row: float = 0.0

    def of(self, rows: float) -> float:
        return self.fixed + self.per_row * rows

    @classmethod
    def through(cls, rows: tuple[int, int], seconds: tuple[float, float]) -> Seconds:
        """Fit a line through two measurements. Negative coefficients, which only noise can cause, become 0."""
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
        backward: additional time in training.
    """

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()

    @classmethod
    def of_forward(cls, seconds: Seconds, n: float = FORWARDS_OF_A_BACKWARD) -> PartTimes:
        """Return the times of a part from its forward; its backward takes as long as n forwards."""
        return cls(seconds, Seconds(n * seconds.fixed, n * seconds.per_row))


@dataclass(frozen=True)
class ModelTimes:
    """Times of a whole model on one device.

    Attributes:
        prologue: the part before the units (embeddings, masks). Every stage runs its forward; only the first stage
            runs its backward.
        units: the units in execution order.
        head: the part after the units, including the loss.
        update_seconds_per_byte: seconds per byte of trainable parameters for clipping and an AdamW step.
        reduce_seconds_per_byte: seconds per byte of an all-reduce over all processes. Both numbers are 0 if the times
            are measured rather than derived from a device table.
    """

    prologue: PartTimes
    units: tuple[PartTimes, ...]
    head: PartTimes
    update_seconds_per_byte: float = 0.0
    reduce_seconds_per_byte: float = 0.0


def measure_times(stack: LayerStack, batch: Batch) -> ModelTimes:
    """Time the parts of a complete model on all samples of `batch`, and on a quarter of them.

    The model's modes and the state of the random generators are restored.

    Args:
        stack: the model's units.
        batch: keyword arguments of the model, on its device.
    """
    many = batch_rows(batch)
    few = max(many // 4, 1)
    stack.runner.install()
    try:
        with global_state_kept(), evaluation_mode(stack.model), torch.no_grad():
            short, long = (_forward_seconds(stack, slice_rows(batch, 0, rows)) for rows in (few, many))
    finally:
        stack.runner.remove()
    lines = [Seconds.through((few, many), both) for both in zip(short, long, strict=True)]
    prologue, *units, head = map(PartTimes.of_forward, lines)
    return ModelTimes(prologue, tuple(units), head)


def slowest(everyone: Sequence[ModelTimes]) -> ModelTimes:
    """Return the times of the slowest process for a sample. All processes then use the same times."""

    def of_sample(times: ModelTimes) -> float:
        return sum(part.forward.of(1) for part in (times.prologue, *times.units, times.head))

    return max(everyone, key=of_sample)


def _forward_seconds(stack: LayerStack, batch: Batch) -> list[float]:
    """Seconds of a forward in eval mode: prologue, each unit, head."""
    device = next(stack.model.parameters()).device
    marks: list[float] = []

    def mark(*_: Any) -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        marks.append(time.perf_counter())

    passes = []
    for _ in range(REPETITIONS + 1):
        marks.clear()
        mark()
        with stack.runner.telling_entries(mark):
            stack.runner.trace(batch, mark)
        mark()
        gaps = [b - a for a, b in pairwise(marks)]  # prologue, unit, between, unit, ..., head
        passes.append([gaps[0] + sum(gaps[2:-1:2]), *gaps[1:-1:2], gaps[-1]])
    return [median(times) for times in zip(*passes[1:], strict=True)]
