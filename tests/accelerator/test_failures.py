"""A training that fails while the device waits for a process that will not come."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import fake_device
import pytest
from distributed import run_ranks
from test_accelerator import FREEZING, QUIET, prepare
from training_runs import Run, pipeline_trainer, while_training

from hf_pipetransformer.parts.prefix_cache.cache.side_stream import Copied
from hf_pipetransformer.resilience import exit as process_exit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Fails:
    """A user's loss that raises once the cache is being filled."""

    waiting = threading.Event()

    def compute_loss(self, *positional: Any, **keywords: Any) -> Any:
        if self.waiting.is_set():
            raise KeyError("the reason")
        return super().compute_loss(*positional, **keywords)  # type: ignore[misc]


def fail(rank: int, world_size: int, library: Path) -> bool:
    prepare(world_size, library)
    options = {**QUIET, **FREEZING, "activation_cache": "on"}
    trainer = pipeline_trainer(Run(samples=48, epochs=4, accumulation=1, trainer=Fails), 1, **options)

    def wait_for_ever(self: Copied) -> Any:
        Fails.waiting.set()  # in the thread that writes
        threading.Event().wait()

    while_training(trainer, Copied, "on_host", wait_for_ever)
    with pytest.raises(KeyError, match="the reason"):
        trainer.train()
    return process_exit._has_failed


def test_the_cache_does_not_keep_a_training_that_has_failed(library: Path) -> None:
    """The cache's writer waits for the device."""
    assert run_ranks(fail, 1, library, env=fake_device.ENVIRONMENT, timeout=90) == [True]
