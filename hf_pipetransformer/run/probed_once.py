"""What one process finds out for all: on a lazily loaded model, where K processes would read K times the same files.

    process 0      probes, with the threads of all processes of its host    | tells
    the others     wait                                                     | are told

All processes have the same weights (`weights_in_checkpoint`), the same samples and the same code, so each would find
the same. Every process probes a model in memory, as it is there already, and one that will not be split, because its
loss may contain collectives of all processes (`TrainingJob.is_probed_once`).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from ..pipeline.mesh import ProcessMesh

T = TypeVar("T")


def found_by_each(mesh: ProcessMesh, once: bool, probe: Callable[[], T]) -> list[T]:
    """Call a function that finds something out, and return what was found. Collective over all processes.

    Args:
        mesh: the processes.
        once: whether only process 0 calls it.
        probe: what is called; it must not contain collectives, and its result must be picklable.

    Returns:
        What each process has found, beginning with process 0; what process 0 has found alone with `once`.

    Raises:
        Exception: as `ProcessMesh.failing_together`.
    """
    mine: T | None = None
    told = b""
    with mesh.failing_together():
        if not once:
            mine = probe()
        elif mesh.rank == 0:
            with threads_of_host(mesh):
                mine = probe()
        told = pickle.dumps(mine)
    return [pickle.loads(theirs) for theirs in mesh.gather_objects(told)[: 1 if once else None]]


@contextmanager
def threads_of_host(mesh: ProcessMesh) -> Iterator[None]:
    """Inside, this process computes with the threads of all processes of its host, but no more than it has cores."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = before * int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size))
    torch.set_num_threads(max(before, min(wanted, cores)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
