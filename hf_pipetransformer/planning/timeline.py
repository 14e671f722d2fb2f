"""A simulated training step of a pipeline: which stage computes what, and when.

Each stage works through its own list in order; an entry starts when the stage is free and its input has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .schedules import Work, schedule_of_step


@dataclass(frozen=True)
class Span:
    """The time that one stage spends on one micro-batch, in seconds from the start of the step.

    Attributes:
        part: which of the stage's virtual stages works; 0 if it has only one.
    """

    stage: int
    kind: Literal["forward", "backward"]
    micro_batch: int
    start: float
    end: float
    part: int = 0


@dataclass(frozen=True)
class Timeline:
    """One simulated step.

    Attributes:
        spans: what the stages do, sorted by stage and start; a stage without backward has no backward spans.
        seconds: time until the last stage has finished.
    """

    spans: tuple[Span, ...]
    seconds: float

    @property
    def bubble(self) -> float:
        """Fraction of the stages' time in which they idle, 0 to 1."""
        stages = {span.stage for span in self.spans}
        offered = self.seconds * len(stages)
        return 1 - sum(span.end - span.start for span in self.spans) / offered if offered else 0.0


def simulate(
    forward: Sequence[float],
    backward: Sequence[float],
    num_microbatches: int,
    schedule: str = "1f1b",
    num_virtual_stages: int = 1,
) -> Timeline:
    """Simulate one step of a pipeline whose messages take no time.

    Args:
        forward: seconds of one micro-batch's forward in each virtual stage, in the model's order. `[V * K]`
        backward: seconds of one micro-batch's backward in each virtual stage; 0 for one without backward, because it
            and all before it are frozen. `[V * K]`
        num_microbatches: M.
        schedule: name of the schedule.
        num_virtual_stages: virtual stages per stage V.
    """
    last, k = len(forward) - 1, len(forward) // num_virtual_stages
    order = schedule_of_step(schedule, k, num_microbatches, num_virtual_stages)
    work = [order.order_of_work(stage, k, num_microbatches, num_virtual_stages) for stage in range(k)]
    done: dict[Work, float] = {}  # here, `Work.part` counts the virtual stages of all stages
    free = [0.0] * k
    spans: list[Span] = []
    while any(work):
        for stage in range(k):
            while work[stage]:
                kind, part, i = work[stage][0]
                here = stage + part * k
                source = Work(kind, here - 1 if kind == "forward" else here + 1, i)
                has_source = 0 <= source.part <= last and (kind == "forward" or backward[here] > 0)
                if has_source and source not in done:
                    break
                start = max(free[stage], done[source] if has_source else 0.0)
                end = start + (forward if kind == "forward" else backward)[here]
                free[stage] = done[Work(kind, here, i)] = end
                if kind == "forward" or backward[here] > 0:
                    spans.append(Span(stage, kind, i, start, end, part))
                work[stage].pop(0)
    return Timeline(tuple(sorted(spans, key=lambda span: (span.stage, span.start))), max(free))
