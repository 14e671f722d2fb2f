"""A simulated training step of a pipeline: which stage computes what, and when.

1F1B, K = 2 stages, M = 3 micro-batches, a backward costs two forwards (one column a unit of time):

    stage 0   F0 F1 .  B0 B0 F2 .  B1 B1 .  B2 B2
    stage 1      F0 B0 B0 F1 B1 B1 F2 B2 B2

Each stage works through its own list in order; an entry starts when the stage is free and its input has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .partition import check_schedule


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


def order_of_work(stage: int, num_stages: int, num_microbatches: int, schedule: str) -> list[tuple[str, int]]:
    """Return what a stage does in a step, in order: ("forward" | "backward", micro-batch).

    The order is that of torch's schedules. With fewer micro-batches than stages, 1F1B has no steady state and
    equals GPipe.
    """
    check_schedule(schedule)
    m = num_microbatches
    warm_up = min(num_stages - stage, m) if schedule == "1f1b" and m >= num_stages else m
    work = [("forward", i) for i in range(warm_up)]
    for i in range(m - warm_up):
        work += [("backward", i), ("forward", warm_up + i)]
    return work + [("backward", i) for i in range(m - warm_up, m)]


def simulate(
    forward: Sequence[float], backward: Sequence[float], num_microbatches: int, schedule: str = "1f1b"
) -> Timeline:
    """Simulate one step of a pipeline whose messages take no time.

    Args:
        forward: seconds of one micro-batch's forward in each stage. `[K]`
        backward: seconds of one micro-batch's backward in each stage; 0 for a stage without backward, because it and
            all stages before it are frozen. `[K]`
        num_microbatches: M.
        schedule: "1f1b" or "gpipe".
    """
    k = len(forward)
    work = [order_of_work(stage, k, num_microbatches, schedule) for stage in range(k)]
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
