"""A simulated training step of a pipeline: the start and end of each stage's passes.

Each stage runs its own list of passes in order. A pass starts when the stage is free and its input has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .schedules import WEIGHTS_SHARE, Kind, Work, schedule_of_step


@dataclass(frozen=True)
class Span:
    """The time that one stage spends on one micro-batch, in seconds from the start of the step.

    Attributes:
        part: index of the stage's virtual stage; 0 if it has only one.
    """

    stage: int
    kind: Kind
    micro_batch: int
    start: float
    end: float
    part: int = 0


@dataclass(frozen=True)
class Timeline:
    """One simulated step.

    Attributes:
        spans: the passes of all stages, sorted by stage and start. A stage without backward has no backward spans.
        seconds: time until the last stage has finished.
    """

    spans: tuple[Span, ...]
    seconds: float

    @property
    def bubble(self) -> float:
        """Fraction of the stages' time that they idle, 0 to 1."""
        stages = {span.stage for span in self.spans}
        offered = self.seconds * len(stages)
        return 1 - sum(span.end - span.start for span in self.spans) / offered if offered else 0.0


@dataclass(frozen=True)
class StepPrediction:
    """The predicted time of a training step.

    Attributes:
        timeline: Simulated forward and backward passes of the pipeline.
        seconds_at_end: Seconds of the gradient reduction and the optimizer step on the slowest stage.
    """

    timeline: Timeline
    seconds_at_end: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.timeline.seconds + self.seconds_at_end


def simulate(
    forward: Sequence[float],
    backward: Sequence[float],
    num_microbatches: int,
    schedule: str = "1f1b",
    num_virtual_stages: int = 1,
) -> Timeline:
    """Simulate one step of a pipeline. Messages take no time.

    Args:
        forward: seconds of one micro-batch's forward in each virtual stage, in the model's order. `[V * K]`
        backward: seconds of one micro-batch's backward in each virtual stage, for inputs and weights together; 0
            without a backward, because this and all earlier stages are frozen. `[V * K]`
        num_microbatches: M.
        schedule: name of the schedule.
        num_virtual_stages: virtual stages per stage V.
    """
    k = len(forward) // num_virtual_stages
    order = schedule_of_step(schedule, k, num_microbatches, num_virtual_stages)
    placement = order.placement(k, num_virtual_stages)
    held = [placement.held_by(stage) for stage in range(k)]
    work = [order.order(stage, k, num_microbatches, num_virtual_stages) for stage in range(k)]
    share = WEIGHTS_SHARE if order.splits_backward else 0.0
    seconds: dict[Kind, list[float]] = {
        "forward": list(forward),
        "backward": [(1 - share) * of_both for of_both in backward],
        "weights": [share * of_both for of_both in backward],
    }
    return play(work, held, lambda task: seconds[task.kind][task.part])


def play(work: Sequence[list[Work]], held: Sequence[Sequence[int]], seconds: Callable[[Work], float]) -> Timeline:
    """Simulate stages that each run their own list of passes in order.

    Args:
        work: the passes of each stage; `Work.part` is an index into its own virtual stages. The lists are emptied.
            `[K]`
        held: the virtual stages that each stage holds. `[K]`
        seconds: returns the time of a pass; here `Work.part` is an index into the virtual stages of all stages. A
            backward that takes no time is skipped: no layer up to there is trained.
    """
    last = max(map(max, held))
    done: dict[Work, float] = {}  # `Work.part` as for `seconds`
    free = [0.0] * len(work)
    spans: list[Span] = []
    while any(work):
        for stage, tasks in enumerate(work):
            while tasks:
                kind, part, i = tasks[0]
                task = Work(kind, held[stage][part], i)
                exists = kind == "forward" or seconds(Work("backward", task.part, i)) > 0
                source = _source(*task)
                has_source = 0 <= source.part <= last and exists
                if has_source and source not in done:
                    break
                start = max(free[stage], done[source] if has_source else 0.0)
                free[stage] = done[task] = start + seconds(task)
                if exists:
                    spans.append(Span(stage, kind, i, start, free[stage], part))
                tasks.pop(0)
    return Timeline(tuple(sorted(spans, key=lambda span: (span.stage, span.start))), max(free))


def _source(kind: Kind, virtual_stage: int, micro_batch: int) -> Work:
    """Return the pass that computes the input of a pass."""
    if kind == "weights":
        return Work("backward", virtual_stage, micro_batch)
    return Work(kind, virtual_stage + (-1 if kind == "forward" else 1), micro_batch)
