"""The number of micro-batches that is fastest on all stages stays, and is not tried again by a later job."""

from __future__ import annotations

import time

import pytest
import torch

from hf_pipetransformer.pipeline.microbatch_trials import TRIES, MicrobatchTrials


def batch(rows: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(rows, 8, dtype=torch.long), "labels": torch.zeros(rows)}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def run(trials: MicrobatchTrials, clock: Clock, seconds: dict[int, float], steps: int) -> list[int]:
    chosen = []
    for _ in range(steps):
        with trials.number_for(batch(8)) as m:
            clock.now += seconds[m]
            chosen.append(m)
    return chosen


def test_the_fastest_on_all_stages_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[float]] = []

    def slowest(seconds: torch.Tensor) -> torch.Tensor:
        asked.append(seconds.tolist())
        return torch.tensor([5.0, 1.0])  # elsewhere the first candidate was slow

    seconds = {4: 1.0, 2: 2.0}
    for agreed, fastest in ((lambda seconds: seconds, 4), (slowest, 2)):
        chosen = run(MicrobatchTrials(lambda rows: (4, 2), agreed), Clock(monkeypatch), seconds, steps=2 * TRIES + 1)
        assert sorted(chosen[:-1]) == sorted([4, 2] * TRIES) and chosen[-1] == fastest
    assert len(asked) == 1


def test_what_an_earlier_job_has_settled_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = MicrobatchTrials(lambda rows: (8, 4, 2), lambda seconds: seconds)
    trials.settle({(8, 8): 2})
    assert run(trials, Clock(monkeypatch), {2: 1.0}, steps=3) == [2, 2, 2]
    assert trials.settled == {(8, 8): 2}
