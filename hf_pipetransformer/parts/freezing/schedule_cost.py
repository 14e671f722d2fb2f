"""The cost of a training under a freeze policy, counted before the training begins.

epoch                        1     2     3     4        L = 6, alpha = 1/3
frozen                       0     2     4     5
read from the cache          0     0     2     4
layers' forwards and         18   14     8     4        3 for each trained layer, 1 for each frozen layer that is
backwards, in forwards                                  computed, 0 for each layer read from the cache
"""

from __future__ import annotations

from collections.abc import Sequence

from .policies import FreezeDecision, FreezePolicy, next_num_frozen

ACTIVE, FROZEN = 3, 1
"""Cost of a layer's step in forwards: its backward takes about as long as two forwards."""
WORTH_FREEZING = 1.15
"""Smallest speed-up that counts; smaller ones are within the error of a forecast."""


def frozen_in_epochs(
    policy: FreezePolicy,
    num_layers: int,
    max_frozen: int,
    num_epochs: int,
    steps_per_epoch: int,
    max_frozen_layers: int | None = None,
) -> list[int]:
    """Return the number of frozen layers in each epoch, if decisions are made when epochs begin.

    Args:
        policy: a policy that needs no gradients.
        num_layers: L.
        max_frozen: the largest number of layers that can be frozen while some parameters stay trainable.
        num_epochs: number of epochs.
        steps_per_epoch: optimizer steps in an epoch.
        max_frozen_layers: the user's upper bound.
    """
    frozen = [0]
    for epoch in range(num_epochs):
        decision = FreezeDecision(
            epoch, num_layers, frozen[-1], float(epoch), epoch * steps_per_epoch, None, max_frozen
        )
        frozen.append(next_num_frozen(policy, decision, max_frozen_layers))
    return frozen[1:]


def plain_epochs(frozen: Sequence[int], num_layers: int, caches: bool) -> float:
    """Return the number of epochs without freezing that cost as much, counting layers only.

    Embeddings, the head and the loading of cached outputs are not counted. The cache is empty at the start.

    Args:
        frozen: number of frozen layers in each epoch.
        num_layers: L.
        caches: whether frozen layers' outputs are cached.
    """
    total, before = 0, 0
    for number in frozen:
        cached = min(before, number) if caches else 0
        total += ACTIVE * (num_layers - number) + FROZEN * (number - cached)
        before = number
    return total / (ACTIVE * num_layers)
