"""The order of the samples in an epoch: drawn once, the same on every process and in a resumed job."""

from __future__ import annotations

import copy
import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import SequentialSampler

from ..logs import log_once
from ..randomness import global_states, seeded, set_global_states
from .node_order import Order, order_by_node

logger = logging.getLogger(__name__)

CHUNK = 2**20
"""Number of indices to take from a sampler at once."""
SEED = "seed"
"""Key of an order drawn from a seed rather than from the state of the global generators."""


class SampleOrder:
    """Draws the order of each epoch.

    Args:
        sampler: order of a map-style dataset's samples; None for an iterable, which has its own order.
        batch_size: number of samples in one batch, over all pipelines.
        seed: seed of all random numbers drawn while data is read.
        node_shares: number of processes on each node, if samples must stay with a node.
        agree: returns rank 0's value on every process; collective.
        draws_as_stock: let a sampler without its own generator draw from the global generators in their current state,
            which gives the stock Trainer's order. Otherwise the order depends only on seed and epoch.
    """

    def __init__(
        self,
        sampler: Iterable[int] | None,
        batch_size: int,
        seed: int = 0,
        node_shares: Sequence[int] = (1,),
        agree: Callable[[Order], Order] = lambda order: order,
        draws_as_stock: bool = False,
    ) -> None:
        self.sampler, self.batch_size, self.seed = sampler, batch_size, seed
        self._node_shares = tuple(node_shares)
        self._agree, self._draws_as_stock = agree, draws_as_stock
        self._kept: dict[int, tuple[Sequence[int], int]] = {}  # epoch begun by another job -> its `arrangement`
        self._kept_draws: dict[int, Mapping[str, Any]] = {}  # the same epoch -> source of its order
        self._drawn_from: Mapping[str, Any] = {}  # source of the current order: a seed, or global generators' states

    def aside(self) -> SampleOrder:
        """Return a copy that draws for one process alone, and leaves the source of this order as it is."""
        other = copy.copy(self)
        other._agree = lambda order: order
        return other

    def arrangement(self, epoch: int) -> tuple[Sequence[int], int]:
        """Return the nodes' shares and the global batch size that arrange the samples of an epoch."""
        return self._kept.get(epoch, (self._node_shares, self.batch_size))

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """Return the state that determines the order of an epoch, for a checkpoint, as plain values for JSON."""
        shares, rows = self.arrangement(epoch)
        return {"shares": shares, "rows": rows, "drawn_from": self._drawn_from}

    def load_state_dict(
        self, epoch: int, shares: Sequence[int], rows: int, drawn_from: Mapping[str, Any] | None = None
    ) -> None:
        """Finish an epoch that another job began, possibly on other nodes, in the order that it had there.

        Args:
            epoch: number of the epoch.
            shares: as in `state_dict`.
            rows: as in `state_dict`.
            drawn_from: as in `state_dict`; None for older checkpoints, which do not contain it.
        """
        self._kept = {epoch: (tuple(shares), rows)}
        # older versions always drew the order from the seed
        self._kept_draws = {epoch: {SEED: self.seed + epoch} if drawn_from is None else drawn_from}

    def of_epoch(self, epoch: int, num_samples: int, at_most: int | None = None) -> Order:
        """Draw the order of an epoch. Collective over all processes.

        Args:
            epoch: number of the epoch.
            num_samples: number of samples in the data set.
            at_most: number of indices to draw from the sampler, which may be endless; None for all.
        """
        order = self._agree(self._draw(epoch, at_most))
        return order_by_node(order, *self.arrangement(epoch), num_samples, self.seed)

    def _draw(self, epoch: int, at_most: int | None) -> Order:
        """Draw the sampler's order, and record its source."""
        assert self.sampler is not None
        is_first = not self._drawn_from
        self._drawn_from = self._kept_draws.get(epoch, {SEED: self.seed + epoch})
        if epoch not in self._kept_draws and self._draws_as_stock:
            before = global_states()
            order = _drawn(self.sampler, at_most)
            after = global_states()
            self._drawn_from = {name: state for name, state in before.items() if state != after[name]}
            return order
        with seeded(self._drawn_from.get(SEED, 0)):
            set_global_states(self._drawn_from)
            before = global_states()
            order = _drawn(self.sampler, at_most)
            if is_first and not self._draws_as_stock and global_states() != before:
                log_once(
                    logger,
                    logging.INFO,
                    "The sampler (%s) draws from the global random generators. On several processes they are seeded"
                    " with seed + epoch for it, so the order of the samples is not that of one process.",
                    type(self.sampler).__name__,
                )
            return order


def _drawn(sampler: Iterable[int], at_most: int | None) -> Order:
    """Return the order of a sampler, as an array if it consists of integers."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    indices, arrays = itertools.islice(sampler, at_most), [np.empty(0, dtype=np.int64)]
    while chunk := list(itertools.islice(indices, CHUNK)):
        try:
            arrays.append(np.fromiter(map(operator.index, chunk), dtype=np.int64, count=len(chunk)))
        except TypeError:  # keys of the user's dataset
            return [*np.concatenate(arrays).tolist(), *chunk, *indices]
    return np.concatenate(arrays)
