"""The log of a training: one line at its start, one at each change, one at its end; metrics; its model card."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from distributed import run_ranks
from one_job import run_each
from training_runs import Run, pipeline_trainer
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from hf_pipetransformer.parts.prefix_cache.cache.file_store import FileStore

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
    """Collects the values that a logger such as TensorBoard's gets."""

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
    transformers_logging.remove_handler(handler)
    card = Path(folder, "README.md")
    return handler.lines, logged.values, card.read_text() if rank == 0 else None


def test_one_line_at_the_start_at_each_change_and_at_the_end(tmp_path: Path) -> None:
    (lines, values, card), (others, *_) = run_ranks(voiced, 2, RUN, str(tmp_path), {})
    start, costs, *told, end = [text for level, text in lines if level == logging.INFO]
    changes = [text for text in told if text.startswith("Step")]
    assert "in 2 stages (2+2 layers) x 1 replica" in start and "freezing 1 layer after epoch 1, 2 in all" in start
    # (12 + (9 + 1) + (6 + 1) + 6) / 12: three forwards for each layer that trains, one for each that is stored
    assert costs.startswith("4 epochs with this policy cost about 2.9 plain epochs")
    assert [text.partition(":")[0] for text in changes] == ["Step 4", "Step 8", "Step 12"]
    assert "freezing 1 layer (bert.encoder.layer.0) and, outside of the layers, bert.embeddings" in changes[0]
    assert "2 of 4 layers frozen, 2 of them cached" in changes[2]
    # backward: (0 + 1 + 2 + 2) / 16; forward: in the third epoch 1 layer, in the fourth 2, of 4 epochs of 4
    assert "Skipped 31.2% of the layers' backward passes and 18.8% of their forward passes" in end
    # the third change counts other layers as cached, and moves no weights
    shapes = [re.findall(r"\d stages? \(\S+ layers\) x \d replicas?", text) for text in changes]
    moved = sum(before != after for before, after in filter(None, shapes))
    assert f"the layout changed {moved} time{'' if moved == 1 else 's'}." in end and moved < len(changes)
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
    assert re.search(r"\| 12 \| 3 \| 2 of 4 layers \| 2 \| \d × \d \|", card) and "hf_pipetransformer 0." in card
    assert str(tmp_path) not in card


def with_frozen_layers(rank: int, world_size: int, folder: str) -> list[str]:
    """The lines of a training in two stages with layers that the user has frozen."""
    logging.getLogger("hf_pipetransformer").setLevel(logging.NOTSET)
    transformers_logging.add_handler(handler := Lines())
    run = Run(epochs=4, samples=32, accumulation=1).with_options(log_level="info", activation_cache="on")
    model = run.build_model()
    for part in (model.bert.embeddings, *model.bert.encoder.layer[:2]):
        part.requires_grad_(False)
    pipeline_trainer(run, 2, folder, model=model).train()
    transformers_logging.remove_handler(handler)
    return [text for _, text in handler.lines]


@pytest.mark.slow
def test_the_last_line_counts_the_users_frozen_layers_that_several_stages_read(tmp_path: Path) -> None:
    lines, _ = run_ranks(with_frozen_layers, 2, str(tmp_path))
    # 2 of 4 layers in 3 of 4 epochs
    assert "were read, which skipped 38% of the layers' forward passes. Report:" in lines[-1]


WARNED: dict[str, dict[str, Any]] = {
    r"will freeze no layer.*every freeze_steps=500 steps, of 16\.": {
        "freeze_policy": "alpha",
        "freeze_strategy": "steps",
        "freeze_steps": 500,
    },
    "freeze_policy='autofreeze' has frozen no layer": {"freeze_policy": "autofreeze", "num_train_epochs": 1},
    "num_microbatches=3, but 2 are used.*divisor of 8": {"num_microbatches": 3},
}


@pytest.mark.slow
def test_what_has_no_effect_is_warned_of_once_and_what_is_chosen_is_told(tmp_path: Path) -> None:
    plain = Run(epochs=4, samples=32, accumulation=1).with_options(log_level="info")
    cases = {words: (plain, str(tmp_path / str(number)), WARNED[words]) for number, words in enumerate(WARNED)}
    chosen = plain.with_options(num_train_epochs=1), str(tmp_path / "chosen"), {"stages": "auto"}
    found = run_each(voiced, 2, {**cases, "chosen": chosen})
    for words in WARNED:
        (lines, _, _), (others, *_) = found[words]
        (warning,) = [text for level, text in lines if level == logging.WARNING]
        assert re.search(words, warning)
        assert not [text for level, text in others if level >= logging.WARNING]
    (lines, *_), _ = found["chosen"]
    assert any(text.startswith("pipeline_parallel_size='auto' is 1: ") for _, text in lines)


def without_room(rank: int, world_size: int, folder: str, name: str, mode: str) -> str | list[str]:
    """The error, or the warnings, with a file in the folder's place, or on a full disk."""
    run = RUN.with_options(activation_cache=mode, activation_cache_dir=str(Path(folder, name, "cache")))
    usable = (lambda self: 0) if name == "full" else FileStore.usable_bytes
    with mock.patch.object(FileStore, "usable_bytes", usable):
        if mode == "on":
            with pytest.raises(ValueError) as error:
                voiced(rank, world_size, run, folder, {})
            return str(error.value)
        lines, *_ = voiced(rank, world_size, run, folder, {})
    return [text for level, text in lines if level == logging.WARNING]


NO_ROOM = {
    "file": r"activation_cache_dir: the folder .* cannot be written to",
    "full": r"activation_cache_dir: the disk .* is full \(0.0 MiB may be used; .* need up to 0\.\d MiB\)",
}


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_or_is_full_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cases = {f"{name} {mode}": (str(tmp_path), name, mode) for name in NO_ROOM for mode in ("on", "auto")}
    found = run_each(without_room, 2, cases)
    for name, words in NO_ROOM.items():
        assert all(re.search(words, error) for error in found[f"{name} on"])
        (warning,), others = found[f"{name} auto"]
        assert re.search(f"The activation cache is off: {words}", warning) and others == []
