"""Any accelerator that torch knows may be used."""

from __future__ import annotations

from pathlib import Path

import hf_pipetransformer


def test_no_code_is_for_one_kind_of_accelerator():
    package = Path(hf_pipetransformer.__file__).parent
    files = list(package.rglob("*.py"))
    assert len(files) > 50
    found = [(file.name, word) for file in files for word in ("torch.cuda", "is_cuda") if word in file.read_text()]
    assert not found, "use torch.accelerator, or torch.get_device_module"
