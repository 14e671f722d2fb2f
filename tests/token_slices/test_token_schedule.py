"""Pipelines over tokens: the training of one process, in every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, run_ranks_expecting_error
from selection import slow
from test_elastic_pipeline import reference as freezing_reference
from test_elastic_pipeline import stages_by_frozen
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from training_runs import (
    Outcome,
    Run,
    assert_same_training,
    largest_difference,
    outcome_of,
    pipeline,
    pipeline_trainer,
    reference,
)

from hf_pipetransformer import UnsupportedModelError
from hf_pipetransformer.data.numbered_batches import NumberedBatches
from hf_pipetransformer.token_slices import slice_choice, slice_timeline, slicing_setup

RUN = Run("causal-lm", epochs=3)
"""Rows of 5 to 24 tokens, so each batch has another length; the last one of an epoch is odd."""
STEPS = 9
"""Of AdamW; the first one at a learning rate of 0."""


@cache
def expected(model: str | None = None) -> Outcome:
    outcome = run_ranks(reference, 1, replace(RUN, model=model))[0]
    assert outcome.steps == len(outcome.losses) == STEPS
    assert sum(rate > 0 for rate in outcome.learning_rates) >= 6
    return outcome


def cuts_in(folder: Path) -> list[dict[str, Any]]:
    """How batches were cut, as recorded."""
    return [event["slices"] for event in events_in(folder) if event["event"] == "slices"]


def events_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "pipeline_events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("world", "stages", "options"),
    [
        (2, 2, {"token_slices": [7, 1, 4], "num_microbatches": 1}),
        *slow((4, 2, {"token_slices": 3})),
        *slow((4, 4, {"token_slices": [3, 5], "num_microbatches": 2, "gradient_checkpointing": True})),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_a_training_in_slices_is_that_of_one_process(world: int, stages: int, options: dict[str, Any]) -> None:
    run = replace(RUN, per_device=16 // world)
    assert_same_training(run_ranks(pipeline, world, run, stages, **options), expected())


# ------------------------------------------------------------------------------------------ "auto"
def with_known_latency() -> None:
    """Slices take a fixed time for each token, without a time for each call: the shortest slices are the best."""

    def measure(_stage: Any, _whole: Any, batch: dict[str, torch.Tensor], *_: Any) -> list[Any]:
        return [
            (r, n, c, 1e-3 * r * n, 2e-3 * r * n)
            for r, n, c in slice_choice.points_to_measure(*batch["input_ids"].shape)
        ]

    slice_choice.measure_slices = measure
    slice_timeline.LEAST_GAIN_OF_CUTS = 0.0  # rows this short are not worth cutting otherwise


def pipeline_with_known_latency(rank: int, world_size: int, run: Run, folder: str) -> Outcome:
    with_known_latency()
    return pipeline(rank, world_size, run, 2, folder, token_slices="auto", num_microbatches=1)


def test_slices_by_the_dynamic_program(tmp_path: Path) -> None:
    run = replace(RUN, per_device=8)
    assert_same_training(run_ranks(pipeline_with_known_latency, 2, run, str(tmp_path)), expected())
    cuts = cuts_in(tmp_path)
    assert all(sum(lengths) == cut["tokens"] for cut in cuts for _, lengths in cut["parts"])
    assert all(sum(rows for rows, _ in cut["parts"]) == cut["rows"] for cut in cuts)
    assert cuts and all(len(lengths) == -(-cut["tokens"] // 16) for cut in cuts for _, lengths in cut["parts"])
    assert any(cut["tokens"] > 16 for cut in cuts) and all(cut["predicted_seconds"] > 0 for cut in cuts)


# ------------------------------------------------------------------------------------------ freezing, transformation
def transformed(rank: int, world_size: int, run: Run, folder: str, stages: dict[int, int]) -> Outcome:
    options = {"freeze_policy": "schedule", "freeze_strategy": "steps", "freeze_steps": 1, "freeze_schedule": FREEZE}
    trainer = pipeline_trainer(run, stages[0], folder, token_slices=3, gradient_checkpointing=True, **options)
    stages_by_frozen(trainer, stages)
    return outcome_of(trainer)


FREEZE = {3: 1}
"""Steps done -> frozen layers."""


@pytest.mark.slow
def test_slices_go_on_through_a_transformation(tmp_path: Path) -> None:
    """(4, 1) -> (2, 2)."""
    stages = {0: 4, 1: 2}
    outcomes = run_ranks(transformed, 4, RUN, str(tmp_path), stages)
    assert_same_training(outcomes, run_ranks(freezing_reference, 1, RUN, FREEZE)[0])
    events = events_in(tmp_path)
    change = next(i for i, event in enumerate(events) if event["event"] == "transform")
    for part, k in ((events[:change], stages[0]), (events[change:], stages[1])):
        assert {event["pipeline_parallel_size"] for event in part} == {k}
        slices = [lengths for e in part if e["event"] == "slices" for _, lengths in e["slices"]["parts"]]
        assert any(len(lengths) > 1 for lengths in slices)


# ------------------------------------------------------------------------------------------ precision, rows
def in_bfloat16(rank: int, world_size: int) -> list[Outcome]:
    run = replace(RUN, per_device=8).with_options(bf16=True)
    return [outcome_of(pipeline_trainer(run, 2, token_slices=token_slices)) for token_slices in ("off", 3)]


def distances(outcome: Outcome) -> tuple[float, float]:
    """Distances from float32: the largest one of the gradients' norms, relative, and of the final weights."""
    exact = expected()
    pairs = zip(outcome.gradient_norms, exact.gradient_norms, strict=True)
    assert outcome.steps == STEPS
    return max(abs(a - b) / b for a, b in pairs), largest_difference(outcome.weights, exact.weights)[0]


@pytest.mark.slow
def test_bfloat16_in_slices_is_no_further_from_float32_than_whole_rows() -> None:
    whole, sliced = (distances(outcome) for outcome in run_ranks(in_bfloat16, 2)[0])
    assert all(b <= 2 * a for a, b in zip(whole, sliced, strict=True))


class LayRows:
    """A collator."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [torch.tensor(sample["input_ids"]) for sample in samples]
        side = "left" if self.how == "left padding" else "right"
        ids, labels = (pad_sequence(rows, True, filler, side) for filler in (0, -100))
        if self.how == "left padding":
            return {"input_ids": ids, "labels": labels, "attention_mask": labels.ne(-100).long()}
        middle = ids.shape[1] // 2
        labels[:, middle] = -100
        positions = torch.cat([torch.arange(middle), torch.arange(ids.shape[1] - middle)])
        return {"input_ids": ids, "labels": labels, "position_ids": positions.repeat(len(rows), 1)}


def on_rows(rank: int, world_size: int, **options: Any) -> list[Outcome]:
    outcomes = []
    for how in ("left padding", "packed"):
        trainer = pipeline_trainer(replace(RUN, per_device=16 // world_size, epochs=1), world_size, **options)
        trainer.data_collator = LayRows(how)
        outcomes.append(outcome_of(trainer))
    return outcomes


@pytest.mark.slow
def test_other_rows_in_two_stages() -> None:
    everyone = run_ranks(on_rows, 2, token_slices=3)
    for whole, *outcomes in zip(run_ranks(on_rows, 1)[0], *everyone, strict=True):
        assert_same_training(outcomes, whole)


# ------------------------------------------------------------------------------------------ one process
def test_on_one_process_nothing_is_cut() -> None:
    run = replace(RUN, per_device=32, accumulation=1)
    assert_same_training(run_ranks(pipeline, 1, run, "auto", token_slices="auto"), expected())


class CoupledRows:
    """A contrastive loss."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> torch.Tensor:
        rows = model(**{**inputs, "labels": None}).logits.mean(dim=1)
        return nn.functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def test_a_loss_that_does_not_add_up_is_refused() -> None:
    run = replace(RUN, trainer=CoupledRows, per_device=32, accumulation=1)
    (error,) = run_ranks_expecting_error(pipeline, 1, run, "auto", token_slices=3)
    assert isinstance(error, UnsupportedModelError) and "not a plain sum or mean over samples or tokens" in str(error)


def short_of_memory(rank: int, world_size: int, folder: str) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 4 GiB")

    if rank == 1:
        slicing_setup.probe_slicing = fail
    pipeline_trainer(RUN, 2, folder, token_slices=3).train()


def test_all_hear_of_a_check_that_one_process_has_no_memory_for(tmp_path: Path) -> None:
    errors = run_ranks_expecting_error(short_of_memory, 2, str(tmp_path), timeout=60)
    for error in errors:
        assert isinstance(error, UnsupportedModelError)
        assert "failed on process 1 (OutOfMemoryError: tried to allocate 4 GiB)" in str(error)


def studied(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Tokens of the rows to choose from; of those that the check is made on."""
    study, sample_rows = slicing_setup.probe_slicing, NumberedBatches.sample_rows
    rows: list[int] = []
    chosen: list[int] = []

    def noting_rows(self: Any, count: int) -> list[Any]:
        found = sample_rows(self, count)
        rows.extend(len(row["input_ids"]) for row in found)
        return found

    def noting_sample(stack: Any, sample: Any, *rest: Any, **options: Any) -> Any:
        chosen.extend(sample["attention_mask"].sum(dim=1).tolist())
        return study(stack, sample, *rest, **options)

    slicing_setup.probe_slicing, NumberedBatches.sample_rows = noting_sample, noting_rows
    pipeline_trainer(RUN.with_options(max_steps=1), "auto", token_slices=3).train()
    return rows, chosen


def test_slices_are_checked_on_the_longest_and_the_shortest_row() -> None:
    ((rows, chosen),) = run_ranks(studied, 1)
    assert len(rows) == 16 and chosen == [max(rows), min(rows)]
    assert chosen != [max(rows[:2]), min(rows[:2])]


def told_apart(rank: int, world_size: int, folder: str) -> bool:
    """Whether packed rows will be cut, where one process has found that documents see each other."""
    study = slicing_setup.probe_slicing
    if rank == 1:
        slicing_setup.probe_slicing = lambda *rest, **more: replace(study(*rest, **more), separates_documents=False)
    trainer = pipeline_trainer(RUN.with_options(max_steps=1), 2, folder, token_slices=3)
    trainer.train()
    assert trainer.pipeline is not None and trainer.pipeline.execution.slicing is not None
    return trainer.pipeline.execution.slicing.windows.separates_documents


def test_all_processes_agree_on_what_documents_see(tmp_path: Path) -> None:
    assert run_ranks(told_apart, 2, str(tmp_path)) == [False, False]
