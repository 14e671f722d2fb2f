"""A process dies, stops, hangs or fails in any phase of a training: the others say so, and the next attempt ends as an
undisturbed training does. A SIGTERM in any phase: all save at the same step, and the next attempt loses none.

A few of these run with all tests; `make test-faults` runs them all, prints a table, and asks how long it took
(`conftest.py`).
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from distributed import RankDiedError, RankOutcome, RankTimeoutError, launch_ranks, run_ranks
from faults import (
    CACHED_FREEZES,
    CACHED_RUN,
    COUNTED,
    DDP_TIMEOUT_WITH_A_HANG,
    EVERYONE,
    HANGS,
    PHASES,
    RUN,
    WATCHDOG_TIMEOUT,
    Fault,
    Report,
    global_rows,
    train,
)
from test_elastic_pipeline import MID_EPOCH, reference
from training_runs import WORLD, Outcome, assert_same_training

from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.parts.preemption.stop_signal import EXIT_CODE as PREEMPTED
from hf_pipetransformer.parts.watchdog.watchdog import EXIT_CODE, SECONDS_FOR_A_VERDICT
from hf_pipetransformer.progress import UNKNOWN_PACE
from hf_pipetransformer.run.checkpoint_folders import SAVING, latest_valid

Recorder = Callable[[str, Any], None]

STEP_OF = dict(PHASES)
PATIENT = ("start", "save", "end")
"""Some of the phases that may take as long as `ddp_timeout`."""
AFTER_THE_STEP = ("log", "evaluation", "prediction", "save", "publish", "end")
"""Phases after a step that is not counted yet."""

FAULTS = [
    *(Fault("kill", (0, 2)[n % 2], phase, step) for n, (phase, step) in enumerate(PHASES)),
    *(Fault("stop", rank, phase, STEP_OF[phase]) for rank, phase in enumerate(("step", "move", "data", "update"))),
    *(Fault("hang", rank % 4, phase, step) for rank, (phase, step) in enumerate(PHASES) if phase in ("data", "step")),
    *(Fault("hang", rank % 4, phase, step) for rank, (phase, step) in enumerate(PHASES) if phase in PATIENT),
    *(Fault("busy", 1, phase, STEP_OF[phase]) for phase in ("step", "prediction")),
    *(Fault("raise", 3 - rank % 4, *PHASES[rank]) for rank in (*range(1, 14, 2), 16)),  # each second phase
    Fault("corrupt", 0, "step", 4),
    Fault("kill", 2, "move", 8, caches=True),
    Fault("stop", 3, "step", 7, caches=True),
    Fault("kill", 2, "update", 4, entry=2, sharding="optimizer"),  # while replicas exchange updated parameters
]
WHO = (2, EVERYONE, 0)
TERMS = [
    *(Fault("term", WHO[n % 3], phase, step) for n, (phase, step) in enumerate(PHASES) if phase != "end"),
    Fault("term", 3, "all-reduce", 4, entry=2),  # behind its vote
    Fault("terms", EVERYONE, "move", 5),
    Fault("term", 2, "build", 8, caches=True),
    Fault("term", EVERYONE, "evaluation", 8, caches=True),
]
"""(At "end" no step is left to save after.)"""
BEHIND_THE_VOTE = (*AFTER_THE_STEP, "update")
"""Phases after the vote of the current step: a SIGTERM comes too late for it. For "cache" it is not known."""

FEW = {
    Fault("kill", 2, "step", 4),
    Fault("kill", 2, "move", 8, caches=True),
    Fault("stop", 0, "step", 4),
    Fault("hang", 3, "step", 4),
    Fault("terms", EVERYONE, "move", 5),
    Fault("kill", 2, "update", 4, entry=2, sharding="optimizer"),
}
assert {*FAULTS, *TERMS} >= FEW
IN_AN_EPOCH = 8
"""A number of steps that ends a training inside an epoch."""


@cache
def expected(world_size: int = WORLD, max_steps: int = -1, caches: bool = False) -> Outcome:
    """The outcome of one process, with the batches of `world_size` processes."""
    run, freezes = (CACHED_RUN, CACHED_FREEZES) if caches else (RUN, MID_EPOCH)
    run = replace(run, per_device=global_rows(world_size) // WORLD)
    run = run.with_options(eval_strategy="no", save_strategy="no", max_steps=max_steps)
    return run_ranks(reference, 1, run, freezes)[0]


def wanted_of(fault: Fault) -> Outcome:
    return expected(caches=True) if fault.caches else expected()


def when(folder: Path) -> tuple[float, int]:
    """When the fault happened, and the number of steps that were done."""
    at, step, _ = (folder / "fault").read_text().split()
    return float(at), int(step)


def steps_lost(fault: Fault, step: int, resumed: int) -> int:
    return step + (fault.phase in AFTER_THE_STEP) - resumed


def assert_nothing_lost(reports: Sequence[Report], wanted: Outcome) -> None:
    """No step, and no evaluation either."""
    assert_same_training([report.outcome for report in reports], wanted)
    assert len({report.resumed_step for report in reports}) == 1
    for report in reports:
        steps = report.outcome.steps
        assert report.evaluations == sorted({*range(3, steps + 1, 3), steps})


def counted(steps: int) -> int:
    """Layers that count as cached from so many steps on."""
    return max((count for since, count in COUNTED.items() if since <= steps), default=0)


def assert_cached(folder: Path, reports: Sequence[Report]) -> None:
    """Layers counted as cached when the fault happened, and at once when the checkpoint was gone on with."""
    _, step, cached = (folder / "fault").read_text().split()
    assert int(cached) == counted(int(step)) > 0
    for report in reports:
        assert report.cached == counted(report.resumed_step - 1)  # it was written before the plan of the next step


def seconds_to_notice(fault: Fault) -> float:
    """Seconds until a process that stands still is noticed, as in `docs/resuming.md`."""
    if fault.phase in ("step", "update") or fault.kind == "busy":
        return WATCHDOG_TIMEOUT + 2
    if fault.kind == "stop":
        return UNKNOWN_PACE * WATCHDOG_TIMEOUT + 2
    return DDP_TIMEOUT_WITH_A_HANG + SECONDS_FOR_A_VERDICT  # the others' collectives fail at the same time


def row_of(fault: Fault, folder: Path, ended_at: float, first_step_at: float, lost: int, how: str, **more: Any) -> str:
    """A row for the table of `conftest.py`."""
    happened_at, _ = when(folder)
    row: dict[str, Any] = {
        "fault": f"{fault.kind}{how}",
        "phase": fault.phase,
        "rank": "all" if fault.rank == EVERYONE else fault.rank,
        "steps_lost": lost,
        "seconds_until_all_ended": round(ended_at - happened_at, 2),
        "seconds_to_recover": round(first_step_at - happened_at, 2),
        **more,
        "final weights": "equal",
    }
    return json.dumps(row)


def row_of_ranks(fault: Fault, folder: Path, ended_at: float, reports: Sequence[Report], lost: int) -> str:
    how = ", cached" * fault.caches + (f", sharded: {fault.sharding}" if fault.sharding != "none" else "")
    notice = {"seconds_to_notice": seconds_to_notice(fault)} if fault.kind in ("stop", *HANGS) else {}
    return row_of(fault, folder, ended_at, max(report.first_step_at for report in reports), lost, how, **notice)


FEWEST = {Fault("kill", 2, "step", 4)}
"""The fault of `make test`."""


def mark(fault: Fault) -> Any:
    marks = [] if fault in FEWEST else [pytest.mark.slow] if fault in FEW else [pytest.mark.faults]
    who = "all" if fault.rank == EVERYONE else f"rank{fault.rank}"
    again = f"-{fault.entry}" if fault.entry > 1 else ""
    more = "-cached" if fault.caches else f"-{fault.sharding}" if fault.sharding != "none" else ""
    return pytest.param(fault, marks=marks, id=f"{fault.kind}-{who}-{fault.phase}{again}{more}")


def assert_told(outcomes: Sequence[RankOutcome], fault: Fault) -> None:
    """Nobody hung, and the others have said who it was."""
    assert not any(isinstance(outcome.error, RankTimeoutError) for outcome in outcomes), "somebody hung"
    for outcome in outcomes:
        if outcome.rank == fault.rank and fault.kind != "raise":
            assert isinstance(outcome.error, RankDiedError)
        elif outcome.rank == fault.rank:
            assert isinstance(outcome.error, LookupError)
        else:
            assert isinstance(outcome.error, PeerFailedError) or outcome.exitcode == EXIT_CODE, outcome.error
            said = f"{outcome.log}\n{outcome.error}"
            assert f"rank {fault.rank} " in said
            # of a process that is gone, the others know the phase of its last beat
            assert fault.kind in ("kill", "corrupt", "stop") or f"in phase {fault.phase!r}" in said


@pytest.mark.slow
@pytest.mark.parametrize("fault", [mark(fault) for fault in FAULTS])
def test_nothing_is_lost(fault: Fault, tmp_path: Path, record_property: Recorder) -> None:
    options = {"caches": fault.caches, "sharding": fault.sharding}
    outcomes = launch_ranks(train, WORLD, str(tmp_path), fault, timeout=90, **options)
    ended_at = time.time()
    assert_told(outcomes, fault)
    reports = run_ranks(train, WORLD, str(tmp_path), None, timeout=90, **options)
    assert_nothing_lost(reports, wanted_of(fault))
    if fault.caches:
        assert_cached(tmp_path, reports)
    lost = steps_lost(fault, when(tmp_path)[1], reports[0].resumed_step)
    assert 0 <= lost <= (4 if fault.kind == "corrupt" else 2)  # a checkpoint every second step
    record_property("fault", row_of_ranks(fault, tmp_path, ended_at, reports, lost))


def assert_left(outcomes: Sequence[RankOutcome], folder: Path) -> int:
    """All have left with the exit code of a preempted process, and one whole checkpoint; returns its step."""
    for outcome in outcomes:
        assert isinstance(outcome.error, SystemExit) and outcome.error.code == PREEMPTED, outcome.error
    newest, problems = latest_valid(folder)
    assert newest is not None and not problems and not (folder / SAVING).exists()
    assert f"Received SIGTERM and saved {newest.name}" in outcomes[0].log
    return int(newest.name.split("-")[1])


@pytest.mark.parametrize("fault", [mark(fault) for fault in TERMS])
def test_sigterm_loses_no_step(fault: Fault, tmp_path: Path, record_property: Recorder) -> None:
    """The signal may reach some of the processes, and more than one may come."""
    outcomes = launch_ranks(train, WORLD, str(tmp_path), fault, timeout=90, caches=fault.caches)
    ended_at = time.time()
    saved = assert_left(outcomes, tmp_path)
    steps = saved - when(tmp_path)[1]
    if fault.phase == "cache":
        assert steps in (1, 2)
    else:
        is_late = fault.phase in BEHIND_THE_VOTE or (fault.phase == "all-reduce" and fault.entry == 2)
        assert steps == 1 + is_late
    reports = run_ranks(train, WORLD, str(tmp_path), None, timeout=90, caches=fault.caches)
    assert_nothing_lost(reports, wanted_of(fault))
    if fault.caches:
        assert_cached(tmp_path, reports)
    lost = saved - reports[0].resumed_step
    assert lost == 0
    record_property("fault", row_of_ranks(fault, tmp_path, ended_at, reports, lost))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("kind", "rank", "options"),
    [("kill", 2, {"max_steps": IN_AN_EPOCH}), ("term", EVERYONE, {"max_steps": IN_AN_EPOCH}), ("term", 0, {})],
    ids=["kill-within-an-epoch", "term-all-within-an-epoch", "term-rank0"],
)
def test_a_training_that_has_ended_is_not_gone_on_with(
    kind: Any, rank: int, options: dict[str, int], tmp_path: Path, record_property: Recorder
) -> None:
    """After a fault behind the last step, another start of the job trains no further step."""
    wanted = expected(**options)
    fault = Fault(kind, rank, "end", wanted.steps - 1)
    outcomes = launch_ranks(train, WORLD, str(tmp_path), fault, timeout=90, **options)
    ended_at = time.time()
    if kind == "kill":
        assert_told(outcomes, fault)
    else:
        assert_signal_delivered(outcomes, rank)
    reports = run_ranks(train, WORLD, str(tmp_path), None, timeout=90, **options)
    assert_nothing_lost(reports, wanted)
    assert reports[0].resumed_step == wanted.steps
    assert latest_valid(tmp_path) == (tmp_path / f"checkpoint-{wanted.steps}", [])
    record_property("fault", row_of_ranks(fault, tmp_path, ended_at, reports, 0))


def assert_signal_delivered(outcomes: Sequence[RankOutcome], rank: int) -> None:
    """After the last save, the signal ends its receiver and the others end as usual; or all leave together."""
    if all(isinstance(outcome.error, SystemExit) for outcome in outcomes):
        assert {outcome.error.code for outcome in outcomes} == {PREEMPTED}  # type: ignore[union-attr]
        return
    for outcome in outcomes:
        if rank in (outcome.rank, EVERYONE):
            assert outcome.exitcode == -signal.SIGTERM
        else:
            assert outcome.error is None
