from __future__ import annotations

import math
import mmap
import os
import time
from pathlib import Path

import pytest

from hf_pipetransformer.resilience.watchdog.progress import (
    DEFAULT_TIMEOUT,
    LONGER_THAN_EVER,
    PROGRESS,
    SIZE,
    UNKNOWN_PACE,
    Progress,
    Record,
    doing_when,
    phase,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_a_file_holds_what_was_written_last(tmp_path: Path, clock: Clock) -> None:
    progress = Progress()
    progress.enter("start", 3)
    progress.share(tmp_path / "record")
    clock.now += 2
    progress.enter("move")
    progress.note_watch(101.0, 101.5, "forward (script.py:12)")
    with open(tmp_path / "record", "rb") as file:
        record = Record.read(mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ))
    assert (record.pid, record.step, record.phase, record.since) == (os.getpid(), 3, "move", 102.0)
    assert (record.beat, record.own_since, record.busy_at) == (102.0, 101.0, 101.5)
    assert record.place == "forward (script.py:12)"
    assert record.doing == "in phase 'move' at step 3"
    assert progress.read() == record


def test_a_tick_is_something_finished(clock: Clock) -> None:
    progress = Progress()
    progress.enter("step", 1)
    clock.now += 1
    progress.tick()
    assert (progress.read().since, progress.read().phase) == (101.0, "step")


def test_patience_goes_by_the_longest_pause_in_the_same_phase(clock: Clock) -> None:
    progress = Progress()
    progress.timeout, progress.limit = 30.0, 1800.0

    def patience(name: str) -> float:
        progress.enter(name)
        return progress.read().patience

    assert patience("start") == patience("save") == 1800
    assert patience("move") == patience("step") == UNKNOWN_PACE * 30
    clock.now += 2
    patience("save")
    clock.now += 1000  # says nothing of steps
    assert patience("step") == 30
    clock.now += 20
    progress.tick()
    clock.now += 1
    patience("log")
    assert patience("step") == LONGER_THAN_EVER * 20
    clock.now += 1000
    patience("log")
    assert patience("step") == 1800  # the others wait no longer
    patience("log")
    progress.forget_pace()
    assert patience("step") == UNKNOWN_PACE * 30


def test_without_a_watchdog_nothing_is_ever_overdue() -> None:
    progress = Progress()
    progress.enter("step")
    assert progress.read().patience == math.inf


def test_phases_nest_and_an_error_knows_where_it_came_from() -> None:
    seen: list[tuple[str, int]] = []
    PROGRESS.enter("outer", 7)
    PROGRESS.on_enter = lambda name, step: seen.append((name, step))
    try:
        with phase("inner"):
            pass
        with pytest.raises(KeyError) as raised, phase("failing"), phase("innermost"):
            raise KeyError
    finally:
        PROGRESS.on_enter = None
    entered = ["inner", "outer", "failing", "innermost", "failing", "outer"]
    assert seen == [(name, 7) for name in entered]
    assert doing_when(raised.value) == "in phase 'innermost' at step 7"
    assert doing_when(ValueError()) == "in phase 'outer' at step 7"


def test_long_names_are_cut() -> None:
    progress = Progress()
    progress.enter("x" * 100)
    progress.note_watch(0.0, 0.0, "ä" * 100)
    assert progress.read().phase == "x" * 32
    assert progress.read().place == "ä" * 80


def test_after_sigterm_a_process_has_a_bounded_time(clock: Clock) -> None:
    progress = Progress()  # of one process that nobody watches
    assert progress.patience_when_stopping == UNKNOWN_PACE * DEFAULT_TIMEOUT
    progress.timeout, progress.limit = 7.0, 1800.0
    for phase_name, seconds in (("callbacks", 7.0 * UNKNOWN_PACE), ("save", 1800.0)):
        progress.enter(phase_name)
        assert progress.patience_when_stopping == seconds
    progress.enter("step")
    clock.now += 4
    progress.enter("callbacks")  # now a step is known to take four seconds
    progress.enter("step")
    assert progress.patience_when_stopping == 4 * LONGER_THAN_EVER


def test_rounds_are_counted() -> None:
    progress = Progress()
    assert progress.begin_round("is in step 1") == (1, "is in step 1", 0)
    assert progress.begin_round("called evaluate()", is_meeting=True) == (2, "called evaluate()", 2)
    assert progress.begin_round("is in step 2") == (3, "is in step 2", 2)
