"""What goes wrong with the store of cached layers costs time, and is said once: never a wrong number."""

from __future__ import annotations

import logging
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from cached_runs import EPOCH_START, RUNS, SHRINK, cached, expected_of, hit_rates, trainer_of
from distributed import run_ranks
from test_activation_files import small_disk
from test_cache_doubts import augmented
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
    with_cache_changed,
)
from transformers import TrainerCallback

from hf_pipetransformer.cache import writing
from hf_pipetransformer.cache.activation_cache import ActivationCache
from hf_pipetransformer.cache.sharing import STORE
from hf_pipetransformer.run import cache_control
from hf_pipetransformer.run.run import PipelineRun


def warnings_of_the_cache() -> list[str]:
    """Grows from now on."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                messages.append(record.getMessage())

    for name in (cache_control.__name__, writing.__name__, PipelineRun.__module__):
        logging.getLogger(name).addHandler(Handler())
    return messages


def warned(
    rank: int, world_size: int, run: Run, table: dict[int, int], options: dict[str, Any]
) -> tuple[Outcome, list[dict[str, Any]], list[str]]:
    """With what the cache has warned of on this process."""
    messages = warnings_of_the_cache()
    return *cached(rank, world_size, run, SHRINK, table, **options), messages


def test_a_full_store_costs_time_only_and_is_said_once() -> None:
    """A row of 64 bytes a token: 20 KiB hold some of them."""
    run = RUNS["bert"]
    results = run_ranks(warned, WORLD, run, EPOCH_START, {"activation_cache_max_gib": 20 / 2**20})
    expected = expected_of(run, EPOCH_START)
    assert_same_training([outcome for outcome, *_ in results], expected)
    stored = [e["cache_rows_stored"] for e in results[0][1]]
    assert 0 < stored[0] < run.samples
    ((warning,), *others) = [messages for *_, messages in results]
    assert "stores no further samples" in warning and others == [[], [], []]


@pytest.fixture(scope="module")
def gib_for_one_generation(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Room for what a layer gives, and a little more."""
    folder = str(tmp_path_factory.mktemp("unlimited"))
    unlimited = run_ranks(cached, WORLD, Run(epochs=3), SHRINK, {3: 1}, folder=folder)
    return 1.3 * float(unlimited[0][1][-1]["cache_bytes"]) / 2**30


@pytest.mark.slow
def test_a_store_for_one_generation_holds_the_latest(gib_for_one_generation: float) -> None:
    """While two layers fill it, there is no room beside what one layer gave: that makes way, and they fill it anew."""
    run, table, gib = Run(epochs=7), {3: 1, 9: 2}, gib_for_one_generation
    results = run_ranks(cached, WORLD, run, SHRINK, table, activation_cache_max_gib=gib)
    expected = expected_of(run, table)
    assert_same_training([outcome for outcome, _ in results], expected)
    assert hit_rates(results[0][1])[-1] == (1, 0)
    batch = 4 * (LONGEST * 64 + 32)  # processes that write at the same moment may exceed it, each by one
    assert all(entry["cache_bytes"] <= gib * 2**30 + (WORLD - 1) * batch for entry in results[0][1])


@pytest.mark.slow
def test_nothing_makes_way_where_nothing_more_is_put(gib_for_one_generation: float) -> None:
    """The last epoch only reads: what one layer gave is worth more than nothing."""
    run, table = Run(epochs=5), {3: 1, 9: 2}
    results = run_ranks(cached, WORLD, run, SHRINK, table, activation_cache_max_gib=gib_for_one_generation)
    last = results[0][1][-1]
    assert last["cache_hit_rate"] + last["cache_older_hit_rate"] > 0.95


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
        inner = batches._keying_collate_fn.inner

        def collate(samples: list[Any]) -> dict[str, Any]:
            batch = inner(samples)
            padded = {name: nn.functional.pad(batch[name], (1, 0)) for name in ("input_ids", "attention_mask")}
            return {**batch, **padded}

        batches._keying_collate_fn.inner = collate
        return super().create_scheduler(*positional, **keywords)  # type: ignore[misc]


@pytest.mark.slow
def test_a_reason_is_given_where_nothing_can_be_kept() -> None:
    run = replace(RUNS["bert"], trainer=LeftPadded)
    results = run_ranks(warned, WORLD, run, {3: 1}, {})
    (warning,) = results[0][2]
    assert "none of an epoch's samples could be cached (possible reasons: padding on the left" in warning


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    run = RUNS["bert"]
    folder = str(tmp_path / "file" / "cache")
    options = {"activation_cache_dir": folder, "activation_cache": "auto"}
    results = run_ranks(warned, WORLD, run, EPOCH_START, options)
    expected = expected_of(run, EPOCH_START)
    assert_same_training([outcome for outcome, *_ in results], expected)
    ((warning,), *others) = [messages for *_, messages in results]
    assert "The activation cache is off" in warning and "Not a directory" in warning and others == [[], [], []]


@pytest.mark.slow
def test_a_full_disk_costs_time_only(tmp_path: Path) -> None:
    run = RUNS["bert"]
    with small_disk(tmp_path / "disk"):
        (tmp_path / "disk" / "others").write_bytes(bytes(2**20 - 50_000))
        folder = str(tmp_path / "disk" / "cache")
        results = run_ranks(warned, WORLD, run, EPOCH_START, {"activation_cache_dir": folder})
    assert_same_training([outcome for outcome, *_ in results], expected_of(run, EPOCH_START))
    ((warning,), *others) = [messages for *_, messages in results]
    assert "stores no further samples" in warning and others == [[], [], []]


@pytest.mark.slow
def test_images_that_change_under_a_full_store() -> None:
    """A part of the rows is kept: that none of them is found again must end it, too."""
    options = {"activation_cache_max_gib": 60 / 2**20}
    with_cache = run_ranks(augmented, WORLD, "on", options)
    without = run_ranks(augmented, WORLD, "off", {})
    assert_same_training([outcome for outcome, *_ in with_cache], without[0][0])
    stored = with_cache[0][1][0]["cache_rows_stored"]
    assert 0.1 * 83 < stored < 0.8 * 83
    assert all("0 were found" in str(reason) for *_, reason in with_cache)


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


def losing(
    rank: int, world_size: int, run: Run, folder: str, epoch: int
) -> tuple[Outcome, list[dict[str, Any]], list[str]]:
    messages = warnings_of_the_cache()
    trainer = trainer_of(run, SHRINK, {3: 1}, activation_cache_dir=folder)
    trainer.add_callback(DeletesStore(folder, epoch))
    outcome = outcome_of(trainer)
    return outcome, [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry], messages


@pytest.mark.slow
def test_a_store_that_is_deleted_is_filled_anew(tmp_path: Path) -> None:
    """Filled in the second epoch, read in the third, deleted before the fourth."""
    run = Run(epochs=6)
    results = run_ranks(losing, WORLD, run, str(tmp_path / "cache"), 3)
    assert_same_training([outcome for outcome, *_ in results], expected_of(run, {3: 1}))
    assert hit_rates(results[0][1]) == [(0, 0), (1, 0), (0, 0), (1, 0)]
    ((warning,), *others) = [messages for *_, messages in results]
    assert "has lost samples" in warning and others == [[], [], []]


def loading_slowly(rank: int, world_size: int, run: Run) -> tuple[Outcome, str | None, list[dict[str, Any]]]:
    """From a disk that takes a second for a row, though it was fast when it was tried."""
    cache_control.AutoCache._pays = lambda self: True  # type: ignore[method-assign]
    find = ActivationCache._find

    def find_slowly(self: ActivationCache, *positional: Any) -> Any:
        found = find(self, *positional)
        return replace(found, seconds=float(sum(len(rows) for rows, _ in found.states.values())))

    ActivationCache._find = find_slowly  # type: ignore[method-assign]
    trainer = trainer_of(run, SHRINK, {3: 1}, activation_cache="auto")
    reasons: list[str | None] = []
    when_it_ends(trainer, lambda cache: reasons.append(cache and cache.reason_off))
    outcome = outcome_of(trainer)
    return outcome, reasons[-1], [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry]


@pytest.mark.slow
def test_loading_that_turns_out_slow_ends() -> None:
    """After two epochs: the first one may have met a disk that was not in the page cache yet."""
    run = Run(epochs=6)
    results = run_ranks(loading_slowly, WORLD, run)
    assert_same_training([outcome for outcome, *_ in results], expected_of(run, {3: 1}))
    assert {reason is not None and "loading a sample takes 1e+03 ms" in reason for _, reason, _ in results} == {True}
    assert hit_rates(results[0][2]) == [(0, 0), (1, 0), (1, 0)]


@pytest.mark.slow
def test_a_folder_of_another_training_is_not_believed(tmp_path: Path) -> None:
    """The same samples and layers, other weights when they freeze: nothing is found, and nothing is lost."""
    folder = str(tmp_path / "cache")
    first = RUNS["bert"].with_options(activation_cache_dir=folder)
    second = first.with_options(learning_rate=1e-3)
    run_ranks(cached, WORLD, first, SHRINK, EPOCH_START)
    before = {path.name for path in Path(folder, STORE).iterdir()}
    results = run_ranks(cached, WORLD, second, SHRINK, EPOCH_START)
    expected = expected_of(RUNS["bert"].with_options(learning_rate=1e-3), EPOCH_START)
    assert_same_training([outcome for outcome, _ in results], expected)
    assert [hit_rates(results[0][1])[epoch] for epoch in (0, -1)] == [(0, 0), (1, 0)]
    assert before < {path.name for path in Path(folder, STORE).iterdir()}


def damaging(rank: int, world_size: int, run: Run, folder: str) -> tuple[Outcome, list[dict[str, Any]], list[str]]:
    """After some steps bytes of the store are turned over or cut off."""
    messages = warnings_of_the_cache()
    trainer = trainer_of(run, SHRINK, EPOCH_START, activation_cache_dir=folder)
    draw = random.Random(rank)

    def damage(run: PipelineRun) -> None:
        if rank or trainer.state.global_step % 4:
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

    at_each_step(trainer, after=damage)
    outcome = outcome_of(trainer)
    return outcome, [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry], messages


@pytest.mark.slow
def test_a_damaged_store_costs_time_only(tmp_path: Path) -> None:
    run = RUNS["bert"]
    results = run_ranks(damaging, WORLD, run, str(tmp_path / "cache"))
    expected = expected_of(run, EPOCH_START)
    assert_same_training([outcome for outcome, *_ in results], expected)
    (warnings, *others) = [messages for *_, messages in results]
    assert any("samples in the activation cache are damaged" in warning for warning in warnings), warnings
    assert others == [[], [], []]
    found = sum(e["cache_hit_rate"] + e["cache_older_hit_rate"] for e in results[0][1])
    assert 0 < found < 3  # of 3 epochs that read: some entries were damaged, and some were not


@pytest.mark.slow
def test_two_jobs_on_one_folder(tmp_path: Path) -> None:
    """At the same time, with the same weights: they share what they find, and neither deletes what the other reads."""
    run = RUNS["bert"].with_options(activation_cache_dir=str(tmp_path / "cache"))
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run_ranks, cached, 2, run, {0: 2, 1: 1, 2: 1, 3: 1}, EPOCH_START) for _ in range(2)]
        outcomes = [outcome for job in jobs for outcome, _ in job.result()]
    assert_same_training(outcomes, expected_of(replace(RUNS["bert"], per_device=2), EPOCH_START))
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
    run = Run(epochs=4)
    cache = str(tmp_path / "cache")
    run = run.with_options(activation_cache_dir=cache)
    run_ranks(train_some, WORLD, run, str(tmp_path / "run"), SHRINK, {3: 1}, 7)
    results = run_ranks(resume, WORLD, run, str(tmp_path / "run"), SHRINK, {3: 1})
    expected = expected_of(Run(epochs=4), {3: 1})
    assert_same_training([outcome for outcome, _ in results], expected)
    new = [e for e in results[0][1] if e["step"] > 7]
    assert new and set(hit_rates(new)) == {(1, 0)}


@pytest.mark.slow
def test_a_warm_store_is_found_where_a_later_stage_fills_it(tmp_path: Path) -> None:
    """The first of two stages ends below the three frozen layers, and cannot see that their output is there."""
    stages, table = {0: 2, 3: 2}, {6: 3}  # of six steps an epoch
    run = Run(epochs=6).with_options(activation_cache_dir=str(tmp_path / "cache"), elastic=False)
    run_ranks(train_some, 2, run, str(tmp_path / "run"), stages, table, 14)
    results = run_ranks(resume, 2, run, str(tmp_path / "run"), stages, table)
    expected = expected_of(Run(epochs=6, per_device=2), table)
    assert_same_training([outcome for outcome, _ in results], expected)
    new = [e for e in results[0][1] if e["step"] > 14]
    assert hit_rates(new)[-1] == (1, 0) and all(e["cache_rows_stored"] < 5 for e in new)
