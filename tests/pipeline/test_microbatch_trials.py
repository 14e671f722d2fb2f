from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from hf_pipetransformer.pipeline.microbatch_trials import TRIES, MicrobatchTrials


def batch(rows: int, tokens: int = 8) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(rows, tokens, dtype=torch.long), "labels": torch.zeros(rows)}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def alone(seconds: torch.Tensor) -> torch.Tensor:
    return seconds


def run(trials: MicrobatchTrials, clock: Clock, seconds: dict[int, float], steps: int, tokens: int = 8) -> list[int]:
    chosen = []
    for _ in range(steps):
        with trials.number_for(batch(8, tokens)) as m:
            clock.now += seconds[m] * tokens
            chosen.append(m)
    return chosen


def test_the_fastest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = MicrobatchTrials(lambda rows: (8, 4, 2), alone)
    chosen = run(trials, Clock(monkeypatch), {8: 3.0, 4: 1.0, 2: 2.0}, steps=9)
    assert sorted(chosen[: 3 * TRIES]) == sorted([8, 4, 2] * TRIES)
    assert chosen[3 * TRIES :] == [4] * (9 - 3 * TRIES)


def test_longer_rows_of_one_kind_do_not_count_as_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 to 8 tokens are one kind; 9 are another."""
    trials = MicrobatchTrials(lambda rows: (4, 2), alone)
    clock = Clock(monkeypatch)
    for tokens in (5, 8, 8, 5):  # 4 gets short rows first, 2 long ones
        run(trials, clock, {4: 1.1, 2: 1.0}, steps=1, tokens=tokens)
    assert trials.settled == {(8, 8): 2}
    run(trials, clock, {4: 1.0, 2: 1.0}, steps=1, tokens=9)
    assert trials.settled == {(8, 8): 2}


def test_the_slowest_stage_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[float]] = []

    def slowest(seconds: torch.Tensor) -> torch.Tensor:
        asked.append(seconds.tolist())
        return torch.tensor([5.0, 1.0])  # elsewhere the first candidate was slow

    trials = MicrobatchTrials(lambda rows: (4, 2), slowest)
    chosen = run(trials, Clock(monkeypatch), {4: 1.0, 2: 2.0}, steps=2 * TRIES + 1)
    assert asked == [[1.0, 2.0]]
    assert chosen[-1] == 2


def test_what_an_earlier_job_has_settled_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = MicrobatchTrials(lambda rows: (8, 4, 2), alone)
    trials.settle({(8, 8): 2})
    assert run(trials, Clock(monkeypatch), {2: 1.0}, steps=3) == [2, 2, 2]
    assert trials.settled == {(8, 8): 2}


def test_a_single_candidate_is_not_tried() -> None:
    def never(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing to agree on")

    def promising(rows: int) -> Sequence[int]:
        return (rows,)

    trials = MicrobatchTrials(promising, never)
    for _ in range(2):
        with trials.number_for(batch(6)) as m:
            assert m == 6
    assert trials.settled == {(6, 8): 6}
