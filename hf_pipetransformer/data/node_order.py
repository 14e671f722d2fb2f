"""The order of the samples on several nodes: each node gets the same samples again in every epoch.

A node's cached outputs help only if the same samples return to this node. So the samples are divided among the nodes
once, at random, and each global batch takes its share from each node's samples:

    nodes               0  0  0  0  1  1  1  1        2 nodes of 4 processes
    samples of a batch [7  3  9  1  4  8  0  5]       7, 3, 9, 1 and 6 are node 0's for the whole training
    next epoch         [9  6  7  3  0  5  8  2]

One node keeps the ordinary order. A random partition makes batches like a global shuffle, except that the number of
samples from each part is fixed. Partitioning a file that is sorted by label in its own order would not.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

Order = Sequence[int] | npt.NDArray[np.int64]
"""Indices of samples. For 10^8 samples, an array takes 0.8 GB, and a list of Python's integers 4 to 8 GB."""


def order_by_node(order: Order, shares: Sequence[int], batch_size: int, num_samples: int, seed: int) -> Order:
    """Rearrange an epoch's order to give each node its own samples.

    Every sample is kept, as often as it occurs. When a node runs out of samples for its share of a batch, the
    remaining samples of all nodes follow, regardless of nodes.

    Args:
        order: the indices of an epoch's samples, from a sampler.
        shares: number of processes on each node; their sum divides `batch_size`.
        batch_size: samples of a global batch; the first `batch_size * shares[0] / sum(shares)` are node 0's.
        num_samples: number of samples in the data set.
        seed: seed of the partition, the same in every epoch.
    """
    if len(shares) == 1:
        return order
    world = sum(shares)
    ends = [num_samples * sum(shares[: node + 1]) // world for node in range(len(shares))]
    home = np.empty(num_samples, dtype=np.int32)  # the node of each sample
    shuffled = list(range(num_samples))
    random.Random(seed).shuffle(shuffled)
    for node, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        home[shuffled[begin:end]] = node
    samples = np.asarray(order, dtype=np.int64)
    mine = [samples[home[samples] == node] for node in range(len(shares))]
    takes = [batch_size * share // world for share in shares]
    full = min(len(own) // take for own, take in zip(mine, takes, strict=True))
    batches = [own[: full * take].reshape(full, take) for own, take in zip(mine, takes, strict=True)]
    rest = [own[full * take :] for own, take in zip(mine, takes, strict=True)]
    return np.concatenate([np.concatenate(batches, axis=1).reshape(-1), *rest])


def node_shares(nodes: Sequence[str]) -> tuple[int, ...]:
    """Return the number of processes on each node, in the order of ranks.

    Returns a single share if the nodes have different numbers of processes, or if their ranks alternate. The samples
    of a batch are then not divided by node.

    Args:
        nodes: name of each rank's node (`node_name`). The names are counted, because only `torchrun` is sure to give
            the number of processes of a node.
    """
    shares = tuple(len(list(ranks)) for _, ranks in groupby(nodes))
    return shares if len(shares) == len(set(nodes)) and len(set(shares)) == 1 else (len(nodes),)


def node_name() -> str:
    """Return the name of this process's node: host name plus `GROUP_RANK`. In tests, nodes may share a host."""
    return f"{socket.gethostname()}-{os.environ.get('GROUP_RANK', 0)}"
