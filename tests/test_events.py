"""The run's record: one JSON object a line, appended."""

from __future__ import annotations

import json

from test_plan import unit

from hf_pipetransformer import events
from hf_pipetransformer.elastic_pipeline import Transformation
from hf_pipetransformer.planner import make_plan

UNITS = tuple(unit(k) for k in range(6))


def plan(stages: int, frozen: int = 0):
    return make_plan(UNITS, 4, stages, rows_per_device=4, memory_budget_bytes=None, num_frozen_layers=frozen)


def test_records_are_appended(tmp_path):
    events.record(tmp_path / "run", "start", plan(4), 0, 0.0)
    events.record(tmp_path / "run", "transform", plan(2, 2), 7, 1.5, 0.25, 1024, {"move": 0.2})
    first, second = map(json.loads, (tmp_path / "run" / events.FILE_NAME).read_text().splitlines())
    assert (first["event"], first["pipeline_parallel_size"], first["num_microbatches"]) == ("start", 4, 8)
    assert (second["global_step"], second["epoch"], second["num_frozen_layers"]) == (7, 1.5, 2)
    assert (second["data_parallel_size"], second["bytes_moved"], second["phases"]) == (2, 1024, {"move": 0.2})
    assert len(second["stage_bounds"]) == 3 and second["num_layers"] == 6


def test_the_line_for_the_log():
    change = Transformation(plan(4), plan(2, 2), {"move": 0.1}, 0)
    line = events.describe(change, 0.5, 2**21)
    assert "2 of 6 layers frozen" in line and "4 x 1 -> 2 x 2" in line and "2.0 MiB moved in 0.500 s" in line
