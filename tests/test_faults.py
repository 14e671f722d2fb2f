"""A process dies, stops, hangs or fails in any phase of a training: the others say so, and the next attempt ends as if
nothing had happened.

A few of these run with all tests; `make test-faults` runs them all and prints a table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from distributed import RankDiedError, RankTimeoutError, launch_ranks, run_ranks
from faults import PHASES, RUN, Fault, train
from test_elastic import MID_EPOCH, reference
from training_runs import WORLD, Outcome, assert_same_training

from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.resilience.watchdog import EXIT_CODE

STEP_OF = dict(PHASES)
PATIENT = ("start", "adapt", "log", "evaluation", "save", "publish", "end")
"""Phases in which a process may take as long as `ddp_timeout`."""
AFTER_THE_STEP = ("log", "evaluation", "prediction", "save", "publish", "end")
"""Phases in which a step is done that is not yet counted."""

FAULTS = [
    *(Fault("kill", rank, phase, step) for phase, step in PHASES for rank in (0, 2)),
    *(Fault("stop", rank, phase, STEP_OF[phase]) for rank, phase in enumerate(("step", "move", "save", "update"))),
    *(Fault("stop", 3 - rank, phase, STEP_OF[phase]) for rank, phase in enumerate(("data", "build", "log", "end"))),
    *(Fault("hang", rank % 4, phase, step) for rank, (phase, step) in enumerate(PHASES) if phase in ("data", "step")),
    *(Fault("hang", rank % 4, phase, step) for rank, (phase, step) in enumerate(PHASES) if phase in PATIENT),
    *(Fault("busy", 1, phase, STEP_OF[phase]) for phase in ("step", "prediction")),
    *(Fault("raise", 3 - rank % 4, phase, step) for rank, (phase, step) in enumerate(PHASES) if phase != "cache"),
    *(Fault("corrupt", 0, phase, STEP_OF[phase]) for phase in ("step", "move", "prediction")),
]
FEW = {("kill", 2, "step"), ("kill", 0, "move"), ("stop", 0, "step"), ("hang", 3, "step"), ("raise", 2, "build")}


@cache
def expected() -> Outcome:
    return run_ranks(reference, 1, RUN.with_options(eval_strategy="no", save_strategy="no"), MID_EPOCH)[0]


def steps_lost(fault: Fault, step: int, resumed: int) -> int:
    return step + (fault.phase in AFTER_THE_STEP) - resumed


def mark(fault: Fault) -> Any:
    marks = [] if (fault.kind, fault.rank, fault.phase) in FEW else [pytest.mark.faults]
    return pytest.param(fault, marks=marks, id=f"{fault.kind}-rank{fault.rank}-{fault.phase}")


@pytest.mark.parametrize("fault", [mark(fault) for fault in FAULTS])
def test_nothing_is_lost(fault: Fault, tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    outcomes = launch_ranks(train, WORLD, str(tmp_path), fault, timeout=90)
    ended_at = time.time()
    happened_at, step = (float(number) for number in (tmp_path / "fault").read_text().split())

    assert not any(isinstance(outcome.error, RankTimeoutError) for outcome in outcomes), "somebody hung"
    for outcome in outcomes:
        if outcome.rank == fault.rank and fault.kind != "raise":
            assert isinstance(outcome.error, RankDiedError)
        elif outcome.rank == fault.rank:
            assert isinstance(outcome.error, LookupError)
        else:
            assert isinstance(outcome.error, PeerFailedError) or outcome.exitcode == EXIT_CODE, outcome.error
            if fault.phase != "cache":  # the phase is the main thread's
                said = f"{outcome.log}\n{outcome.error}"  # the error may come before the line in the log
                assert f"rank {fault.rank} " in said and f"in phase {fault.phase!r}" in said

    reports = run_ranks(train, WORLD, str(tmp_path), None, timeout=90)
    assert_same_training([report.outcome for report in reports], expected())
    assert len({report.resumed_step for report in reports}) == 1
    lost = steps_lost(fault, int(step), reports[0].resumed_step)
    assert 0 <= lost <= (4 if fault.kind == "corrupt" else 2)  # a checkpoint every second step
    row = {
        "fault": fault.kind,
        "phase": fault.phase,
        "rank": fault.rank,
        "steps_lost": lost,
        "seconds_until_all_ended": round(ended_at - happened_at, 2),
        "seconds_to_recover": round(max(report.first_step_at for report in reports) - happened_at, 2),
        "final weights": "equal",
    }
    record_property("fault", json.dumps(row))
