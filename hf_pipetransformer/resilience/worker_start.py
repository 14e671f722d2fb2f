"""Start of data loader workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerStart:
    """Initializer of a data loader's worker. It moves the worker out of the training process's process group.

    Launchers and schedulers send SIGTERM to whole process groups. If it terminated a worker, the training would fail
    before the checkpoint is saved.

    Attributes:
        init: the loader's own `worker_init_fn`, called with the worker's number.
    """

    init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)
        if self.init is not None:
            self.init(worker)
