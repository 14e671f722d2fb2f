"""The split of a batch along samples and tokens: by the user's setting, or by measured times of slices on the stages.

profile      each stage runs slices of a few sizes after contexts of a few sizes, alone
fit          a latency model of four terms for each stage; a bad fit is rejected
agree        every stage gets all stages' models, so all derive the same plan
plan         the dynamic program; once for each shape of batch
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import in_one_line, is_out_of_memory
from ..logs import log_once
from ..model.layer_stack import CarrySlot
from ..model.micro_batch import Batch, batch_rows, slice_rows
from ..pipeline.devices import synchronise
from ..pipeline.mesh import can_be_sent
from ..pipeline.stage import FIRST, CarriedTensor, StageModule, StageShapes
from ..randomness import global_state_kept
from .slice_planning import FEWEST_POINTS, RowSlices, SliceLatency, slices_asked_for, whole_rows
from .slice_timeline import SlicePlan, StageLatency, choose_slices
from .slices import SlicedSequence, Windows, first_tokens, running_slices, sequence_length

logger = logging.getLogger(__name__)

TokenSlices = str | int | Sequence[int]
"""`"auto"`, a number of equal slices, or the lengths of the slices."""

Point = tuple[int, int, int, float, float]
"""Samples, tokens of a slice, tokens before it; seconds of its forward and backward."""

PROFILE_SECONDS = 5.0
"""Time limit in seconds for a profile."""
ROUNDS = 5
"""Number of repetitions of each measurement; fewer if the time is up. The shortest time counts."""
LARGEST_ERROR = 0.15
"""Maximum root mean square relative error of an accepted fit."""
SHORTEST_SLICE = 16


class SlowSlicesError(RuntimeError):
    """There was not enough time to measure enough slices."""


class SliceChooser:
    """Chooses the split of each batch shape, on one stage.

    Args:
        token_slices: the user's setting.
        windows: attention windows of the model's layers.
        num_parts: returns the number of equal parts for a batch's number of samples; larger parts may not fit into
            memory.
        everyone: gathers an object of each stage of the pipeline; collective over the pipeline.
        on_plan: called with the plan of each new batch shape.
        chooses_parts: with "auto", let the dynamic program choose the parts as well.
    """

    def __init__(
        self,
        token_slices: TokenSlices,
        windows: Windows,
        num_parts: Callable[[int], int],
        everyone: Callable[[Any], list[Any]],
        on_plan: Callable[[SlicePlan], None] = lambda plan: None,
        chooses_parts: bool = False,
    ) -> None:
        self._asked = token_slices
        self._windows = windows
        self._num_parts = num_parts
        self._everyone = everyone
        self._on_plan = on_plan
        self._chooses_parts = chooses_parts
        self._plans: dict[tuple[int, int], SlicePlan] = {}
        self._latencies: list[StageLatency] | None = None
        self._profiled = (0, 0)  # largest number of samples, and of tokens

    def parts_of(self, stage: StageModule, whole: Callable[[int], StageShapes], batch: Batch) -> tuple[RowSlices, ...]:
        """Return the split of a batch. Collective over the pipeline for a new shape.

        Args:
            stage: this process's stage, under the current plan.
            whole: returns the shapes at the stage's boundaries for a number of whole samples of the batch.
            batch: the pipeline's batch.
        """
        rows, tokens = batch_rows(batch), sequence_length(batch)
        if (rows, tokens) not in self._plans:
            plan = self._plans[rows, tokens] = self._plan(stage, whole, batch)
            self._on_plan(plan)
        return self._plans[rows, tokens].parts

    def _plan(self, stage: StageModule, whole: Callable[[int], StageShapes], batch: Batch) -> SlicePlan:
        rows, tokens = batch_rows(batch), sequence_length(batch)
        num_parts = self._num_parts(rows)
        if not isinstance(self._asked, str):
            return SlicePlan((RowSlices(rows // num_parts, slices_asked_for(tokens, self._asked)),) * num_parts)
        uncut = SlicePlan(whole_rows(rows, tokens, num_parts))
        if len(points_to_measure(rows, tokens)) < FEWEST_POINTS:
            return uncut
        most_rows, most_tokens = self._profiled
        if self._latencies is None or rows > most_rows or tokens > 1.5 * most_tokens:  # fits extrapolate slightly
            self._latencies = self._profile(stage, whole, batch)
            self._profiled = (max(rows, most_rows), max(tokens, most_tokens))
        if not self._latencies:
            return uncut
        return choose_slices(self._latencies, rows, tokens, num_parts, chooses_parts=self._chooses_parts)

    def _profile(self, stage: StageModule, whole: Callable[[int], StageShapes], batch: Batch) -> list[StageLatency]:
        """Return all stages' latencies; an empty list if they are unreliable.

        Raises:
            Exception: an error of any stage, on all stages. Lack of memory or time is not an error.
        """
        whole(1)  # before the profile: stages exchange shapes in this call
        failure: Exception | None = None
        mine: tuple[StageLatency, float] | str | Exception
        try:
            mine = fit_stage(measure_slices(stage, whole, batch, self._windows, time.perf_counter() + PROFILE_SECONDS))
        except Exception as error:  # the other stages must raise it, too
            if isinstance(error, SlowSlicesError) or is_out_of_memory(error):
                mine = str(error)  # batches are then split along samples only
            else:
                failure, mine = error, error if can_be_sent(error) else ValueError(in_one_line(error))
        everyone = self._everyone(mine)
        for one in (failure, *everyone):  # the process's own error first: it has the traceback
            if isinstance(one, Exception):
                raise one
        fits = [one for one in everyone if not isinstance(one, str)]
        why = next((one for one in everyone if isinstance(one, str)), None)
        if why is None:
            worst = max(error for _, error in fits)
            if worst <= LARGEST_ERROR:
                return [latency for latency, _ in fits]
            why = (
                f"the root mean square of the fit's relative error is {worst:.2f}, but at most {LARGEST_ERROR} is"
                " allowed; another program may be running on the device"
            )
        log_once(
            logger,
            logging.WARNING,
            "token_slices='auto' has no effect: the time of token slices could not be measured (%s), so batches are"
            " split only by samples.",
            why,
        )
        return []


def fit_stage(points: Sequence[Point]) -> tuple[StageLatency, float]:
    """Fit a stage's latency.

    Returns:
        The latency, and the largest root mean square relative error of the fits of forward, backward and both.
    """
    both, error = SliceLatency.fit([(r, n, c, forward + backward) for r, n, c, forward, backward in points])
    forward, of_forward = SliceLatency.fit([(r, n, c, seconds) for r, n, c, seconds, _ in points], both.flat_tokens)
    if not any(point[-1] for point in points):  # all layers up to here are frozen
        return StageLatency(forward, SliceLatency(0.0, 0.0, 0.0, 0.0, both.flat_tokens)), error
    backward, of_backward = SliceLatency.fit([(r, n, c, seconds) for r, n, c, _, seconds in points], both.flat_tokens)
    return StageLatency(forward, backward), max(error, of_forward, of_backward)


def shapes_of_slice(stage: StageModule, whole: StageShapes, length: int, tokens: int) -> StageShapes:
    """Return the shapes at a stage's boundaries for a slice of the samples, from the shapes for whole samples.

    Raises:
        ValueError: if a tensor that is sent between stages has no dimension of tokens.
    """

    def cut(slot: CarrySlot, carried: CarriedTensor) -> CarriedTensor:
        if not slot.is_used:  # for example attention weights that no later layer reads
            return carried
        if len(carried.shape) < 2 or carried.shape[1] != length:
            raise ValueError(
                f"token_slices: the second dimension of a tensor of shape {carried.shape} that is sent between the"
                f" stages is not the {length} tokens of the batch. Set token_slices='off'."
            )
        return replace(carried, shape=(carried.shape[0], tokens, *carried.shape[2:]))

    return StageShapes(
        tuple(map(cut, stage.slots_in, whole.incoming)), tuple(map(cut, stage.slots_out, whole.outgoing))
    )


def points_to_measure(rows: int, tokens: int) -> list[tuple[int, int, int]]:
    """Return sizes (samples, tokens of a slice, tokens before it) that separate the terms of the latency.

    There are at most 16; the cheapest one is the first.
    """
    lengths = [tokens // share for share in (1, 2, 4, 8, 16, 32) if tokens // share >= SHORTEST_SLICE] or [tokens]
    points = [(1, length, 0) for length in lengths]
    for length, before in ((2, 2), (4, 2), (4, 4), (8, 4), (8, 8), (16, 8), (16, 16)):  # divisors of the tokens
        length, context = tokens // length, tokens - tokens // before
        if length >= 1 and length + context <= tokens:
            points.append((1, length, context))
    if rows > 1:
        points += [(rows, tokens // 4 or 1, 0), (rows, tokens // 4 or 1, tokens // 2), (rows, tokens // 16 or 1, 0)]
    return sorted(set(points), key=lambda size: (size[0] * size[1], size[2]))


def measure_slices(
    stage: StageModule,
    whole: Callable[[int], StageShapes],
    batch: Batch,
    windows: Windows,
    deadline: float,
) -> list[Point]:
    """Time forward and backward of slices of the batch's first samples on this stage alone.

    Gradients, random generators and the batch are restored afterwards.

    Args:
        stage: this process's stage.
        whole: returns the shapes at the stage's boundaries for a number of whole samples.
        batch: the pipeline's batch.
        windows: attention windows of the model's layers.
        deadline: `time.perf_counter()` at which measuring must end. To meet it, there are fewer rounds, and sizes are
            omitted, the most expensive first.

    Returns:
        (rows, length, context, forward seconds, backward seconds) for each size; 0 seconds if there is no backward.

    Raises:
        SlowSlicesError: if there was time for less than half of the sizes.
    """
    sizes = points_to_measure(batch_rows(batch), sequence_length(batch))
    times: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    before = [parameter.grad for parameter in stage.parameters()]
    try:
        with global_state_kept(), running_slices(stage.stack.model, batch):
            for parameter in stage.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            _run_slice(stage, whole, batch, windows, sizes[0])  # discarded: the very first run is slow
            for _ in range(ROUNDS):
                expected, tokens = 0.0, 1
                for size in sizes:
                    expected *= size[0] * size[1] / tokens  # an upper bound, unless attention dominates
                    if size in times:
                        expected = sum(times[size][-1])
                    if time.perf_counter() + expected > deadline:
                        break
                    times.setdefault(size, []).append(_run_slice(stage, whole, batch, windows, size))
                    expected, tokens = sum(times[size][-1]), size[0] * size[1]
    finally:
        for parameter, gradient in zip(stage.parameters(), before, strict=True):
            parameter.grad = gradient
    if len(times) < max(FEWEST_POINTS, len(sizes) / 2):
        raise SlowSlicesError(
            f"only {len(times)} of {len(sizes)} slice sizes could be measured in {PROFILE_SECONDS:g} seconds"
        )
    return [
        (*size, min(forward for forward, _ in seconds), min(backward for _, backward in seconds))
        for size, seconds in times.items()
    ]


def _run_slice(
    stage: StageModule, whole: Callable[[int], StageShapes], batch: Batch, windows: Windows, size: tuple[int, int, int]
) -> tuple[float, float]:
    rows, length, context = size
    part = first_tokens(slice_rows(batch, 0, rows), context + length)
    lengths = (context, length) if context else (length,)
    shapes = shapes_of_slice(stage, whole(rows), sequence_length(batch), length)
    inputs = [
        torch.randn(c.shape, dtype=c.dtype, device=stage.device).requires_grad_(c.requires_grad)
        for slot, c in zip(stage.slots_in, shapes.incoming, strict=True)
        if slot.is_used
    ]
    # the context's keys and values are zeros: their values do not affect the time
    sliced = SlicedSequence(stage.stack.model, part, lengths, windows).slice(len(lengths) - 1)
    with stage.holding((sliced,), shapes):
        synchronise(stage.device)
        began = time.perf_counter()
        output = stage(*inputs, index=FIRST)
        synchronise(stage.device)
        middle = time.perf_counter()
        outputs = [out for out in ((output,) if isinstance(output, torch.Tensor) else output) if out.requires_grad]
        if not outputs:
            return middle - began, 0.0
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
        synchronise(stage.device)
        return middle - began, time.perf_counter() - middle
