"""How a batch is cut along its rows and tokens: as asked for, or by what slices take on the stages themselves.

profile      each stage runs slices of a few sizes behind contexts of a few sizes, alone
fit          a latency model of four terms for each stage; a bad fit is refused and the profile repeated
agree        every stage gets everyone's model, so all derive one plan
plan         the dynamic program; once for each shape of batch
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from ..model.micro_batch import Batch, batch_rows, slice_rows
from ..model.token_slices import SlicedSequence, Windows, first_tokens, running_slices, sequence_length
from ..planning.token_slicing import RowSlices, SliceLatency, given_slices, plan_slices, uniform_slices
from .stage import CarriedTensor, StageModule, StageShapes

logger = logging.getLogger(__name__)

TokenSlices = str | int | Sequence[int]
"""`"auto"`, a number of equal slices, or their lengths."""

OnPlan = Callable[[tuple[RowSlices, ...], float | None], None]

PROFILE_SECONDS = 5.0
ROUNDS = 5
"""Of each measurement; the median counts. Fewer where the time is up."""
LARGEST_ERROR = 0.15
"""Root mean square of the relative error up to which a fit is believed."""
PROFILES = 3
SHORTEST_SLICE = 16


class SliceChooser:
    """The way in which each shape of batch is cut, on one stage.

    Args:
        token_slices: as the user asked.
        windows: of the model's layers.
        num_parts: rows of a batch -> number of equal parts; None where the dynamic program chooses that as well.
        everyone: an object of each stage of the pipeline; collective over the pipeline.
        on_plan: told of each new shape of batch, how it is cut and how many seconds that is predicted to take.
    """

    def __init__(
        self,
        token_slices: TokenSlices,
        windows: Windows,
        num_parts: Callable[[int], int] | None,
        everyone: Callable[[Any], list[Any]],
        on_plan: OnPlan = lambda parts, seconds: None,
    ) -> None:
        self._asked = token_slices
        self._windows = windows
        self._num_parts = num_parts
        self._everyone = everyone
        self._on_plan = on_plan
        self._plans: dict[tuple[int, int], tuple[RowSlices, ...]] = {}
        self._latencies: list[SliceLatency] | None = None
        self._profiled_tokens = 0

    def parts_of(self, stage: StageModule, whole: Callable[[int], StageShapes], batch: Batch) -> tuple[RowSlices, ...]:
        """How to cut a batch. Collective over the pipeline, for a new shape.

        Args:
            stage: this process's stage, under the plan in force.
            whole: rows -> shapes at the stage's boundaries for so many whole rows of the batch.
            batch: the pipeline's.
        """
        rows, tokens = batch_rows(batch), sequence_length(batch)
        if (rows, tokens) not in self._plans:
            if self._asked == "auto":
                parts, seconds = self._best(stage, whole, batch)
            else:
                parts, seconds = self._as_asked(rows, tokens), None
            self._plans[rows, tokens] = parts
            self._on_plan(parts, seconds)
        return self._plans[rows, tokens]

    def _as_asked(self, rows: int, tokens: int) -> tuple[RowSlices, ...]:
        if isinstance(self._asked, int):
            lengths = uniform_slices(tokens, self._asked)
        else:
            assert not isinstance(self._asked, str)
            lengths = given_slices(tokens, self._asked)
        assert self._num_parts is not None
        parts = self._num_parts(rows)
        return (RowSlices(rows // parts, lengths),) * parts

    def _best(
        self, stage: StageModule, whole: Callable[[int], StageShapes], batch: Batch
    ) -> tuple[tuple[RowSlices, ...], float | None]:
        rows, tokens = batch_rows(batch), sequence_length(batch)
        parts = self._num_parts(rows) if self._num_parts is not None else None
        if self._latencies is None or tokens > 1.5 * self._profiled_tokens:  # a fit holds a little beyond its points
            self._latencies = self._profile(stage, whole, batch)
            self._profiled_tokens = tokens
        if not self._latencies:
            count = parts or rows
            return (RowSlices(rows // count, (tokens,)),) * count, None
        plan = plan_slices(self._latencies, rows, tokens, num_parts=parts)
        return plan.parts, plan.seconds

    def _profile(self, stage: StageModule, whole: Callable[[int], StageShapes], batch: Batch) -> list[SliceLatency]:
        """Everyone's latencies; nothing where they cannot be believed."""
        for _ in range(PROFILES):
            points = measure_slices(stage, whole, batch, self._windows)
            fits = self._everyone(SliceLatency.fit(points))
            worst = max(error for _, error in fits)
            if worst <= LARGEST_ERROR:
                return [latency for latency, _ in fits]
        logger.warning(
            "token_slices='auto': what slices take cannot be predicted here (root mean square of the relative error"
            " %.2f, allowed %.2f): batches are cut by rows alone. Is something else running on the device?",
            worst,
            LARGEST_ERROR,
        )
        return []


def shapes_of_slice(whole: StageShapes, length: int, tokens: int) -> StageShapes:
    """Shapes at the boundaries for some tokens of a row, from those for whole rows.

    Raises:
        ValueError: a tensor has no dimension of tokens.
    """

    def cut(carried: CarriedTensor) -> CarriedTensor:
        if len(carried.shape) < 2 or carried.shape[1] != length:
            raise ValueError(
                f"token_slices: a tensor of shape {carried.shape} travels between the stages, and its second"
                f" dimension is not the {length} tokens of the batch: set token_slices='off'."
            )
        return replace(carried, shape=(carried.shape[0], tokens, *carried.shape[2:]))

    return StageShapes(tuple(map(cut, whole.incoming)), tuple(map(cut, whole.outgoing)))


def points_to_measure(rows: int, tokens: int) -> list[tuple[int, int, int]]:
    """(rows, tokens of a slice, tokens before it) that tell the terms of the latency apart; at most 16."""
    lengths = [tokens // share for share in (1, 2, 4, 8, 16, 32) if tokens // share >= SHORTEST_SLICE] or [tokens]
    points = [(1, length, 0) for length in lengths]
    for length, before in ((2, 2), (4, 2), (4, 4), (8, 4), (8, 8), (16, 8), (16, 16)):  # shares of the tokens
        length, context = tokens // length, tokens - tokens // before
        if length >= 1 and length + context <= tokens:
            points.append((1, length, context))
    if rows > 1:
        points += [(rows, tokens // 4 or 1, 0), (rows, tokens // 4 or 1, tokens // 2), (rows, tokens // 16 or 1, 0)]
    return sorted(set(points))


def measure_slices(
    stage: StageModule, whole: Callable[[int], StageShapes], batch: Batch, windows: Windows
) -> list[tuple[int, int, int, float]]:
    """Time forward and backward of slices of the batch's first rows on this stage alone.

    Gradients, random numbers and the batch are as before when it returns.

    Returns:
        (rows, length, context, seconds) for each size.
    """
    sizes = points_to_measure(batch_rows(batch), sequence_length(batch))
    times: dict[tuple[int, int, int], list[float]] = {size: [] for size in sizes}
    before = [parameter.grad for parameter in stage.parameters()]
    device = stage.device
    began = time.perf_counter()
    try:
        with (
            torch.random.fork_rng(devices=[device] if device.type != "cpu" else [], device_type=device.type),
            running_slices(stage.stack.model, batch),
        ):
            for parameter in stage.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            _run_slice(stage, whole, batch, windows, sizes[0])  # the first run of all is slow
            for round in range(ROUNDS):
                for size in sizes:
                    if round and time.perf_counter() - began > PROFILE_SECONDS:
                        break
                    times[size].append(_run_slice(stage, whole, batch, windows, size))
    finally:
        for parameter, gradient in zip(stage.parameters(), before, strict=True):
            parameter.grad = gradient
    return [(*size, median(seconds)) for size, seconds in times.items()]


def _run_slice(
    stage: StageModule, whole: Callable[[int], StageShapes], batch: Batch, windows: Windows, size: tuple[int, int, int]
) -> float:
    rows, length, context = size
    part = first_tokens(slice_rows(batch, 0, rows), context + length)
    lengths = (context, length) if context else (length,)
    shapes = shapes_of_slice(whole(rows), sequence_length(batch), length)
    inputs = [
        torch.randn(c.shape, dtype=c.dtype, device=stage.device).requires_grad_(c.requires_grad)
        for slot, c in zip(stage.slots_in, shapes.incoming, strict=True)
        if slot.is_used
    ]
    # the context's keys and values are zeros: what they are does not matter for the time
    sliced = SlicedSequence(stage.stack.model, part, lengths, windows).slice(len(lengths) - 1)
    stage.shapes, stage.micro_batches = shapes, (sliced,)
    try:
        _synchronise(stage.device)
        began = time.perf_counter()
        output = stage(*inputs, index=_FIRST)
        outputs = [out for out in ((output,) if isinstance(output, torch.Tensor) else output) if out.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
        _synchronise(stage.device)
        return time.perf_counter() - began
    finally:
        stage.micro_batches = ()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_FIRST = torch.zeros(1, dtype=torch.long)
