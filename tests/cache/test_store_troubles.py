"""Trouble with the store of cached layers costs time and causes one warning, never a wrong number."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cached_runs import EPOCH_START, RUNS, cached, expected_of, hit_rates, trainer_of
from distributed import run_ranks
from selection import slow
from torch import nn
from training_data import LONGEST
from training_runs import WORLD, Outcome, Run, StopAfter, assert_same_training, at_each_step, outcome_of
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.parts.prefix_cache import cache_control, cache_setup
from hf_pipetransformer.parts.prefix_cache.cache import writing
from hf_pipetransformer.parts.prefix_cache.cache.activation_files import FileReader, FileWriter
from hf_pipetransformer.parts.prefix_cache.cache.sharing import STORE
from hf_pipetransformer.run.run import PipelineRun


def warnings_of_the_cache() -> list[str]:
    """Grows from now on."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                messages.append(record.getMessage())

    for name in (cache_control.__name__, cache_setup.__name__, writing.__name__, PipelineRun.__module__):
        logging.getLogger(name).addHandler(Handler())
    return messages


TWO = {0: 2, 1: 1, 2: 1, 3: 1}
"""Frozen layers -> stages, on two processes with the same batches as the four of `RUNS`."""
Found = tuple[Outcome, list[dict[str, Any]], list[str]]


def on_two(run: Run) -> Run:
    return replace(run, per_device=2 * run.per_device)


RUN = on_two(RUNS["bert"])


def warned(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    run: Run = RUN,
    table: dict[int, int] = EPOCH_START,
    change: Callable[[PipeTransformerTrainer], None] = lambda trainer: None,
) -> Found:
    """A training, and the cache's warnings on this process."""
    messages = warnings_of_the_cache()
    trainer = trainer_of(run, TWO, table, **options)
    change(trainer)
    outcome = outcome_of(trainer)
    return outcome, [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry], list(messages)


def assert_said_once(found: list[Found], words: str) -> None:
    (messages, others) = [messages for *_, messages in found]
    assert len(messages) == 1 and words in messages[0] and others == [], messages


@pytest.mark.slow
def test_a_full_store_costs_time_only_and_is_said_once() -> None:
    """A row of 64 bytes a token: 20 KiB hold some of them."""
    found = run_ranks(warned, 2, {"activation_cache_max_gib": 20 / 2**20})
    assert_same_training([outcome for outcome, *_ in found], expected_of(RUNS["bert"], EPOCH_START))
    assert 0 < found[0][1][0]["cache_rows_stored"] < RUN.samples
    assert_said_once(found, "stores no further samples")


@pytest.mark.parametrize("trouble", ["gone", *slow("slow")])
def test_what_cannot_be_written_is_computed(
    trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system that tells of live files that they are gone; a disk that is waited for, but not for long."""
    put = FileWriter.put

    def troubled(self: FileWriter, *arguments: Any) -> int:
        if trouble == "gone":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        time.sleep(1)
        return put(self, *arguments)

    monkeypatch.setattr(FileWriter, "put", troubled)
    for name, value in (("SECONDS_TO_WAIT", 0.1), ("SHARE_TO_WAIT", 0.0), ("PENDING_BATCHES", 1)):
        monkeypatch.setattr(writing, name, value)
    run = Run(samples=48, epochs=3, accumulation=1)
    trainer = trainer_of(replace(run, per_device=WORLD * run.per_device), {0: 1, 1: 1}, {3: 1}, use_cpu=True)
    monkeypatch.setattr(writing, "PENDING_BATCHES", 1)  # `trainer_of` has other plans
    assert_same_training([outcome_of(trainer)], expected_of(run, {3: 1}))
    stored = next(entry["cache_rows_stored"] for entry in trainer.state.log_history if "cache_rows_stored" in entry)
    words = os.strerror(errno.ESTALE) if trouble == "gone" else "writing is slower than training"
    assert caplog.text.count(words) == 1 and stored < run.samples


def test_an_error_of_the_thread_that_reads_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PENDING_BATCHES", 1000)  # `trainer_of` sets it for good
    read_into = FileReader.read_into

    def failing(self: FileReader, *arguments: Any) -> list[bool]:
        if threading.current_thread().name == "activation-cache-reader":
            raise MemoryError("no memory")
        return read_into(self, *arguments)

    monkeypatch.setattr(FileReader, "read_into", failing)
    trainer = trainer_of(Run(samples=48, epochs=3, accumulation=1), {0: 1, 1: 1}, {3: 1}, use_cpu=True)
    with pytest.raises(MemoryError, match="no memory"):
        trainer.train()


# ------------------------------------------------------------------------------------ room for one generation
LIMITED = Run(epochs=7), {3: 1, 9: 2}


def limited(rank: int, world_size: int) -> tuple[float, Found]:
    """A training with room for a layer's outputs, and a little more."""
    _, epochs, _ = warned(rank, world_size, {}, on_two(Run(epochs=3)), {3: 1})
    gib = torch.tensor(1.3 * float(epochs[-1]["cache_bytes"]) / 2**30, dtype=torch.float64)
    dist.broadcast(gib, 0)
    run, table = LIMITED
    return float(gib), warned(rank, world_size, {"activation_cache_max_gib": float(gib)}, on_two(run), table)


@pytest.mark.slow
def test_a_store_for_one_generation_holds_the_latest() -> None:
    """The outputs of two layers do not fit beside those of one: these are deleted, and the store is filled anew."""
    results = run_ranks(limited, 2)
    gib, (_, epochs, _) = results[0]
    assert_same_training([outcome for _, (outcome, *_) in results], expected_of(*LIMITED))
    assert hit_rates(epochs)[-1] == (1, 0)
    batch = 8 * (LONGEST * 64 + 32)  # processes that write at the same moment may exceed it by one
    assert all(entry["cache_bytes"] <= gib * 2**30 + batch for entry in epochs)


# ------------------------------------------------------------------------------------ what may not be kept
class LeftPadded:
    """A Trainer's mixin: all rows get padding on the left after the model has been examined."""

    def create_scheduler(self, *positional: Any, **keywords: Any) -> Any:
        batches = self._pipeline_run.data  # type: ignore[attr-defined]
        inner = batches.collate_fn

        def collate(samples: list[Any]) -> dict[str, Any]:
            batch = inner(samples)
            padded = {name: nn.functional.pad(batch[name], (1, 0)) for name in ("input_ids", "attention_mask")}
            return {**batch, **padded}

        batches.use_collator(collate)
        return super().create_scheduler(*positional, **keywords)  # type: ignore[misc]


# ------------------------------------------------------------------------------------ what happens to the files
class DeletesStore(TrainerCallback):
    """All that frozen layers gave, once, when an epoch begins."""

    def __init__(self, folder: str, epoch: int) -> None:
        self.folder, self.epoch = folder, epoch

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if round(state.epoch) == self.epoch:
            if args.process_index == 0:
                for generation in Path(self.folder, STORE).glob("0*-*"):
                    shutil.rmtree(generation)
            dist.barrier()


def damage(trainer: PipeTransformerTrainer, folder: str) -> None:
    """After some steps bytes of the store are turned over or cut off."""
    draw = random.Random(0)

    def damage_some(run: PipelineRun) -> None:
        if not trainer.is_world_process_zero() or trainer.state.global_step % 4:
            return
        files = [path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size > 64]
        for path in draw.sample(sorted(files), min(len(files), 2)):
            with suppress(OSError):
                data = bytearray(path.read_bytes())
                for _ in range(8):
                    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                with path.open("r+b") as file:
                    file.write(data)
                    file.truncate(len(data) - draw.randrange(0, 64))

    at_each_step(trainer, after=damage_some)


def troubled(rank: int, world_size: int, folder: str) -> dict[str, Found]:
    """Trainings one after the other."""

    def training(name: str, **given: Any) -> Found:
        return warned(rank, world_size, {"activation_cache_dir": f"{folder}/{name}"}, **given)

    deletes = DeletesStore(f"{folder}/deleted", 3)
    return {
        "left": training("left", run=replace(RUN, trainer=LeftPadded), table={3: 1}),
        "deleted": training("deleted", table={3: 1}, change=lambda trainer: trainer.add_callback(deletes)),
        "damaged": training("damaged", change=lambda trainer: damage(trainer, f"{folder}/damaged")),
    }


@pytest.mark.slow
def test_what_happens_to_the_store_costs_time_only(tmp_path: Path) -> None:
    results = run_ranks(troubled, 2, str(tmp_path), timeout=240)
    for name, table in {"damaged": EPOCH_START, "deleted": {3: 1}}.items():
        assert_same_training([found[name][0] for found in results], expected_of(RUNS["bert"], table))
    all_found = {name: [found[name] for found in results] for name in results[0]}
    assert_said_once(
        all_found["left"], "none of an epoch's samples could be cached (possible reasons: padding on the left"
    )

    # filled in the second epoch, read in the third, deleted before the fourth
    assert hit_rates(all_found["deleted"][0][1]) == [(0, 0), (1, 0), (0, 0), (1, 0)]
    assert_said_once(all_found["deleted"], "has lost samples")

    warnings, others = (messages for *_, messages in all_found["damaged"])
    assert any("samples in the activation cache are damaged" in warning for warning in warnings), warnings
    assert others == []
    read = sum(e["cache_hit_rate"] + e["cache_older_hit_rate"] for e in all_found["damaged"][0][1])
    assert 0 < read < 3  # of 3 epochs that read: some entries were damaged, and some were not


@pytest.mark.slow
def test_two_jobs_on_one_folder(tmp_path: Path) -> None:
    """Both run at once with the same weights. They share the entries, and delete none that the other job reads."""
    run = RUNS["bert"].with_options(activation_cache_dir=str(tmp_path / "cache"))
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run_ranks, cached, 2, on_two(run), TWO, EPOCH_START) for _ in range(2)]
        outcomes = [outcome for job in jobs for outcome, _ in job.result()]
    assert_same_training(outcomes, expected_of(RUNS["bert"], EPOCH_START))
    # (their later weights may differ by rounding, and then each has a generation of its own)
    assert {path.name[:3] for path in (tmp_path / "cache" / STORE).glob("0*-*")} == {"001", "002", "003"}


def train_some(
    rank: int, world_size: int, run: Run, folder: str, stages: dict[int, int], table: dict[int, int], steps: int
) -> None:
    trainer = trainer_of(run, stages, table, folder, save_strategy="steps", save_steps=steps)
    trainer.add_callback(StopAfter(steps))
    trainer.train()


def resume(
    rank: int, world_size: int, run: Run, folder: str, stages: dict[int, int], table: dict[int, int]
) -> tuple[Outcome, list[dict[str, Any]]]:
    trainer = trainer_of(run, stages, table, folder)
    outcome = outcome_of(trainer, resume_from_checkpoint="last")
    return outcome, [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry]


@pytest.mark.slow
def test_a_warm_store_is_found_where_a_later_stage_fills_it(tmp_path: Path) -> None:
    """The first of two stages ends below the three frozen layers, and cannot see that their output is there."""
    stages, table = {0: 2, 3: 2}, {3: 3}
    run = on_two(Run(epochs=4)).with_options(activation_cache_dir=str(tmp_path / "cache"), elastic=False)
    run_ranks(train_some, 2, run, str(tmp_path / "run"), stages, table, 7)
    results = run_ranks(resume, 2, run, str(tmp_path / "run"), stages, table)
    assert_same_training([outcome for outcome, _ in results], expected_of(Run(epochs=4), table))
    new = [e for e in results[0][1] if e["step"] > 7]
    assert hit_rates(new)[-1] == (1, 0) and all(e["cache_rows_stored"] < 5 for e in new)
