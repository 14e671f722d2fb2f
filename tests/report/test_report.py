"""The report: its numbers equal the records', also if some records are missing, and a browser draws it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from layouts import planner_of, times_of, unit
from test_cli import run
from transformers import TrainerState

from hf_pipetransformer import PipeTransformerTrainingArguments
from hf_pipetransformer.parts.records.files import METRICS
from hf_pipetransformer.parts.records.history import Training, read_trainings
from hf_pipetransformer.parts.records.recorder import RunRecorder
from hf_pipetransformer.planning.schedules import virtual_stages_of
from hf_pipetransformer.planning.tables import MIB
from hf_pipetransformer.planning.timeline import simulate
from hf_pipetransformer.report import report
from hf_pipetransformer.report.words import changes, verdict

UNITS = tuple(unit(k) for k in range(6))
TIMES = times_of(6)
FIRST, SECOND = "2026-01-01T10:00:00.000", "2026-01-01T11:00:00.000"
FACTS = {
    "model": "BertForSequenceClassification",
    "name_or_path": "/home/me/my-bert",
    "num_parameters": 1_600_000,
    "world_size": 4,
    "global_batch_size": 16,
    "device": "cpu (x86_64)",
    "device_type": "cpu",
    "backend": "gloo",
    "threads": 1,
    "versions": {"hf_pipetransformer": "0.1", "torch": "2.13"},
    "arguments": {
        "freeze_policy": "alpha",
        "mixed_precision": "no",
        "freeze_schedule": {"1": 4},
        "learning_rate": 4e-4,
    },
}


@dataclass
class Run:
    """Writes records as a training would."""

    folder: Path
    name: str = FIRST
    schedule: str = "1f1b"

    def event(self, kind: str, step: int, stages: int, frozen: int = 0, times: Any = TIMES, **facts: Any) -> Run:
        v = virtual_stages_of(self.schedule, None)
        planner = planner_of(stages, 4, UNITS, schedule=self.schedule, virtual_pipeline_parallel_size=v, times=times)
        layout = planner.in_stages(stages, frozen)
        begins = kind in ("start", "resume")
        recorder = RunRecorder(PipeTransformerTrainingArguments(str(self.folder)))
        recorder.begin(True)
        recorder.run = self.name
        state = TrainerState(global_step=step, epoch=step / 100)
        recorder.record_event(kind, planner, layout, state, **({"facts": {**FACTS, **facts}} if begins else {}))
        return self

    def line(self, kind: str, step: int, **values: Any) -> Run:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / METRICS).open("a") as file:
            file.write(json.dumps({"kind": kind, "run": self.name, "time": 0.0, "global_step": step, **values}) + "\n")
        return self

    def steps(self, begin: int, end: int, seconds_each: float, every: int = 10) -> Run:
        """Steps `begin` + 1 to `end`, and a loss of 1 / step."""
        for step in range(begin + every, end + 1, every):
            seconds = {"steps": every * seconds_each, "batches": 0.25}
            self.line("time", step, steps=every, rows=every * 16, seconds=seconds)
            self.line("log", step, values={"loss": 1 / step, "learning_rate": 1e-4, "grad_norm": 2.0})
        return self

    def usage(self, step: int, m: int | None) -> Run:
        return self.line("usage", step, resident_bytes=[MIB] * 4, device_peak_bytes=[], num_microbatches=m)

    def end(self, step: int, has_ended: bool = True) -> Run:
        return self.line("end", step, has_ended=has_ended)


def elastic_run(folder: Path) -> Run:
    """4 x 1 for 50 steps, 2 x 2 with two frozen layers for 50 more."""
    first = Run(folder).event("start", 0, 4).steps(0, 50, 0.2).usage(50, 4)
    return first.event("transform", 50, 2, 2).steps(50, 100, 0.1).usage(100, 8).end(100)


def the_training(folder: Path) -> Training:
    (training,) = read_trainings(folder)
    return training


class Page(HTMLParser):
    """The parts of a page that a browser would draw."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: dict[str, dict[str, Any]] = {}
        self.links: list[str] = []
        self.text = ""
        self._script: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        attributes = dict(attrs)
        self.links += [attributes[name] for name in ("src", "href") if name in attributes]
        self._script = attributes.get("id", "") if tag in ("script", "style") else None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text += data
        elif self._script.startswith("data-"):
            self.figures[self._script.removeprefix("data-")] = json.loads(data)

    def handle_endtag(self, tag: str) -> None:
        self._script = None


def page_of(folder: Path) -> Page:
    return Page(report.write_report(folder).read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------ text
def test_the_verdict_compares_with_the_first_layout_and_each_change_has_a_reason(tmp_path: Path) -> None:
    """50 steps of 16 rows in 11.25 s, then 50 in 6.25 s; without freezing all 100 would have taken 22.5 s."""
    elastic_run(tmp_path).line("log", 100, values={"eval_accuracy": 0.91})
    training = the_training(tmp_path)
    gain, taken, rival, quality = verdict(training)
    first = "4 × 1, nothing frozen, measured in 50 steps"
    assert gain.startswith(f"1.29 times as fast as its own first layout ({first}), preparation left out")
    assert taken.startswith("Steps and changes of layout took 17.5 s") and "would have taken 22.5 s" in taken
    assert "78% of the steps" in rival
    assert quality == "Accuracy at the end: 0.91."
    page = page_of(tmp_path)
    assert gain in " ".join(page.text.split())
    start, (when, shorter) = changes(training)
    assert start == ("at the start", "4 × 1 (stages × replicas).")
    assert when == "after step 50 (epoch 0.5)" and "after step 50" in page.text
    assert shorter.startswith("2 more layers froze by freeze_policy='alpha', 2 in all; the pipeline became shorter")
    assert "4 × 1 → 2 × 2" in shorter


@pytest.mark.parametrize(
    ("steps", "seconds", "why"),
    [
        (9, [0.2] * 9, "the first layout had only 9 steps"),
        (20, [0.4] + [0.1] * 19, "its first 1 step took 4.0 times as long as the others (warm-up)"),
        (20, [0.12] + [0.1] * 19, None),
    ],
)
def test_a_factor_that_rests_on_few_steps_or_on_warm_up_is_doubted(
    steps: int, seconds: list[float], why: str | None, tmp_path: Path
) -> None:
    first = Run(tmp_path).event("start", 0, 4)
    for step, taken in enumerate(seconds, 1):
        first.line("time", step, steps=1, rows=16, seconds={"steps": taken})
    first.event("transform", steps, 2, 2).steps(steps, 100 + steps, 0.1).end(100 + steps)
    sentences = verdict(the_training(tmp_path))
    assert f"measured in {steps} steps" in sentences[0]
    doubts = [sentence for sentence in sentences if sentence.startswith("This factor is uncertain")]
    assert len(doubts) == (why is not None) and (why or "") in "".join(doubts)


def test_only_changes_of_k_r_and_cuts_count_as_changes_of_the_layout(tmp_path: Path) -> None:
    """Four events after the start: of these one freezes only, and one counts layers as cached."""
    some = elastic_run(tmp_path).event("transform", 60, 2, 3).event("cache", 80, 2, 3).event("transform", 90, 1, 3)
    some.steps(100, 120, 0.1).end(120)
    training = the_training(tmp_path)
    assert len(training.layouts) == 5
    moved = sum(a.event["stage_bounds"] != b.event["stage_bounds"] for a, b in pairwise(training.layouts))
    assert training.num_layout_changes == moved == 2
    text = report.write_report(tmp_path).read_text(encoding="utf-8")
    assert "The layout changed 2 times (K, R or the cuts between stages)." in text
    events = re.findall(r"<tr><td>(start|transform|freeze|cache)</td>", text)
    assert events == ["start", "transform", "freeze", "cache", "transform"]


# ------------------------------------------------------------------------------------------ records
def test_steps_that_were_done_again_count_once(tmp_path: Path) -> None:
    Run(tmp_path).event("start", 0, 4).steps(0, 80, 0.2).event("transform", 80, 2, 2).steps(80, 90, 0.1).end(90, False)
    Run(tmp_path, SECOND).event("resume", 50, 4).steps(50, 100, 0.3).usage(100, 4).end(100)
    training = the_training(tmp_path)
    assert [(e["event"], e["global_step"]) for e in training.events] == [("start", 0), ("resume", 50)]
    steps, losses = training.curve("loss")
    assert steps == list(range(10, 101, 10)) and losses == [1 / step for step in steps]
    assert training.repeated_steps == 40 and training.calls == 2 and training.is_complete
    assert training.seconds["steps"] == pytest.approx(80 * 0.2 + 10 * 0.1 + 50 * 0.3)  # all that was spent
    assert sum(layout.steps for layout in training.layouts) == 100
    assert any("40 steps were done again" in problem for problem in training.problems)


def test_the_trainers_own_state_stands_in(tmp_path: Path) -> None:
    """The report on a folder of an earlier version, or of another Trainer: losses, and words on the missing rest."""
    (folder := tmp_path / "checkpoint-20").mkdir()
    history = [{"step": step, "loss": 2.0, "epoch": 1.0} for step in range(5, 21, 5)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history, "global_step": 20}))
    assert the_training(tmp_path).curve("loss") == ([5, 10, 15, 20], [2.0] * 4)
    page = page_of(tmp_path)
    assert set(page.figures) == {"loss"}
    assert "time and memory are not known" in page.text and "layouts and frozen layers are not known" in page.text


# ------------------------------------------------------------------------------------------ charts
def test_each_figure_shows_the_recorded_numbers(tmp_path: Path) -> None:
    elastic_run(tmp_path).line("log", 100, values={"eval_accuracy": 0.9, "eval_loss": 0.4, "eval_runtime": 3.0})
    drawn = page_of(tmp_path).figures

    def traces(name: str) -> dict[str, dict[str, Any]]:
        return {trace["name"]: trace for trace in drawn[name]["data"] if "name" in trace}

    assert traces("layers")["trained"]["y"] == [6, 6, 4, 4]
    assert traces("layers")["frozen (forward only)"]["y"] == [0, 0, 2, 2]
    assert traces("shape")["K stages"]["x"] == [0, 50, 50, 100]
    assert traces("shape")["K stages"]["y"] == [4, 4, 2, 2]
    assert traces("shape")["R replicas"]["y"] == [1, 1, 2, 2]
    assert traces("shape")["M micro-batches"]["y"] == [4, 4, 8, 8]
    assert traces("loss")["training"]["y"] == [1 / step for step in range(10, 101, 10)]
    assert traces("loss")["evaluation"]["y"] == [0.4]
    assert set(traces("quality")) == {"accuracy"}
    assert traces("speed")["between two log entries"]["y"][::2] == pytest.approx([160 / 2.25] * 5 + [160 / 1.25] * 5)
    assert set(traces("memory")) == {"measured"}, "of the process: the stage's prediction is no match"
    assert traces("memory")["measured"]["y"] == [1.0] * 8
    assert traces("memory")["measured"]["x"] == ["4 × 1"] * 4 + ["2 × 2, 2 frozen"] * 4
    lasting = sum(sum(trace["x"]) for trace in drawn["time"]["data"])
    assert lasting == pytest.approx(10 + 5 + 10 * 0.25)


def test_the_step_is_that_of_the_simulation(tmp_path: Path) -> None:
    stages, virtual, schedule = 2, 2, "zbv"
    Run(tmp_path, schedule=schedule).event("start", 0, stages).steps(0, 20, 0.2).end(20)
    (layout,) = the_training(tmp_path).layouts
    prediction = layout.prediction
    assert prediction is not None
    m = prediction["num_microbatches"]
    timeline = simulate(prediction["forward"], prediction["backward"], m, schedule, virtual)
    bars = {trace["name"]: trace for trace in page_of(tmp_path).figures["step"]["data"]}
    names = ["forward", "backward", "backward of weights"]
    assert [len(bars[name]["x"]) for name in names] == [stages * virtual * m] * len(names)
    ends = [a + b for name in names for a, b in zip(bars[name]["base"], bars[name]["x"], strict=True)]
    assert max(ends) == pytest.approx(1e3 * timeline.seconds)
    assert bars["waiting (bubble)"]["x"] == pytest.approx([1e3 * timeline.seconds] * stages)


def test_cache_hits_or_why_there_are_none(tmp_path: Path) -> None:
    metrics = {"cache_hit_rate": 0.0, "cache_older_hit_rate": 0.0, "cache_rows_stored": 160, "cache_bytes": MIB}
    some = elastic_run(tmp_path / "hits").line("log", 60, values=metrics)
    assert "160 samples were put into it" in page_of(some.folder).text
    some.line("log", 100, values={**metrics, "cache_hit_rate": 0.75})
    bars = page_of(some.folder).figures["cache"]["data"]
    assert bars[0]["x"] == [60, 100] and bars[0]["y"] == [0.0, 0.75]
    off = elastic_run(tmp_path / "off").line("cache_off", 100, reason="loading takes longer")
    assert "because loading takes longer" in page_of(off.folder).text
    none = Run(tmp_path / "none").event("start", 0, 4).steps(0, 20, 0.2).end(20)
    assert "No layer was frozen" in page_of(none.folder).text


def test_the_page_needs_no_network_tells_no_path_and_takes_nothing_for_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    elastic_run(tmp_path).line("log", 100, values={f"eval_{evil}": 1.0})
    path = report.write_report(tmp_path)
    page = Page(text := path.read_text())
    assert page.links == [] and path.stat().st_size < 2.5 * MIB
    assert "my-bert" in page.text and "/home/me" not in page.text
    assert "<script>alert" not in text and "prefers-color-scheme: dark" in text
    assert evil in page.figures["quality"]["data"][0]["name"]


# ------------------------------------------------------------------------------------------ the command
def test_the_command_prints_the_path_or_what_to_pass(tmp_path: Path) -> None:
    elastic_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    given, mine = str(tmp_path / "run"), tmp_path / "new" / "my.html"
    result = run("report", given)
    assert result.exit_code == 0 and result.stdout.strip() == str(tmp_path / "run" / "report.html")
    assert "1.29 times as fast as its own first layout" in result.stderr
    assert run("report", given, "--output", str(mine)).exit_code == 0 and mine.is_file()
    for arguments, words in (
        ((str(tmp_path / "missing"),), "Pass the output_dir of a training run"),
        ((str(tmp_path / "empty"),), "Pass the output_dir of a training run"),
        ((given, "--output", str(tmp_path)), "Pass a file path"),
        ((given, "--output", str(tmp_path / "file" / "x.html")), "Pass another --output"),
    ):
        result = run("report", *arguments)
        assert result.exit_code == 2 and words in result.stderr


def test_two_trainings_are_compared(tmp_path: Path) -> None:
    """17.5 s of ours and 30 s of the stock Trainer's. The stock Trainer's steps have no times."""
    elastic_run(tmp_path / "ours").line("log", 100, values={"eval_accuracy": 0.9})
    history = [
        *({"step": step, "loss": 1.0} for step in (50, 100)),
        {"step": 100, "eval_accuracy": 0.92, "train_runtime": 30.0, "train_samples_per_second": 1600 / 30},
    ]
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "trainer_state.json").write_text(json.dumps({"log_history": history, "global_step": 100}))
    file = tmp_path / "both.html"
    result = run("compare", str(tmp_path / "ours"), str(tmp_path / "plain"), "--output", str(file))
    assert result.exit_code == 0, result.output
    assert re.search(r"seconds in all +17\.5 +30\.0 +1\.71", result.stdout)
    assert re.search(r"samples/s, all in +91\.4 +53\.3 +0\.58", result.stdout)
    said = "ours took 17.5 s and plain 30.0 s: ours was 1.71 times as fast, and its accuracy is 0.02 lower."
    assert said in result.stdout
    assert "The arguments of plain were not recorded" in result.stdout
    page = Page(file.read_text())
    assert said in page.text and "4 × 1 → 2 × 2" in page.text
    assert file.read_text().index('id="comparison"') < file.read_text().index('id="losses-over-time"')
    assert len(re.findall(r"times as fast|× \d+\.\d", page.text)) == 1, "one speed-up: that over the other training"
    assert len(re.findall(r"times as fast|× \d+\.\d", page_of(tmp_path / "ours").text)) == 1, "over the first layout"
    curves = {trace["name"]: trace for trace in page.figures["losses-over-time"]["data"]}
    assert curves["plain, training"]["x"] == [15, 30] and curves["ours, training"]["x"][-1] == pytest.approx(17.5)
    assert run("compare", str(tmp_path / "ours"), str(tmp_path / "nothing")).exit_code == 2


def evaluated(folder: Path, metrics: dict[str, float], samples: int = 200, **facts: Any) -> Path:
    """A training that ends with an evaluation of so many samples, in 0.5 s."""
    speed = {"eval_runtime": 0.5, "eval_samples_per_second": samples / 0.5}
    run_ = Run(folder).event("start", 0, 2, **facts).steps(0, 100, 0.1)
    run_.line("log", 100, values={**{f"eval_{name}": value for name, value in metrics.items()}, **speed}).end(100)
    return folder


EVIDENCE = [
    # 5 of 200: sqrt(2 * 0.9 * 0.1 / 200) = 0.03
    (
        {"accuracy": 0.9},
        {"accuracy": 0.875},
        200,
        "of 0.025 is within the standard error of 200 evaluation samples (0.03",
    ),
    ({"accuracy": 0.9}, {"accuracy": 0.85}, 200, "is less than 2 standard errors of 200 evaluation samples"),
    ({"accuracy": 0.9}, {"accuracy": 0.8}, 200, None),
    ({"accuracy": 0.9}, {"accuracy": 0.9}, 200, None),
    ({"accuracy": 0.9012}, {"accuracy": 0.8991}, 200, None),  # no whole number of samples: of tokens, perhaps
    ({"f1": 0.9}, {"f1": 0.895}, 200, None),
    ({"balanced_accuracy": 0.9}, {"balanced_accuracy": 0.895}, 200, None),
    ({"accuracy": 0.9}, {"accuracy": 0.9}, 100, "of 200 and 100 evaluation samples: not the same data"),
]


@pytest.mark.parametrize(("mine", "other", "samples", "said"), EVIDENCE)
def test_accuracies_within_their_standard_error_are_no_evidence(
    mine: dict[str, float], other: dict[str, float], samples: int, said: str | None, tmp_path: Path
) -> None:
    a, b = evaluated(tmp_path / "a", mine), evaluated(tmp_path / "b", other, samples)
    result = run("compare", str(a), str(b), "--output", str(tmp_path / "both.html"))
    assert result.exit_code == 0, result.output
    doubts = [line for line in result.stdout.splitlines() if "evaluation samples" in line]
    assert len(doubts) == (said is not None) and (said or "") in "".join(doubts)
    assert said is None or doubts[0] in Page((tmp_path / "both.html").read_text()).text


def test_settings_that_differ_are_listed(tmp_path: Path) -> None:
    arguments: dict[str, Any] = FACTS["arguments"]  # type: ignore[assignment]
    a = evaluated(tmp_path / "a", {})
    b = evaluated(
        tmp_path / "b",
        {},
        world_size=2,
        device="NVIDIA H100",
        model="GPT2LMHeadModel",
        global_batch_size=8,
        versions={"hf_pipetransformer": "0.1", "torch": "2.12"},
        arguments={**arguments, "learning_rate": 1e-4, "eval_frozen_modules": True},
    )
    result = run("compare", str(a), str(b), "--output", str(tmp_path / "both.html"))
    listed = [
        re.split(r"  +", line) for line in result.stdout.partition("The trainings also differ in:")[2].splitlines()
    ]
    assert [row for row in listed if len(row) == 3 and row[0]] == [
        ["model", "BertForSequenceClassification", "GPT2LMHeadModel"],
        ["processes", "4", "2"],
        ["device", "cpu (x86_64)", "NVIDIA H100"],
        ["global batch", "16", "8"],
        ["torch", "2.13", "2.12"],
        ["learning_rate", "0.0004", "0.0001"],
    ], "and not an argument that only one of them has recorded"
    assert "What else differs" in (tmp_path / "both.html").read_text()
    same = run("compare", str(a), str(evaluated(tmp_path / "c", {})))
    assert same.exit_code == 0 and "differ in" not in same.stdout


def test_short_trainings_and_long_preparations_are_doubted(tmp_path: Path) -> None:
    short = Run(tmp_path / "short").event("start", 0, 2).steps(0, 8, 0.1, every=4).end(8).folder
    slow = Run(tmp_path / "slow").event("start", 0, 2)
    slow.line("time", 0, steps=0, rows=0, seconds={"preparing": 9.0}).steps(0, 100, 0.1).end(100)
    result = run("compare", str(short), str(slow.folder))
    assert "The factor is uncertain: short has only 8 steps" in result.stdout
    assert "slow spent 9.0 of its 21.5 s before the first step" in result.stdout
