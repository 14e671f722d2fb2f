"""What a freeze policy makes of a training's cost, counted before the training begins.

epoch                        1     2     3     4        L = 6, alpha = 1/3
frozen                       0     2     4     5
read from the cache          0     0     2     4
layers' forwards and         18   14     8     4        3 for each layer that trains, 1 for each frozen one that is
backwards, in forwards                                  computed, 0 for each that is read from the cache
"""

from __future__ import annotations

from collections.abc import Sequence

from .policies import FreezeDecision, FreezePolicy, next_num_frozen

ACTIVE, FROZEN = 3, 1
"""Forwards that a layer's step costs: its backward takes about as long as two."""
WORTH_FREEZING = 1.15
"""A smaller speed-up than this is within the error of a forecast."""


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
        max_frozen: the largest number of layers that can be frozen while something is left to train.
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
    """Return the number of epochs without freezing whose layers cost as much.

    Embeddings, the head and the loading of cached outputs are not counted, and no sample is in a store beforehand.

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
