"""The recipes' parts that need no process group: generated data, metrics, columns and arguments."""

import importlib
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

import generated_data
import metrics

pytest.importorskip("datasets")
pytest.importorskip("evaluate")

from datasets import Dataset, DatasetDict

# ---------------------------------------------------------------- generated data


def test_same_seed_same_sentences_other_seed_others():
    first = generated_data.generate_splits(50, 20, seed=3)
    assert first == generated_data.generate_splits(50, 20, seed=3)
    assert first != generated_data.generate_splits(50, 20, seed=4)


def test_global_random_state_is_left_alone():
    random.seed(0)
    expected = random.random()
    random.seed(0)
    generated_data.generate_splits(10, 10)
    assert random.random() == expected


def test_splits_are_balanced_and_share_no_sentence():
    splits = generated_data.generate_splits(301, 100)
    sentences = splits["train"]["sentence"] + splits["validation"]["sentence"]
    assert len(sentences) == len(set(sentences)) == 401
    assert sum(splits["train"]["label"]) == 150
    assert sum(splits["validation"]["label"]) == 50


def test_labels_are_not_sorted():
    labels = generated_data.generate_splits(100, 10)["train"]["label"]
    assert 10 < sum(a != b for a, b in itertools.pairwise(labels)) < 90


@pytest.mark.parametrize("sizes", [(0, 10), (10, 0), (generated_data.MAX_SENTENCES, 1)])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="num_train"):
        generated_data.generate_splits(*sizes)


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


def test_positive_and_negative_words_are_disjoint():
    assert not set(generated_data.POSITIVE) & set(generated_data.NEGATIVE)


def test_tokenizer_knows_every_word_and_pads_pairs():
    tokenizer = generated_data.build_tokenizer(model_max_length=32)
    encoded = tokenizer(generated_data.generate_splits(300, 1)["train"]["sentence"])["input_ids"]
    assert tokenizer.unk_token_id not in {token for ids in encoded for token in ids}
    assert max(len(ids) for ids in encoded) <= 32
    assert len(tokenizer) == len(generated_data.vocabulary()) + 5
    pair = tokenizer("The plot", "is dull", return_tensors="np")["input_ids"][0]
    assert tokenizer.decode(pair) == "[CLS] the plot [SEP] is dull [SEP]"
    assert tokenizer("qwerty")["input_ids"][1] == tokenizer.unk_token_id


# ---------------------------------------------------------------- metrics


def test_accuracy_and_f1_by_hand():
    predictions, references = np.array([1, 1, 0, 1]), np.array([1, 0, 0, 1])
    # Two true positives, one false positive, no false negative: precision 2/3, recall 1.
    assert metrics.paraphrase_metrics(predictions, references) == pytest.approx({"accuracy": 0.75, "f1": 0.8})


def test_matthews_by_hand():
    # TP 2, TN 1, FP 1, FN 0: (2·1 - 1·0) / sqrt(3·2·2·1)
    result = metrics.matthews_correlation(np.array([1, 1, 0, 1]), np.array([1, 0, 0, 1]))
    assert result == pytest.approx(2 / np.sqrt(12))


def test_ranks_share_ties():
    assert metrics.ranks(np.array([30, 10, 20, 20])).tolist() == [4.0, 1.0, 2.5, 2.5]


def test_correlations_by_hand():
    predictions, references = np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0])
    assert metrics.spearman(predictions, references) == pytest.approx(1.0)
    # Deviations (-1, 0, 1) and (-11/3, -2/3, 13/3): 8 / sqrt(2 · 294/9)
    assert metrics.pearson(predictions, references) == pytest.approx(8 / np.sqrt(2 * 294 / 9))


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


def test_constant_predictions_have_no_correlation():
    constant, references = np.ones(4, dtype=int), np.array([0, 1, 0, 1])
    assert metrics.matthews_correlation(constant, references) == 0.0
    assert np.isnan(metrics.pearson(constant, references))
    assert metrics.f1_binary(np.zeros(4), np.zeros(4)) == 0.0


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("cola", {"matthews_correlation"}),
        ("mrpc", {"accuracy", "f1"}),
        ("stsb", {"pearson", "spearmanr"}),
        ("sst2", {"accuracy"}),
    ],
)
def test_offline_tasks_use_local_metrics(task, names, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    metric = metrics.load_metric(task, is_regression=task == "stsb")
    assert set(metric(np.array([0, 1, 1]), np.array([0, 1, 0]))) == names


# ---------------------------------------------------------------- run_glue

run_glue = pytest.importorskip("run_glue")
common = pytest.importorskip("common")


def parse(arguments):
    return common.parse_arguments(arguments, run_glue.DataTrainingArguments)


def dataset(**columns):
    return Dataset.from_dict(columns)


def test_text_columns_skip_keys_labels_and_numbers():
    one = dataset(idx=["a", "b"], length=[3, 4], sentence=["x", "y"], label=["no", "yes"])
    assert run_glue.find_text_columns(one) == ("sentence",)
    two = dataset(sentence1=["x"], sentence2=["y"], source=["z"], label=[0])
    assert run_glue.find_text_columns(two) == ("sentence1", "sentence2")
    with pytest.raises(ValueError, match="No column of text"):
        run_glue.find_text_columns(dataset(idx=["a"], label=["no"]))


def test_labels_become_classes_in_the_order_of_their_values():
    splits = DatasetDict(train=dataset(text=["a", "b", "c"], label=["yes", "no", "yes"]), test=dataset(text=["d"]))
    data = run_glue.own_task_data(splits)
    assert data.label_names == ("no", "yes")
    assert list(data.splits["train"]["label"]) == [1, 0, 1]
    assert not data.is_regression


def test_labels_that_do_not_start_at_zero():
    data = run_glue.own_task_data(DatasetDict(train=dataset(text=["a", "b"], label=[5, 2])))
    assert list(data.splits["train"]["label"]) == [1, 0]


def test_fractions_make_a_regression():
    data = run_glue.own_task_data(DatasetDict(train=dataset(text=["a", "b"], label=[0.5, 3.0])))
    assert data.is_regression
    assert data.text_columns == ("text",)


def test_missing_label_is_named():
    with pytest.raises(ValueError, match="'label' is missing"):
        run_glue.own_task_data(DatasetDict(train=dataset(text=["a"])))


def test_file_formats():
    assert common.file_format({"train": "a.jsonl", "test": "b.json"}, run_glue.FILE_FORMATS) == "json"
    assert common.file_format({"train": "a.csv"}, run_glue.FILE_FORMATS) == "csv"
    with pytest.raises(ValueError, match="must all end in"):
        common.file_format({"train": "a.csv", "test": "b.jsonl"}, run_glue.FILE_FORMATS)


def test_part_is_random_but_the_same_for_the_same_seed():
    ordered = dataset(label=[1] * 50 + [0] * 50, text=[str(i) for i in range(100)])
    part = common.take_part(ordered, 20, seed=0)
    assert 0 < sum(part["label"]) < 20
    assert list(part["text"]) == list(common.take_part(ordered, 20, seed=0)["text"])
    assert common.take_part(ordered, 500, seed=0) is ordered


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


def test_scores_are_combined():
    prediction = run_glue.EvalPrediction(
        predictions=np.array([[0.1, 0.9], [0.2, 0.8], [0.9, 0.1], [0.4, 0.6]]), label_ids=np.array([1, 0, 0, 1])
    )
    result = run_glue.make_compute_metrics(metrics.paraphrase_metrics, is_regression=False)(prediction)
    assert result == pytest.approx({"accuracy": 0.75, "f1": 0.8, "combined_score": 0.775})


def test_regression_predictions_are_numbers():
    assert run_glue.to_predictions((np.array([[0.5], [1.5]]), None), is_regression=True).tolist() == [0.5, 1.5]


@pytest.mark.parametrize(
    ("stages", "processes", "expected"),
    [(4, 4, "4 stages × 1 replica"), (4, 8, "4 stages × 2 replicas"), (1, 2, "1 stage × 2 replicas")],
)
def test_layout(stages, processes, expected):
    assert common.describe_layout(stages, processes) == expected


def test_splits_by_prefix():
    splits = DatasetDict({name: dataset(text=["a"]) for name in ("train", "validation_a", "validation_b")})
    assert common.split_names("validation", splits) == ["validation_a", "validation_b"]
    with pytest.raises(ValueError, match="test_file"):
        common.split_names("test", splits)


def test_checkpoint_to_resume_from(tmp_path):
    def args(value):
        return run_glue.PipeTransformerTrainingArguments(
            output_dir=str(tmp_path), resume_from_checkpoint=value, report_to="none"
        )

    assert common.find_checkpoint(args(None)) is None
    assert common.find_checkpoint(args("last")) == common.find_checkpoint(args("True")) == "last"
    assert common.find_checkpoint(args("elsewhere")) == "elsewhere"


def test_predictions_file(tmp_path):
    run_glue.write_predictions(tmp_path / "p.tsv", np.array([1, 0]), ("negative", "positive"))
    assert (tmp_path / "p.tsv").read_text().splitlines() == ["index\tprediction", "0\tpositive", "1\tnegative"]
    run_glue.write_predictions(tmp_path / "r.tsv", np.array([1.25]), ())
    assert (tmp_path / "r.tsv").read_text().splitlines()[1] == "0\t1.250"


# ---------------------------------------------------------------- all recipes

RECIPES = {
    "cifar100": "run_image_classification",
    "clm_demo": "run_clm",
    "demo": "run_glue",
    "digits": "run_image_classification",
    "qa_demo": "run_qa",
    "squad": "run_qa",
    "sst2": "run_glue",
    "wikitext": "run_clm",
}
CONFIGS = Path(run_glue.__file__).parent / "configs"


def test_every_config_belongs_to_a_recipe():
    assert {path.stem for path in CONFIGS.iterdir()} == set(RECIPES)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_configs_are_read_by_their_recipe(name, tmp_path):
    """All names are known and all values allowed; `pipeline_parallel_size` needs its processes."""
    recipe = importlib.import_module(RECIPES[name])
    given = [str(CONFIGS / f"{name}.yaml"), "--pipeline_parallel_size", "1", "--output_dir", str(tmp_path)]
    _, _, training_args = common.parse_arguments(given, recipe.DataTrainingArguments)
    assert training_args.do_train and training_args.do_eval
    assert RECIPES[name] in (CONFIGS / f"{name}.yaml").read_text()  # the command in its first lines


def test_layouts_come_from_the_run_itself(tmp_path):
    args = run_glue.PipeTransformerTrainingArguments(output_dir=str(tmp_path), report_to="none", do_train=True)
    assert common.layouts_of(args) == ["1 stage × 1 replica"]
    events = [("start", 3), ("start", 1), ("transform", 1), ("cache", 1)]  # of two trainings in one folder
    lines = [json.dumps({"event": event, "pipeline_parallel_size": stages}) for event, stages in events]
    (tmp_path / "pipeline_events.jsonl").write_text("\n".join([*lines, '{"event": "something else"}']))
    assert common.layouts_of(args) == ["1 stage × 1 replica"]
    assert [event["event"] for event in common.events_of(args)] == ["start", "transform", "cache"]
