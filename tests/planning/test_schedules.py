from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from hf_pipetransformer.planning.partition import choose_num_microbatches
from hf_pipetransformer.planning.schedules import SCHEDULES, Schedule, schedule_named, schedule_of_step


def drawn(name: str, stage: int, num_stages: int, num_microbatches: int, num_virtual_stages: int = 1) -> str:
    """F and B: passes of the process's first virtual stage; f and b: passes of its second one."""
    schedule = schedule_of_step(name, num_stages, num_microbatches, num_virtual_stages)
    order = schedule.order(stage, num_stages, num_microbatches, num_virtual_stages)
    return " ".join(f"{kind[0].lower() if part else kind[0].upper()}{i}" for kind, part, i in order)


def test_order_is_as_drawn() -> None:
    assert [drawn("1f1b", stage, 2, 3) for stage in range(2)] == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert [drawn("gpipe", stage, 2, 3) for stage in range(2)] == ["F0 F1 F2 B0 B1 B2"] * 2
    assert drawn("1f1b", 0, 4, 3) == drawn("gpipe", 0, 4, 3)  # fewer micro-batches than stages
    assert [drawn("interleaved1f1b", stage, 2, 4, 2) for stage in range(2)] == [
        "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3",
        "F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3",
    ]
    assert [drawn("zbv", stage, 2, 3, 2) for stage in range(2)] == [
        "F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 B1 W1 B2 W2",
        "F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2",
    ]
    assert drawn("interleaved1f1b", 0, 2, 3) == drawn("1f1b", 0, 2, 3)  # one virtual stage per stage


def test_rounds_of_an_interleaved_schedule_have_equal_sizes() -> None:
    interleaved = schedule_named("interleaved1f1b")
    assert [m for m in range(1, 13) if interleaved.divides(4, m)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    assert all(schedule_named("1f1b").divides(4, m) for m in range(1, 13))


def test_torch_runs_every_schedule() -> None:
    for name, schedule in SCHEDULES.items():
        kind = PipelineScheduleMulti if schedule.is_interleaved else PipelineScheduleSingle
        assert issubclass(get_schedule_class(schedule.torch_name), kind), name


def passes(actions: Iterable[Any], splits_backward: bool) -> Iterator[str]:
    """The passes of torch's actions: one of two passes counts as both, a whole backward as its two parts."""
    for action in actions:
        if action is None:  # waiting
            continue
        if action.sub_actions:
            yield from passes(action.sub_actions, splits_backward)
        elif splits_backward and "B" in str(action):
            yield from (str(action).replace("B", kind) for kind in "IW")
        else:
            yield str(action)


def by_torch(schedule: Schedule, stage: int, k: int, m: int, v: int) -> list[str]:
    """What torch's schedule does on a stage; such as 2F0 for the forward of micro-batch 0 in virtual stage 2."""
    held = schedule.placement(k, v).held_by(stage)
    stages: list[Any] = [
        SimpleNamespace(
            group_size=k,
            group_rank=stage,
            num_stages=k * v,
            stage_index=index,
            is_first=False,
            is_last=False,
            submod=None,
        )
        for index in held
    ]
    built = get_schedule_class(schedule.torch_name)(stages, m, loss_fn=None)  # type: ignore[arg-type]
    assert isinstance(built, PipelineScheduleMulti)
    return list(passes(built.pipeline_order[stage], schedule.splits_backward))


@pytest.mark.parametrize("name", [name for name, schedule in SCHEDULES.items() if schedule.is_interleaved])
def test_order_is_that_of_torch(name: str) -> None:
    schedule = SCHEDULES[name]
    letters = {"forward": "F", "backward": "I" if schedule.splits_backward else "B", "weights": "W"}
    for k in (2, 3, 4):
        for v in range(2, (schedule.most_virtual_stages or 3) + 1):
            for m in (m for m in range(1, 10) if schedule.divides(k, m)):
                for stage in range(k):
                    held = schedule.placement(k, v).held_by(stage)
                    order = [f"{held[part]}{letters[kind]}{i}" for kind, part, i in schedule.order(stage, k, m, v)]
                    assert order == by_torch(schedule, stage, k, m, v), f"stage {stage}, K={k}, M={m}, V={v}"


def test_a_schedule_that_needs_more_micro_batches_is_replaced_where_there_are_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_more = replace(SCHEDULES["zbv"], name="dualpipev", torch_name="DualPipeV", microbatches_per_stage=2)
    monkeypatch.setitem(SCHEDULES, "dualpipev", needs_more)
    assert [schedule_of_step("dualpipev", 2, m, 2).name for m in (2, 3, 4, 5)] == [
        "zbv",
        "zbv",
        "dualpipev",
        "dualpipev",
    ]
    assert schedule_of_step("dualpipev", 2, 4).name == "1f1b"  # with one virtual stage
    assert [choose_num_microbatches(rows, 2, None, "dualpipev") for rows in (3, 4, 6, 8)] == [3, 4, 6, 4]
    assert [choose_num_microbatches(rows, 2, None, "zbv") for rows in (3, 4, 6, 8)] == [3, 4, 3, 4]
