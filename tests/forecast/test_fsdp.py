from __future__ import annotations

from dataclasses import replace

import pytest
from test_forecast import MEMORY_BYTES, job, machine, workload
from test_plan import times_of, unit

from hf_pipetransformer.forecast.forecast import forecast
from hf_pipetransformer.forecast.forecast_text import advise
from hf_pipetransformer.forecast.fsdp import fsdp_run
from hf_pipetransformer.freezing.policies import SchedulePolicy

UNITS, DEVICES, ROWS = 12, 4, 8
COSTS = tuple(unit(i, activation_bytes=10) for i in range(UNITS))


def test_where_transfers_are_free_devices_divide_the_time() -> None:
    run = fsdp_run(COSTS, times_of(UNITS), DEVICES, ROWS, num_steps=5, budget=None)
    assert run.step_seconds == pytest.approx(UNITS * 3 * ROWS)
    assert run.seconds == pytest.approx(5 * run.step_seconds) and run.num_microbatches == 1


def test_slow_transfers_decide() -> None:
    """Half of an all-reduce before each forward, and twice that in each backward.

    The first gather is not hidden, and the last layer's parameters stay for its backward.
    """
    slow = replace(times_of(UNITS), reduce_seconds_per_byte=10.0)
    gather = 0.5 * 10.0 * MEMORY_BYTES
    run = fsdp_run(COSTS, slow, DEVICES, ROWS, num_steps=1, budget=None)
    assert run.step_seconds == pytest.approx(UNITS * 3 * gather)


def test_memory_of_a_device() -> None:
    """Everything is divided but two layers' parameters and gradients; activations are those of a micro-batch."""
    shards = UNITS * MEMORY_BYTES * (1 + 1 + 2) / DEVICES
    activations = sum(cost.activation_bytes for cost in COSTS)
    whole = fsdp_run(COSTS, times_of(UNITS), DEVICES, ROWS, 1, budget=None)
    assert whole.largest_bytes == shards + 4 * MEMORY_BYTES + ROWS * activations
    some = fsdp_run(COSTS, times_of(UNITS), DEVICES, ROWS, 1, budget=whole.largest_bytes - 1)
    assert some.num_microbatches == 2 and some.fits
    assert some.largest_bytes == shards + 4 * MEMORY_BYTES + ROWS // 2 * activations
    none = fsdp_run(COSTS, times_of(UNITS), DEVICES, ROWS, 1, budget=100)
    assert not none.fits and none.seconds == float("inf") and none.num_microbatches == ROWS


def test_advice_where_freezing_gains_less_than_fsdp() -> None:
    """A model that needs four stages: freezing one layer does not make up for the bubble."""
    needed = UNITS * MEMORY_BYTES * 4 // DEVICES + 6 * MEMORY_BYTES
    few = forecast(job(DEVICES, 3, SchedulePolicy({2: 1})), workload(), machine(budget=needed))
    assert few.fsdp is not None and few.fsdp.fits and few.fsdp.seconds < few.best_static.seconds
    assert any("Use FSDP with plain transformers instead" in sentence for sentence in advise(few))
    assert any("FSDP can freeze layers as well" in sentence for sentence in advise(few))
    many = forecast(job(DEVICES, 9, SchedulePolicy({1: 11})), workload(), machine(budget=needed))
    assert many.fsdp is not None and many.fsdp.seconds > 1.15 * many.seconds
    assert not any("Use FSDP" in sentence for sentence in advise(many))


def test_where_ddp_is_possible_fsdp_is_no_rival() -> None:
    times = replace(times_of(UNITS), reduce_seconds_per_byte=1e-3)  # hidden in FSDP, but not in the count of DDP
    result = forecast(job(DEVICES, 3, SchedulePolicy({2: 1})), workload(), replace(machine(), times=times))
    assert result.fsdp is not None and result.fsdp.seconds < result.ddp.seconds
    assert result.fastest_plain is result.best_static and result.best_static.plan.pipeline_parallel_size == 1
    assert not any("FSDP" in sentence for sentence in advise(result))
