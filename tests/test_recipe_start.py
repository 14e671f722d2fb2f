"""What all recipes share when they are started: their help, and how an error reaches the launcher."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("run_*.py"))


def start(recipe: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbour = {"run_trl": "trl", "run_sentence_embeddings": "sentence_transformers"}.get(recipe.stem)
    if neighbour is not None:
        pytest.importorskip(neighbour)
    monkeypatch.setattr(sys, "argv", [str(recipe), *arguments])
    runpy.run_path(str(recipe), run_name="__main__")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_an_error_is_written_where_the_launcher_reads_it(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    data = [] if recipe.stem == "run_image_classification" else ["--generated_data", "8"]
    wrong = [*data, "--freeze_policy", "alpha", "--freeze_alpha", "2", "--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match="freeze_alpha=2"):
        start(recipe, *wrong, monkeypatch=monkeypatch)
    assert "freeze_alpha=2" in json.loads(file.read_text())["message"]["message"]
