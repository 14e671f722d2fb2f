"""A simulated training step of a pipeline: which stage computes what, and when.

Each stage works through its own list in order; an entry starts when the stage is free and its input has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .schedules import schedule_of_step


@dataclass(frozen=True)
class Span:
    """The time that one stage spends on one micro-batch, in seconds from the start of the step."""

    stage: int
    kind: Literal["forward", "backward"]
    micro_batch: int
    start: float
    end: float


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
    forward: Sequence[float], backward: Sequence[float], num_microbatches: int, schedule: str = "1f1b"
) -> Timeline:
    """Simulate one step of a pipeline whose messages take no time.

    Args:
        forward: seconds of one micro-batch's forward in each stage. `[K]`
        backward: seconds of one micro-batch's backward in each stage; 0 for a stage without backward, because it and
            all stages before it are frozen. `[K]`
        num_microbatches: M.
        schedule: name of the schedule.
    """
    k = len(forward)
    order = schedule_of_step(schedule, k, num_microbatches)
    work = [order.order_of_work(stage, k, num_microbatches) for stage in range(k)]
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * k
    spans: list[Span] = []
    while any(work):
        for stage in range(k):
            while work[stage]:
                kind, i = work[stage][0]
                source = stage - 1 if kind == "forward" else stage + 1
                has_source = 0 <= source < k and (kind == "forward" or backward[stage] > 0)
                if has_source and (kind, source, i) not in done:
                    break
                start = max(free[stage], done[kind, source, i] if has_source else 0.0)
                end = start + (forward if kind == "forward" else backward)[stage]
                free[stage] = done[kind, stage, i] = end
                if kind == "forward":
                    spans.append(Span(stage, "forward", i, start, end))
                elif backward[stage] > 0:
                    spans.append(Span(stage, "backward", i, start, end))
                work[stage].pop(0)
    return Timeline(tuple(sorted(spans, key=lambda span: (span.stage, span.start))), max(free))
