"""Image classification: data, transforms, and the recipe from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks
from PIL import Image as PILImage

pytest.importorskip("datasets")
pytest.importorskip("sklearn")

from datasets import ClassLabel, Dataset, Features, Image, Value
from transformers import Trainer

import run_image_classification as recipe


def test_user_errors() -> None:
    with pytest.raises(ValueError, match="not both"):
        recipe.DataTrainingArguments(dataset_name="cifar100", train_dir="images")
    with pytest.raises(ValueError, match=r"validation_share=1\.0"):
        recipe.DataTrainingArguments(validation_share=1.0)
    with pytest.raises(ValueError, match="augment_flip needs augment"):
        recipe.DataTrainingArguments(augment_flip=True)
    rows = Dataset.from_dict(
        {"picture": [PILImage.new("L", (2, 2))], "fine": [0], "id": [7]},
        features=Features({"picture": Image(), "fine": ClassLabel(names=["a"]), "id": Value("int64")}),
    )
    usual = recipe.with_usual_columns(rows, recipe.DataTrainingArguments())
    assert usual.column_names == ["image", "label"]
    with pytest.raises(ValueError, match=r"label_column='id' is no column of ClassLabel; .* id \(Value\)"):
        recipe.with_usual_columns(rows, recipe.DataTrainingArguments(label_column="id"))


# ------------------------------------------------------------------------------------------ from end to end
def run(rank: int, world_size: int, folder: str, *more: str) -> tuple[dict[str, float], list[float]]:
    rates: list[float] = []
    stock = Trainer.log

    def log(self: Any, logs: dict[str, float], *rest: Any, **keywords: Any) -> None:
        if "cache_hit_rate" in logs:
            rates.append(logs["cache_hit_rate"])
        stock(self, logs, *rest, **keywords)

    Trainer.log = log  # type: ignore[method-assign]
    overrides = "num_hidden_layers=3,hidden_size=16,num_attention_heads=2,intermediate_size=32"
    arguments = (
        f"--config_overrides {overrides} --max_train_samples 64 --max_eval_samples 20 --output_dir {folder} --do_train"
        " --do_eval --pipeline_parallel_size 2 --per_device_train_batch_size 8 --num_train_epochs 4 --report_to none"
        " --freeze_policy schedule --activation_cache on --freeze_schedule"
    )
    results = recipe.main([*arguments.split(), '{"1": 1}', *more])
    return results, rates


def reasons_off(folder: Path) -> list[str]:
    """Why there was no cache any more at the end, as recorded."""
    lines = [json.loads(line) for line in (folder / "pipeline_metrics.jsonl").read_text().splitlines()]
    return [line["reason"] for line in lines if line["kind"] == "cache_off"]


@pytest.mark.slow
def test_fixed_transforms_hit_the_cache_and_random_ones_turn_it_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results, rates), _ = run_ranks(run, 2, str(tmp_path / "fixed"))
    assert results["eval_samples"] == 20
    assert rates[-1] > 0.9
    assert reasons_off(tmp_path / "fixed") == []
    (_, rates), _ = run_ranks(run, 2, str(tmp_path / "random"), "--augment")
    assert max(rates) < 0.1
    (reason,) = reasons_off(tmp_path / "random")
    assert "of 64 samples 0 were found; the inputs of a sample probably change from epoch to epoch" in reason
    assert f"The activation cache is off: {reason}." in capsys.readouterr().out  # the processes' output, too
