"""Text classification: columns, labels and checkpoints, and the recipe from end to end."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from distributed import run_ranks

import generated_data
import metrics

pytest.importorskip("datasets")

from datasets import Dataset, DatasetDict

run_glue = pytest.importorskip("run_glue")
common = pytest.importorskip("common")


def dataset(**columns):
    return Dataset.from_dict(columns)


def three_labels():
    """Data with labels in MNLI's order; the test data has no known labels."""
    names = ("entailment", "neutral", "contradiction")
    splits = DatasetDict(train=dataset(sentence=["a", "b", "c"], label=[0, 1, 2]), test=dataset(sentence=["d"]))
    return run_glue.TaskData(splits, ("sentence",), names)


def test_the_best_model_is_looked_for_by_a_metric_that_there_is(tmp_path):
    classes = three_labels()
    numbers = run_glue.TaskData(classes.splits, ("sentence",), ())

    def check(wanted, data):
        args = run_glue.PipeTransformerTrainingArguments(str(tmp_path), metric_for_best_model=wanted, report_to="none")
        run_glue.check_metric(args, metrics.load_metric(None, data.is_regression), data)

    for wanted in (None, "loss", "eval_accuracy"):
        check(wanted, classes)
    with pytest.raises(ValueError, match=r"metric_for_best_model='f1' .* take one of accuracy, loss"):
        check("f1", classes)
    with pytest.raises(ValueError, match="take one of pearson, spearmanr, combined_score, loss"):
        check("accuracy", numbers)


# ---------------------------------------------------------------- run_glue from end to end

SENTENCES = generated_data.generate_splits(24, 16)  # to evaluate: one full batch of both processes


def run(rank, world_size, folder):
    folder = Path(folder)
    files = {name: folder / f"{name}.jsonl" for name in ("train", "validation", "test")}
    if rank == 0:
        for name, path in files.items():
            rows = SENTENCES["validation" if name == "test" else name]
            names = ("bad", "good")
            lines = [
                {"idx": i, "sentence": text, "label": names[label]}
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
    """The test data is the validation data without labels, so the predictions have the reported accuracy."""
    results, _ = run_ranks(run, 2, str(tmp_path))
    references = [("bad", "good")[label] for label in SENTENCES["validation"]["label"]]
    predictions = predictions_of(tmp_path)
    assert set(predictions) <= {"bad", "good"} and len(predictions) == results["eval_samples"] == 16
    hits = [found == wanted for found, wanted in zip(predictions, references, strict=True)]
    assert results["eval_accuracy"] == pytest.approx(np.mean(hits))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["label2id"] == {"bad": 0, "good": 1}

    folder = str(tmp_path)
    again = ("--output_dir", f"{folder}/again")
    run_ranks(apply, 1, folder, "--do_predict", "--test_file", f"{folder}/test.jsonl", *again)
    assert predictions_of(tmp_path, "again") == predictions
    good = [line for line in (tmp_path / "validation.jsonl").read_text().splitlines() if '"good"' in line]
    (tmp_path / "good.jsonl").write_text("\n".join(good))  # labels have the order that the checkpoint knows
    (alone,) = run_ranks(apply, 1, folder, "--do_eval", "--validation_file", f"{folder}/good.jsonl", *again)
    assert alone["eval_accuracy"] == pytest.approx(
        np.mean([p == "good" for p, r in zip(predictions, references, strict=True) if r == "good"])
    )
