#!/usr/bin/env python
"""Fine-tunes a model for sentence classification (or regression) in pipeline stages.

The data is a GLUE task from the hub (`--task_name sst2`), files of one's own (`--train_file`, `--validation_file`,
`--test_file`: JSON Lines, JSON or CSV), or a set that is generated on the spot (`--generated_data 4000`).

All arguments can stand in one YAML or JSON file, given first; those after it on the command line win:

    accelerate launch --config_file accelerate_configs/cpu_4.yaml recipes/run_glue.py recipes/configs/demo.yaml \
        --num_train_epochs 1
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import transformers
import yaml
from datasets import ClassLabel, Dataset, DatasetDict, Value, load_dataset
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

from generated_data import build_tokenizer, generate_splits
from metrics import MetricFn, load_metric

logger = logging.getLogger(__name__)

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
LABEL = "label"
NOT_TEXT = {LABEL, "idx", "id"}
# What a model made from scratch looks like; `--config_overrides` changes it.
SMALL_MODEL = {"num_hidden_layers": 8, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
# Generated: one validation sentence for every so many training sentences, but not fewer than the minimum.
GENERATED_TRAIN_PER_VALIDATION = 8
GENERATED_MIN_VALIDATION = 200


@dataclass
class ModelArguments:
    """Which model is fine-tuned."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "A model on the hub or in a folder. Without it a small model is made from scratch."},
    )
    model_type: str = field(default="bert", metadata={"help": "The architecture of a model made from scratch."})
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "Changes a model made from scratch, e.g. num_hidden_layers=4,hidden_size=256."},
    )
    config_name: str | None = field(default=None, metadata={"help": "The config, where it is not the model's own."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "The tokenizer, where it is not the model's own."}
    )
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads are kept."})
    model_revision: str = field(default="main", metadata={"help": "A branch, a tag or a commit on the hub."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Whether to run code that a hub model brings."})
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Whether to replace a head that has another number of labels."}
    )

    def __post_init__(self) -> None:
        if self.config_overrides is not None and (self.model_name_or_path or self.config_name):
            raise ValueError(
                "config_overrides describes a model made from scratch; remove it, or remove model_name_or_path and "
                "config_name."
            )


@dataclass
class DataTrainingArguments:
    """What the model is trained, evaluated and applied on."""

    task_name: str | None = field(default=None, metadata={"help": f"A GLUE task: {', '.join(TASK_COLUMNS)}."})
    train_file: str | None = field(default=None, metadata={"help": "A .jsonl, .json or .csv file."})
    validation_file: str | None = field(default=None, metadata={"help": "A .jsonl, .json or .csv file."})
    test_file: str | None = field(default=None, metadata={"help": "A .jsonl, .json or .csv file."})
    generated_data: int | None = field(
        default=None, metadata={"help": "Generate so many training sentences; see generated_data.py. No download."}
    )
    max_seq_length: int = field(default=128, metadata={"help": "Longer inputs are truncated, in tokens."})
    pad_to_max_length: bool = field(
        default=False, metadata={"help": "Pad to max_seq_length, rather than to the longest of each batch."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on a random part of so many."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on a random part of so many."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Predict the first so many."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again even where it was done before."})

    def __post_init__(self) -> None:
        files = any((self.train_file, self.validation_file, self.test_file))
        sources = [
            name
            for name, given in (
                ("task_name", self.task_name is not None),
                ("train_file/validation_file/test_file", files),
                ("generated_data", self.generated_data is not None),
            )
            if given
        ]
        if len(sources) != 1:
            raise ValueError(
                "Give exactly one of task_name, train_file/validation_file/test_file and generated_data; "
                f"got {', '.join(sources) or 'none'}."
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
    label_names: tuple[str, ...]  # empty for regression

    @property
    def is_regression(self) -> bool:
        """Whether the labels are numbers rather than classes."""
        return not self.label_names


def parse_arguments(
    arguments: list[str],
) -> tuple[ModelArguments, DataTrainingArguments, PipeTransformerTrainingArguments]:
    """Parses `[config.yaml | config.json] [--name value ...]`; what comes later wins."""
    if arguments and arguments[0].endswith((".yaml", ".yml", ".json")):
        arguments = config_to_arguments(Path(arguments[0])) + arguments[1:]
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, PipeTransformerTrainingArguments))
    return parser.parse_args_into_dataclasses(args=arguments)


def config_to_arguments(path: Path) -> list[str]:
    """Turns a YAML or JSON file of `name: value` into command-line arguments, so that one parser reads both."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML, too
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold `name: value` pairs, but holds {type(values).__name__}.")
    arguments: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        items = value if isinstance(value, list) else [value]
        arguments.append(f"--{name}")
        arguments += [json.dumps(item) if isinstance(item, dict) else str(item) for item in items]
    return arguments


def load_task_data(data_args: DataTrainingArguments, seed: int, cache_dir: str | None = None) -> TaskData:
    """Loads or generates the raw splits and finds their text columns and label names."""
    if data_args.generated_data is not None:
        num_validation = max(GENERATED_MIN_VALIDATION, data_args.generated_data // GENERATED_TRAIN_PER_VALIDATION)
        columns = generate_splits(data_args.generated_data, num_validation, seed=seed)
        splits = DatasetDict({name: Dataset.from_dict(split) for name, split in columns.items()})
        return TaskData(splits, ("sentence",), ("negative", "positive"))
    if data_args.task_name is not None:
        splits = load_dataset("nyu-mll/glue", data_args.task_name, cache_dir=cache_dir)
        labels = splits["train"].features[LABEL]
        label_names = tuple(labels.names) if isinstance(labels, ClassLabel) else ()
        return TaskData(splits, TASK_COLUMNS[data_args.task_name], label_names)
    given = {
        "train": data_args.train_file,
        "validation": data_args.validation_file,
        "test": data_args.test_file,
    }
    files = {name: path for name, path in given.items() if path is not None}
    splits = load_dataset(file_format(files), data_files=files, cache_dir=cache_dir)
    return own_task_data(splits)


def file_format(files: dict[str, str]) -> str:
    """Returns the `datasets` builder, "csv" or "json", that reads all of the files."""
    formats = {".csv": "csv", ".json": "json", ".jsonl": "json"}
    found = {formats.get(Path(path).suffix) for path in files.values()}
    if len(found) != 1 or None in found:
        raise ValueError(f"Files must all end in .csv, or all in .json/.jsonl; got {', '.join(files.values())}.")
    return found.pop() or ""


def own_task_data(splits: DatasetDict) -> TaskData:
    """Finds text columns and labels in data of one's own; classes become 0 ... n-1, in the order of their values.

    A numeric label with a fraction (a float column) makes it a regression.
    """
    first = splits.get("train") or next(iter(splits.values()))
    text_columns = find_text_columns(first)
    if LABEL not in first.column_names:
        raise ValueError(f"Column {LABEL!r} is missing; the columns are {', '.join(first.column_names)}.")
    if first.features[LABEL].dtype in {"float16", "float32", "float64"}:
        return TaskData(splits, text_columns, ())
    values = sorted({value for split in splits.values() if LABEL in split.column_names for value in split[LABEL]})
    class_of = {value: i for i, value in enumerate(values)}
    for name, split in splits.items():
        if LABEL in split.column_names:
            classes = [class_of[value] for value in split[LABEL]]
            splits[name] = split.remove_columns(LABEL).add_column(LABEL, classes)
    return TaskData(splits, text_columns, tuple(str(value) for value in values))


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


def load_tokenizer(model_args: ModelArguments, data_args: DataTrainingArguments) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer, or builds the one of the generated sentences."""
    name = model_args.tokenizer_name or model_args.model_name_or_path
    if name is not None:
        return AutoTokenizer.from_pretrained(
            name,
            cache_dir=model_args.cache_dir,
            revision=model_args.model_revision,
            trust_remote_code=model_args.trust_remote_code,
        )
    if data_args.generated_data is None:
        raise ValueError("A model made from scratch needs tokenizer_name, unless the data is generated_data.")
    return build_tokenizer(model_max_length=data_args.max_seq_length)


def load_model(model_args: ModelArguments, data: TaskData, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Loads the model with a head for the labels, or makes a small one from its config."""
    labels: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
    if not data.is_regression:
        label2id = {name: i for i, name in enumerate(data.label_names)}
        id2label = {i: name for name, i in label2id.items()}
        labels = {"num_labels": len(label2id), "label2id": label2id, "id2label": id2label}
    hub = {
        "cache_dir": model_args.cache_dir,
        "revision": model_args.model_revision,
        "trust_remote_code": model_args.trust_remote_code,
    }
    config_name = model_args.config_name or model_args.model_name_or_path
    if config_name is not None:
        config = AutoConfig.from_pretrained(config_name, **hub, **labels)
    else:
        config = AutoConfig.for_model(
            model_args.model_type,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            max_position_embeddings=tokenizer.model_max_length,
            **SMALL_MODEL,
            **labels,
        )
        if model_args.config_overrides:
            config.update_from_string(model_args.config_overrides)
    if config.get_text_config().pad_token_id is None:  # GPT-2 and its like: sentences of one batch differ in length
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if model_args.model_name_or_path is None:
        return AutoModelForSequenceClassification.from_config(config)
    return AutoModelForSequenceClassification.from_pretrained(
        model_args.model_name_or_path,
        config=config,
        ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
        **hub,
    )


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


def take_part(dataset: Dataset, max_samples: int | None, seed: int) -> Dataset:
    """Returns a random part of at most `max_samples` (files are often sorted by label), the same on every rank."""
    if max_samples is None or max_samples >= len(dataset):
        return dataset
    return dataset.shuffle(seed=seed).select(range(max_samples))


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


def split_names(prefix: str, splits: DatasetDict) -> list[str]:
    """Returns the splits that begin with `prefix`: MNLI has `validation_matched` and `validation_mismatched`.

    Raises:
        ValueError: there is none.
    """
    names = [name for name in splits if name == prefix or name.startswith(f"{prefix}_")]
    if not names:
        raise ValueError(f"There is no {prefix} data: give {prefix}_file, or leave that step out.")
    return names


def find_checkpoint(training_args: PipeTransformerTrainingArguments) -> str | None:
    """Returns the checkpoint to resume from; `--resume_from_checkpoint last` is the newest in `output_dir`, if any."""
    wanted = training_args.resume_from_checkpoint
    if wanted is None or str(wanted).lower() in {"false", "no"}:
        return None
    if str(wanted).lower() not in {"last", "true", "yes"}:
        return wanted
    output_dir = Path(training_args.output_dir)
    return get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None


def write_predictions(path: Path, predictions: np.ndarray, label_names: tuple[str, ...]) -> None:
    """Writes one line `index<TAB>label` per sample."""
    lines = ["index\tprediction"]
    for index, value in enumerate(predictions):
        lines.append(f"{index}\t{label_names[value]}" if label_names else f"{index}\t{value:.3f}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def describe_layout(num_stages: int | str, world_size: int) -> str:
    """Returns "4 stages × 2 replicas" for 8 processes in pipelines of 4."""
    if not isinstance(num_stages, int) or num_stages < 1 or world_size % num_stages:
        return f"{num_stages} stages, {world_size} processes"
    replicas = world_size // num_stages
    stages = "1 stage" if num_stages == 1 else f"{num_stages} stages"
    return f"{stages} × {replicas} replica{'' if replicas == 1 else 's'}"


def layouts_of(training_args: PipeTransformerTrainingArguments) -> list[str]:
    """The layouts that this training went through, from the run's own record; without training the one asked for."""
    record = Path(training_args.output_dir or ".") / "pipeline_events.jsonl"
    if not training_args.do_train or not record.is_file():
        return [describe_layout(training_args.pipeline_parallel_size, training_args.world_size)]
    layouts: list[str] = []
    for event in map(json.loads, record.read_text(encoding="utf-8").splitlines()):
        layout = describe_layout(event["pipeline_parallel_size"], training_args.world_size)
        if event["event"] != "transform":
            layouts = []  # a new training, appended to the record of earlier ones
        if layouts[-1:] != [layout]:
            layouts.append(layout)
    return layouts


def print_summary(
    training_args: PipeTransformerTrainingArguments, model: PreTrainedModel, results: dict[str, float]
) -> None:
    """Prints the layout, the time and the quality of the run as a table."""
    table = Table(title="Summary", show_header=False, title_justify="left")
    table.add_row("Model", type(model).__name__)
    table.add_row("Layout", " → ".join(layouts_of(training_args)))
    table.add_row("Device", training_args.device.type)
    if "train_runtime" in results:
        table.add_row("Training time", f"{results['train_runtime']:.1f} s")
        table.add_row("Throughput", f"{results['train_samples_per_second']:.1f} samples/s")
        table.add_row("Training loss", f"{results['train_loss']:.4f}")
    technical = ("_runtime", "_per_second", "_samples", "_time")
    for name, value in results.items():
        if name.startswith("eval_") and not name.endswith(technical):
            table.add_row(name.replace("_", " ").capitalize(), f"{value:.4f}")
    Console().print(table)


def setup_logging(training_args: PipeTransformerTrainingArguments) -> None:
    """Gives all libraries the log level that the arguments ask for on this rank."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    level = training_args.get_process_log_level()
    logger.setLevel(level)
    # plans and transformations: a few lines, on the main process
    logging.getLogger("hf_pipetransformer").setLevel(logging.INFO if training_args.should_log else level)
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)
    if not training_args.should_log:
        datasets.disable_progress_bars()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains, evaluates and predicts as the arguments say.

    Every rank must call this. Returns the metrics of training and evaluation.
    """
    model_args, data_args, training_args = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    setup_logging(training_args)
    # Before the model is made: a new head must have the same weights on every rank.
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="loading of the data"):
        data = load_task_data(data_args, seed=training_args.seed, cache_dir=model_args.cache_dir)
    tokenizer = load_tokenizer(model_args, data_args)
    model = load_model(model_args, data, tokenizer)
    splits = tokenize(data, tokenizer, data_args, training_args)

    train_dataset = None
    if training_args.do_train:
        train_dataset = take_part(
            splits[split_names("train", splits)[0]], data_args.max_train_samples, training_args.seed
        )
    eval_datasets: dict[str, Dataset] = {}
    if training_args.do_eval:
        for name in split_names("validation", splits):
            eval_datasets[name] = take_part(splits[name], data_args.max_eval_samples, training_args.seed)

    # Dynamic padding to a multiple of 8 lets tensor cores be used.
    multiple = 8 if training_args.fp16 or training_args.bf16 else None
    padding_collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
    trainer = PipeTransformerTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=next(iter(eval_datasets.values()), None),
        compute_metrics=make_compute_metrics(load_metric(data_args.task_name, data.is_regression), data.is_regression),
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else padding_collator,
    )

    results: dict[str, float] = {}
    if training_args.do_train:
        metrics = trainer.train(resume_from_checkpoint=find_checkpoint(training_args)).metrics
        metrics["train_samples"] = len(train_dataset or ())
        trainer.save_model()  # saves the tokenizer, too
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
        results.update(metrics)

    for name, dataset in eval_datasets.items():
        metrics = trainer.evaluate(eval_dataset=dataset)
        metrics["eval_samples"] = len(dataset)
        suffix = name.removeprefix("validation")  # "", or MNLI's "_matched" and "_mismatched"
        trainer.log_metrics(f"eval{suffix}", metrics)
        trainer.save_metrics(f"eval{suffix}", metrics)
        results.update({f"{key}{suffix}": value for key, value in metrics.items()})

    if training_args.do_predict:
        for name in split_names("test", splits):
            dataset = splits[name]
            if data_args.max_predict_samples is not None:
                dataset = dataset.select(range(min(len(dataset), data_args.max_predict_samples)))
            if data_args.task_name is not None:
                dataset = dataset.remove_columns(LABEL)  # GLUE's test labels are placeholders, -1
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

    if trainer.is_world_process_zero():
        print_summary(training_args, model, results)
    return results


if __name__ == "__main__":
    main()
