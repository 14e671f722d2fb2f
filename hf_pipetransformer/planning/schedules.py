"""The schedules: in which order a stage runs the forwards and backwards of its micro-batches.

    K = 2 stages, M = 3 micro-batches, a backward costs two forwards (one column a unit of time)

    1F1B     stage 0   F0 F1 .  B0 B0 F2 .  B1 B1 .  B2 B2
             stage 1      F0 B0 B0 F1 B1 B1 F2 B2 B2

    GPipe    stage 0   F0 F1 F2 .  .  .  B0 B0 B1 B1 B2 B2
             stage 1      F0 F1 F2 B0 B0 B1 B1 B2 B2

A schedule is described by its warm-up: the number of forwards that a stage runs before its first backward. Then
backwards and forwards alternate until no forward is left, and the other backwards follow. The arguments, the planner,
the simulated timeline, the prediction of memory and the running pipeline all read the table `SCHEDULES`: a schedule of
this kind is one more entry in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The order of a stage's work, in a step with at least as many micro-batches as stages.

    Attributes:
        name: the value of `pipeline_schedule`, and torch's name of the class that runs it (`get_schedule_class`).
        warm_up: called with a stage's index, K and M; returns the number of forwards before the first backward, which
            is also the largest number of micro-batches whose activations the stage keeps at once.
        keeps_all: whether activations of all micro-batches are kept, so that memory grows with their number.
    """

    name: str
    warm_up: Callable[[int, int, int], int]
    keeps_all: bool

    def order_of_work(self, stage: int, num_stages: int, num_microbatches: int) -> list[tuple[str, int]]:
        """Return what a stage does in a step, in order: ("forward" | "backward", micro-batch).

        The order is that of torch's schedules.
        """
        warm_up = self.warm_up(stage, num_stages, num_microbatches)
        work = [("forward", i) for i in range(warm_up)]
        for i in range(num_microbatches - warm_up):
            work += [("backward", i), ("forward", warm_up + i)]
        return work + [("backward", i) for i in range(num_microbatches - warm_up, num_microbatches)]


GPIPE = Schedule("gpipe", lambda stage, num_stages, num_microbatches: num_microbatches, keeps_all=True)

SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("1f1b", lambda stage, num_stages, num_microbatches: num_stages - stage, keeps_all=False),
        GPIPE,
    )
}


def schedule_named(name: str) -> Schedule:
    """Return a schedule.

    Raises:
        ValueError: There is none of this name.
    """
    if name not in tuple(SCHEDULES):  # of any type, also one that cannot be hashed
        raise ValueError(f"schedule is {name!r}, but must be one of {', '.join(map(repr, SCHEDULES))}.")
    return SCHEDULES[name]


def schedule_of_step(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """Return the schedule that runs a step of a plan with the schedule `name`.

    With fewer micro-batches than stages there is no steady state: the order is that of GPipe, and torch refuses 1F1B.
    """
    schedule = schedule_named(name)
    return schedule if num_microbatches >= num_stages else GPIPE
