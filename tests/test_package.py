"""The published package: the wheel, built and installed offline; the oldest versions; accelerate_configs/."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from distributed import patient
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import hf_pipetransformer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(code: str, *arguments: str, cwd: Path, path: Path | None = None) -> str:
    """The output of a new process. It imports from `path` first, and not from this checkout."""
    others = [entry for entry in sys.path if entry and not Path(entry).is_relative_to(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*([str(path)] if path else []), *others])}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env=environment,
        text=True,
        capture_output=True,
        timeout=patient(120),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == hf_pipetransformer.__version__ == citation["version"]
    assert citation["license"] == PROJECT["license"]


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else_is_installed_and_runs(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling builds the package; it is part of the extra 'quality'")
    run("import sys, hatchling.build as b; b.build_wheel(sys.argv[1])", str(tmp_path), cwd=ROOT)
    wheel = next(tmp_path.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"hf_pipetransformer"}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_pipetransformer").rglob("*.py")}
    expected |= {"hf_pipetransformer/py.typed", "hf_pipetransformer/report/report.html.jinja"}
    assert {name for name in names if ".dist-info/" not in name} == expected

    target = tmp_path / "installed"
    options = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(target)]
    run("from pip._internal.cli.main import main; main()", *options, str(wheel), cwd=tmp_path)
    code = (
        "import sys, hf_pipetransformer as package; print(package.__file__);"
        "from hf_pipetransformer.cli import app; sys.argv = ['hf-pipetransformer', 'version']; app()"
    )
    file, version = run(code, cwd=tmp_path, path=target).splitlines()
    assert Path(file).is_relative_to(target) and version == PROJECT["version"]
    found: Distribution = next(iter(distributions(name="hf_pipetransformer", path=[str(target)])))
    (entry,) = [point for point in found.entry_points if point.group == "console_scripts"]
    assert (entry.name, entry.value) == ("hf-pipetransformer", "hf_pipetransformer.cli:app")
    assert found.metadata["License-Expression"] == "Apache-2.0"


# ------------------------------------------------------------------------------------------ the oldest versions
TESTED = ("recipes", "report", "sentence-transformers", "test")
"""The extras that tests need."""


def bounds() -> dict[str, Version]:
    """The lower bound of each dependency that the oldest Python can have."""
    lines = [*PROJECT["dependencies"], *(line for extra in TESTED for line in PROJECT["optional-dependencies"][extra])]
    found = {}
    for requirement in map(Requirement, lines):
        is_for_oldest = requirement.marker is None or requirement.marker.evaluate({"python_version": "3.10"})
        if is_for_oldest and canonicalize_name(requirement.name) != canonicalize_name(PROJECT["name"]):
            (found[canonicalize_name(requirement.name)],) = [
                Version(part.version) for part in requirement.specifier if part.operator == ">="
            ]
    return found


def test_the_constraints_are_the_lower_bounds() -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {canonicalize_name(name): Version(version) for name, version in pins.items()} == bounds()


def test_the_readme_says_what_is_needed() -> None:
    (said,) = re.findall(r"^Requires (.*)\. Without", (ROOT / "README.md").read_text(), re.MULTILINE)
    for name in ("torch", "transformers", "accelerate"):
        assert f"{name} ≥ {bounds()[name]}" in said
    assert f"Python ≥ {PROJECT['requires-python'].removeprefix('>=')}" in said


# ------------------------------------------------------------------------------------------ accelerate_configs/
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
