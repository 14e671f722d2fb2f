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
from training_runs import (
    WORLD,
    Outcome,
    Run,
    assert_same_training,
    at_each_step,
    cache_of,
    largest_difference,
    outcome_of,
    with_cache_changed,
)
from transformers import TrainerCallback

from hf_pipetransformer.model.tags import TAGS
from hf_pipetransformer.parts.prefix_cache import cache_control
from hf_pipetransformer.parts.prefix_cache.cache.cache_counts import CacheCounts


def cached_and_changed(
    rank: int, world_size: int, run: Run, stages: dict[int, int], table: dict[int, int], options: Any = None
) -> tuple[Outcome, list[dict[str, Any]], list[tuple[int, int]]]:
    """The outcome of a training, the cache's metrics, and the logged changes of the layout."""
    cache_control.EARLY_STEPS = 1
    trainer = trainer_of(run, stages, table, **(options or {}))
    outcome = outcome_of(trainer)
    history = trainer.state.log_history
    changes = [(entry["step"], entry["num_cached_layers"]) for entry in history if "transform_seconds" in entry]
    return outcome, [entry for entry in history if "cache_hit_rate" in entry], changes


CASES: dict[str, tuple[Run, dict[int, int], dict[int, int]]] = {
    # of a stream, epoch 2 fills the store, epoch 3 reads it and fills it anew, ..., epochs 5 and 6 only read
    "streamed": (RUNS["streamed"], SHRINK, EPOCH_START),
    # half of an epoch is in the store when the next begins: rows are found at several places, or not at all
    "frozen in the middle of an epoch": (RUNS["bert"], SHRINK, MID_EPOCH),
    # all four layers are frozen: alone on its process, the head computes from the last layer's stored output
    "only the head is left": (Run(epochs=5), {0: 2, 4: 2}, {3: 4}),
    # T5's layers hand on a position bias beside the hidden state: it trains without a cache
    "refused": (Run("seq2seq", epochs=4), {0: 2, 1: 2, 2: 1, 3: 1}, EPOCH_START),
    # of four stages of four layers the first can take one layer's output, also where three are frozen
    "long": (RUNS["bert"], {0: 4, 1: 4, 2: 4, 3: 4}, {3: 3}),
}


@pytest.mark.slow
def test_cached_training_equals_one_process() -> None:
    found = run_each(cached_and_changed, WORLD, CASES, timeout=240)
    for name, (run, _, table) in CASES.items():
        assert_same_training([outcome for outcome, *_ in found[name]], expected_of(run, table))
    rates = {name: hit_rates(results[0][1]) for name, results in found.items()}
    assert rates["streamed"] == [(0, 0), (0, 1), (0, 1), (1, 0)]
    stored = [entry["cache_rows_stored"] for entry in found["streamed"][0][1]]
    assert stored == pytest.approx([RUNS["streamed"].samples] * 3 + [0], abs=4)
    hits = [hits for hits, _ in rates["frozen in the middle of an epoch"]]
    assert hits[0] == 0 and 0 < hits[1] < 1 and hits[-1] == 1
    # steps 2 and 7 freeze; layers count as cached from an epoch on that has a whole one behind it
    assert found["frozen in the middle of an epoch"][0][2] == [(2, 0), (6, 1), (7, 1), (12, 2)]
    assert rates["only the head is left"][-1] == (1, 0) and rates["refused"] == []
    assert rates["long"] == [(0, 0), (1, 0), (1, 0), (1, 0)]


@pytest.mark.slow
def test_under_autocast_and_from_a_stream_that_a_worker_reads() -> None:
    # M is given: in bf16 another one, found by the clock, moves losses by more than the cache does
    in_bf16 = RUNS["bert"].with_options(bf16=True, num_microbatches=2)
    streamed = replace(RUNS["streamed"], samples=40).with_options(max_steps=18, dataloader_num_workers=1)
    given = {
        "bf16": (in_bf16, dict.fromkeys(range(4), 2), EPOCH_START),
        "stream": (streamed, {0: 2, 1: 1, 2: 1, 3: 1}, EPOCH_START),
    }
    cases = {
        f"{name} {mode}": (*of, {"activation_cache": mode}) for name, of in given.items() for mode in ("on", "off")
    }
    found = run_each(cached_and_changed, 2, cases)
    for name, tolerance in (("bf16", 5e-3), ("stream", 1e-5)):
        on, off = found[f"{name} on"], found[f"{name} off"][0]
        for outcome, *_ in (*on, off) if name == "bf16" else ():
            # a key's bias has no gradient but rounding, which Adam makes whole steps of
            outcome.weights = {name: value for name, value in outcome.weights.items() if "key.bias" not in name}
        assert_same_training([outcome for outcome, *_ in on], off[0], tolerance)
        assert hit_rates(on[0][1])[-1] == (1, 0)


def with_workers(rank: int, world_size: int, run: Run) -> tuple[Outcome, list[dict[str, Any]]]:
    torch.multiprocessing.set_start_method("spawn", force=True)
    options = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    return cached(rank, world_size, run, {0: 2, 1: 1, 2: 1, 3: 1}, EPOCH_START, **options)


@pytest.mark.slow
def test_loader_workers() -> None:
    """Workers compute the keys; persistent workers follow the generations."""
    run = replace(RUNS["bert"], samples=40)
    results = run_ranks(with_workers, 2, run, timeout=180)
    assert_same_training([outcome for outcome, _ in results], expected_of(replace(run, per_device=2), EPOCH_START))
    assert hit_rates(results[0][1])[-1] == (1, 0)


@pytest.mark.slow
def test_storage_of_another_precision_costs_digits_and_is_not_believed(tmp_path: Path) -> None:
    """The same weights and samples in one folder, first in bf16: only its own states are exact.

    Measured: 1.3e-4 (docs/evidence/numerics.md).
    """
    run = RUNS["bert"].with_options(activation_cache_dir=str(tmp_path / "cache"))
    given = replace(run, per_device=4 * WORLD), dict.fromkeys(range(4), 1), EPOCH_START
    cases = {"bf16": (*given, {"activation_cache_dtype": "bf16"}), "exact": given}
    found, expected = run_each(cached_and_changed, 1, cases), expected_of(RUNS["bert"], EPOCH_START)
    assert 1e-5 < largest_difference(found["bf16"][0][0].weights, expected.weights)[0] < 2e-3
    assert_same_training([outcome for outcome, *_ in found["exact"]], expected)


def slow_to_load(rank: int, world_size: int) -> tuple[Outcome, list[dict[str, Any]], list[str | None]]:
    """The first layer is so fast that loading cannot be faster; the second one is slow."""
    trainer = trainer_of(Run(epochs=7, per_device=8), {0: 2, 1: 1, 2: 1}, {3: 1, 12: 2}, activation_cache="auto")
    reasons: list[str | None] = []
    with_cache_changed(trainer, lambda cache: setattr(cache, "_seconds_per_row", [1e-9, 1e3, 1e3, 1e3]))
    at_each_step(trainer, after=lambda run: reasons.append(cache_of(run).reason_off))  # type: ignore[union-attr]
    outcome = outcome_of(trainer)
    return outcome, [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry], reasons


@pytest.mark.slow
def test_it_waits_for_more_layers_where_loading_takes_longer() -> None:
    results = run_ranks(slow_to_load, 2)
    for outcome, _, reasons in results:
        assert_same_training([outcome], expected_of(Run(epochs=7), {3: 1, 12: 2}))
        assert [reason is None for reason in reasons] == [True] * 6 + [False] * 6 + [True] * 9
        assert all("loading a sample takes" in reason for reason in reasons if reason is not None)
    assert hit_rates(results[0][1])[-1] == (1, 0)


def on_two_nodes(rank: int, world_size: int, options: dict[str, Any]) -> tuple[Outcome, list[dict[str, Any]]]:
    """Set the variables of a launcher with two processes on each of two nodes."""
    os.environ.update(LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    return cached(rank, world_size, Run(epochs=6), {0: 2, 1: 2, 2: 1}, {3: 1, 6: 2}, **options)


@pytest.mark.slow
def test_nodes_have_stores_and_samples_of_their_own(tmp_path: Path) -> None:
    """The order differs from one node's, so the training is compared with one that cannot make its store."""
    (tmp_path / "file").write_text("not a folder")
    kept, impossible = {"activation_cache_dir": str(tmp_path / "cache")}, str(tmp_path / "file" / "cache")
    cases: dict[str, list[dict[str, Any]]] = {
        "kept": [kept],
        "none": [{"activation_cache_dir": impossible, "activation_cache": "auto"}],
        "of the training": [{"folder": str(tmp_path / "run")}],
    }
    results, uncached, of_this_training = run_each(on_two_nodes, WORLD, cases).values()
    assert_same_training([outcome for outcome, _ in (*results, *of_this_training)], uncached[0][0])
    assert len(list((tmp_path / "cache").glob("*/002-*"))) == 2
    assert not list(tmp_path.rglob("_hf_pipetransformer_run_cache")), "nothing is left"
    # the rows of the last batch may fall to the other node, in each epoch to another one
    first, *_, last = (e["cache_hit_rate"] + e["cache_older_hit_rate"] for e in results[0][1])
    assert first == 0 and last > 0.85


class PassesOn:
    """A Trainer's mixin that calls the model on what an evaluation's loader gives, as for generation."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Done twice it would be undone."""
        assert TAGS not in inputs
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
            assert all(TAGS not in batch for batch in trainer.get_eval_dataloader())
            run = trainer._pipeline_run
            cache = cache_of(run) if run is not None else None
            if cache is not None:
                counts.append(cache.cache.evaluated)

    trainer.add_callback(Looking())
    trainer.train()
    trainer.evaluate()  # the loader's workers may have begun while there was a cache
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    left = (Path(folder) / "_hf_pipetransformer_run_cache").exists()
    return losses, [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry], counts[-1], left


@pytest.mark.slow
def test_evaluation_sets_are_cached_too(tmp_path: Path) -> None:
    """Replicas also read them if their loaders' workers began before there was a cache."""
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    layouts = {"pipeline": ({0: 2, 1: 2}, {}), "replicas": ({0: 1, 1: 1}, workers)}
    cases = {f"{name} {m}": (m, str(tmp_path / name / m), *layouts[name]) for name in layouts for m in ("on", "off")}
    found = run_each(evaluating, 2, cases)
    for name in layouts:
        with_cache, without = found[f"{name} on"], found[f"{name} off"]
        assert len(without[0][0]) == 6
        torch.testing.assert_close(with_cache[0][0], without[0][0], rtol=0, atol=1e-5)
        first, *rest = with_cache[0][1]
        assert first["cache_rows_stored"] == pytest.approx(83, abs=4)
        assert set(hit_rates(rest)) == {(1, 0)}
        evaluated = reduce(add, (counts for _, _, counts, _ in with_cache))
        assert evaluated.rows >= 29 and evaluated.hits >= evaluated.rows - 2
        assert not with_cache[0][3]  # of no use to another run
