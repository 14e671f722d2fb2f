#!/usr/bin/env python
"""Fine-tunes a model for sentence classification (or regression) in pipeline stages.

The data is a GLUE task from the hub (`--task_name sst2`), files of one's own (`--train_file`, `--validation_file`,
`--test_file`: JSON Lines, JSON or CSV), or a set that is generated on the spot (`--generated_data 4000`).

All arguments can stand in one YAML or JSON file, given first; those after it on the command line win:

    accelerate launch --config_file accelerate_configs/cpu_4.yaml recipes/run_glue.py recipes/configs/demo.yaml \
        --num_train_epochs 1
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Value, load_dataset
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    default_data_collator,
)
from transformers.tokenization_utils_base import LARGE_INTEGER

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

from common import (
    LABEL,
    SMALL_MODEL,
    ModelArguments,
    Names,
    TextArguments,
    check_one_source,
    evaluate,
    file_format,
    in_order_of,
    labels_of,
    load_config,
    load_model,
    load_tokenizer,
    padding_multiple,
    parse_arguments,
    print_summary,
    split_names,
    start,
    take_part,
    train,
    without_column,
    without_missing,
)
from generated_data import build_tokenizer, generate_splits
from metrics import MetricFn, load_metric

TASK_COLUMNS: dict[str, tuple[str, ...]] = {
    "cola": ("sentence",),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence",),
    "stsb": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
}
FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv"}
NOT_TEXT = {LABEL, "idx", "id"}
# Of CSV, an empty cell is none, or what stands for a number that is none: "NA" and "null" are texts and labels.
CSV_OPTIONS = {"keep_default_na": False, "na_values": ["", "nan", "NaN"]}
USUAL_LENGTH = 512
"""Positions of a model made from scratch, where the tokenizer was saved without a length."""
# Generated: one validation sentence for every so many training sentences, but not fewer than the minimum.
GENERATED_TRAIN_PER_VALIDATION = 8
GENERATED_MIN_VALIDATION = 200


@dataclass
class DataTrainingArguments(TextArguments):
    """The data for training, evaluation and prediction."""

    task_name: str | None = field(default=None, metadata={"help": f"A GLUE task: {', '.join(TASK_COLUMNS)}."})
    train_file: str | None = field(default=None, metadata={"help": "A .jsonl, .json or .csv file."})
    validation_file: str | None = field(default=None, metadata={"help": "A .jsonl, .json or .csv file."})
    test_file: str | None = field(default=None, metadata={"help": "A .jsonl, .json or .csv file."})
    generated_data: int | None = field(
        default=None, metadata={"help": "Generate this many training sentences; see generated_data.py. No download."}
    )
    max_seq_length: int = field(default=128, metadata={"help": "Longer inputs are truncated, in tokens."})
    pad_to_max_length: bool = field(
        default=False, metadata={"help": "Pad to max_seq_length instead of to the longest sample of each batch."}
    )
    max_predict_samples: int | None = field(
        default=None, metadata={"help": "Predict only the first samples, this many."}
    )

    def __post_init__(self) -> None:
        check_one_source(
            **{
                "task_name": self.task_name is not None,
                "train_file/validation_file/test_file": any((self.train_file, self.validation_file, self.test_file)),
                "generated_data": self.generated_data is not None,
            }
        )
        if self.task_name is not None:
            self.task_name = self.task_name.lower()
            if self.task_name not in TASK_COLUMNS:
                raise ValueError(f"task_name={self.task_name!r} is not one of {', '.join(TASK_COLUMNS)}.")


@dataclass(frozen=True)
class TaskData:
    """Raw data and what its labels mean."""

    splits: DatasetDict
    text_columns: tuple[str, ...]
    label_names: Names  # empty for regression

    @property
    def is_regression(self) -> bool:
        """Whether the labels are numbers rather than classes."""
        return not self.label_names


def load_task_data(
    data_args: DataTrainingArguments, seed: int, cache_dir: str | None = None, known: Names | None = None
) -> TaskData:
    """Loads or generates the raw splits and finds their text columns and label names.

    Args:
        data_args: which data.
        seed: of generated data.
        cache_dir: where downloads are kept.
        known: a checkpoint's labels, for files that have none.
    """
    if data_args.generated_data is not None:
        num_validation = max(GENERATED_MIN_VALIDATION, data_args.generated_data // GENERATED_TRAIN_PER_VALIDATION)
        columns = generate_splits(data_args.generated_data, num_validation, seed=seed)
        splits = DatasetDict({name: Dataset.from_dict(split) for name, split in columns.items()})
        return TaskData(splits, ("sentence",), ("negative", "positive"))
    if data_args.task_name is not None:
        splits = load_dataset("nyu-mll/glue", data_args.task_name, cache_dir=cache_dir)
        labels = splits["train"].features[LABEL]
        label_names = tuple(labels.names) if isinstance(labels, ClassLabel) else ()
        return TaskData(without_column(splits, LABEL, "test"), TASK_COLUMNS[data_args.task_name], label_names)
    given = {
        "train": data_args.train_file,
        "validation": data_args.validation_file,
        "test": data_args.test_file,
    }
    files = {name: path for name, path in given.items() if path is not None}
    builder = file_format(files, FILE_FORMATS)
    options = CSV_OPTIONS if builder == "csv" else {}
    splits = load_dataset(builder, data_files=files, cache_dir=cache_dir, **options)
    return own_task_data(splits, known)


def own_task_data(splits: DatasetDict, known: Names | None = None) -> TaskData:
    """Finds text columns and labels in data of one's own; classes become 0 ... n-1, in the order of their values.

    A numeric label with a fraction (a float column) makes it a regression. If no split has labels (labels of test data
    are not read), the `known` ones of a checkpoint are used.

    Raises:
        ValueError: a row, or all of them, has no label; a row has no text.
    """
    splits = without_missing(without_column(splits, LABEL, "test"), LABEL)
    first = splits.get("train") or next(iter(splits.values()))
    text_columns = find_text_columns(first)
    check_texts(splits, text_columns)
    labelled = {name: split for name, split in splits.items() if LABEL in split.column_names}
    if not labelled:
        if known is None:
            raise ValueError(f"Column {LABEL!r} is missing; the columns are {', '.join(first.column_names)}.")
        return TaskData(splits, text_columns, known)
    for name, split in labelled.items():
        row = next((row for row, label in enumerate(split[LABEL]) if label is None), None)
        if row is not None:
            raise ValueError(f"Row {row} of the {name} data has no label: give it one, or remove it.")
    if any(split.features[LABEL].dtype in {"float16", "float32", "float64"} for split in labelled.values()):
        return TaskData(splits, text_columns, ())
    values = sorted({value for split in labelled.values() for value in split[LABEL]})
    class_of = {value: i for i, value in enumerate(values)}
    numbered = TaskData(splits, text_columns, tuple(str(value) for value in values))
    return with_classes(numbered, class_of, numbered.label_names)


def check_texts(splits: DatasetDict, text_columns: tuple[str, ...]) -> None:
    """Refuses rows without a text.

    Raises:
        ValueError: naming the first of them.
    """
    for name, split in splits.items():
        for column in text_columns:
            texts = split[column] if column in split.column_names else ()
            row = next((row for row, text in enumerate(texts) if text is None), None)
            if row is not None:
                raise ValueError(
                    f"Row {row} of the {name} data has no text in column {column!r}: give it one, or remove the row."
                )


def with_classes(data: TaskData, class_of: Mapping[Any, int], label_names: Names) -> TaskData:
    """The data with other numbers for its classes: what stands there -> its number among `label_names`."""

    def renumbered(split: Dataset) -> Dataset:
        if LABEL not in split.column_names:
            return split
        return split.remove_columns(LABEL).add_column(LABEL, [class_of[label] for label in split[LABEL]])

    splits = DatasetDict({name: renumbered(split) for name, split in data.splits.items()})
    return TaskData(splits, data.text_columns, label_names)


def split_with_labels(name: str, splits: DatasetDict) -> Dataset:
    """The split of this name, to train or to evaluate on.

    Raises:
        ValueError: it has no labels.
    """
    if LABEL not in splits[name].column_names:
        raise ValueError(f"Column {LABEL!r} of the {name} data is missing, or empty in all rows.")
    return splits[name]


def find_text_columns(dataset: Dataset) -> tuple[str, ...]:
    """Returns the first one or two columns of strings that are neither a label nor a key.

    Raises:
        ValueError: there is none.
    """
    texts = [
        name
        for name, feature in dataset.features.items()
        if name not in NOT_TEXT and isinstance(feature, Value) and feature.dtype in {"string", "large_string"}
    ]
    if not texts:
        raise ValueError(f"No column of text among {', '.join(dataset.column_names)}.")
    return tuple(texts[:2])


def find_tokenizer(model_args: ModelArguments, data_args: DataTrainingArguments) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer, or builds one for the generated sentences."""
    tokenizer = load_tokenizer(model_args)
    if tokenizer is not None:
        return tokenizer
    if data_args.generated_data is None:
        raise ValueError("A model made from scratch needs tokenizer_name, unless the data is generated_data.")
    return build_tokenizer(model_max_length=data_args.max_seq_length)


def with_labels_of(known: Names | None, data: TaskData) -> TaskData:
    """The data with the classes of a checkpoint that knows them all, by name."""
    names = None if data.is_regression else in_order_of(known, data.label_names)
    if names is None or names == data.label_names:
        return data
    return with_classes(data, {i: names.index(label) for i, label in enumerate(data.label_names)}, names)


def check_metric(training_args: PipeTransformerTrainingArguments, metric: MetricFn, data: TaskData) -> None:
    """Refuses, before the training, to look for the best model by what no evaluation gives.

    Raises:
        ValueError: naming what there is.
    """
    wanted = training_args.metric_for_best_model
    if wanted is None:
        return
    logits = np.array([[0.0], [1.0]]) if data.is_regression else np.eye(2)
    tried = make_compute_metrics(metric, data.is_regression)(EvalPrediction(logits, np.array([0, 1])))
    given = [*tried, "loss"]
    if wanted.removeprefix("eval_") not in given:
        raise ValueError(
            f"metric_for_best_model={wanted!r} is not what this task's evaluation gives: take one of"
            f" {', '.join(given)}."
        )


def make_model(
    model_args: ModelArguments, data: TaskData, tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> nn.Module:
    """Loads the model with a head for the labels, or makes a small one from scratch, for inputs of that length."""
    labels: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
    if not data.is_regression:
        label2id = {name: i for i, name in enumerate(data.label_names)}
        id2label = {i: name for name, i in label2id.items()}
        # a checkpoint of another task would keep its own problem_type
        labels = {"num_labels": len(label2id), "label2id": label2id, "id2label": id2label}
        labels["problem_type"] = "single_label_classification"
    has_length = tokenizer.model_max_length < LARGE_INTEGER
    small = {
        "model_type": "bert",
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": tokenizer.model_max_length if has_length else max(USUAL_LENGTH, max_seq_length),
        **SMALL_MODEL,
    }
    config = load_config(model_args, small, **labels)
    if config.get_text_config().pad_token_id is None:  # GPT-2 and its like: sentences of one batch differ in length
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return load_model(AutoModelForSequenceClassification, model_args, config)


def tokenize(
    data: TaskData,
    tokenizer: PreTrainedTokenizerBase,
    data_args: DataTrainingArguments,
    training_args: PipeTransformerTrainingArguments,
) -> DatasetDict:
    """Turns the text columns into token ids; the label stays, every other column goes."""
    max_length = min(data_args.max_seq_length, tokenizer.model_max_length)
    padding = "max_length" if data_args.pad_to_max_length else False

    def encode(batch: dict[str, list]) -> dict[str, list]:
        texts = [batch[column] for column in data.text_columns]
        return tokenizer(*texts, padding=padding, max_length=max_length, truncation=True)

    columns = {name for split in data.splits.values() for name in split.column_names if name != LABEL}
    with training_args.main_process_first(desc="tokenization"):
        return DatasetDict(
            {
                name: split.map(
                    encode,
                    batched=True,
                    num_proc=data_args.preprocessing_num_workers,
                    remove_columns=[column for column in split.column_names if column in columns],
                    load_from_cache_file=not data_args.overwrite_cache,
                    desc=f"Tokenizing {name}",
                )
                for name, split in data.splits.items()
            }
        )


def make_compute_metrics(metric: MetricFn, is_regression: bool) -> Any:
    """Wraps a metric as the Trainer wants it; adds `combined_score`, the mean, where there are several numbers."""

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        result = dict(metric(to_predictions(prediction.predictions, is_regression), np.asarray(prediction.label_ids)))
        if len(result) > 1:
            result["combined_score"] = float(np.mean(list(result.values())))
        return result

    return compute_metrics


def to_predictions(logits: np.ndarray | tuple[np.ndarray, ...], is_regression: bool) -> np.ndarray:
    """Returns classes [N], or numbers [N] for regression, from logits [N, num_labels]."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return np.squeeze(logits, axis=-1) if is_regression else np.argmax(logits, axis=-1)


def write_predictions(path: Path, predictions: np.ndarray, label_names: tuple[str, ...]) -> None:
    """Writes one line `index<TAB>label` per sample."""
    lines = ["index\tprediction"]
    for index, value in enumerate(predictions):
        lines.append(f"{index}\t{label_names[value]}" if label_names else f"{index}\t{value:.3f}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains, evaluates and predicts as the arguments say.

    Every rank must call this. Returns the metrics of training and evaluation.
    """
    model_args, data_args, training_args = parse_arguments(
        sys.argv[1:] if arguments is None else arguments, DataTrainingArguments
    )
    start(training_args)

    known = labels_of(model_args)
    with training_args.main_process_first(desc="loading of the data"):
        data = load_task_data(data_args, seed=training_args.seed, cache_dir=model_args.cache_dir, known=known)
    data = with_labels_of(known, data)
    metric = load_metric(data_args.task_name, data.is_regression)
    check_metric(training_args, metric, data)
    tokenizer = find_tokenizer(model_args, data_args)
    model = make_model(model_args, data, tokenizer, data_args.max_seq_length)
    splits = tokenize(data, tokenizer, data_args, training_args)

    train_dataset = None
    if training_args.do_train:
        train_dataset = take_part(
            split_with_labels(split_names("train", splits)[0], splits), data_args.max_train_samples, training_args.seed
        )
    eval_datasets: dict[str, Dataset] = {}
    if training_args.do_eval:
        for name in split_names("validation", splits):
            evaluated = split_with_labels(name, splits)
            eval_datasets[name] = take_part(evaluated, data_args.max_eval_samples, training_args.seed)

    padding_collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=padding_multiple(training_args))
    trainer = PipeTransformerTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=next(iter(eval_datasets.values()), None),
        compute_metrics=make_compute_metrics(metric, data.is_regression),
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else padding_collator,
    )

    results = {**train(trainer), **evaluate(trainer, eval_datasets)}

    if training_args.do_predict:
        for name in split_names("test", splits):
            dataset = splits[name]
            if data_args.max_predict_samples is not None:
                dataset = dataset.select(range(min(len(dataset), data_args.max_predict_samples)))
            logits = trainer.predict(dataset, metric_key_prefix="predict").predictions
            if trainer.is_world_process_zero():
                path = Path(training_args.output_dir) / f"predictions_{name}.tsv"
                write_predictions(path, to_predictions(logits, data.is_regression), data.label_names)

    if training_args.push_to_hub:
        card: dict[str, Any] = {"finetuned_from": model_args.model_name_or_path, "tasks": "text-classification"}
        if data_args.task_name is not None:
            card.update(language="en", dataset_tags="glue", dataset_args=data_args.task_name)
            card["dataset"] = f"GLUE {data_args.task_name.upper()}"
        trainer.push_to_hub(**card)

    print_summary(trainer, results)
    return results


if __name__ == "__main__":
    record(main)()  # a launcher then shows the error itself
