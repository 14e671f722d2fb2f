"""What one process finds out for all."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch

from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.run.probed_once import threads_of_host

CORES = PROCESSES = 4


@pytest.mark.parametrize(("load", "threads"), [(PROCESSES, PROCESSES), (PROCESSES + 1, CORES - 1), (20, 1)])
def test_no_more_threads_than_other_programs_leave_cores(
    load: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(PROCESSES))
    monkeypatch.setattr(os, "cpu_count", lambda: CORES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(CORES), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (float(load), 0.0, 0.0))
    before = torch.get_num_threads()
    assert before == 1, "conftest.py"
    with threads_of_host(ProcessMesh(timedelta(seconds=1))):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == before
