"""Vision towers with the patches of all images in one dimension: each image has an entry of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from flat_patches import IMAGES, VISION, collate_images, vlm, vlm_with_trained_merger
from frozen_runs import BATCH, EPOCHS, SAMPLES, Build, Trained
from selection import few, slow

from hf_pipetransformer.model.micro_batch import SampleBounds
from hf_pipetransformer.parts.front.divided import EACH, Rows, rows_of


def logged(folder: Path, name: str) -> list[float]:
    """A metric of each epoch."""
    lines = (folder / "pipeline_metrics.jsonl").read_text().splitlines()
    values = [line.get("values", {}) for line in map(json.loads, lines)]
    return [value[name] for value in values if name in value]


def hit_rates(folder: Path) -> list[float]:
    return logged(folder, "cache_hit_rate")


def assert_equals_stock(folder: Path, build: Build, **options: Any) -> None:
    options = {"collator": collate_images, **options}
    expected = Trained(folder / "stock", build, is_ours=False, **options)
    Trained(folder / "ours", build, **options).assert_same(expected)


@pytest.mark.parametrize("name", few(VISION, "Qwen2VL", "Qwen2_5_VL"))
def test_equals_the_stock_trainer(name: str, tmp_path: Path) -> None:
    """All images are found from the second epoch on, beside other images and in other numbers."""
    assert_equals_stock(tmp_path, vlm(name))
    assert hit_rates(tmp_path / "ours") == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("name", few(VISION, "Qwen2_5_VL"))
def test_the_layers_below_a_trained_merger_are_read(name: str, tmp_path: Path) -> None:
    """Besides patches, these layers get cumulative lengths of the images, and of windows in them."""
    assert_equals_stock(tmp_path, vlm_with_trained_merger(name))
    assert hit_rates(tmp_path / "ours") == [0.0, 1.0, 1.0]
    skipped = logged(tmp_path / "ours", "cache_layers_skipped")
    assert skipped[0] == 0.0 and min(skipped[1:]) > 0.0, "not the embedding of the patches alone"


FEW = {
    "none in the first batches": (0,) * (SAMPLES - 4) + (1, 2, 3, 1),
    "one in a batch, or none": (0, 0, 0, 1) * 3 + (0, 0),
    "one in the first batch": (0, 0, 0, 1, 2, 3, 1, 2, 2, 3, 3, 3, 1, 0),
}


class InOrder:
    """The first batch has the first samples."""

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(range(SAMPLES))


@pytest.mark.parametrize("name", few(FEW, "one in the first batch"))
def test_few_images(name: str, tmp_path: Path) -> None:
    """The tower is looked for again when it is called for the first time, or on several images."""
    assert_equals_stock(tmp_path, vlm("Qwen2VL", FEW[name]), mixin=InOrder)
    assert hit_rates(tmp_path / "ours")[1:] == [1.0] * (EPOCHS - 1)


SMOOTH = {"dataloader_drop_last": True, "optim": "sgd"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "stages": {"pipeline_parallel_size": 2},
}


def in_two_processes(rank: int, world_size: int, folder: str, name: str, layout: str) -> dict[str, torch.Tensor]:
    options = {"per_device_train_batch_size": BATCH // 2, "collator": collate_images, **SMOOTH, **LAYOUTS[layout]}
    return Trained(Path(folder), vlm(name), **options).weights


@pytest.mark.parametrize(
    ("name", "layout"),
    [("Qwen2VL", "replicas"), *slow(("Qwen2_5_VL", "replicas"), ("Qwen2VL", "stages"), ("Qwen2_5_VL", "stages"))],
)
def test_two_processes(name: str, layout: str, tmp_path: Path) -> None:
    """Replicas read what each has stored, and sum their losses; stages compute the tower."""
    expected = Trained(tmp_path / "stock", vlm(name), is_ours=False, collator=collate_images, **SMOOTH).weights
    for weights in run_ranks(in_two_processes, 2, str(tmp_path / layout), name, layout, timeout=240):
        for of, weight in expected.items():
            torch.testing.assert_close(weights[of], weight, atol=2e-6, rtol=1e-5, msg=of)
    if layout == "replicas":
        # the last samples of an epoch are dropped, others in each
        assert min(hit_rates(tmp_path / layout)[1:]) >= 1 - 2 * 3 / IMAGES


# ------------------------------------------------------------------------------------------ what belongs to whom
def test_rows_with_different_numbers_of_patches() -> None:
    grid = torch.tensor([[1, 2, 2], [1, 4, 4], [2, 2, 2]])
    inputs = {"pixel_values": torch.arange(28.0)[:, None], "image_grid_thw": grid}
    rows = rows_of(inputs, inputs)
    assert rows == Rows(3, (4, 16, 8))
    assert [rows.patches_per_entry(length) for length in (28, 7, 3, 6, 14)] == [1, 4, EACH, None, 2]
    assert rows.some(inputs["pixel_values"], [2, 0]).flatten().tolist() == [*range(20, 28), *range(4)]
    assert rows.some(grid, [1]).tolist() == [[1, 4, 4]] and rows.chosen([2, 0]) == Rows(2, (8, 4))
    merged = torch.zeros(7, 1)
    rows.put(merged, [1], torch.ones(4, 1))
    assert merged.flatten().tolist() == [0, 1, 1, 1, 1, 0, 0]
    assert rows_of(inputs, {**inputs, "pixel_values": torch.zeros(27, 1)}) is None
    assert Rows(2).patches_per_entry(6) == EACH and Rows(2).patches_per_entry(5) is None


def test_cumulative_lengths_are_divided() -> None:
    rows = Rows(3, (4, 16, 8))
    ends = torch.tensor([0, 4, 12, 20, 28], dtype=torch.int32)  # the second image has two windows
    assert rows.divides(ends) and [part.tolist() for part in rows.split(ends)] == [[4], [8, 16], [8]]
    some = rows.some(ends, [2, 1])
    assert some.tolist() == [0, 8, 16, 24] and some.dtype == torch.int32
    for other in ([0, 4, 12, 28], [0, 4, 20, 27], [1, 4, 20, 28], [0, 4, 20, 12, 28]):
        assert not rows.divides(torch.tensor(other))
    assert not rows.divides(ends.float()) and not Rows(4).divides(ends)


def test_where_samples_begin() -> None:
    samples = vlm("Qwen2VL", (1, 0, 2, 1))()[1]
    rows = [{name: column[row] for name, column in samples.items()} for row in range(4)]
    batch = {**collate_images(rows), "prompt": torch.ones(3, 2)}
    first = [{**collate_images(rows[:stop]), "prompt": torch.ones(3, 2)} for stop in (1, 2, 3)]
    bounds = SampleBounds.found(batch, first)
    assert bounds is not None and bounds.of["image_grid_thw"] == (0, 1, 1, 3, 4) and "prompt" not in bounds.of
    part = bounds.cut(batch, 2, 4)
    assert torch.equal(part["pixel_values"], torch.cat([rows[2]["pixel_values"], rows[3]["pixel_values"]]))
    assert torch.equal(part["labels"], batch["labels"][2:]) and torch.equal(part["prompt"], batch["prompt"])
    assert "pixel_values" not in bounds.cut(batch, 1, 2)
    other = [{**one, "pixel_values": one["pixel_values"] + 1} for one in first]
    assert SampleBounds.found(batch, other) is None, "the collator draws random numbers"
