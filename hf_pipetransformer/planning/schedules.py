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

Interleaved 1F1B (Narayanan et al., SC 2021) gives each stage V parts of the model, its virtual stages. Part v of stage
s is virtual stage s + v K, so a micro-batch goes round the K processes V times, and the pipeline fills and empties in
1 / V of the time. Micro-batches run in rounds: each part runs all micro-batches of a round before the next part does.

    K = 2, V = 2 (F B virtual stages 0 and 1, f b virtual stages 2 and 3), M = 4, one column a pass

    interleaved1f1b    stage 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
                       stage 1   .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Work(NamedTuple):
    """One pass of a stage.

    Attributes:
        kind: its direction.
        part: which of the stage's virtual stages runs, 0 ... V - 1.
        micro_batch: index of the micro-batch.
    """

    kind: Literal["forward", "backward"]
    part: int
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """The order of a stage's work.

    Attributes:
        name: the value of `pipeline_schedule`, and torch's name of the class that runs it (`get_schedule_class`).
        warm_up: called with a stage's index, K, M and V; returns the number of forwards before the first backward,
            which is also the largest number of forwards whose activations the stage keeps at once.
        keeps_all: whether activations of all micro-batches are kept, so that memory grows with their number.
        is_interleaved: whether a stage may have several virtual stages.
    """

    name: str
    warm_up: Callable[[int, int, int, int], int]
    keeps_all: bool
    is_interleaved: bool = False

    def divides(self, num_stages: int, num_microbatches: int) -> bool:
        """Whether this number of micro-batches can be run; an interleaved schedule needs rounds of equal size."""
        return not self.is_interleaved or num_microbatches % _num_rounds(num_stages, num_microbatches) == 0

    def order_of_work(
        self, stage: int, num_stages: int, num_microbatches: int, num_virtual_stages: int = 1
    ) -> list[Work]:
        """Return what a stage does in a step, in the order of torch's schedules."""
        v, m = num_virtual_stages, num_microbatches
        in_round = m // _num_rounds(num_stages, m) if v > 1 else m
        passes = [(part, first + i) for first in range(0, m, in_round) for part in range(v) for i in range(in_round)]
        forwards = [Work("forward", part, i) for part, i in passes]
        backwards = [Work("backward", v - 1 - part, i) for part, i in passes]
        warm_up = self.warm_up(stage, num_stages, m, v)
        alternating = zip(backwards, forwards[warm_up:], strict=False)
        return [*forwards[:warm_up], *(work for pair in alternating for work in pair), *backwards[m * v - warm_up :]]


def _num_rounds(num_stages: int, num_microbatches: int) -> int:
    """Return the number of rounds of an interleaved schedule: of K micro-batches each, or of a few more."""
    return max(1, num_microbatches // num_stages)


def _interleaved_warm_up(stage: int, num_stages: int, num_microbatches: int, num_virtual_stages: int) -> int:
    """Return torch's warm-up; torch counts it without the forward that precedes the first backward."""
    in_round = num_microbatches // _num_rounds(num_stages, num_microbatches)
    before = (num_virtual_stages - 1) * in_round + 2 * (num_stages - 1 - stage)
    return min(before + 1, num_virtual_stages * num_microbatches)


GPIPE = Schedule("gpipe", lambda stage, num_stages, num_microbatches, _: num_microbatches, keeps_all=True)
ONE_F_ONE_B = Schedule("1f1b", lambda stage, num_stages, num_microbatches, _: num_stages - stage, keeps_all=False)
INTERLEAVED = Schedule("interleaved1f1b", _interleaved_warm_up, keeps_all=False, is_interleaved=True)

SCHEDULES: Mapping[str, Schedule] = {schedule.name: schedule for schedule in (ONE_F_ONE_B, GPIPE, INTERLEAVED)}


DEFAULT_VIRTUAL_STAGES = 2
"""Virtual stages per stage of an interleaved schedule, if none are requested."""


def virtual_stages_of(schedule: str, requested: int | None) -> int:
    """Return the number of virtual stages per stage to ask for.

    Args:
        schedule: value of `pipeline_schedule`, one of `SCHEDULES`.
        requested: value of `virtual_pipeline_parallel_size`; None if the user has not set it.

    Raises:
        ValueError: It is no number of 2 or more with an interleaved schedule, or not 1 with another one.
    """
    is_interleaved = schedule_named(schedule).is_interleaved
    if requested is None:
        return DEFAULT_VIRTUAL_STAGES if is_interleaved else 1
    is_number = isinstance(requested, int) and not isinstance(requested, bool)
    if not is_number or requested < 1 or (requested > 1) != is_interleaved:
        fitting = "at least 2" if is_interleaved else "1, because only 'interleaved1f1b' has more"
        raise ValueError(
            f"virtual_pipeline_parallel_size={requested!r} cannot be combined with pipeline_schedule={schedule!r},"
            f" with which it must be {fitting}. Unset virtual_pipeline_parallel_size, or set pipeline_schedule to"
            f" {'1f1b' if is_interleaved else 'interleaved1f1b'!r}."
        )
    return requested


def schedule_named(name: str) -> Schedule:
    """Return a schedule.

    Raises:
        ValueError: There is none of this name.
    """
    if name not in tuple(SCHEDULES):  # of any type, also one that cannot be hashed
        raise ValueError(f"schedule is {name!r}, but must be one of {', '.join(map(repr, SCHEDULES))}.")
    return SCHEDULES[name]


def schedule_of_step(name: str, num_stages: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Return the schedule that runs a step of a plan with the schedule `name`.

    An interleaved schedule with one virtual stage is 1F1B. With fewer micro-batches than stages 1F1B has no steady
    state: the order is that of GPipe, and torch refuses 1F1B.
    """
    schedule = schedule_named(name)
    if schedule.is_interleaved:
        if num_virtual_stages > 1:
            return schedule
        schedule = ONE_F_ONE_B
    return schedule if num_microbatches >= num_stages else GPIPE
