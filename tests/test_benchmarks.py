"""`benchmarks/`: ratios are taken within a turn, and each benchmark can be started as its docstring says."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").rglob("*.py") if "def main()" in path.read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_says_how_it_is_started(path: Path) -> None:
    """Each benchmark can also be imported: the names that it uses exist in the library."""
    is_study = path.parent.name == "studies"
    if path.stem == "half_frozen":
        pytest.importorskip("sentence_transformers")
    module = importlib.import_module(f"benchmarks.studies.{path.stem}" if is_study else path.stem)
    started = f"python -m benchmarks.studies.{path.stem}" if is_study else f"python benchmarks/{path.stem}.py"
    assert started in (module.__doc__ or "")


def test_the_page_names_benchmarks_that_exist() -> None:
    page, evidence = ((ROOT / "docs" / folder / "benchmarks.md").read_text() for folder in ("", "evidence"))
    named = set(re.findall(r"python (?:-m )?(benchmarks[\w./]+)", page + evidence))
    files = {str(path.relative_to(ROOT)) for path in SCRIPTS}
    assert {name if name.endswith(".py") else name.replace(".", "/") + ".py" for name in named} <= files
    assert len(page.splitlines()) <= 250


def test_options_of_any_kind_are_written(tmp_path: Path) -> None:
    options = argparse.Namespace(alpha=Fraction(1, 3), model=Path("/models/bert"), out=tmp_path / "results.json")
    importlib.import_module("harness").write(options, summary={})
    written = json.loads(options.out.read_text())
    assert "1/3" in json.dumps(written) and "/models" not in json.dumps(written)
