"""A recipe that trains the head alone before the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks
from test_recipe_sweep import SMALL

pytest.importorskip("datasets")

import run_glue


def trained(rank: int, world_size: int, folder: Path) -> dict[str, float]:
    first = ["--head_first_epochs", "2", "--output_dir", str(folder), "--pipeline_parallel_size", str(world_size)]
    return run_glue.main([*SMALL[: SMALL.index("--freeze_policy")], *first])


def values_in(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "pipeline_metrics.jsonl").read_text().splitlines()
    return [values for line in lines if (values := json.loads(line).get("values"))]


@pytest.mark.slow
def test_the_head_is_trained_over_cached_outputs_and_then_the_model(tmp_path: Path) -> None:
    run_ranks(trained, 2, tmp_path)
    head, whole = values_in(tmp_path / "head"), values_in(tmp_path)
    assert max(values.get("num_frozen_layers", 0) for values in head) == 4
    assert [values["cache_hit_rate"] for values in head if "cache_hit_rate" in values] == [0.0, 1.0]
    assert max(values.get("num_frozen_layers", 0) for values in whole) == 0
    assert any("train_loss" in values for values in whole)
