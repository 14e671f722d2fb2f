"""The recipes' parts that need no process group: generated data, metrics, columns and arguments."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
import transformers
from distributed import run_ranks

import generated_data
import metrics

pytest.importorskip("datasets")

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

# ---------------------------------------------------------------- generated data


def test_same_seed_same_sentences_other_seed_others():
    first = generated_data.generate_splits(50, 20, seed=3)
    assert first == generated_data.generate_splits(50, 20, seed=3)
    assert first != generated_data.generate_splits(50, 20, seed=4)


def test_splits_are_balanced_and_share_no_sentence():
    splits = generated_data.generate_splits(301, 100)
    sentences = splits["train"]["sentence"] + splits["validation"]["sentence"]
    assert len(sentences) == len(set(sentences)) == 401
    assert sum(splits["train"]["label"]) == 150
    assert sum(splits["validation"]["label"]) == 50


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
    data = run_glue.own_task_data(DatasetDict(train=dataset(text=["a", "b"], label=[5, 2])))
    assert list(data.splits["train"]["label"]) == [1, 0]
    data = run_glue.own_task_data(DatasetDict(train=dataset(text=["a", "b"], label=[0.5, 3.0])))
    assert data.is_regression and data.text_columns == ("text",)


def test_labels_of_test_data_are_no_classes():
    """They may be placeholders."""
    splits = DatasetDict(train=dataset(text=["a", "b"], label=[0, 1]), test=dataset(text=["c"], label=[-1]))
    data = run_glue.own_task_data(splits)
    assert data.label_names == ("0", "1")
    assert data.splits["test"].column_names == ["text"]


def test_a_row_without_a_label_is_named():
    for labels in (["no", None], [0.5, None]):
        splits = DatasetDict(
            train=dataset(text=["a"], label=labels[:1]), validation=dataset(text=["b", "c"], label=labels)
        )
        with pytest.raises(ValueError, match="Row 1 of the validation data has no label"):
            run_glue.own_task_data(splits)
    splits = DatasetDict(train=dataset(text=["a"]), validation=dataset(text=["b"], label=["no"]))
    data = run_glue.own_task_data(splits)
    with pytest.raises(ValueError, match="'label' of the train data is missing"):
        run_glue.split_with_labels("train", data.splits)


def test_a_row_without_a_text_is_named():
    splits = DatasetDict(train=dataset(a=["x"], b=["y"], label=[0]), test=dataset(a=["x", "y"], b=["z", None]))
    with pytest.raises(ValueError, match="Row 1 of the test data has no text in column 'b': give it one, or remove"):
        run_glue.own_task_data(splits)


def test_only_an_empty_cell_of_csv_is_none(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("text,label\nN/A,None\nNULL,NA\n", encoding="utf-8")
    data_args = run_glue.DataTrainingArguments(train_file=str(path))
    data = run_glue.load_task_data(data_args, seed=0, cache_dir=str(tmp_path / "cache"))
    assert list(data.splits["train"]["text"]) == ["N/A", "NULL"]
    assert data.label_names == ("NA", "None")
    path.write_text("text,label\na,yes\n,no\n", encoding="utf-8")
    with pytest.raises(ValueError, match="Row 1 of the train data has no text"):
        run_glue.load_task_data(data_args, seed=0, cache_dir=str(tmp_path / "cache"))
    path.write_text("text,label\na,0.5\nb,nan\n", encoding="utf-8")  # no class, in a column of numbers
    with pytest.raises(ValueError, match="Row 1 of the train data has no label"):
        run_glue.load_task_data(data_args, seed=0, cache_dir=str(tmp_path / "cache"))


def test_data_without_labels_has_those_of_the_checkpoint():
    splits = DatasetDict(test=dataset(text=["a"], label=[-1]))
    assert run_glue.own_task_data(splits, ("bad", "good")).label_names == ("bad", "good")
    assert run_glue.own_task_data(splits, ()).is_regression
    with pytest.raises(ValueError, match="'label' is missing"):
        run_glue.own_task_data(splits)


def checkpoint(folder, *names):
    """A model that has learnt these labels, in this order."""
    id2label = dict(enumerate(names))
    label2id = {name: i for i, name in id2label.items()}
    common.AutoConfig.for_model("bert", id2label=id2label, label2id=label2id).save_pretrained(folder)
    return common.labels_of(common.ModelArguments(model_name_or_path=str(folder)))


def three_labels():
    """In MNLI's order; those of the test data are not known."""
    names = ("entailment", "neutral", "contradiction")
    splits = DatasetDict(train=dataset(sentence=["a", "b", "c"], label=[0, 1, 2]), test=dataset(sentence=["d"]))
    return run_glue.TaskData(splits, ("sentence",), names)


def test_a_checkpoint_keeps_the_order_of_its_labels(tmp_path):
    data = run_glue.with_labels_of(checkpoint(tmp_path, "CONTRADICTION", "NEUTRAL", "ENTAILMENT"), three_labels())
    assert data.label_names == ("contradiction", "neutral", "entailment")
    assert list(data.splits["train"]["label"]) == [2, 1, 0]


def test_a_checkpoint_keeps_labels_that_a_small_file_lacks(tmp_path):
    data = run_glue.own_task_data(DatasetDict(validation=dataset(text=["a", "b"], label=["neutral", "entailment"])))
    data = run_glue.with_labels_of(checkpoint(tmp_path, "Contradiction", "Entailment", "Neutral"), data)
    assert data.label_names == ("Contradiction", "entailment", "neutral")
    assert list(data.splits["validation"]["label"]) == [2, 1]


@pytest.mark.parametrize("names", [("LABEL_0", "LABEL_1", "LABEL_2"), ("contradiction", "entailment"), ("score",)])
def test_a_checkpoint_of_other_labels_gets_those_of_the_data(names, tmp_path):
    data = run_glue.with_labels_of(checkpoint(tmp_path, *names), three_labels())
    assert data.label_names == three_labels().label_names
    assert list(data.splits["train"]["label"]) == [0, 1, 2]


def test_classes_that_differ_in_capital_letters_only_and_classes_of_one_name():
    assert common.in_order_of(("b", "a", "B"), ("B", "b")) == ("b", "a", "B")
    assert common.in_order_of(("crane", "Heron", "crane"), ("heron",)) == ("crane (0)", "heron", "crane (2)")
    assert common.in_order_of(("crane", "heron", "crane"), ("crane",)) is None


SMALL = "num_hidden_layers=1,hidden_size=16,num_attention_heads=2,intermediate_size=16"


@pytest.mark.parametrize(("length", "asked", "positions"), [(None, 128, 512), (None, 600, 600), (64, 128, 64)])
def test_positions_of_a_model_made_from_scratch(length, asked, positions):
    """`None`: a tokenizer that was saved without a length."""
    tokenizer = generated_data.build_tokenizer(length)
    assert length or tokenizer.model_max_length > 10**20
    model = run_glue.make_model(common.ModelArguments(config_overrides=SMALL), three_labels(), tokenizer, asked)
    assert model.config.max_position_embeddings == positions


def test_a_checkpoint_of_another_problem_learns_classes(tmp_path):
    model_args = common.ModelArguments(config_overrides=SMALL)
    tokenizer = generated_data.build_tokenizer(16)
    model = run_glue.make_model(model_args, three_labels(), tokenizer, 16)
    model.config.problem_type = "multi_label_classification"
    model.save_pretrained(tmp_path)
    model_args = common.ModelArguments(model_name_or_path=str(tmp_path))
    model = run_glue.make_model(model_args, three_labels(), tokenizer, 16)
    assert model.config.problem_type == "single_label_classification"


def test_the_best_model_is_looked_for_by_a_metric_that_there_is(tmp_path):
    classes = three_labels()
    numbers = run_glue.TaskData(classes.splits, ("sentence",), ())

    def check(wanted, data):
        args = run_glue.PipeTransformerTrainingArguments(str(tmp_path), metric_for_best_model=wanted, report_to="none")
        run_glue.check_metric(args, metrics.load_metric(None, data.is_regression), data)

    for wanted in (None, "loss", "eval_loss", "accuracy", "eval_accuracy"):
        check(wanted, classes)
    for wanted in ("pearson", "eval_spearmanr", "combined_score"):
        check(wanted, numbers)
    with pytest.raises(ValueError, match=r"metric_for_best_model='f1' .* take one of accuracy, loss"):
        check("f1", classes)
    with pytest.raises(ValueError, match="take one of pearson, spearmanr, combined_score, loss"):
        check("accuracy", numbers)


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
    "deberta-v2": (
        {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32},
        {"pooler", "classifier"},
    ),
    "xlnet": ({"n_layer": 1, "d_model": 16, "n_head": 2, "d_inner": 32}, {"sequence_summary", "logits_proj"}),
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
    assert len(adapters) >= 2 * 2 and (model_type not in ("distilbert", "vit") or len(adapters) == 2 * 6)
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
    rest |= {"stage_bounds": [0, 4], "seconds": 0.0, "bytes_moved": 0}
    lines = [
        json.dumps({"event": event, "pipeline_parallel_size": stages, "global_step": step, **rest})
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


# ---------------------------------------------------------------- run_glue from end to end

SENTENCES = generated_data.generate_splits(24, 16)  # to evaluate: one full batch of both processes


def run(rank, world_size, folder, scores):
    """`scores`: what is learnt of each sentence is a number, not a class."""
    folder = Path(folder)
    files = {name: folder / f"{name}.jsonl" for name in ("train", "validation", "test")}
    if rank == 0:
        for name, path in files.items():
            rows = SENTENCES["validation" if name == "test" else name]
            names = ("bad", "good")
            lines = [
                {"idx": i, "sentence": text, "label": 2.5 * label if scores else names[label]}
                for i, (text, label) in enumerate(zip(rows["sentence"], rows["label"], strict=True))
            ]
            if name == "test":  # its labels are not known
                lines = [{key: value for key, value in line.items() if key != "label"} for line in lines]
            path.write_text("\n".join(map(json.dumps, lines)))
        generated_data.build_tokenizer(32).save_pretrained(folder / "tokenizer")
    dist.init_process_group("gloo")
    dist.barrier()
    overrides = "num_hidden_layers=2,hidden_size=16,num_attention_heads=2,intermediate_size=32"
    return run_glue.main(
        f"--train_file {files['train']} --validation_file {files['validation']} --test_file {files['test']}"
        f" --tokenizer_name {folder}/tokenizer --config_overrides {overrides} --cache_dir {folder}/cache"
        f" --output_dir {folder}/out --do_train --do_eval --do_predict --pipeline_parallel_size 2"
        " --per_device_train_batch_size 4 --max_steps 2 --learning_rate 1e-2 --report_to none".split()
    )


def apply(rank, world_size, folder, *more):
    """The model that was trained, on files of one's own."""
    return run_glue.main(
        [*f"--model_name_or_path {folder}/out --cache_dir {folder}/cache --report_to none".split(), *more]
    )


def predictions_of(folder, name="out", split="test"):
    lines = (folder / name / f"predictions_{split}.tsv").read_text().splitlines()[1:]
    return [line.split("\t")[1] for line in lines]


def test_classes_from_end_to_end(tmp_path):
    """The test data is the validation data without labels, so what is predicted has the accuracy that is reported."""
    results, _ = run_ranks(run, 2, str(tmp_path), False)
    references = [("bad", "good")[label] for label in SENTENCES["validation"]["label"]]
    predictions = predictions_of(tmp_path)
    assert set(predictions) <= {"bad", "good"} and len(predictions) == results["eval_samples"] == 16
    hits = [found == wanted for found, wanted in zip(predictions, references, strict=True)]
    assert results["eval_accuracy"] == pytest.approx(np.mean(hits))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["label2id"] == {"bad": 0, "good": 1}

    run_ranks(
        apply,
        1,
        str(tmp_path),
        "--do_predict",
        "--test_file",
        f"{tmp_path}/test.jsonl",
        "--output_dir",
        f"{tmp_path}/again",
    )
    assert predictions_of(tmp_path, "again") == predictions
    good = [line for line in (tmp_path / "validation.jsonl").read_text().splitlines() if '"good"' in line]
    (tmp_path / "good.jsonl").write_text("\n".join(good))
    (alone,) = run_ranks(
        apply,
        1,
        str(tmp_path),
        "--do_eval",
        "--validation_file",
        f"{tmp_path}/good.jsonl",
        "--output_dir",
        f"{tmp_path}/again",
    )
    assert alone["eval_accuracy"] == pytest.approx(
        np.mean([p == "good" for p, r in zip(predictions, references, strict=True) if r == "good"])
    )


@pytest.mark.slow
def test_numbers_from_end_to_end(tmp_path):
    """Likewise, with the mean squared error that is the loss."""
    results, _ = run_ranks(run, 2, str(tmp_path), True)
    references = 2.5 * np.array(SENTENCES["validation"]["label"])
    predictions = np.array([float(text) for text in predictions_of(tmp_path)])
    assert results["eval_loss"] == pytest.approx(np.mean((predictions - references) ** 2), rel=1e-3)
    mean = (results["eval_pearson"] + results["eval_spearmanr"]) / 2
    assert results["eval_combined_score"] == pytest.approx(mean, nan_ok=True)


# ---------------------------------------------------------------- GLUE's tasks, as they are on the hub

NLI = ("entailment", "neutral", "contradiction")
HUB_TASKS = {  # text columns, labels, sets of validation and of test data
    "stsb": (("sentence1", "sentence2"), (), ("",)),
    "mnli": (("premise", "hypothesis"), NLI, ("_matched", "_mismatched")),
    "wnli": (("sentence1", "sentence2"), ("not_entailment", "entailment"), ("",)),
}


def task_on_the_hub(task):
    """In its columns and types; test data has the sentences of the validation data, and -1 for labels."""
    columns, names, sets = HUB_TASKS[task]
    label = ClassLabel(names=list(names)) if names else Value("float32")
    features = {**dict.fromkeys(columns, Value("string")), "label": label, "idx": Value("int32")}

    def split(begin, labels=None):
        texts = SENTENCES["train"]["sentence"][begin : begin + 6]
        labels = labels or [number % len(names) if names else 0.9 * number for number in range(begin, begin + 6)]
        rows = dict(zip(columns, (texts, texts[::-1]), strict=True))
        return Dataset.from_dict({**rows, "label": labels, "idx": list(range(6))}, features=Features(features))

    splits = {"train": split(0)}
    for number, name in enumerate(sets, 1):
        splits |= {f"validation{name}": split(6 * number), f"test{name}": split(6 * number, [-1] * 6)}
    return DatasetDict(splits)


def apply_to_tasks(rank, world_size, folder):
    """A model without training on each task."""
    generated_data.build_tokenizer(32).save_pretrained(f"{folder}/tokenizer")
    asked = []

    def load_dataset(path, task, cache_dir):
        asked.append((path, task, cache_dir))
        return task_on_the_hub(task)

    run_glue.load_dataset = load_dataset
    overrides = "num_hidden_layers=2,hidden_size=16,num_attention_heads=2,intermediate_size=32"
    results = {
        task: run_glue.main(
            f"--task_name {task} --tokenizer_name {folder}/tokenizer --config_overrides {overrides} --cache_dir here"
            f" --output_dir {folder}/{task} --do_eval --do_predict --report_to none".split()
        )
        for task in HUB_TASKS
    }
    return asked, results


@pytest.mark.slow
def test_tasks_from_the_hub(tmp_path):
    """Each set of validation data has metrics of its own, and what is predicted for its sentences gives them, too."""
    ((asked, results),) = run_ranks(apply_to_tasks, 1, str(tmp_path))
    assert asked == [("nyu-mll/glue", task, "here") for task in HUB_TASKS]
    for task, (_, names, sets) in HUB_TASKS.items():
        for name in sets:
            labels = np.array(task_on_the_hub(task)[f"validation{name}"]["label"])
            found = predictions_of(tmp_path, task, f"test{name}")
            if names:
                accuracy = np.mean([names.index(text) == label for text, label in zip(found, labels, strict=True)])
                assert results[task][f"eval_accuracy{name}"] == pytest.approx(accuracy)
            else:
                numbers = np.array([float(text) for text in found])
                loss = np.mean((numbers - labels) ** 2)
                assert results[task][f"eval_loss{name}"] == pytest.approx(loss, rel=1e-2)
                assert {"eval_pearson", "eval_spearmanr", "eval_combined_score"} <= results[task].keys()
    assert not {"eval_accuracy", "eval_loss"} & results["mnli"].keys()
