"""How much memory a stage may be planned to fill."""

from __future__ import annotations

import psutil
import torch

from hf_pipetransformer.pipeline.devices import USABLE_MEMORY, fits, memory_budget

CPU = torch.device("cpu")


def test_processes_of_a_host_share_its_memory(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    available = psutil.virtual_memory().available
    assert memory_budget(CPU, 4) <= available / 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the launcher knows better
    budget = memory_budget(CPU, 4)
    assert budget is not None and 0.5 * available * USABLE_MEMORY / 2 < budget < 1.5 * available * USABLE_MEMORY / 2


def test_unknown_devices_have_no_budget():
    assert memory_budget(torch.device("meta"), 1) is None


def test_a_model_that_was_made_on_the_cpu_fits_there():
    assert fits(2**60, CPU)
