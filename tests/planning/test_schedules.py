from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from hf_pipetransformer.planning.schedules import SCHEDULES, schedule_named, schedule_of_step


def drawn(name: str, stage: int, num_stages: int, num_microbatches: int) -> str:
    order = schedule_of_step(name, num_stages, num_microbatches).order_of_work(stage, num_stages, num_microbatches)
    return " ".join(f"{kind[0].upper()}{i}" for kind, i in order)


def test_order_is_as_drawn() -> None:
    assert [drawn("1f1b", stage, 2, 3) for stage in range(2)] == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert [drawn("gpipe", stage, 2, 3) for stage in range(2)] == ["F0 F1 F2 B0 B1 B2"] * 2
    assert [drawn("1f1b", stage, 4, 6) for stage in range(4)] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]
    assert drawn("1f1b", 0, 4, 3) == drawn("gpipe", 0, 4, 3)  # fewer micro-batches than stages


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="schedule is 'zigzag'"):
        schedule_named("zigzag")


def test_torch_runs_every_schedule() -> None:
    assert all(issubclass(get_schedule_class(name), PipelineScheduleSingle) for name in SCHEDULES)
