"""The schedules: the order of the forwards and backwards of a stage's micro-batches.

    K = 2 stages, M = 3 micro-batches, a backward costs two forwards (one column a unit of time)

    1F1B     stage 0   F0 F1 .  B0 B0 F2 .  B1 B1 .  B2 B2
             stage 1      F0 B0 B0 F1 B1 B1 F2 B2 B2

    GPipe    stage 0   F0 F1 F2 .  .  .  B0 B0 B1 B1 B2 B2
             stage 1      F0 F1 F2 B0 B0 B1 B1 B2 B2

Its warm-up defines such a schedule: the number of forwards that a stage runs before its first backward. Then backwards
and forwards alternate until no forward is left, and the other backwards follow. The arguments, the planner, the
simulated timeline, the prediction of memory and the running pipeline all read the table `SCHEDULES`. To add a
schedule, add an entry (CONTRIBUTING.md shows one).

Interleaved 1F1B (Narayanan et al., SC 2021) gives each stage V parts of the model, its virtual stages. Part v of stage
s is virtual stage s + v K, so a micro-batch goes round the K processes V times, and the pipeline fills and empties in
1 / V of the time. Micro-batches run in rounds: each part runs all micro-batches of a round before the next part does.

    K = 2, V = 2 (F B virtual stages 0 and 1, f b virtual stages 2 and 3), M = 4, one column a pass

    interleaved1f1b    stage 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
                       stage 1   .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

ZBV (Qi et al., *Zero Bubble Pipeline Parallelism*, ICLR 2024, section 6) gives each stage two virtual stages in the
shape of a V (`placement`), and splits a backward: B computes the gradients of the inputs, for which the previous stage
waits, and W computes the gradients of the weights, for which no stage waits. W fills idle time.

    K = 2 (F B W virtual stages 0 and 1, f b w virtual stages 3 and 2), M = 3, one column a pass

    zbv    stage 0   F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 B1 W1 B2 W2
           stage 1   .  F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .placement import Placement

Kind = Literal["forward", "backward", "weights"]
"""Kind of a pass: "forward" computes outputs; "backward" computes gradients of inputs, and of weights if the schedule
does not split backwards; "weights" computes gradients of weights."""

WEIGHTS_SHARE = 0.5
"""Share of a split backward that computes gradients of weights: both halves multiply matrices of the same sizes."""


class Work(NamedTuple):
    """One pass of a stage.

    Attributes:
        kind: "forward", "backward", or "weights" if the schedule splits backwards. If such a schedule runs an unsplit
            backward, its "weights" follow the "backward" immediately.
        part: index of the stage's virtual stage, 0 ... V - 1.
        micro_batch: index of the micro-batch.
    """

    kind: Kind
    part: int
    micro_batch: int


Order = Callable[[int, int, int, int], list[Work]]
"""Called with a stage's index, K, M and V; returns the passes of the stage in a step."""


@dataclass(frozen=True)
class Schedule:
    """The order of a stage's work.

    Attributes:
        name: the value of `pipeline_schedule`.
        torch_name: torch's name of the schedule class (`get_schedule_class`), or a class of your own.
        order: the passes of a stage in a step, in the order of torch's schedule. Only plans and forecasts read it: a
            wrong order makes them wrong, but does not affect the training.
        keeps_all: whether the activations of all micro-batches are kept: memory then grows with their number.
        is_interleaved: whether a stage may have several virtual stages.
        most_virtual_stages: maximum number of virtual stages per stage; None for no bound.
        has_rounds: whether the micro-batches run in rounds of K or more, which must have equal sizes.
        is_v_shaped: whether the placement of virtual stages is V-shaped.
        splits_backward: whether gradients of the weights are computed in passes of their own.
        microbatches_per_stage: minimum of M / K (2: it needs 2 K micro-batches). Smaller batches run under another
            schedule with the same placement (`schedule_of_step`).
    """

    name: str
    torch_name: str | type
    order: Order
    keeps_all: bool
    is_interleaved: bool = False
    most_virtual_stages: int | None = 1
    has_rounds: bool = False
    is_v_shaped: bool = False
    splits_backward: bool = False
    microbatches_per_stage: int = 1

    def divides(self, num_stages: int, num_microbatches: int) -> bool:
        """Whether the schedule can run this number of micro-batches."""
        return not self.has_rounds or num_microbatches % _num_rounds(num_stages, num_microbatches) == 0

    def placement(self, num_stages: int, num_virtual_stages: int = 1) -> Placement:
        """Return the placement of virtual stages on stages."""
        return Placement(num_stages, num_virtual_stages, self.is_v_shaped)

    def frees_activations(self, kind: Kind) -> bool:
        """Whether a pass of this kind frees the activations of its forward."""
        return kind == ("weights" if self.splits_backward else "backward")


def _alternating(warm_up: Callable[[int, int, int, int], int]) -> Order:
    """Return the order of a schedule with this warm-up. `warm_up` takes the arguments of an `Order`."""

    def order(stage: int, num_stages: int, num_microbatches: int, num_virtual_stages: int) -> list[Work]:
        v, m = num_virtual_stages, num_microbatches
        in_round = m // _num_rounds(num_stages, m) if v > 1 else m
        passes = [(part, first + i) for first in range(0, m, in_round) for part in range(v) for i in range(in_round)]
        forwards = [Work("forward", part, i) for part, i in passes]
        backwards = [Work("backward", v - 1 - part, i) for part, i in passes]
        before = warm_up(stage, num_stages, m, v)
        alternating = zip(backwards, forwards[before:], strict=False)
        return [*forwards[:before], *(work for pair in alternating for work in pair), *backwards[m * v - before :]]

    return order


def _num_rounds(num_stages: int, num_microbatches: int) -> int:
    """Return the number of rounds of an interleaved schedule, with K or slightly more micro-batches each."""
    return max(1, num_microbatches // num_stages)


def _interleaved_warm_up(stage: int, num_stages: int, num_microbatches: int, num_virtual_stages: int) -> int:
    """Return torch's warm-up, plus the forward before the first backward, which torch does not count."""
    in_round = num_microbatches // _num_rounds(num_stages, num_microbatches)
    before = (num_virtual_stages - 1) * in_round + 2 * (num_stages - 1 - stage)
    return min(before + 1, num_virtual_stages * num_microbatches)


def _zero_bubble_v(stage: int, num_stages: int, num_microbatches: int, _: int) -> list[Work]:
    """Return torch's order. Torch makes it for at least 2 K - 1 micro-batches; with fewer, some passes are dropped."""
    most, order = max(2 * num_stages - 1, num_microbatches), list[Work]()
    run: Counter[tuple[Kind, int]] = Counter()

    def add(*passes: tuple[Kind, int]) -> None:
        for kind, part in passes:
            order.append(Work(kind, part, run[kind, part]))
            run[kind, part] += 1

    forwards: list[tuple[Kind, int]] = [("forward", 0), ("forward", 1)]
    inputs: list[tuple[Kind, int]] = [("backward", 0), ("backward", 1)]
    weights: list[tuple[Kind, int]] = [("weights", 0), ("weights", 1)]
    add(*[forwards[0]] * (2 * (num_stages - stage) - 1))
    add(*[forwards[1], forwards[0]] * stage)
    add(*[forwards[1], inputs[1], weights[1]] * (num_stages - stage))
    while run[forwards[1]] < run[forwards[0]] or run[forwards[0]] < most:
        if run[forwards[0]] < most:
            add(forwards[0])
        add(inputs[0], weights[0], forwards[1], inputs[1], weights[1])
    add(*[inputs[0], inputs[1]] * stage)
    add(*[inputs[0], weights[0]] * (num_stages - stage))
    for part in (1, 0):
        add(*[weights[part]] * (run[inputs[part]] - run[weights[part]]))
    return [work for work in order if work.micro_batch < num_microbatches]


GPIPE = Schedule("gpipe", "gpipe", _alternating(lambda stage, k, m, v: m), keeps_all=True)
ONE_F_ONE_B = Schedule("1f1b", "1f1b", _alternating(lambda stage, k, m, v: k - stage), keeps_all=False)
INTERLEAVED = Schedule(
    "interleaved1f1b",
    "interleaved1f1b",
    _alternating(_interleaved_warm_up),
    keeps_all=False,
    is_interleaved=True,
    most_virtual_stages=None,
    has_rounds=True,
)
ZERO_BUBBLE_V = Schedule(
    "zbv",
    "ZBVZeroBubble",
    _zero_bubble_v,
    keeps_all=False,
    is_interleaved=True,
    most_virtual_stages=2,
    is_v_shaped=True,
    splits_backward=True,
)

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule for schedule in (ONE_F_ONE_B, GPIPE, INTERLEAVED, ZERO_BUBBLE_V)
}
"""Value of `pipeline_schedule` -> schedule. Add entries before you create a trainer's arguments."""

DEFAULT_VIRTUAL_STAGES = 2
"""Virtual stages per stage of an interleaved schedule, if none are requested."""


def virtual_stages_of(schedule: str, requested: int | None) -> int:
    """Return the number of virtual stages per stage to request.

    Args:
        schedule: value of `pipeline_schedule`, a key of `SCHEDULES`.
        requested: value of `virtual_pipeline_parallel_size`; None if the user has not set it.

    Raises:
        ValueError: The number is below 2 or above the schedule's maximum for an interleaved schedule, or not 1 for
            another schedule.
    """
    chosen = schedule_named(schedule)
    least = DEFAULT_VIRTUAL_STAGES if chosen.is_interleaved else 1
    if requested is None:
        return least
    is_number = isinstance(requested, int) and not isinstance(requested, bool)
    most = chosen.most_virtual_stages
    if is_number and least <= requested <= (most or requested):
        return requested
    fitting = "at least 2" if most is None else str(most)
    if not chosen.is_interleaved:
        interleaved = [repr(name) for name, one in SCHEDULES.items() if one.is_interleaved]
        fitting += f", because only {' and '.join(interleaved)} have more"
    other = INTERLEAVED if is_number and requested > 1 else ONE_F_ONE_B
    raise ValueError(
        f"virtual_pipeline_parallel_size={requested!r} cannot be combined with pipeline_schedule={schedule!r},"
        f" with which it must be {fitting}. Unset virtual_pipeline_parallel_size, or set pipeline_schedule to"
        f" {other.name!r}."
    )


def schedule_named(name: str) -> Schedule:
    """Return a schedule.

    Raises:
        ValueError: There is no schedule of this name.
    """
    if name not in tuple(SCHEDULES):  # the name may have any type, even an unhashable one
        raise ValueError(f"pipeline_schedule is {name!r}, but must be one of {', '.join(map(repr, SCHEDULES))}.")
    return SCHEDULES[name]


def schedule_of_step(name: str, num_stages: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Return the schedule that runs a step of a layout with the schedule `name`.

    If there are fewer micro-batches than a schedule with virtual stages needs, another schedule with the same
    placement runs. An interleaved schedule with one virtual stage is 1F1B. With fewer micro-batches than stages, 1F1B
    has no steady state, and its order equals GPipe's. GPipe then runs, because torch refuses 1F1B: on NCCL it would
    hang, as one end of some messages would be a single call and the other a batch.
    """
    schedule = schedule_named(name)
    is_enough = num_microbatches >= schedule.microbatches_per_stage * num_stages
    if schedule.is_interleaved and num_virtual_stages > 1:
        other = ZERO_BUBBLE_V if schedule.is_v_shaped else INTERLEAVED
        return schedule if is_enough else other
    if schedule.is_interleaved:
        schedule, is_enough = ONE_F_ONE_B, num_microbatches >= num_stages
    return schedule if is_enough else GPIPE
