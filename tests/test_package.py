"""What is published: a wheel and a source distribution, built and installed without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
import yaml
from distributed import patient

import hf_pipetransformer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(code: str, *arguments: str, cwd: Path, path: Path | None = None) -> str:
    """The output of a new process: what `path` holds is found first, and nothing of this checkout."""
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
