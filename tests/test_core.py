"""To train needs nothing but what the package itself depends on: no `datasets`, nor anything else of an extra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from core_job import RUN, TABLE
from distributed import patient, run_ranks
from training_runs import assert_same_training, freezing_reference

ROOT = Path(__file__).parent.parent
JOB = ROOT / "tests" / "core_job.py"
OF_EXTRAS = ("PIL", "datasets", "evaluate", "pandas", "peft", "plotly", "pyarrow", "scipy", "sklearn")
"""What `[recipes]` and `[report]` install, and what of that transformers and accelerate import where it is there.

(`rich` and `jinja2` come with typer and torch.)
"""
SECONDS = 240
MOST = 0.9
"""Of the samples that are found in the third epoch: one that loses a race for a place in the store is found later."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Each Python that is started in it finds none of these packages, and nor do the processes that it starts."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({OF_EXTRAS}))\n")
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "ACCELERATE"))}
    return {**mine, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "CUDA_VISIBLE_DEVICES": ""}


def output_of(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """Returns what a command printed, which must succeed."""
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        timeout=patient(SECONDS),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_each_module_but_the_reports_figures_is_imported_without_the_extras(
    environment: dict[str, str], tmp_path: Path
) -> None:
    package = ROOT / "hf_pipetransformer"
    files = [path for path in package.rglob("*.py") if path.stem not in ("__init__", "figures")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    code = f"import importlib\nfor name in {modules}:\n    importlib.import_module(name)\n"
    code += (
        "import hf_pipetransformer\nfor name in hf_pipetransformer.__all__:\n    getattr(hf_pipetransformer, name)\n"
    )
    code += f"import sys\nprint('found:', [name for name in {OF_EXTRAS} if sys.modules[name] is not None])"
    assert "found: []" in output_of([sys.executable, "-c", code], environment, tmp_path)


@pytest.mark.slow
def test_freezing_and_the_cache_need_no_extra(environment: dict[str, str], tmp_path: Path) -> None:
    """As the documentation starts it: by `accelerate launch` with a file of accelerate_configs/."""
    folder, stages = tmp_path / "run", 2
    (expected,) = run_ranks(freezing_reference, 1, RUN, TABLE)
    accelerate = ["-m", "accelerate.commands.launch", f"--config_file={ROOT / 'accelerate_configs' / 'cpu_2.yaml'}"]
    output_of([sys.executable, *accelerate, str(JOB), str(stages), str(folder)], environment, tmp_path)
    outcome = torch.load(folder / "outcome.pt", weights_only=False)
    assert_same_training([outcome], expected)
    assert outcome.notes["cache"][-1]["cache_older_hit_rate"] >= MOST
    start, *_, last = [json.loads(line) for line in (folder / "pipeline_events.jsonl").read_text().splitlines()]
    assert start["pipeline_parallel_size"] == stages and last["num_cached_layers"] == 2
