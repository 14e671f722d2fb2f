from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

from hf_pipetransformer.cli import app

ROOT = Path(__file__).parent.parent  # for processes of their own: the package need not be installed


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def inspect_json(*arguments: str) -> dict[str, Any]:
    result = run("inspect", *arguments, "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


# model type -> class by default, number of units, parameters in millions


def test_inspect_lists_units_stages_and_shared_parameters() -> None:
    report = inspect_json("gpt2")
    assert (report["model"], len(report["units"])) == ("GPT2LMHeadModel", 12)
    assert round(report["parameters"] / 1e6) == 124
    assert all(unit["parameters"] > 0 and unit["forward_flops_per_sample"] > 0 for unit in report["units"])
    assert list(report["stages"]) == ["1", "2", "4", "8"]
    assert all((s[0]["first_unit"], s[-1]["last_unit"]) == (0, 11) for s in report["stages"].values())
    assert report["shared_parameters"] == {"transformer.wte.weight": [0, 11]}
    albert = run("inspect", "albert").stdout
    assert "16 parameters in albert.encoder.albert_layer_groups.0.albert_layers.0  0-11" in albert


def test_inspect_takes_folder_file_and_architecture(tmp_path: Path) -> None:
    architectures = ["BertForTokenClassification"]
    AutoConfig.for_model("bert", num_hidden_layers=3, architectures=architectures).save_pretrained(tmp_path)
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        report = inspect_json(name)
        assert (report["model"], len(report["units"])) == ("BertForTokenClassification", 3)
    assert inspect_json(str(tmp_path), "--task", "question-answering")["model"] == "BertForQuestionAnswering"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["{tmp}"], 2, "unknown model .*: the folder has no config.json"),
        (["{tmp}/broken.json"], 2, "unknown model .*: its configuration cannot be read"),
        (["bert", "--task", "ctc"], 2, "no ctc model for BertConfig"),
        (["bert", "--task", "cooking"], 2, "--task is 'cooking', but must be one of auto"),
        (["bert", "--stages", "2,x"], 2, "--stages is '2,x', but must be"),
        (["no/such-model"], 2, "unknown model .*is not in the Hub.s local cache, and HF_HUB_OFFLINE is set"),
        (["brt"], 2, "Model types of a similar name: bert"),
        (["wav2vec2"], 1, "Wav2Vec2ForSequenceClassification cannot be trained as a pipeline: layerdrop=0.1"),
        (["bert", "--seq", "1000"], 1, "bert cannot be inspected: seq is 1000, but .* has 512 positions"),
        (["encodec"], 1, "encodec cannot be inspected: No dummy batch"),
        # its default configuration does not fit its own front end
        (["glmasr_encoder"], 1, r"fails on a small batch \(RuntimeError: .*Pass another --task, or a folder"),
    ],
)
def test_errors_are_one_line(arguments: list[str], exit_code: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    result = run("inspect", *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert result.exit_code == exit_code
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert re.search(message, " ".join(result.stderr.split()))
    assert "Traceback" not in result.output


def test_help_and_version_need_no_torch() -> None:
    """`--help` is typed while one waits: it takes 0.2 s of CPU time, where importing torch takes seconds."""
    code = (
        "import sys; from typer.testing import CliRunner; from hf_pipetransformer.cli import app;"
        "words = (['--help'], ['plan', '--help'], ['version']);"
        "codes = [CliRunner().invoke(app, each).exit_code for each in words];"
        "print(codes, sorted({'torch', 'transformers', 'accelerate', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[0, 0, 0] []\n"
