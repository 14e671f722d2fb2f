"""`benchmarks/`: ratios are taken within a turn, and each benchmark can be started as its docstring says."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import loss_curves
import pytest
from distributed import patient

from harness import Ratio, summary_of

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").rglob("*.py") if "def main()" in path.read_text())


def test_a_ratio_is_one_of_the_same_turn_and_disturbed_ones_do_not_count() -> None:
    turns = [
        {"base": {"ms": 10.0, "others": 0.0}, "case": {"ms": 20.0, "others": 0.0}},
        {"base": {"ms": 100.0, "others": 0.0}, "case": {"ms": 300.0, "others": 0.0}},  # a slower machine
        {"base": {"ms": 10.0, "others": 0.0}, "case": {"ms": 990.0, "others": 1.5}},  # other programs ran
    ]
    slower, faster = Ratio("slower", "ms", "base"), Ratio("faster", "ms", lambda name: "base", is_speed_up=True)
    found = summary_of(turns, [slower, faster], max_others=0.1)["case"]
    assert found["slower"] == {"median": 2.5, "turns": [2.0, 3.0, 99.0], "is_disturbed": [False, False, True]}
    assert found["faster"]["median"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert found["ms"] == 300.0
    assert summary_of(turns, [slower], max_others=math.inf)["case"]["slower"]["median"] == 3.0


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_says_how_it_is_started(path: Path) -> None:
    """And can be imported, so that the names of the library that it uses exist."""
    is_study = path.parent.name == "studies"
    if path.stem == "half_frozen":
        pytest.importorskip("sentence_transformers")
    module = importlib.import_module(f"benchmarks.studies.{path.stem}" if is_study else path.stem)
    started = f"python -m benchmarks.studies.{path.stem}" if is_study else f"python benchmarks/{path.stem}.py"
    assert started in (module.__doc__ or "")


def test_the_page_names_benchmarks_that_exist() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    named = set(re.findall(r"python (?:-m )?(benchmarks[\w./]+)", page))
    files = {str(path.relative_to(ROOT)) for path in SCRIPTS}
    assert {name if name.endswith(".py") else name.replace(".", "/") + ".py" for name in named} <= files
    assert len(page.splitlines()) <= 250


ONE_CURVE = """
    import loss_curves
    loss_curves.LAYOUTS = {"K = 2": loss_curves.LAYOUTS["K = 2"]}
    loss_curves.main()
"""


@pytest.mark.slow
def test_processes_are_started_and_results_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "curves.py", str(tmp_path / "results.json")
    script.write_text(textwrap.dedent(ONE_CURVE))
    mine = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment = {**mine, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    command = [sys.executable, str(script), "--processes", "2", "--out", out]
    subprocess.run(command, env=environment, check=True, timeout=patient(280), capture_output=True)
    results = json.loads(Path(out).read_text())
    assert results["processes"] == 2 and results["versions"]["torch"]
    (lines,) = results["curves"].values()
    assert lines[-1].startswith("weights ") and len(lines) == 1 + 2 * 12, "losses, norms"
    monkeypatch.setattr(sys, "argv", ["loss_curves.py", "--compare", out, out])
    with pytest.raises(SystemExit) as end:
        loss_curves.main()
    assert end.value.code == 0 and "identical" in capsys.readouterr().out
