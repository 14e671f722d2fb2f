"""accelerate_configs/: what each file says, and a recipe that is launched with one of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from distributed import patient

ROOT = Path(__file__).parent.parent
FILES = ROOT / "accelerate_configs"
SAID = {  # in docs/launching.md: processes, machines, type, mixed precision
    "cpu_2": (2, 1, "MULTI_GPU", "no"),
    "cpu_4": (4, 1, "MULTI_GPU", "no"),
    "gpu_1": (1, 1, "NO", "bf16"),
    "gpu_1node": (8, 1, "MULTI_GPU", "bf16"),
    "gpu_multinode": (16, 2, "MULTI_GPU", "bf16"),
}
LAUNCH_SECONDS = 240


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


@pytest.mark.slow
def test_a_recipe_is_launched_with_its_configuration(tmp_path: Path) -> None:
    recipes, folder = ROOT / "recipes", tmp_path / "out"
    command = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={FILES / 'cpu_2.yaml'}"]
    command += [str(recipes / "run_image_classification.py"), str(recipes / "configs" / "digits.yaml")]
    command += f"--max_steps 2 --max_train_samples 64 --max_eval_samples 20 --output_dir {folder}".split()
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "ACCELERATE"))}
    output = run_and_leave_nothing(command, tmp_path, {**mine, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""})
    assert "2 stages × 1 replica" in output
    (start,) = [json.loads(line) for line in (folder / "pipeline_events.jsonl").read_text().splitlines()]
    assert (start["event"], start["pipeline_parallel_size"], start["data_parallel_size"]) == ("start", 2, 1)
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2
    assert json.loads((folder / "all_results.json").read_text())["eval_samples"] == 20
    assert (folder / "model.safetensors").is_file()


def run_and_leave_nothing(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Returns what a command printed, which must succeed; a launcher's processes do not outlive the test."""
    log = folder / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, cwd=folder)
    everyone: list[psutil.Process] = []
    try:
        code = process.wait(patient(LAUNCH_SECONDS))
    finally:
        if process.poll() is None:  # they have sessions of their own: no signal to a group reaches them all
            launcher = psutil.Process(process.pid)
            everyone = [launcher, *launcher.children(recursive=True)]
        for one in everyone:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
        print(log.read_text())
    assert code == 0
    return log.read_text()
