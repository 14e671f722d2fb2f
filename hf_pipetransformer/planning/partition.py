"""The contiguous split of the units into stages, and the number of micro-batches.

Pure arithmetic without torch. Every rank computes the same result from the same costs without communication: sums are
exact (integers), and a fixed rule breaks ties.

    costs          4   2   2   2   6        K = 3
    split        | 4 | 2   2   2 | 6 |      largest stage 6, bounds (0, 1, 4, 5)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise

from .schedules import schedule_named

MOST_MICROBATCHES_PER_STAGE = 6
"""Upper bound on M / K if the stages fit only with more micro-batches. Beyond it, more micro-batches shorten the
bubble by less than 2% of a step."""

MICROBATCHES_PER_STAGE = 2
"""Upper bound on M / K if memory suffices. More micro-batches shorten the bubble, which is (K - 1) / (M + K - 1) of a
step, below 1 / 3 at M = 2 K. But each adds the fixed time of a forward and backward, and small micro-batches use a
device badly."""


def check_pipeline_size(world_size: int, k: int, num_units: int) -> None:
    """Check that K divides the world size and that each stage gets a unit."""
    if num_units < 1:
        raise ValueError("unit_costs is empty, but a layout needs at least 1 unit. Measure the model's costs first.")
    if k < 1 or world_size % k:
        divisors = ", ".join(str(d) for d in range(1, world_size + 1) if world_size % d == 0)
        hint = ""
        if world_size == 1:
            hint = (
                " Only one process was started. Launch several with torchrun --nproc_per_node, or accelerate launch "
                "--multi_gpu (accelerate launch --cpu starts only one)."
            )
        raise ValueError(
            f"pipeline_parallel_size is {k}, but must divide the world size {world_size}. "
            f"Set it to one of {divisors}.{hint}"
        )
    if k > num_units:
        raise ValueError(
            f"pipeline_parallel_size is {k}, but the model has {num_units} unit{'' if num_units == 1 else 's'} and"
            f" every stage needs at least one. Set it to at most {num_units}."
        )


def split_min_max(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Split units into contiguous stages, minimizing the cost of the most expensive stage.

    The load balancing of AutoPipe (PipeTransformer, ICML 2021, section 3.2). The paper goes greedily from the left;
    this function solves the problem exactly by dynamic programming over suffixes in O(K L^2).

    Among the splits with the least maximum:

    1. the least sum of squared stage costs wins, because the maximum alone does not constrain the other
       stages (one huge unit would leave the rest arbitrary);
    2. then the lexicographically least bounds win, because under 1F1B the early stages keep the
       activations of the most micro-batches and should hold fewer units.

    Both criteria use exact integer arithmetic, so the result is the same on every rank and does not depend on the
    order of additions.

    Args:
        costs: Cost of each unit in execution order, in any unit of measure; finite, not negative. `[L]`
        num_stages: Number of stages K, 1 <= K <= L.

    Returns:
        Bounds `(0, ..., L)` of length K + 1; stage s holds the units `bounds[s]` to `bounds[s + 1] - 1`,
        at least one.
    """
    num_units, prefix = len(costs), _exact_prefix_sums(costs)
    assert 1 <= num_stages <= num_units, (num_stages, num_units)

    @cache
    def largest_of(begin: int, stages: int) -> int:
        """Return the least possible cost of the largest stage of the units from `begin` on."""
        if stages == 1:
            return prefix[-1] - prefix[begin]
        cuts = range(begin + 1, num_units - stages + 2)
        return min(max(prefix[cut] - prefix[begin], largest_of(cut, stages - 1)) for cut in cuts)

    largest = largest_of(0, num_stages)

    @cache
    def squares(begin: int, stages: int) -> tuple[int, tuple[int, ...]] | None:
        """Return the least sum of squares of stages up to `largest`, and the bounds; None if there are none."""
        found: list[tuple[int, tuple[int, ...]]] = []
        for cut in range(begin + 1, num_units - stages + 2) if stages > 1 else (num_units,):
            stage = prefix[cut] - prefix[begin]
            if stage > largest:
                break
            rest = squares(cut, stages - 1) if stages > 1 else (0, ())
            if rest is not None:
                found.append((stage * stage + rest[0], (cut, *rest[1])))
        return min(found, default=None)

    best = squares(0, num_stages)
    assert best is not None
    return (0, *best[1])


def balance_holders(bounds: Sequence[int], costs: Sequence[float], held: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Move the cuts between virtual stages to balance the cost of each process.

    `split_min_max` balances virtual stages: it splits six equal units into 1 | 2 | 2 | 1. The V-shaped placement then
    gives one process two units and the other four. This function moves neighbouring cuts by one unit as long as that
    lowers the largest cost of a process, or keeps it and lowers the largest cost of a virtual stage.

    Args:
        bounds: bounds of the virtual stages, as `split_min_max` returns them.
        costs: cost of each unit, as for `split_min_max`. `[L]`
        held: for each process, the indices of its virtual stages.

    Returns:
        The bounds; as given if each process holds one virtual stage.
    """
    prefix = _exact_prefix_sums(costs)

    def largest(cuts: Sequence[int]) -> tuple[int, int]:
        parts = [prefix[stop] - prefix[start] for start, stop in pairwise(cuts)]
        return max(sum(parts[part] for part in parts_held) for parts_held in held), max(parts)

    best = tuple(bounds)
    if max(map(len, held)) == 1:
        return best
    while True:
        inner = range(1, len(best) - 1)
        moved = [
            tuple(cut + by if first <= index <= last else cut for index, cut in enumerate(best))
            for first in inner
            for last in range(first, len(best) - 1)
            for by in (-1, 1)
        ]
        moved = [cuts for cuts in moved if all(start < stop for start, stop in pairwise(cuts))]
        better = min(moved, key=largest, default=best)
        if largest(better) >= largest(best):
            return best
        best = better


def choose_num_microbatches(rows: int, num_stages: int, requested: int | None, schedule: str) -> int:
    """Choose the number of equal micro-batches into which a pipeline's batch is split.

    A schedule's buffers have one shape, so the number M divides the batch. A stage of a balanced pipeline idles for
    the share (K - 1) / (M + K - 1) of a step (PipeTransformer, ICML 2021, section 2). More micro-batches shorten this
    time, but each one is smaller and uses the device less well.

    - One stage needs no micro-batches: 1.
    - A requested number is replaced by the largest divisor of `rows` that does not exceed it.
    - Otherwise the largest divisor up to 2 K is taken: a bubble of less than a third if the samples allow it.
      1F1B needs M >= K; if no divisor lies between K and 2 K, the smallest divisor above is taken
      (13 samples in 3 stages: 13 micro-batches instead of 1), because under 1F1B more micro-batches do
      not need more memory. Other schedules need `microbatches_per_stage` x K.

    - An interleaved schedule runs rounds of equal size: with M // K rounds, only divisors that this number divides are
      considered. All multiples of K and all numbers below 2 K are among them.

    The result may still be below K (fewer samples than stages, a small request); 1F1B is then replaced by GPipe.

    Args:
        rows: Number of samples of the batch that one pipeline processes in one step, at least 1.
        num_stages: Number of stages K.
        requested: The user's number, or None to choose.
        schedule: name of the schedule.

    Returns:
        M, a divisor of `rows`.

    Raises:
        ValueError: If there is no sample or the schedule is unknown.
    """
    if rows < 1:
        raise ValueError(f"rows is {rows}, but a batch needs at least 1 sample. Check the batch size.")
    if num_stages == 1:
        return 1
    divisors = _divisors(rows, num_stages, schedule)
    if requested is not None:
        return max(d for d in divisors if d <= requested)
    least = schedule_named(schedule).microbatches_per_stage * num_stages
    chosen = max(d for d in divisors if d <= max(MICROBATCHES_PER_STAGE * num_stages, least))
    if not schedule_named(schedule).keeps_all and chosen < least:
        chosen = min((d for d in divisors if d >= least), default=divisors[-1])
    return chosen


def more_microbatches(rows: int, num_stages: int, than: int, schedule: str) -> list[int]:
    """Return the larger numbers of micro-batches to try if stages do not fit, up to 6 K, in ascending order."""
    most = MOST_MICROBATCHES_PER_STAGE * num_stages
    return [m for m in _divisors(rows, num_stages, schedule) if max(num_stages, than + 1) <= m <= most]


def _divisors(rows: int, num_stages: int, schedule: str) -> list[int]:
    divides = schedule_named(schedule).divides
    return [d for d in range(1, rows + 1) if rows % d == 0 and divides(num_stages, d)]


def _exact_prefix_sums(costs: Sequence[float]) -> list[int]:
    """Return the running sums of the costs, scaled by a common factor to integers. `[L + 1]`"""
    fractions = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(f.denominator for f in fractions))
    prefix = [0]
    for f in fractions:
        prefix.append(prefix[-1] + f.numerator * (scale // f.denominator))
    return prefix
