"""Pipelines over tokens: the training of one process, in every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from training_runs import Outcome, Run, assert_same_training, outcome_of, pipeline, pipeline_trainer, reference

from hf_pipetransformer.pipeline import slice_choice

RUN = Run("causal-lm", samples=64)
"""Rows of 5 to 24 tokens, so each batch has another length."""


def cuts_in(folder: Path) -> list[dict[str, Any]]:
    """How batches were cut, as recorded."""
    events = [json.loads(line) for line in (folder / "pipeline_events.jsonl").read_text().splitlines()]
    return [event["slices"] for event in events if event["event"] == "slices"]


@pytest.mark.parametrize(
    ("world", "stages", "options"),
    [
        (2, 2, {"token_slices": 3}),
        (2, 2, {"token_slices": [7, 1, 4], "num_microbatches": 1}),
        (2, 2, {"token_slices": 2, "gradient_checkpointing": True}),
        (4, 2, {"token_slices": 3}),
        (4, 4, {"token_slices": [3, 5], "num_microbatches": 2}),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_a_training_in_slices_is_that_of_one_process(world: int, stages: int, options: dict[str, Any]) -> None:
    run = replace(RUN, per_device=16 // world)
    expected = run_ranks(reference, 1, replace(RUN, per_device=4))[0]
    assert_same_training(run_ranks(pipeline, world, run, stages, **options), expected)


@pytest.mark.parametrize("model", ["bloom", "mistral", "gpt2"])
def test_families_in_two_stages(model: str) -> None:
    """Bloom's layers also return attention weights, which nobody reads and which have no tokens to be cut along."""
    run = replace(RUN, model=model, per_device=8, epochs=1)
    expected = run_ranks(reference, 1, replace(run, per_device=4))[0]
    assert_same_training(run_ranks(pipeline, 2, run, 2, token_slices=3), expected)


def pipeline_with_known_latency(rank: int, world_size: int, run: Run, folder: str) -> Outcome:
    """Slices that take a time for each token and nothing else: the shortest ones are the best."""

    def measure(_stage: Any, _whole: Any, batch: dict[str, torch.Tensor], _windows: Any) -> list[Any]:
        return [
            (r, n, c, 1e-3 * r * n, 2e-3 * r * n)
            for r, n, c in slice_choice.points_to_measure(*batch["input_ids"].shape)
        ]

    slice_choice.measure_slices = measure
    return pipeline(rank, world_size, run, 2, folder, token_slices="auto", num_microbatches=1)


def test_slices_by_the_dynamic_program(tmp_path: Path) -> None:
    run = replace(RUN, per_device=8)
    expected = run_ranks(reference, 1, replace(RUN, per_device=4))[0]
    assert_same_training(run_ranks(pipeline_with_known_latency, 2, run, str(tmp_path)), expected)
    cuts = cuts_in(tmp_path)
    assert cuts and all(len(lengths) == -(-cut["tokens"] // 16) for cut in cuts for _, lengths in cut["parts"])
    assert any(cut["tokens"] > 16 for cut in cuts) and all(cut["predicted_seconds"] > 0 for cut in cuts)


def test_slices_by_a_profile_of_the_stages() -> None:
    run = replace(RUN, per_device=8, epochs=1)
    expected = run_ranks(reference, 1, replace(run, per_device=4))[0]
    assert_same_training(run_ranks(pipeline, 2, run, 2, token_slices="auto"), expected)


FROZEN = {"freeze_policy": "schedule", "freeze_schedule": {1: 1}}


@pytest.mark.parametrize("elastic", [True, False])
def test_slices_go_on_through_freezing_and_transformation(elastic: bool) -> None:
    run = replace(RUN, epochs=3)
    options = {**FROZEN, "elastic": elastic, "num_microbatches": 2}
    unsliced = run_ranks(pipeline, 4, run, 4, **options)
    sliced = run_ranks(pipeline, 4, run, 4, token_slices=3, **options)
    assert_same_training(sliced, unsliced[0])


def test_bfloat16_in_slices_follows_whole_rows() -> None:
    run = replace(RUN, per_device=8, epochs=1)
    whole, sliced = (run_ranks(pipeline, 2, run, 2, bf16=True, **more)[0] for more in ({}, {"token_slices": 3}))
    assert len(whole.losses) >= 2
    for a, b in zip(whole.losses, sliced.losses, strict=True):
        assert a == pytest.approx(b, abs=1e-2)


def events_of(rank: int, world_size: int, folder: str) -> Outcome:
    trainer = pipeline_trainer(RUN.with_options(max_steps=2), 2, folder, token_slices=[8, 8], num_microbatches=1)
    return outcome_of(trainer)


def test_how_batches_are_cut_is_recorded(tmp_path: Path) -> None:
    run_ranks(events_of, 2, str(tmp_path))
    cuts = cuts_in(tmp_path)
    assert cuts
    for cut in cuts:
        ((rows, lengths),) = cut["parts"]
        assert rows == cut["rows"] and sum(lengths) == cut["tokens"] and lengths[:2] == [8, 8]
