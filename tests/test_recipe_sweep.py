"""A recipe that is run several times over one store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks

from hf_pipetransformer.own_files import OwnFolder
from hf_pipetransformer.parts.prefix_cache.cache.sharing import STORE

import sweep

pytest.importorskip("datasets")

SMALL = [
    *("--config_overrides", "num_hidden_layers=4,hidden_size=32,num_attention_heads=2,intermediate_size=64"),
    *("--generated_data", "64", "--max_seq_length", "16", "--do_train", "--do_eval", "--max_eval_samples", "16"),
    *("--num_train_epochs", "1", "--per_device_train_batch_size", "8"),
    *("--report_to", "none", "--disable_tqdm", "true", "--activation_cache", "on"),
    *("--freeze_policy", "schedule", "--freeze_schedule", '{"0": 3}'),
]


def test_trials_are_all_combinations() -> None:
    assert sweep.trials_of(["learning_rate=1e-4,2e-4", "seed=1,2"]) == [
        {"learning_rate": rate, "seed": seed} for rate in ("1e-4", "2e-4") for seed in ("1", "2")
    ]
    text = 'freeze_schedule={"0": 3, "1": 4},{"0": 2}'  # a value may be JSON
    assert [trial["freeze_schedule"] for trial in sweep.trials_of([text])] == ['{"0": 3, "1": 4}', '{"0": 2}']
    with pytest.raises(ValueError, match=r"seed is invalid|'seed' is invalid"):
        sweep.trials_of(["seed"])
    with pytest.raises(ValueError, match="given twice"):
        sweep.trials_of(["seed=1", "seed=2"])


def test_a_trial_that_fails_leaves_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recipe:
        @staticmethod
        def main(arguments: list[str]) -> dict[str, float]:
            folder = Path(arguments[arguments.index("--activation_cache_dir") + 1])
            OwnFolder(folder / STORE).create()
            raise RuntimeError("a trial")

    monkeypatch.setattr(sweep.importlib, "import_module", lambda name: Recipe)
    with pytest.raises(RuntimeError, match="a trial"):
        sweep.main(["run_glue", "--metric", "train_loss", "--output_dir", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def swept(rank: int, world_size: int, folder: Path) -> list[dict[str, Any]]:
    """A mistyped metric is refused before the first trial."""
    wrong = ["--metric", "eval_acuracy", "--output_dir", str(folder), *SMALL]
    with pytest.raises(ValueError, match=r"--metric 'eval_acuracy' is not among .*eval_accuracy"):
        sweep.main(["run_glue", "--try", "seed=1,2", *wrong])
    assert not list(folder.glob("*trial*")), "something was trained"
    return sweep.main(["run_glue", "--try", "learning_rate=1e-3,2e-3", "--output_dir", str(folder), *SMALL])


@pytest.mark.slow
def test_a_sweep_of_a_recipe_has_one_store(tmp_path: Path) -> None:
    """The model is made from scratch with the same seed, so frozen layers have the same weights in both trials."""
    (done,) = run_ranks(swept, 1, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in lines] == [trial["learning_rate"] for trial in done] == ["1e-3", "2e-3"]
    assert not list(tmp_path.glob("_hf_pipetransformer_cache"))
    rates = []
    for number in range(2):
        records = (tmp_path / f"trial-{number}" / "pipeline_metrics.jsonl").read_text().splitlines()
        values = [json.loads(record).get("values") or {} for record in records]
        rates.append([value["cache_hit_rate"] for value in values if "cache_hit_rate" in value])
    assert rates == [[0.0], [1.0]]
