"""How much memory a stage may be planned to fill."""

from __future__ import annotations

from pathlib import Path

import torch

import hf_pipetransformer
from hf_pipetransformer.pipeline.devices import USABLE_MEMORY, fits, memory_budget, peak_memory

CPU = torch.device("cpu")


def test_any_accelerator_tells_its_memory(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (600, 1000))
    device = torch.device("xpu")
    assert memory_budget(device, 1) == int(1000 * USABLE_MEMORY)
    assert fits(539, device) and not fits(541, device) and fits(2**60, CPU)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 77)
    assert peak_memory(device) == 77 and peak_memory(CPU) is None


def test_no_code_is_for_one_kind_of_accelerator():
    package = Path(hf_pipetransformer.__file__).parent
    files = list(package.rglob("*.py"))
    assert len(files) > 50
    found = [(file.name, word) for file in files for word in ("torch.cuda", "is_cuda") if word in file.read_text()]
    assert not found, "use torch.accelerator, or torch.get_device_module"
