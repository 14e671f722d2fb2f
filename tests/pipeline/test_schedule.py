"""torch runs interleaved schedules in the order that plans count on, and only so many of them keep their buffers."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from distributed import run_ranks
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from training_runs import Run, pipeline_trainer, while_training

from hf_pipetransformer.pipeline import schedule
from hf_pipetransformer.planning.schedules import schedule_named

STAGES, VIRTUAL = 2, 2


def orders(rank: int, world_size: int) -> None:
    """Compares the order of work in each step. Each batch is padded to its longest row."""
    step = PipelineScheduleMulti.step
    for name, kept_bytes in (("interleaved1f1b", schedule.KEPT_BYTES), ("zbv", 0)):
        planned, seen = schedule_named(name), weakref.WeakSet[Any]()
        kinds = {"forward": "F", "backward": "I" if planned.splits_backward else "B", "weights": "W"}
        most = []

        def noting(self: Any, *args: Any, planned=planned, kinds=kinds, seen=seen, most=most, **options: Any) -> Any:  # type: ignore[no-untyped-def]
            by_torch = [str(action) for action in self.pipeline_order[self.rank] if action is not None]
            work = planned.order(self.rank, STAGES, self._n_microbatches, VIRTUAL)
            held = planned.placement(STAGES, VIRTUAL).held_by(self.rank)
            assert by_torch == [f"{held[part]}{kinds[kind]}{i}" for kind, part, i in work]
            seen.add(self)
            most.append(len(seen))
            return step(self, *args, **options)

        run = Run(samples=168, epochs=1, accumulation=1, per_device=2)
        trainer = pipeline_trainer(run, STAGES, pipeline_schedule=name, num_microbatches=2)
        while_training(trainer, PipelineScheduleMulti, "step", noting)
        while_training(trainer, schedule, "KEPT_BYTES", kept_bytes)
        trainer.train()
        kept = schedule.KEPT_SCHEDULES if kept_bytes else 1
        assert max(most) <= kept + 1, "one more while it is being exchanged"
        assert (max(most) > 2) == (kept > 1)


@pytest.mark.slow
def test_what_is_planned_is_what_torch_runs() -> None:
    run_ranks(orders, STAGES)
