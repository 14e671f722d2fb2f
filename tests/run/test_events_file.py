"""The run's record: one JSON object a line, appended."""

from __future__ import annotations

import json

import pytest
from test_plan import times_of, unit

from hf_pipetransformer.planning.plan_choice import make_plan
from hf_pipetransformer.planning.timeline import simulate
from hf_pipetransformer.run import events_file
from hf_pipetransformer.token_slices.slice_planning import RowSlices

UNITS = tuple(unit(k) for k in range(6))


def plan(stages: int, frozen: int = 0, times=None):
    return make_plan(
        UNITS,
        4,
        stages,
        rows_per_device=4,
        memory_budget_bytes=None,
        num_frozen_layers=frozen,
        times=times,
    )


def test_records_are_appended(tmp_path):
    events_file.record(tmp_path / "run", "start", plan(4), 0, 0.0)
    events_file.record(tmp_path / "run", "transform", plan(2, 2), 7, 1.5, 0.25, 1024, {"move": 0.2})
    first, second = map(json.loads, (tmp_path / "run" / events_file.FILE_NAME).read_text().splitlines())
    assert (first["event"], first["pipeline_parallel_size"], first["num_microbatches"]) == ("start", 4, 8)
    assert (second["global_step"], second["epoch"], second["num_frozen_layers"]) == (7, 1.5, 2)
    assert (second["data_parallel_size"], second["bytes_moved"], second["phases"]) == (2, 1024, {"move": 0.2})
    assert len(second["stage_bounds"]) == 3 and second["num_layers"] == 6


def test_facts_and_the_name_of_the_run(tmp_path):
    events_file.record(tmp_path, "start", plan(2), 0, 0.0, run="now", facts={"model": "Bert"})
    events_file.record(tmp_path, "cache", plan(2), 7, 1.5, run="now")
    first, second = map(json.loads, (tmp_path / events_file.FILE_NAME).read_text().splitlines())
    assert first["run"] == second["run"] == "now" and second["time"] >= first["time"] > 0
    assert first["facts"] == {"model": "Bert"} and "facts" not in second


def test_what_a_plan_predicts_draws_its_timeline():
    """The seconds of each stage are enough to simulate the step again, for each M that may be tried."""
    timed = plan(2, frozen=4, times=times_of(6, fixed=0.01))
    predicted = events_file.prediction_of(timed)
    assert predicted["memory_bytes"] == [
        timed.stage_bytes(stage, rows=8, num_microbatches=timed.num_microbatches_for(8)) for stage in (1, 0)
    ]
    assert predicted["steps"][0]["num_microbatches"] == timed.num_microbatches_for(8)
    for step in predicted["steps"]:
        m = step["num_microbatches"]
        again = simulate(step["forward"], step["backward"], m, predicted["schedule"])
        assert again.seconds == pytest.approx(timed.predict(8, m).timeline.seconds)
        assert step["seconds"] == pytest.approx(again.seconds + step["end"])


def test_nothing_is_predicted_that_was_not_timed():
    assert events_file.prediction_of(plan(2))["steps"] == []


def test_slices_in_words() -> None:
    parts = (RowSlices(2, (300, 212)), RowSlices(2, (300, 212)), RowSlices(1, (512,)))
    assert events_file.describe_slices(parts, 0.25) == (
        "Batches of 5 rows x 512 tokens: 2 x 2 rows in slices of 300+212 tokens, 1 row in one slice;"
        " forward and backward predicted 0.25 s"
    )
    assert events_file.slices_of(parts, None) == {
        "rows": 5,
        "tokens": 512,
        "parts": [[2, [300, 212]], [2, [300, 212]], [1, [512]]],
        "predicted_seconds": None,
    }
