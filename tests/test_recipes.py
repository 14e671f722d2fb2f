"""The recipes' parts that need no process group: generated data, metrics, columns and arguments."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import transformers

import generated_data
import metrics

pytest.importorskip("datasets")


# ---------------------------------------------------------------- generated data


def test_same_seed_same_sentences_other_seed_others():
    first = generated_data.generate_splits(50, 20, seed=3)
    assert first == generated_data.generate_splits(50, 20, seed=3)
    assert first != generated_data.generate_splits(50, 20, seed=4)


def read_label(sentence):
    """Reads a generated sentence back, by the rules in the module's docstring, written independently of it."""
    _, found, rest = sentence.partition(" yet ")
    sentence = rest if found else sentence
    clauses = [sentence]
    weights = [1]
    for join, weight in ((" but the ", 3), (" and the ", 1)):
        if join in sentence:
            clauses, weights = sentence.split(join), [1, weight]
    total = 0.0
    for clause, weight in zip(clauses, weights, strict=True):
        words = clause.split()
        score = 2.0 if words[-1] in generated_data.POSITIVE else -2.0
        score *= -1 if set(words) & set(generated_data.NEGATIONS) else 1
        score *= 2.0 if set(words) & set(generated_data.STRONGER) else 1
        score *= 0.5 if set(words) & set(generated_data.WEAKER) else 1
        total += weight * score
    return int(total > 0)


def test_labels_follow_from_the_sentences():
    split = generated_data.generate_splits(500, 1)["train"]
    assert [read_label(sentence) for sentence in split["sentence"]] == split["label"]


# ---------------------------------------------------------------- metrics


@pytest.mark.parametrize("num_classes", [2, 3])
def test_classification_metrics_equal_sklearn(num_classes):
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(num_classes)
    references = rng.integers(num_classes, size=200)
    predictions = np.where(rng.random(200) < 0.6, references, rng.integers(num_classes, size=200))
    assert metrics.accuracy(predictions, references) == pytest.approx(
        sklearn_metrics.accuracy_score(references, predictions)
    )
    assert metrics.matthews_correlation(predictions, references) == pytest.approx(
        sklearn_metrics.matthews_corrcoef(references, predictions)
    )
    if num_classes == 2:
        assert metrics.f1_binary(predictions, references) == pytest.approx(
            sklearn_metrics.f1_score(references, predictions)
        )


def test_correlations_equal_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    references = rng.integers(0, 26, size=300) / 5  # STS-B's scores have many ties
    predictions = references + rng.normal(size=300)
    result = metrics.regression_metrics(predictions, references)
    assert result["pearson"] == pytest.approx(stats.pearsonr(predictions, references)[0])
    assert result["spearmanr"] == pytest.approx(stats.spearmanr(predictions, references)[0])


@pytest.mark.parametrize("is_reachable", [True, False])
def test_tasks_use_evaluate_where_it_is_reachable(is_reachable, monkeypatch, caplog):
    def load(*names):
        if not is_reachable:
            raise ConnectionError("no route")
        return SimpleNamespace(compute=lambda **given: {"names": names, **given})

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setitem(sys.modules, "evaluate", SimpleNamespace(load=load))
    metric = metrics.load_metric("mrpc", is_regression=False)
    predictions, references = np.array([1, 1, 0, 1]), np.array([1, 0, 0, 1])
    if is_reachable:
        expected = {"names": ("glue", "mrpc"), "predictions": predictions, "references": references}
        assert metric(predictions, references) == expected  # the same arrays
    else:
        assert "evaluate.load('glue', 'mrpc') failed (no route)" in caplog.text
        assert metric is metrics.paraphrase_metrics
    assert metrics.load_metric(None, is_regression=False) is metrics.accuracy_metrics  # data of one's own


# ---------------------------------------------------------------- what recipes share

run_glue = pytest.importorskip("run_glue")
common = pytest.importorskip("common")


def parse(arguments):
    return common.parse_arguments(arguments, run_glue.DataTrainingArguments)


def test_mixed_precision_pads_to_a_multiple_of_8(tmp_path, monkeypatch):
    """Also where the launcher asks for it."""

    def multiple(**options):
        args = run_glue.PipeTransformerTrainingArguments(str(tmp_path), report_to="none", **options)
        return common.padding_multiple(args)

    assert (multiple(), multiple(bf16=True)) == (None, 8)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert multiple() == 8


WITH_ADAPTERS = {  # the sizes of a small model, and the heads that are trained whole
    "distilbert": ({"n_layers": 1, "dim": 16, "n_heads": 2, "hidden_dim": 32}, {"pre_classifier", "classifier"}),
    "vit": (
        {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "image_size": 8, "patch_size": 4},
        {"classifier"},
    ),
    "llama": ({"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}, set()),
}


@pytest.mark.parametrize("model_type", WITH_ADAPTERS)
def test_adapters_and_new_heads_are_trained(model_type):
    """Also where PEFT has no default for the model, and where a head has two layers."""
    pytest.importorskip("peft")
    sizes, heads = WITH_ADAPTERS[model_type]
    auto = {"vit": "AutoModelForImageClassification", "llama": "AutoModelForCausalLM"}
    model_class = getattr(transformers, auto.get(model_type, "AutoModelForSequenceClassification"))
    model_args = common.ModelArguments(model_type=model_type, lora_rank=2)
    vocabulary = {} if model_type == "vit" else {"vocab_size": 9}
    model = common.load_model(model_class, model_args, common.load_config(model_args, {**sizes, **vocabulary}))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapters = {name for name in trained if "lora_" in name}
    assert len(adapters) >= 2 * 2 and (model_type == "llama" or len(adapters) == 2 * 6)
    assert {name.split(".")[2] for name in trained - adapters} == heads
    for bad, message in (({"lora_rank": 0}, "lora_rank=0"), ({"lora_target_modules": ["q"]}, "needs lora_rank")):
        with pytest.raises(ValueError, match=message):
            common.ModelArguments(**bad)


def test_file_formats():
    assert common.file_format({"train": "a.jsonl", "test": "b.json"}, run_glue.FILE_FORMATS) == "json"
    assert common.file_format({"train": "a.csv"}, run_glue.FILE_FORMATS) == "csv"
    with pytest.raises(ValueError, match="must all end in"):
        common.file_format({"train": "a.csv", "test": "b.jsonl"}, run_glue.FILE_FORMATS)


def test_exactly_one_source_of_data():
    with pytest.raises(ValueError, match="got none"):
        run_glue.DataTrainingArguments()
    with pytest.raises(ValueError, match="task_name, generated_data"):
        run_glue.DataTrainingArguments(task_name="sst2", generated_data=10)
    with pytest.raises(ValueError, match="is not one of"):
        run_glue.DataTrainingArguments(task_name="sst9")
    assert run_glue.DataTrainingArguments(task_name="SST2").task_name == "sst2"


def test_command_line_wins_over_the_file(tmp_path):
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


def test_unknown_name_in_the_file_is_refused(tmp_path):
    config = tmp_path / "run.yaml"
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


def test_layouts_come_from_the_run_itself(tmp_path):
    args = run_glue.PipeTransformerTrainingArguments(output_dir=str(tmp_path), report_to="none", do_train=True)
    assert common.layouts_of(args) == ()
    assert common.describe_layouts(args, ()) == "1 stage × 1 replica"
    events = [("start", 3), ("start", 4), ("transform", 2), ("cache", 2), ("transform", 1)]  # of two trainings
    rest = {"epoch": 0.0, "num_layers": 4, "num_frozen_layers": 0, "data_parallel_size": 1, "num_microbatches": 1}
    rest |= {"stage_bounds": [0, 4], "seconds": 0.0, "bytes_moved": 0, "num_cached_layers": 0, "phases": {}}
    rest["predicted"] = {"schedule": "1f1b", "memory_bytes": [], "steps": []}
    lines = [
        json.dumps(
            {"event": event, "pipeline_parallel_size": stages, "global_step": step, "run": str(step > 0), **rest}
        )
        for step, (event, stages) in enumerate(events)
    ]
    # the last line was cut off by a kill
    (tmp_path / "pipeline_events.jsonl").write_text("\n".join([*lines, lines[-1][:30]]))
    layouts = common.layouts_of(args)
    assert [layout.num_stages for layout in layouts] == [4, 2, 2, 1]
    assert common.describe_layouts(args, layouts).count("→") == 2


@pytest.mark.parametrize("name", ["run_clm", "run_image_classification"])
def test_recipes_without_predictions_refuse_to_predict(name, tmp_path):
    data = ["--generated_data", "10"] if name == "run_clm" else []
    with pytest.raises(ValueError, match="do_predict"):
        importlib.import_module(name).main(
            [*data, "--output_dir", str(tmp_path), "--do_predict", "--report_to", "none"]
        )
