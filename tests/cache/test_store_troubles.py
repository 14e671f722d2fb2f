"""What goes wrong with the store of cached layers costs time, and is said once: never a wrong number."""

from __future__ import annotations

import logging
import random
import shutil
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
from test_activation_files import small_disk
from test_elastic_pipeline import StopAfter
from torch import nn
from training_data import LONGEST
from training_runs import (
    WORLD,
    Outcome,
    Run,
    assert_same_training,
    at_each_step,
    outcome_of,
    when_it_ends,
    while_training,
    with_cache_changed,
)
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.cache import writing
from hf_pipetransformer.cache.activation_cache import ActivationCache
from hf_pipetransformer.cache.sharing import STORE
from hf_pipetransformer.run import cache_control, cache_setup
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
"""Frozen layers -> stages, on two processes, whose batches are those of the four of `RUNS`."""
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
    """With what the cache has warned of on this process."""
    messages = warnings_of_the_cache()
    trainer = trainer_of(run, TWO, table, **options)
    change(trainer)
    outcome = outcome_of(trainer)
    return outcome, [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry], list(messages)


def assert_said_once(found: list[Found], words: str) -> None:
    (messages, others) = [messages for *_, messages in found]
    assert len(messages) == 1 and words in messages[0] and others == [], messages


def test_a_full_store_costs_time_only_and_is_said_once() -> None:
    """A row of 64 bytes a token: 20 KiB hold some of them."""
    found = run_ranks(warned, 2, {"activation_cache_max_gib": 20 / 2**20})
    assert_same_training([outcome for outcome, *_ in found], expected_of(RUNS["bert"], EPOCH_START))
    assert 0 < found[0][1][0]["cache_rows_stored"] < RUN.samples
    assert_said_once(found, "stores no further samples")


@pytest.mark.slow
def test_a_full_disk_costs_time_only(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk"):
        (tmp_path / "disk" / "others").write_bytes(bytes(2**20 - 50_000))
        found = run_ranks(warned, 2, {"activation_cache_dir": str(tmp_path / "disk" / "cache")})
    assert_same_training([outcome for outcome, *_ in found], expected_of(RUNS["bert"], EPOCH_START))
    assert_said_once(found, "stores no further samples")


# ------------------------------------------------------------------------------------ room for one generation
LIMITED = {"the latest": (Run(epochs=7), {3: 1, 9: 2}), "the last epoch reads": (Run(epochs=5), {3: 1, 9: 2})}


def limited(rank: int, world_size: int) -> tuple[float, dict[str, Found]]:
    """With room for what a layer gives, and a little more."""
    _, epochs, _ = warned(rank, world_size, {}, on_two(Run(epochs=3)), {3: 1})
    gib = torch.tensor(1.3 * float(epochs[-1]["cache_bytes"]) / 2**30, dtype=torch.float64)
    dist.broadcast(gib, 0)
    options = {"activation_cache_max_gib": float(gib)}
    return float(gib), {
        name: warned(rank, world_size, options, on_two(run), table) for name, (run, table) in LIMITED.items()
    }


@pytest.mark.slow
def test_a_store_for_one_generation_holds_the_latest() -> None:
    """While two layers fill it, there is no room beside what one layer gave: that makes way, and they fill it anew.

    Nothing makes way where the last epoch only reads: what one layer gave is worth more than nothing.
    """
    results = run_ranks(limited, 2)
    gib, found = results[0]
    run, table = LIMITED["the latest"]
    assert_same_training([each["the latest"][0] for _, each in results], expected_of(run, table))
    assert hit_rates(found["the latest"][1])[-1] == (1, 0)
    batch = 8 * (LONGEST * 64 + 32)  # processes that write at the same moment may exceed it by one
    assert all(entry["cache_bytes"] <= gib * 2**30 + batch for entry in found["the latest"][1])
    last = found["the last epoch reads"][1][-1]
    assert last["cache_hit_rate"] + last["cache_older_hit_rate"] > 0.95


# ------------------------------------------------------------------------------------ what may not be kept
def unreadable(rank: int, world_size: int) -> list[str]:
    """Only the output of three layers may be kept, and the first of four stages has one of its own."""
    messages: list[str] = []
    trainer = trainer_of(Run(epochs=3), {0: 4, 2: 4}, {3: 2})
    with_cache_changed(trainer, lambda cache: setattr(cache, "_allowed", [3]))

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger(cache_control.__name__)
    logger.setLevel(logging.INFO)
    logger.addHandler(Handler())
    trainer.train()
    return messages


@pytest.mark.slow
def test_a_layout_under_which_nothing_can_be_cached_is_told() -> None:
    ((message,), *others) = run_ranks(unreadable, WORLD)
    assert "of 2 frozen layers, at most the first 1 can be" in message and "fewer than 3" in message
    assert others == [[]] * 3


class LeftPadded:
    """A Trainer's mixin whose rows all get padding on the left once the model has been examined."""

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


def load_slowly(trainer: PipeTransformerTrainer, reasons: list[str | None]) -> None:
    """From a disk that takes a second for a row, though it was fast when it was tried."""
    find = ActivationCache._find

    def find_slowly(self: ActivationCache, *positional: Any) -> Any:
        found = find(self, *positional)
        return replace(found, seconds=float(sum(len(rows) for rows, _ in found.states.values())))

    while_training(trainer, cache_control.AutoCache, "_pays", lambda self: True)
    while_training(trainer, ActivationCache, "_find", find_slowly)
    when_it_ends(trainer, lambda cache: reasons.append(cache and cache.reason_off))


def troubled(rank: int, world_size: int, folder: str) -> tuple[dict[str, Found], str, set[str], set[str]]:
    """Trainings one after the other; why the cache of "slow" was off; the files of a first training and of another."""

    def training(name: str, **given: Any) -> Found:
        options = {"activation_cache_dir": f"{folder}/{name}", **given.pop("options", {})}
        return warned(rank, world_size, options, **given)

    def generations() -> set[str]:
        dist.barrier()
        return {path.name for path in Path(folder, "another", STORE).iterdir()}

    reasons: list[str | None] = []
    found = {
        "no folder": training("file/cache", options={"activation_cache": "auto"}),
        "left": training("left", run=replace(RUN, trainer=LeftPadded), table={3: 1}),
        "deleted": training(
            "deleted", table={3: 1}, change=lambda trainer: trainer.add_callback(DeletesStore(f"{folder}/deleted", 3))
        ),
        "damaged": training("damaged", change=lambda trainer: damage(trainer, f"{folder}/damaged")),
        "slow": training(
            "slow",
            table={3: 1},
            options={"activation_cache": "auto"},
            change=lambda trainer: load_slowly(trainer, reasons),
        ),
    }
    training("another")
    before = generations()
    found["another"] = training("another", run=RUN.with_options(learning_rate=1e-3))
    return found, str(reasons[-1]), before, generations()


@pytest.mark.slow
def test_what_happens_to_the_store_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    results = run_ranks(troubled, 2, str(tmp_path), timeout=240)
    tables = {"no folder": EPOCH_START, "damaged": EPOCH_START, "deleted": {3: 1}, "slow": {3: 1}}
    for name, table in tables.items():
        assert_same_training([found[name][0] for found, *_ in results], expected_of(RUNS["bert"], table))
    all_found = {name: [found[name] for found, *_ in results] for name in results[0][0]}
    rates = {name: hit_rates(found[0][1]) for name, found in all_found.items()}

    assert_said_once(all_found["no folder"], "The activation cache is off")
    assert "Not a directory" in all_found["no folder"][0][2][0]
    assert_said_once(
        all_found["left"], "none of an epoch's samples could be cached (possible reasons: padding on the left"
    )

    # filled in the second epoch, read in the third, deleted before the fourth
    assert rates["deleted"] == [(0, 0), (1, 0), (0, 0), (1, 0)]
    assert_said_once(all_found["deleted"], "has lost samples")

    warnings, others = (messages for *_, messages in all_found["damaged"])
    assert any("samples in the activation cache are damaged" in warning for warning in warnings), warnings
    assert others == []
    read = sum(e["cache_hit_rate"] + e["cache_older_hit_rate"] for e in all_found["damaged"][0][1])
    assert 0 < read < 3  # of 3 epochs that read: some entries were damaged, and some were not

    # after two epochs: the first one may have met a disk that was not in the page cache yet
    assert all("loading a sample takes 1e+03 ms" in reason for _, reason, *_ in results)
    assert rates["slow"] == [(0, 0), (1, 0), (1, 0)]

    # the same samples and layers, other weights when they freeze: nothing is found, and nothing is lost
    expected = expected_of(RUNS["bert"].with_options(learning_rate=1e-3), EPOCH_START)
    assert_same_training([outcome for outcome, *_ in all_found["another"]], expected)
    assert [rates["another"][epoch] for epoch in (0, -1)] == [(0, 0), (1, 0)]
    assert all(before < after for *_, before, after in results)


@pytest.mark.slow
def test_two_jobs_on_one_folder(tmp_path: Path) -> None:
    """At the same time, with the same weights: they share what they find, and neither deletes what the other reads."""
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


def test_resuming_finds_the_store_warm(tmp_path: Path) -> None:
    """Stopped in the third epoch: what the second has put is found again, by the weights' fingerprint."""
    run = on_two(Run(epochs=4)).with_options(activation_cache_dir=str(tmp_path / "cache"))
    run_ranks(train_some, 2, run, str(tmp_path / "run"), TWO, {3: 1}, 7)
    results = run_ranks(resume, 2, run, str(tmp_path / "run"), TWO, {3: 1})
    expected = expected_of(Run(epochs=4), {3: 1})
    assert_same_training([outcome for outcome, _ in results], expected)
    new = [e for e in results[0][1] if e["step"] > 7]
    assert new and set(hit_rates(new)) == {(1, 0)}


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
