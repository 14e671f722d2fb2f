"""accelerate_configs/: what each file says. `test_core.py` launches a training with one of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

ROOT = Path(__file__).parent.parent
FILES = ROOT / "accelerate_configs"
SAID = {  # in docs/launching.md: processes, machines, type, mixed precision
    "cpu_2": (2, 1, "MULTI_GPU", "no"),
    "cpu_4": (4, 1, "MULTI_GPU", "no"),
    "gpu_1": (1, 1, "NO", "bf16"),
    "gpu_1node": (8, 1, "MULTI_GPU", "bf16"),
    "gpu_multinode": (16, 2, "MULTI_GPU", "bf16"),
}


def test_both_tables_name_the_files() -> None:
    for page in (ROOT / "docs" / "launching.md", ROOT / "recipes" / "README.md"):
        rows = [line for line in page.read_text().splitlines() if re.match(r"\| `(cpu|gpu)_", line)]
        assert [name for row in rows for name in re.findall(r"`(\w+)\.yaml`", row)] == list(SAID)
    assert {path.stem for path in FILES.iterdir()} == set(SAID)


@pytest.mark.parametrize("name", SAID)
def test_files_say_what_the_table_says(name: str) -> None:
    """Read as `accelerate launch` does, which refuses names that it does not know."""
    config = load_config_from_file(str(FILES / f"{name}.yaml"))
    assert isinstance(config, ClusterConfig) and not config.use_cpu  # that would start one process
    said = (config.num_processes, config.num_machines, config.distributed_type.value, config.mixed_precision)
    assert said == SAID[name]
    assert (config.main_process_ip is not None) == (config.num_machines > 1)
