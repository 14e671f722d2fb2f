"""What a training says: one line at its start, one at each change, one at its end; metrics; its model card."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks, run_ranks_expecting_error
from training_runs import Run, pipeline_trainer
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from hf_pipetransformer.run import cache_setup

RUN = Run(epochs=4, samples=32, accumulation=1).with_options(
    freeze_policy="schedule", freeze_schedule={1: 1, 2: 2}, activation_cache="on", log_level="info"
)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("hf_pipetransformer"):
            self.lines.append((record.levelno, record.getMessage().removeprefix("hf_pipetransformer: ")))


class Logged(TrainerCallback):
    """What a logger such as that of TensorBoard is given."""

    def __init__(self) -> None:
        self.values: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        self.values.append(dict(logs))


def voiced(
    rank: int, world_size: int, run: Run, folder: str, options: dict[str, Any]
) -> tuple[list[tuple[int, str]], list[dict[str, Any]], str | None]:
    logging.getLogger("hf_pipetransformer").setLevel(logging.NOTSET)  # as in any script (`distributed`)
    transformers_logging.add_handler(handler := Lines())
    trainer = pipeline_trainer(run, **{"stages": 2, "folder": folder, **options})
    trainer.add_callback(logged := Logged())
    trainer.train()
    trainer.create_model_card()
    card = Path(folder, "README.md")
    return handler.lines, logged.values, card.read_text() if rank == 0 else None


def test_one_line_at_the_start_at_each_change_and_at_the_end(tmp_path: Path) -> None:
    (lines, values, card), (others, *_) = run_ranks(voiced, 2, RUN, str(tmp_path), {})
    start, costs, *told, end = [text for level, text in lines if level == logging.INFO]
    changes = [text for text in told if text.startswith("Step")]
    assert [text.partition(" (")[0].partition("; ")[0] for text in told if text not in changes] == [
        "The output of the first layer is stored for later epochs",
        "Epoch 2, cache: 32 samples stored",
        "The output of the first 2 layers is stored for later epochs",
        "Epoch 3, cache: 100% of the samples found",
    ]
    assert start == (
        "BertForSequenceClassification in 2 stages (2+2 layers) x 1 replica; 4 micro-batches of 2 samples, schedule"
        " 1f1b; freezing 1 layer after epoch 1, 2 in all after epoch 2; cache: on."
    )
    # (12 + (9 + 1) + (6 + 1) + 6) / 12: three forwards for each layer that trains, one for each that is stored
    assert costs.startswith("4 epochs with this policy cost about 2.9 plain epochs")
    assert [text.partition("; 2 stages")[0].partition("; nothing")[0] for text in changes] == [
        "Step 4: freezing 1 layer (bert.encoder.layer.0) and, outside of the layers, bert.embeddings; 1 of 4 layers"
        " frozen",
        "Step 8: freezing 1 layer (bert.encoder.layer.1); 2 of 4 layers frozen, 1 of them cached",
        "Step 12: 2 of 4 layers frozen, 2 of them cached",
    ]
    # backward: (0 + 1 + 2 + 2) / 16; forward: in the third epoch 1 layer, in the fourth 2, of 4 epochs of 4
    assert "Skipped 31.2% of the layers' backward passes and 18.8% of their forward passes" in end
    assert "Trained 16 steps in" in end and f"Report: hf-pipetransformer report {tmp_path}" in end
    assert not [text for level, text in others if level >= logging.INFO]

    # what `report_to` gets
    layouts = [entry for entry in values if "pipeline_parallel_size" in entry]
    assert [entry["num_frozen_layers"] for entry in layouts] == [0, 1, 2, 2]
    assert all(entry["step_seconds"] > 0 for entry in layouts[1:])
    skipped = [entry["cache_layers_skipped"] for entry in values if "cache_layers_skipped" in entry]
    assert skipped == [0, 0.25]  # the second: at the older boundary, where cache_hit_rate is 0

    assert card is not None and "## Pipeline, freezing and cache" in card
    assert "policy `schedule` (freeze_schedule={'1': 1, '2': 2}" in card and "up to 50% of an epoch's" in card
    assert re.search(r"\| 12 \| 3 \| 2 of 4 \| 2 \| \d × \d \|", card) and "hf_pipetransformer 0." in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"freeze_policy": "alpha", "num_train_epochs": 1}, "freeze_policy='alpha' will freeze no layer"),
        (
            {"freeze_policy": "alpha", "freeze_strategy": "steps", "freeze_steps": 500},
            r"will freeze no layer.*every freeze_steps=500 steps, of 16\.",
        ),
        ({"freeze_policy": "schedule", "freeze_schedule": {"9": 2}}, "will freeze no layer"),
        ({"freeze_policy": "autofreeze", "num_train_epochs": 1}, "freeze_policy='autofreeze' has frozen no layer"),
        ({"num_microbatches": 3}, r"num_microbatches=3, but 2 are used.*divisor of 8"),
    ],
)
def test_what_has_no_effect_is_warned_of_once(options: dict[str, Any], warned: str, tmp_path: Path) -> None:
    plain = Run(epochs=4, samples=32, accumulation=1).with_options(log_level="info")
    (lines, _, _), (others, *_) = run_ranks(voiced, 2, plain, str(tmp_path), options)
    (warning,) = [text for level, text in lines if level == logging.WARNING]
    assert re.search(warned, warning)
    assert not [text for level, text in others if level >= logging.WARNING]


def test_what_is_chosen_is_told(tmp_path: Path) -> None:
    plain = Run(epochs=1, samples=8, accumulation=1).with_options(log_level="info")
    (lines, *_), _ = run_ranks(voiced, 2, plain, str(tmp_path), {"stages": "auto"})
    assert any(text.startswith("pipeline_parallel_size='auto' is 1: ") for _, text in lines)


def without_a_folder(rank: int, world_size: int, folder: str, mode: str) -> list[str]:
    blocked = Path(folder, "file")
    blocked.touch()
    run = RUN.with_options(activation_cache=mode, activation_cache_dir=str(blocked / "cache"))
    lines, *_ = voiced(rank, world_size, run, folder, {})
    return [text for level, text in lines if level == logging.WARNING]


def test_a_folder_that_cannot_be_written_to_is_told_at_the_start(tmp_path: Path) -> None:
    for error in run_ranks_expecting_error(without_a_folder, 2, str(tmp_path), "on"):
        assert isinstance(error, ValueError)
        assert "activation_cache_dir: the folder" in str(error) and "cannot be written to" in str(error)
    first, second = run_ranks(without_a_folder, 2, str(tmp_path), "auto")
    assert len(first) == 1 and "The activation cache is off: activation_cache_dir: the folder" in first[0]
    assert second == []


class Disk:
    def __init__(self, usable: int) -> None:
        self.usable = usable

    def why_unwritable(self) -> str | None:
        return None

    def usable_bytes(self) -> int | None:
        return self.usable


@pytest.mark.parametrize(("usable", "needed", "is_full"), [(0, None, True), (3, 100, True), (50, 100, False)])
def test_a_full_disk(usable: int, needed: int | None, is_full: bool) -> None:
    mib = 2**20
    store: Any = Disk(usable * mib)
    found = cache_setup._trouble_with(store, Path("folder"), needed and needed * mib)
    assert (found is not None) == is_full
    if found is not None:
        assert f"({usable:.1f} MiB may be used" in found and ("need up to 100.0 MiB" in found) == bool(needed)
