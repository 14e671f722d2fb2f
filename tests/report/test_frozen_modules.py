"""Modules that the user has frozen, in the log, the records, the report, the comparison and the model card."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from frozen_runs import BATCH, EPOCHS, SAMPLES, Columns, Trained, head_on_bert
from test_cli import run
from test_report import Page, the_training
from torch import nn
from transformers import TrainerCallback

from hf_pipetransformer.parts.records.files import EVENTS
from hf_pipetransformer.parts.records.model_card import section_about
from hf_pipetransformer.report.report import write_report
from hf_pipetransformer.report.words import changes, verdict

STEPS = EPOCHS * -(-SAMPLES // BATCH)


def text_of(path: Path) -> str:
    return " ".join(Page(path.read_text(encoding="utf-8")).text.split())


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]


def head_on_bert_with_dropout() -> tuple[nn.Module, Columns]:
    model, columns = head_on_bert()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model, columns


class Thaws(TrainerCallback):
    """Trains the upper half of the encoder from the second epoch on."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.epoch >= 1:
            model.bert.encoder.layer[-1].requires_grad_(True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trainings of a head on a frozen BERT: "read", with the cache, and "off", without it."""
    folder = tmp_path_factory.mktemp("frozen")
    Trained(folder / "read", head_on_bert)
    Trained(folder / "off", head_on_bert, activation_cache="off")
    return folder


def test_the_log_says_what_is_frozen_and_what_was_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_pipetransformer")
    Trained(tmp_path, head_on_bert)
    lines = [record.getMessage() for record in caplog.records]
    begin, end = (next(line for line in lines if line.startswith(word)) for word in ("Bert", "Trained"))
    assert re.search(r" in 1 stage x 1 replica; bert \(\d\d\.?\d?% of the parameters\) is frozen by you\.$", begin)
    assert "layer" not in begin, "the model is not split"
    # read in two of three epochs; all but the first batch of an epoch is not computed
    assert re.search(
        r"is frozen by you; outputs of frozen modules were read for 67% of the samples, which skipped [1-6]\d% of the"
        r" forward passes\. Report:",
        end,
    )
    assert any("100% of the samples found" in line and "of the forward pass skipped" in line for line in lines)


def test_the_records_name_the_modules(folder: Path) -> None:
    (event,) = events_of(folder / "read")
    frozen = event["frozen_modules"]
    assert frozen["names"] == ["bert"] and frozen["count"] == 1 and frozen["by"] == "you" and 0.9 < frozen["share"] < 1
    assert "num_layers" not in event
    assert event["facts"]["arguments"]["eval_frozen_modules"] is False


def test_the_report_says_what_is_frozen_and_what_was_read(folder: Path) -> None:
    training = the_training(folder / "read")
    frozen, read, speed, *_ = verdict(training)
    assert re.fullmatch(r"bert \(\d\d\.?\d?% of the parameters\) is frozen by you\.", frozen)
    assert read.startswith("Outputs of frozen modules were read for 67% of the samples, which skipped ")
    assert speed.startswith("1 × 1 (stages × replicas) trained ")
    text = text_of(write_report(folder / "read"))
    assert frozen in text and read in text
    assert "of the parameters frozen by you" in text and "of samples read from the cache" in text
    assert "of 1" not in text and "Nothing was frozen" not in text and "The layout did not change." in text
    assert "MiB moved" not in text, "a column without a number"
    cells = re.findall(r"<td>(.*?)</td>", (folder / "read" / "report.html").read_text(encoding="utf-8"))
    second = cells.index("8", cells.index("after epoch"))
    assert cells[second - 1 : second + 3] == ["2", "8", "14", "100%"], "epoch, step, samples, read"
    assert re.fullmatch(r"\d\d%", cells[second + 3]) and cells[second + 4] == "0", "skipped, stored"
    row = cells[cells.index("1–12") :][:4]
    assert any(cell.startswith("bert (") for cell in row), "in the table of layouts"


def test_the_comparison_names_the_modules(folder: Path) -> None:
    result = run("compare", str(folder / "read"), str(folder / "off"))
    assert result.exit_code == 0, result.output
    assert re.search(
        r"frozen at the end +bert \(\S+ of the parameters\) +bert \(\S+ of the parameters\)", result.stdout
    )
    assert re.search(r"samples read from the cache +67% +0%", result.stdout)
    assert "of 1" not in result.stdout
    assert "In off, the output of bert was not read from the cache: activation_cache='off'." in result.stdout
    assert re.search(r"differ in:\s+read +off\s+activation_cache +on +off\s*$", result.stdout), "and in nothing else"


def test_the_card_names_the_modules(folder: Path) -> None:
    section = section_about(folder / "read", the_training(folder / "read").name)
    assert section is not None
    assert "no policy among the arguments; bert (" in section and "of 1" not in section
    assert "forward passes of layers were read" in section


def test_dropout_is_named_with_its_remedy(tmp_path: Path) -> None:
    Trained(tmp_path, head_on_bert_with_dropout)
    why = (
        "The output of bert was not read from the cache: it draws random numbers. Set eval_frozen_modules=True to run"
        " it without dropout and to read its output."
    )
    assert why in verdict(the_training(tmp_path))
    assert why in text_of(write_report(tmp_path))


def test_modules_that_are_trained_again(tmp_path: Path) -> None:
    Trained(tmp_path, head_on_bert, callbacks=(Thaws(),))
    first, second = events_of(tmp_path)
    assert (first["event"], second["event"], second["global_step"]) == ("start", "modules", STEPS // EPOCHS)
    assert first["frozen_modules"]["names"] == ["bert"]
    assert {"bert.embeddings"} < set(second["frozen_modules"]["names"])
    training = the_training(tmp_path)
    assert training.num_layout_changes == 0
    assert "are frozen by you" in verdict(training)[0] and "bert.embeddings" in verdict(training)[0]
    _, (when, why) = changes(training)
    assert when.startswith("after step 4") and why.startswith("Now bert.embeddings") and "are frozen by you" in why


def with_adapters() -> tuple[nn.Module, Columns]:
    peft = pytest.importorskip("peft")
    model, columns = head_on_bert()
    return peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2)), columns


def test_what_peft_freezes_is_not_said_to_be_frozen_by_the_user(tmp_path: Path) -> None:
    Trained(tmp_path, with_adapters)
    frozen = events_of(tmp_path)[0]["frozen_modules"]
    assert frozen["by"] == "PEFT" and len(frozen["names"]) <= 20 < frozen["count"]
    assert re.search(
        r" and \d+ more modules \(\d\d\.?\d?% of the parameters\) are frozen by PEFT\.$",
        verdict(the_training(tmp_path))[0],
    )


def test_records_of_earlier_versions_are_read(folder: Path, tmp_path: Path) -> None:
    """Earlier records counted an unsplit model as one layer, and did not name frozen modules."""
    (event,) = events_of(folder / "read")
    del event["frozen_modules"]
    (tmp_path / EVENTS).write_text(json.dumps({**event, "num_layers": 1}) + "\n")
    assert the_training(tmp_path).layouts[0].frozen == ""
    result = run("compare", str(tmp_path), str(folder / "off"))
    assert result.exit_code == 0 and "of 1" not in result.stdout
    assert "of 1 " not in text_of(write_report(tmp_path))


@pytest.mark.parametrize(
    ("damaged", "field"),
    [
        ({"names": [], "count": 1, "share": 0.5, "by": "you"}, "frozen_modules.names"),
        ({"names": ["bert"], "count": 0, "share": 0.5, "by": "you"}, "frozen_modules.count"),
        ({"names": ["bert"], "count": 1, "share": "half", "by": "you"}, "frozen_modules.share"),
    ],
)
def test_damaged_modules_are_refused(damaged: dict[str, Any], field: str, folder: Path, tmp_path: Path) -> None:
    (event,) = events_of(folder / "read")
    (tmp_path / EVENTS).write_text(json.dumps({**event, "frozen_modules": damaged}) + "\n")
    result = run("report", str(tmp_path))
    assert result.exit_code == 2 and field in result.stderr and "Correct or remove the line." in result.stderr
