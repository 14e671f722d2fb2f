"""Trainings with cached layers: as without a cache, and as one process with the same freeze points."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_runs import EPOCH_START, MID_EPOCH, RUNS, SHRINK, cached, expected_of, hit_rates, trainer_of
from distributed import run_ranks
from one_job import run_each
from safetensors.torch import load_file
from selection import slow
from training_runs import (
    WORLD,
    Outcome,
    Run,
    assert_same_training,
    at_each_step,
    largest_difference,
    outcome_of,
    with_cache_changed,
)
from transformers import TrainerCallback

from hf_pipetransformer.cache.activation_cache import CacheCounts
from hf_pipetransformer.cache.content_keys import KEYS_NAME
from hf_pipetransformer.pipeline.placed import Ways
from hf_pipetransformer.run import cache_control
from hf_pipetransformer.run.run import PipelineRun


def cached_and_changed(
    rank: int, world_size: int, run: Run, stages: dict[int, int], table: dict[int, int], looks_early: bool = False
) -> tuple[Outcome, list[dict[str, Any]], list[tuple[int, int]], int]:
    """With the changes as they are logged, and how many layers count as cached in the end."""
    if looks_early:
        cache_control.EARLY_STEPS = 1
    trainer = trainer_of(run, stages, table)
    counts: list[int] = []
    at_each_step(trainer, after=lambda run: counts.append(run.pipeline.current_plan.num_cached_layers))
    outcome = outcome_of(trainer)
    history = trainer.state.log_history
    changes = [(entry["step"], entry["num_cached_layers"]) for entry in history if "transform_seconds" in entry]
    return outcome, [entry for entry in history if "cache_hit_rate" in entry], changes, counts[-1]


REPLICAS = {0: 1, 1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("streamed", SHRINK),
        *slow(("vit", SHRINK), ("gpt2-tied", REPLICAS)),
    ],
)
def test_cached_training_equals_one_process(name: str, stages: dict[int, int]) -> None:
    """Epoch 2 fills the store, epoch 3 reads it and fills it anew, ..., epochs 5 and 6 only read.

    An epoch that fills the store for more layers reads it for fewer: an early look must see that as hits.
    """
    run = RUNS[name]
    results = run_ranks(cached_and_changed, WORLD, run, stages, EPOCH_START, looks_early=stages is REPLICAS)
    expected = expected_of(run, EPOCH_START)
    assert_same_training([outcome for outcome, *_ in results], expected)
    torch.testing.assert_close(results[0][0].losses, expected.losses, rtol=0, atol=1e-5)
    _, epochs, changes, num_cached = results[0]
    assert hit_rates(epochs) == [(0, 0), (0, 1), (0, 1), (1, 0)]
    assert [e["cache_rows_stored"] for e in epochs] == pytest.approx([run.samples] * 3 + [0], abs=4)
    if stages is SHRINK:  # without a length, an epoch's begin is no whole number for the Trainer
        assert num_cached == 3
    if name == "vit":
        assert changes == [(3, 0), (6, 1), (9, 2)]


@pytest.mark.slow
def test_under_autocast() -> None:
    # M is given: in bf16 another one, found by the clock, moves losses by more than the cache does
    run = RUNS["bert"].with_options(bf16=True, num_microbatches=2)
    given = run, dict.fromkeys(range(4), 2), EPOCH_START
    found = run_each(trained, 2, {"on": given, "off": (*given, {"activation_cache": "off"})})
    for outcome, _ in (*found["on"], found["off"][0]):
        # a key's bias has no gradient but rounding, which Adam makes whole steps of
        outcome.weights = {name: value for name, value in outcome.weights.items() if "key.bias" not in name}
    assert_same_training([outcome for outcome, _ in found["on"]], found["off"][0][0], tolerance=5e-3)
    assert hit_rates(found["on"][0][1])[-1] == (1, 0)


def trained(
    rank: int, world_size: int, run: Run, stages: dict[int, int], table: dict[int, int], options: Any = None
) -> tuple[Outcome, list[dict[str, Any]]]:
    return cached(rank, world_size, run, stages, table, **(options or {}))


@pytest.mark.slow
def test_frozen_in_the_middle_of_an_epoch() -> None:
    """Half of an epoch is in the store when the next begins: rows are found at several places, or not at all."""
    run = RUNS["bert"]
    results = run_ranks(cached_and_changed, WORLD, run, SHRINK, MID_EPOCH)
    assert_same_training([outcome for outcome, *_ in results], expected_of(run, MID_EPOCH))
    hits = [hits for hits, _ in hit_rates(results[0][1])]
    assert hits[0] == 0 and 0 < hits[1] < 1 and hits[-1] == 1
    # steps 2 and 7 freeze; layers count as cached from an epoch on that has a whole one behind it
    assert results[0][2] == [(2, 0), (6, 1), (7, 1), (12, 2)]


LAYOUTS: dict[str, tuple[Run, dict[int, int], dict[int, int]]] = {
    # all four layers are frozen: alone on its process the head goes on from what the last layer gave
    "only the head is left": (Run(epochs=5), {0: 2, 4: 2}, {3: 4}),
    # T5's layers hand on a position bias beside the hidden state: it trains without a cache
    "refused": (Run("seq2seq", epochs=4), {0: 2, 1: 2, 2: 1, 3: 1}, EPOCH_START),
    # of four stages of four layers the first can take one layer's output, also where three are frozen
    "long": (RUNS["bert"], {0: 4, 1: 4, 2: 4, 3: 4}, {3: 3}),
}


@pytest.mark.slow
def test_what_a_layout_leaves_to_the_cache() -> None:
    found = run_each(trained, WORLD, LAYOUTS)
    for name, (run, _, table) in LAYOUTS.items():
        assert_same_training([outcome for outcome, _ in found[name]], expected_of(run, table))
    rates = {name: hit_rates(results[0][1]) for name, results in found.items()}
    assert rates["only the head is left"][-1] == (1, 0) and rates["refused"] == []
    assert rates["long"] == [(0, 0), (1, 0), (1, 0), (1, 0)]


WORKERS = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
MAPPED, STREAMED = (replace(RUNS[name], samples=40) for name in ("bert", "streamed"))
STREAMED = STREAMED.with_options(max_steps=18, dataloader_num_workers=1)  # six epochs of two processes


@pytest.mark.parametrize("method", ["fork", *slow("spawn")])
def test_loader_workers(method: str) -> None:
    """They compute the keys; persistent ones follow the generations."""
    results = run_ranks(with_workers, 2, MAPPED, method, WORKERS, timeout=180)
    expected = expected_of(replace(MAPPED, per_device=2), EPOCH_START)
    assert_same_training([outcome for outcome, _ in results], expected)
    assert hit_rates(results[0][1])[-1] == (1, 0)


@pytest.mark.slow
def test_a_stream_that_a_worker_reads() -> None:
    """Its keys are made in the step's own process."""
    found = run_each(with_workers, 2, {mode: (STREAMED, "fork", {"activation_cache": mode}) for mode in ("on", "off")})
    assert_same_training([outcome for outcome, _ in found["on"]], found["off"][0][0])
    assert hit_rates(found["on"][0][1])[-1] == (1, 0)


def with_workers(
    rank: int, world_size: int, run: Run, method: str, options: dict[str, Any]
) -> tuple[Outcome, list[dict[str, Any]]]:
    torch.multiprocessing.set_start_method(method, force=True)
    return cached(rank, world_size, run, {0: 2, 1: 1, 2: 1, 3: 1}, EPOCH_START, **options)


def test_one_process() -> None:
    """Freezing and the cache need no other process."""
    run = Run(epochs=5, per_device=4 * WORLD)
    ((outcome, epochs),) = run_ranks(cached, 1, run, {0: 1, 1: 1, 2: 1}, {3: 1, 6: 2}, activation_cache="auto")
    expected = expected_of(Run(epochs=5), {3: 1, 6: 2})
    assert_same_training([outcome], expected)
    assert epochs[0]["cache_rows_stored"] == pytest.approx(run.samples, abs=4)


@pytest.mark.slow
def test_storage_of_another_precision_costs_digits_and_is_not_believed(tmp_path: Path) -> None:
    """The same weights and samples in one folder, first in bf16: only its own states are exact.

    Measured: 1.3e-4 (docs/numerics.md).
    """
    run = RUNS["bert"].with_options(activation_cache_dir=str(tmp_path / "cache"))
    given = replace(run, per_device=4 * WORLD), dict.fromkeys(range(4), 1), EPOCH_START
    cases = {"bf16": (*given, {"activation_cache_dtype": "bf16"}), "exact": given}
    found, expected = run_each(trained, 1, cases), expected_of(RUNS["bert"], EPOCH_START)
    assert 1e-5 < largest_difference(found["bf16"][0][0].weights, expected.weights)[0] < 2e-3
    assert_same_training([outcome for outcome, _ in found["exact"]], expected)


def slow_to_load(
    rank: int, world_size: int, table: dict[int, int]
) -> tuple[Outcome, list[dict[str, Any]], list[str | None]]:
    """What the first layer takes is so little that loading cannot be quicker; the second takes long."""
    trainer = trainer_of(Run(epochs=7, per_device=8), {0: 2, 1: 1, 2: 1}, table, activation_cache="auto")
    reasons: list[str | None] = []

    def change(cache: cache_control.AutoCache) -> None:
        assert cache._seconds_per_row is not None
        cache._seconds_per_row = [1e-9, 1e3, 1e3, 1e3]

    with_cache_changed(trainer, change)
    at_each_step(trainer, after=lambda run: reasons.append(run.cache.reason_off))  # type: ignore[union-attr]
    outcome = outcome_of(trainer)
    return outcome, [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry], reasons


@pytest.mark.slow
def test_it_waits_for_more_layers_where_loading_takes_longer() -> None:
    """Also where they freeze at the very moment when it is found out."""
    cases = {
        12: ([True] * 6 + [False] * 6 + [True] * 9, [83, 83, 0]),
        6: ([True] * 21, [83, 83, 0, 0, 0]),
    }
    found = run_each(slow_to_load, 2, {str(freezes): ({3: 1, freezes: 2},) for freezes in cases})
    for freezes, (is_on, stored) in cases.items():
        for outcome, _, reasons in found[str(freezes)]:
            assert_same_training([outcome], expected_of(Run(epochs=7), {3: 1, freezes: 2}))
            assert [reason is None for reason in reasons] == is_on
            assert all("loading a sample takes" in reason for reason in reasons if reason is not None)
        epochs = found[str(freezes)][0][1]
        assert hit_rates(epochs)[-1] == (1, 0)
        assert [entry["cache_rows_stored"] for entry in epochs] == pytest.approx(stored, abs=4)


def on_two_nodes(rank: int, world_size: int, folder: str, mode: str) -> tuple[Outcome, list[dict[str, Any]]]:
    """As a launcher with two processes on each of two nodes says it."""
    os.environ.update(LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    options = {"activation_cache_dir": folder, "activation_cache": mode}
    return cached(rank, world_size, Run(epochs=6), {0: 2, 1: 2, 2: 1}, {3: 1, 6: 2}, **options)


@pytest.mark.slow
def test_nodes_have_stores_and_samples_of_their_own(tmp_path: Path) -> None:
    """The order is another than on one node, so it is compared with a training whose store cannot be made."""
    (tmp_path / "file").write_text("not a folder")
    cases = {"on": (str(tmp_path / "cache"), "on"), "off": (str(tmp_path / "file" / "cache"), "auto")}
    results, uncached = run_each(on_two_nodes, WORLD, cases).values()
    assert_same_training([outcome for outcome, _ in results], uncached[0][0])
    assert len(list((tmp_path / "cache").glob("*/002-*"))) == 2
    # the rows of the last batch may fall to the other node, in each epoch to another one
    first, *_, last = (e["cache_hit_rate"] + e["cache_older_hit_rate"] for e in results[0][1])
    assert first == 0 and last > 0.85


class PassesOn:
    """A Trainer's mixin that calls the model on what an evaluation's loader gives, as for generation."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Done twice it would be undone."""
        assert KEYS_NAME not in inputs
        inputs = super()._prepare_inputs(inputs)  # type: ignore[misc]
        return inputs if self.model.training else {**inputs, "labels": inputs["labels"].flip(0)}  # type: ignore[attr-defined]

    def prediction_step(self, model: Any, inputs: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
        if self.args.pipeline_parallel_size == 1:  # type: ignore[attr-defined]
            self.model(**inputs)  # type: ignore[attr-defined]
        return super().prediction_step(model, inputs, *positional, **keywords)  # type: ignore[misc]


def evaluating(
    rank: int, world_size: int, mode: str, folder: str, stages: dict[int, int], options: dict[str, Any]
) -> tuple[list[float], list[dict[str, Any]], CacheCounts, bool]:
    run = Run(epochs=5, trainer=PassesOn).with_options(eval_strategy="epoch", **options)
    trainer = trainer_of(run, stages, {6: 1}, folder, activation_cache=mode)
    counts = [CacheCounts()]

    class Looking(TrainerCallback):
        def on_evaluate(self, *_: Any, **__: Any) -> None:
            assert all(KEYS_NAME not in batch for batch in trainer.get_eval_dataloader())
            run = trainer._pipeline_run
            if run is not None and run.cache is not None:
                counts.append(run.cache.cache.evaluated)

    trainer.add_callback(Looking())
    trainer.train()
    trainer.evaluate()  # of a loader whose workers may have begun while there was a cache
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    left = (Path(folder) / "_hf_pipetransformer_run_cache").exists()
    return losses, [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry], counts[-1], left


@pytest.mark.parametrize(
    ("stages", "options"),
    [
        ({0: 2, 1: 2}, {}),
        *slow(({0: 1, 1: 1}, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True})),
    ],
    ids=["pipeline", "replicas-persistent"],
)
def test_evaluation_sets_are_cached_too(options: dict[str, Any], stages: dict[int, int], tmp_path: Path) -> None:
    cases = {mode: (mode, str(tmp_path / mode), stages, options) for mode in ("on", "off")}
    with_cache, without = run_each(evaluating, 2, cases).values()
    assert len(without[0][0]) == 6
    torch.testing.assert_close(with_cache[0][0], without[0][0], rtol=0, atol=1e-5)
    first, *rest = with_cache[0][1]
    assert first["cache_rows_stored"] == pytest.approx(83, abs=4)
    assert set(hit_rates(rest)) == {(1, 0)}
    evaluated = reduce(add, (counts for _, _, counts, _ in with_cache))
    assert evaluated.rows >= 29 and evaluated.hits >= evaluated.rows - 2
    assert not with_cache[0][3]  # of no use to another run


def left_by_two_nodes(rank: int, world_size: int, folder: str) -> None:
    os.environ.update(LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank))
    trainer_of(Run(samples=16, epochs=3, accumulation=1), {0: 1, 1: 1}, {2: 1}, folder).train()


def test_nothing_is_left_on_several_nodes(tmp_path: Path) -> None:
    run_ranks(left_by_two_nodes, 2, str(tmp_path))
    assert not (tmp_path / "_hf_pipetransformer_run_cache").exists()


def parked(
    rank: int, world_size: int, stages: dict[int, int], folder: str
) -> tuple[Outcome, list[int], dict[str, torch.Tensor]]:
    """As on a GPU: cached layers' weights leave the device, and come back for saving."""
    run = Run(epochs=6).with_options(eval_strategy="epoch", save_strategy="epoch")
    trainer = trainer_of(run, stages, EPOCH_START, folder)
    held: list[int] = []

    def look(run: PipelineRun) -> None:
        storages = [p.untyped_storage() for p in run.pipeline.parameters()]
        held.append(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))

    at_each_step(trainer, lambda run: setattr(run.pipeline, "ways", Ways(offloads=True)), look)
    outcome = outcome_of(trainer)
    return outcome, held, load_file(Path(folder) / "checkpoint-15" / "model.safetensors")


@pytest.mark.slow
def test_weights_of_cached_layers_leave_the_device(tmp_path: Path) -> None:
    results = run_ranks(parked, WORLD, SHRINK, str(tmp_path))
    expected = expected_of(Run(epochs=6), EPOCH_START)
    assert_same_training([outcome for outcome, *_ in results], expected)
    for outcome, held, saved in results:
        # at once in the first step of each epoch: the last layer and the head, where before one more layer was
        assert held[-1] == held[12] < 0.6 * held[9]
        for name, weight in saved.items():
            if ".layer.0." in name or ".embeddings." in name:
                assert torch.equal(weight, outcome.weights[name])
