"""The recipes' parts that need no process group: generated data, metrics, columns and arguments."""

import importlib
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from selection import slow

import metrics

pytest.importorskip("datasets")


# ---------------------------------------------------------------- metrics


def test_metrics_equal_those_of_sklearn_and_scipy():
    theirs = pytest.importorskip("sklearn.metrics")
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(2)
    references = rng.integers(2, size=200)
    predictions = np.where(rng.random(200) < 0.6, references, rng.integers(2, size=200))
    for ours, wanted in (
        (metrics.accuracy, theirs.accuracy_score),
        (metrics.matthews_correlation, theirs.matthews_corrcoef),
        (metrics.f1_binary, theirs.f1_score),
    ):
        assert ours(predictions, references) == pytest.approx(wanted(references, predictions))
    references = rng.integers(0, 26, size=300) / 5  # STS-B's scores have many ties
    predictions = references + rng.normal(size=300)
    result = metrics.regression_metrics(predictions, references)
    assert result["pearson"] == pytest.approx(stats.pearsonr(predictions, references)[0])
    assert result["spearmanr"] == pytest.approx(stats.spearmanr(predictions, references)[0])


# ---------------------------------------------------------------- what recipes share

run_glue = pytest.importorskip("run_glue")
common = pytest.importorskip("common")


def parse(arguments):
    return common.parse_arguments(arguments, run_glue.DataTrainingArguments)


def test_user_errors():
    with pytest.raises(ValueError, match="got none"):
        run_glue.DataTrainingArguments()
    with pytest.raises(ValueError, match="task_name, generated_data"):
        run_glue.DataTrainingArguments(task_name="sst2", generated_data=10)
    with pytest.raises(ValueError, match="is not one of"):
        run_glue.DataTrainingArguments(task_name="sst9")
    assert run_glue.DataTrainingArguments(task_name="SST2").task_name == "sst2"
    for bad, message in (({"lora_rank": 0}, "lora_rank=0"), ({"lora_target_modules": ["q"]}, "needs lora_rank")):
        with pytest.raises(ValueError, match=message):
            common.ModelArguments(**bad)
    with pytest.raises(ValueError, match="must all end in"):
        common.file_format({"train": "a.csv", "test": "b.jsonl"}, run_glue.FILE_FORMATS)


def test_command_line_wins_over_the_file_which_has_known_names_only(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"generated_data: 10\noutput_dir: {tmp_path}/out\nlearning_rate: 1e-3\ndo_train: true\n"
        "label_names: [labels, more]\nresume_from_checkpoint: null\nreport_to: none\n"
    )
    _, data_args, training_args = parse([str(config), "--learning_rate", "0.5", "--do_eval"])
    assert data_args.generated_data == 10
    assert training_args.learning_rate == 0.5
    assert training_args.do_train and training_args.do_eval and not training_args.do_predict
    assert training_args.label_names == ["labels", "more"]
    config.write_text("generated_data: 10\nlearning_speed: 1\n")
    with pytest.raises(ValueError, match="learning_speed"):
        parse([str(config)])


# ---------------------------------------------------------------- all recipes

RECIPES = {
    "cifar100": "run_image_classification",
    "clm_demo": "run_clm",
    "demo": "run_glue",
    "dpo_demo": "run_trl",
    "llama3_8b_lora": "run_clm",
    "digits": "run_image_classification",
    "qa_demo": "run_qa",
    "squad": "run_qa",
    "sst2": "run_glue",
    "summarization_demo": "run_summarization",
    "wikitext": "run_clm",
}
CONFIGS = Path(run_glue.__file__).parent / "configs"


def test_every_config_belongs_to_a_recipe():
    assert {path.stem for path in CONFIGS.iterdir()} == set(RECIPES)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_configs_are_read_by_their_recipe(name, tmp_path):
    """All names are known and all values allowed; `pipeline_parallel_size` needs its processes."""
    if RECIPES[name] == "run_trl":
        pytest.importorskip("trl")
    recipe = importlib.import_module(RECIPES[name])
    given = [str(CONFIGS / f"{name}.yaml"), "--pipeline_parallel_size", "1", "--output_dir", str(tmp_path)]
    is_seq2seq = RECIPES[name] == "run_summarization"
    kind = recipe.PipeTransformerSeq2SeqTrainingArguments if is_seq2seq else common.PipeTransformerTrainingArguments
    if RECIPES[name] == "run_trl":
        _, _, training_args = recipe.parse(given)
    else:
        _, _, training_args = common.parse_arguments(given, recipe.DataTrainingArguments, kind)
    assert training_args.do_train and training_args.do_eval
    assert RECIPES[name] in (CONFIGS / f"{name}.yaml").read_text()  # the command in its first lines


SCRIPTS = sorted(CONFIGS.parent.glob("run_*.py"))


@pytest.mark.parametrize("recipe", SCRIPTS, ids=lambda path: path.stem)
def test_an_error_is_written_where_the_launcher_reads_it(recipe, tmp_path, monkeypatch):
    pytest.importorskip(
        {"run_trl": "trl", "run_sentence_embeddings": "sentence_transformers"}.get(recipe.stem, "torch")
    )
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    data = [] if recipe.stem == "run_image_classification" else ["--generated_data", "8"]
    wrong = [*data, "--freeze_policy", "alpha", "--freeze_alpha", "2", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(recipe), *wrong])
    with pytest.raises(ValueError, match="freeze_alpha=2"):
        runpy.run_path(str(recipe), run_name="__main__")
    assert "freeze_alpha=2" in json.loads(file.read_text())["message"]["message"]


@pytest.mark.parametrize("kind", ["head", *slow("speech", "image-text", "captioning")])
def test_what_is_frozen_is_read(kind, tmp_path, caplog):
    """The recipe for modules that are frozen already: 24 samples, batches of 8; each epoch compares one batch."""
    caplog.set_level("INFO", "hf_pipetransformer")
    options = f"--kind {kind} --generated_data 24 --output_dir {tmp_path} --num_train_epochs 3 --do_train --use_cpu"
    caching = "--eval_frozen_modules True --activation_cache on --report_to none --save_strategy no --log_level info"
    rows = "--per_device_train_batch_size 8"
    results = importlib.import_module("run_frozen").main([*options.split(), *caching.split(), *rows.split()])
    assert results["train_loss"] > 0
    assert re.findall(r"was read for (\d+) of", caplog.text)[:1] == [str((3 - 1) * (24 - 8))]
