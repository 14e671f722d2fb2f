"""Commands of a newcomer: docs/get_started.md, the README's example, the files in launchers/."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed import run_ranks
from transformers import BertConfig, BertForSequenceClassification
from typer.testing import CliRunner

from hf_pipetransformer.cli import app

import generated_data

ROOT = Path(__file__).parent.parent
LAUNCHERS = ROOT / "launchers"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small BERT with a tokenizer in a folder, in place of one on the hub."""
    tokenizer = generated_data.build_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def recipe(rank: int, world_size: int, folder: str, arguments: Sequence[str]) -> dict[str, float]:
    import run_glue

    os.chdir(folder)
    return run_glue.main([*arguments])


@pytest.mark.slow
def test_the_commands_of_the_first_ten_minutes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "get_started.md"
    done = []
    for words in commands("".join(blocks(page, "bash")).replace("$MODEL", str(model))):
        match words:
            case ["python", "recipes/generated_data.py", *rest]:
                generated_data.main(rest)
                assert (tmp_path / "train.csv").read_text().startswith("sentence,label\n")
            case ["hf-pipetransformer", *rest]:
                result = CliRunner().invoke(app, rest)
                assert result.exit_code == 0, result.output
            case ["accelerate", "launch", "--config_file", file, "recipes/run_glue.py", *rest]:
                assert yaml.safe_load((ROOT / file).read_text())["num_processes"] == 2
                results, _ = run_ranks(recipe, 2, str(tmp_path), [*rest, "--max_train_samples", "256"], timeout=240)
                assert results["eval_accuracy"] > 0.3
            case _:
                pytest.fail(f"the test does not know {words}")
        done.append(words[0])
    assert done == ["python", "hf-pipetransformer", *["accelerate"] * 2, *["hf-pipetransformer"] * 2]
    assert "FROZEN" in (tmp_path / "outputs" / "frozen" / "report.html").read_text().upper()
    (prediction,) = blocks(page, "python")
    exec(compile(prediction, "predict.py", "exec"), {})


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    """The code cells run one after the other, in this test's own working directory."""
    pytest.importorskip("plotly")
    notebook = json.loads((ROOT / "recipes/freeze_and_cache.ipynb").read_text())
    scope: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "commit it without outputs"
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), scope)
    assert scope["skipped"] == [0, 0.5, 0.75]  # filled, read behind two layers while three are filled, behind three
    assert scope["report"].is_file() and "2 of 4" in Path("notebook_output/README.md").read_text()


def shell_parts() -> dict[str, str]:
    """The shell commands of each file that start the training."""
    job = yaml.safe_load((LAUNCHERS / "trainjob.yaml").read_text())
    sky = yaml.safe_load((LAUNCHERS / "skypilot.yaml").read_text())
    return {
        "slurm.sh": (LAUNCHERS / "slurm.sh").read_text(),
        "trainjob.yaml": job["spec"]["trainer"]["command"][-1],
        "skypilot.yaml": sky["setup"] + sky["run"],
    }


def recipe_arguments(name: str) -> list[str]:
    if name != "ray_train.py":
        (words,) = [words for words in commands(shell_parts()[name]) if "recipes/run_glue.py" in words]
        return words[words.index("recipes/run_glue.py") + 1 :]
    scope: dict[str, Any] = {"__name__": "ray_train", "__file__": str(LAUNCHERS / name)}
    exec((LAUNCHERS / name).read_text(), scope)
    return scope["ARGUMENTS"]


@pytest.mark.parametrize("name", sorted(path.name for path in LAUNCHERS.iterdir()))
def test_launchers_start_a_recipe_that_takes_their_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    import run_glue
    from common import parse_arguments

    monkeypatch.chdir(ROOT)
    _, data, training = parse_arguments(
        [*recipe_arguments(name), "--pipeline_parallel_size", "1"], run_glue.DataTrainingArguments
    )  # this process is alone
    assert (data.task_name, training.resume_from_checkpoint) == ("sst2", "last")
    assert f"`launchers/{name}`" in (ROOT / "docs" / "schedulers.md").read_text()
    if name in shell_parts():
        checked = subprocess.run(["bash", "-n"], input=shell_parts()[name], text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr


def test_the_slurm_file_is_the_one_of_the_guide() -> None:
    (shown,) = [block for block in blocks(ROOT / "docs" / "multi_node.md", "bash") if "#SBATCH" in block]
    file = (LAUNCHERS / "slurm.sh").read_text()
    without_comment = re.sub(r"^# .*\n", "", file, flags=re.MULTILINE)
    assert without_comment == shown
