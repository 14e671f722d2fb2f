"""To train needs only the dependencies of the package itself: no `datasets`, nor anything else of an extra."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import patient

ROOT = Path(__file__).parent.parent
OF_EXTRAS = ("PIL", "datasets", "evaluate", "pandas", "peft", "plotly", "pyarrow", "scipy", "sklearn")
"""What `[recipes]` and `[report]` install, and what of that transformers and accelerate import where it is there.

(`rich` and `jinja2` come with typer and torch.)
"""
SECONDS = 240


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment without these packages, for a Python process and the processes that it starts."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({OF_EXTRAS}))\n")
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "ACCELERATE"))}
    return {**mine, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "CUDA_VISIBLE_DEVICES": ""}


def output_of(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """Returns the output of a command. The command must succeed."""
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


@pytest.mark.slow
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
def test_the_readmes_example_needs_no_extra_and_prints_what_is_shown(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Started by `accelerate launch`. Measured numbers, and text that follows from them, may differ."""
    page = (ROOT / "README.md").read_text()
    code, output = (re.search(rf"^```{kind}\n(.*?)^```", page, re.M | re.S)[1] for kind in ("python", "console"))
    (tmp_path / "train.py").write_text(code)
    config = f"--config_file={ROOT / 'accelerate_configs' / 'cpu_2.yaml'}"
    command = [sys.executable, "-m", "accelerate.commands.launch", config, "train.py"]
    printed = output_of(command, {**environment, "TRANSFORMERS_VERBOSITY": "warning"}, tmp_path)
    for line in output.splitlines():  # up to the measured numbers
        fixed = re.split(r", \d of them cached| in \d+\.\d", line)[0]
        assert printed.count(fixed) == 1, fixed  # rank 0 alone prints it
