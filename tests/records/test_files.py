"""What the run's record says of a plan."""

from __future__ import annotations

import pytest
from test_plan import times_of, unit

from hf_pipetransformer.planning.plan_choice import make_plan
from hf_pipetransformer.planning.timeline import simulate
from hf_pipetransformer.records.files import prediction_of

UNITS = tuple(unit(k) for k in range(6))


def test_what_a_plan_predicts_draws_its_timeline():
    """The seconds of each stage are enough to simulate the step again."""
    options = {"rows_per_device": 4, "memory_budget_bytes": None, "num_frozen_layers": 4}
    timed = make_plan(UNITS, 4, 2, times=times_of(6, fixed=0.01), **options)
    predicted = prediction_of(timed)
    assert predicted["memory_bytes"] == [
        timed.stage_bytes(stage, rows=8, num_microbatches=timed.num_microbatches_for(8)) for stage in (1, 0)
    ]
    assert predicted["steps"][0]["num_microbatches"] == timed.num_microbatches_for(8)
    for step in predicted["steps"]:
        m = step["num_microbatches"]
        again = simulate(step["forward"], step["backward"], m, predicted["schedule"])
        assert again.seconds == pytest.approx(timed.predict(8, m).timeline.seconds)
        assert step["seconds"] == pytest.approx(again.seconds + step["end"])
