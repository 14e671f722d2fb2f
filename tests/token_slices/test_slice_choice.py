"""How batches are cut: as asked for, or by a profile of the stages that is believed only where it fits."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sliced_models import LAYERS, TOKENS, batch_for, build, loss_of

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.pipeline.shape_book import ShapeBook
from hf_pipetransformer.pipeline.stage import CarriedTensor, StageModule, StageShapes
from hf_pipetransformer.token_slices import slice_choice
from hf_pipetransformer.token_slices.kv_slices import attention_windows
from hf_pipetransformer.token_slices.slice_choice import (
    SliceChooser,
    fit_stage,
    points_to_measure,
)

BATCH = batch_for("right padding", rows=4)


@pytest.fixture
def stage() -> StageModule:
    """The last two layers of a model."""
    model = build("llama")
    stack = LayerStack.discover(model, {key: value[:1] for key, value in BATCH.items()})
    stack.runner.install()
    stage = StageModule(stack, 1, LAYERS, torch.device("cpu"))
    stage.loss_of = lambda m, part: loss_of(m, part, BATCH)
    return stage


def whole(stage: StageModule, rows: int) -> StageShapes:
    receive = lambda: [(CarriedTensor((count, TOKENS, 32), torch.float32, True),) for count in (1, 2)]  # noqa: E731
    book = ShapeBook(stage, receive, lambda _: None)
    return book.shapes(BATCH, rows)


def chooser(num_parts: Any = lambda rows: 2) -> SliceChooser:
    windows = attention_windows(build("llama"))
    return SliceChooser("auto", windows, num_parts, lambda mine: [mine, mine], chooses_parts=True)


SIZES = points_to_measure(4, TOKENS)


class FakeClock:
    """A clock that only slices move: a fixed time for each token; with noise, every other size takes longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds_of_round: float, noise: float = 0.0) -> None:
        self.now = 100.0
        self.sizes: list[tuple[int, int, int]] = []
        self._seconds = {(r, n, c): r * n * (1 + noise * (i % 2)) for i, (r, n, c) in enumerate(SIZES)}
        self._scale = seconds_of_round / sum(self._seconds.values())
        monkeypatch.setattr(slice_choice, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(slice_choice, "_run_slice", self._run)

    def _run(self, _stage: Any, _whole: Any, _batch: Any, _windows: Any, size: tuple[int, int, int]) -> Any:
        self.sizes.append(size)
        seconds = self._seconds[size] * self._scale
        self.now += seconds
        return seconds / 3, seconds * 2 / 3


@pytest.mark.parametrize(
    ("rounds_in_time", "noise", "is_believed"),
    [(100, 0.0, True), (0.9, 0.0, True), (0.05, 0.0, False), (2.2, 9.0, False)],
)
def test_a_profile_keeps_the_time(
    stage: StageModule,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rounds_in_time: float,
    noise: float,
    is_believed: bool,
) -> None:
    """The profile makes as many rounds over all sizes as fit; if none fits, the costliest sizes are left out."""
    clock = FakeClock(monkeypatch, slice_choice.PROFILE_SECONDS / rounds_in_time, noise)
    with caplog.at_level(logging.WARNING):
        chooser().parts_of(stage, partial(whole, stage), BATCH)
    assert clock.now - 100.0 <= slice_choice.PROFILE_SECONDS * 1.01
    assert ("split only by samples" not in caplog.text) == is_believed
    left_out = set(SIZES) - set(clock.sizes)
    assert bool(left_out) == (rounds_in_time < 1)
    assert min((r * n for r, n, _ in left_out), default=999) >= max(r * n for r, n, _ in clock.sizes)
    assert ("slice sizes could be measured in" in caplog.text) == (rounds_in_time == 0.05)


def test_no_part_has_more_rows_than_are_known_to_fit(stage: StageModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part of all rows would take the least time."""
    fixed = lambda *_: [(r, n, c, 1.0 + 1e-9 * r * n, 1.0) for r, n, c in points_to_measure(4, TOKENS)]  # noqa: E731
    monkeypatch.setattr(slice_choice, "measure_slices", fixed)
    for parts in (1, 2, 4):
        found = chooser(lambda rows, m=parts: m).parts_of(stage, partial(whole, stage), BATCH)
        assert max(part.rows for part in found) == (4 if parts < 2 else 4 // parts)


def test_forward_and_backward_must_fit_each_by_itself() -> None:
    """What both take together may be smooth where neither is."""
    points = [
        (r, n, c, 1.0 + 0.9 * (-1) ** i, 2.0 - 0.9 * (-1) ** i)
        for i, (r, n, c) in enumerate(points_to_measure(4, 512))
    ]
    _, error = fit_stage(points)
    assert error > slice_choice.LARGEST_ERROR
