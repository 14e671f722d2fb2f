"""What the run's record says of a plan."""

from __future__ import annotations

import pytest
from layouts import planner_of, times_of, unit

from hf_pipetransformer.planning.timeline import simulate
from hf_pipetransformer.records.files import prediction_of

UNITS = tuple(unit(k) for k in range(6))


def test_what_a_plan_predicts_draws_its_timeline():
    """The seconds of each stage are enough to simulate the step again."""
    planner = planner_of(2, 4, UNITS, times=times_of(6, fixed=0.01))
    layout = planner.in_stages(2, 4)
    predicted = prediction_of(planner, layout)
    assert predicted["memory_bytes"] == planner.stage_bytes(layout)[::-1]
    assert predicted["steps"][0]["num_microbatches"] == layout.num_microbatches
    for step in predicted["steps"]:
        m = step["num_microbatches"]
        again = simulate(step["forward"], step["backward"], m, predicted["schedule"])
        assert again.seconds == pytest.approx(planner.predict(layout).timeline.seconds)
        assert step["seconds"] == pytest.approx(again.seconds)
