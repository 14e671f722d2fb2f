"""The records of a training for the report: complete, also after an interruption, and never in the training's way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks
from model_zoo import MODELS
from training_data import PadCollator, TrainingData
from transformers import TrainerCallback, TrainerState

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.parts.records.files import EVENTS, METRICS

SAMPLES, BATCH = 13, 4  # the last batch of an epoch has one row


def train(folder: Path, *callbacks: TrainerCallback, resume: bool = False, **options: Any) -> PipeTransformerTrainer:
    arguments = PipeTransformerTrainingArguments(
        str(folder),
        num_train_epochs=3,
        report_to="none",
        disable_tqdm=True,
        **{"per_device_train_batch_size": BATCH, "logging_steps": 2, "save_strategy": "no", **options},
    )
    data = TrainingData("text-classification", SAMPLES)
    trainer = PipeTransformerTrainer(
        MODELS["bert-classification"].build(),
        arguments,
        train_dataset=data,
        eval_dataset=data,
        data_collator=PadCollator("text-classification"),
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def lines_of(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


class Interrupt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_all_steps_rows_and_logged_numbers_are_there(tmp_path: Path) -> None:
    trainer = train(tmp_path, eval_strategy="epoch", save_strategy="epoch", learning_rate=1e-3)
    times = lines_of(tmp_path, "time")
    assert sum(line["steps"] for line in times) == trainer.state.global_step == 12
    assert sum(line["rows"] for line in times) == 3 * SAMPLES
    spent = {what for line in times for what in line["seconds"]}
    assert spent >= {"preparing", "steps", "batches", "adapting", "evaluating", "saving", "ending"}
    logged = [line["values"] for line in lines_of(tmp_path, "log")]
    history = [{k: v for k, v in entry.items() if k != "step"} for entry in trainer.state.log_history]
    assert logged == history
    lines = lines_of(tmp_path)
    assert lines[-1]["kind"] == "end" and lines[-1]["has_ended"]
    # each second is counted once: the sum is the clock's
    by_the_clock = lines[-1]["time"] - times[0]["time"] + sum(times[0]["seconds"].values())
    assert sum(sum(line["seconds"].values()) for line in times) == pytest.approx(by_the_clock, abs=0.05)


def test_an_interrupted_training_leaves_its_record_and_a_resumed_one_adds_to_it(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Interrupt(7), save_strategy="steps", save_steps=4)
    before = lines_of(tmp_path)
    assert before[-1]["kind"] == "end" and not before[-1]["has_ended"] and before[-1]["global_step"] == 7
    assert sum(line["steps"] for line in before if line["kind"] == "time") == 7
    train(tmp_path, resume=True, save_strategy="steps", save_steps=4)
    after = lines_of(tmp_path)[len(before) :]
    assert sum(line["steps"] for line in after if line["kind"] == "time") == 12 - 4
    assert {line["run"] for line in after}.isdisjoint(line["run"] for line in before)


def elastic(rank: int, world_size: int, folder: str) -> None:
    train(
        Path(folder),
        per_device_train_batch_size=2,
        pipeline_parallel_size=2,
        freeze_policy="schedule",
        freeze_schedule={1: 1},
        num_microbatches=2,
    )


def test_two_processes(tmp_path: Path) -> None:
    """M is known to the last stage only, rows to every pipeline, memory to each process."""
    run_ranks(elastic, 2, str(tmp_path))
    layouts = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    assert [event["event"] for event in layouts][:2] == ["start", "transform"]
    assert {event["run"] for event in layouts} == {line["run"] for line in lines_of(tmp_path)}
    facts = layouts[0]["facts"]
    assert facts["model"] == "BertForSequenceClassification" and facts["world_size"] == 2
    assert facts["arguments"]["freeze_schedule"] == {"1": 1} and "facts" not in layouts[1]
    usages = lines_of(tmp_path, "usage")
    assert usages[0]["num_microbatches"] == 2 and usages[-1]["global_step"] == 12
    assert all(len(usage["resident_bytes"]) == 2 for usage in usages)
    assert sum(line["rows"] for line in lines_of(tmp_path, "time")) == 3 * SAMPLES
