#!/usr/bin/env python
"""Trains sentence embeddings on pairs of texts with the same meaning, with in-batch negatives, and freezes layers.

The data is a CSV or JSON Lines file with the columns `anchor` and `positive` (`--train_file`, `--validation_file`), or
generated on the spot (`--generated_data 512`). Every process holds the whole model (`pipeline_parallel_size=1`):

    accelerate launch --config_file accelerate_configs/cpu_2.yaml recipes/run_sentence_embeddings.py \
        --generated_data 512 --freeze_policy alpha --activation_cache on --output_dir outputs/sentences \
        --num_train_epochs 4 --per_device_train_batch_size 16
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import TripletEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import BertConfig, BertModel, HfArgumentParser

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

from common import (
    SMALL_MODEL,
    USAGE,
    PartArguments,
    check_one_source,
    file_format,
    parse_with,
    start,
    take_part,
    train,
)
from generated_data import NEGATIVE, OPENERS, POSITIVE, STRONGER, SUBJECTS, VERBS, build_tokenizer

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv"}
COLUMNS = ("anchor", "positive")
GENERATED_TRAIN_PER_VALIDATION = 8


@dataclass
class ModelArguments:
    """Which model is fine-tuned."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A folder or a model on the hub; without it a small one is made from scratch."}
    )


@dataclass
class DataArguments(PartArguments):
    """The data for training and evaluation."""

    train_file: str | None = field(default=None, metadata={"help": "A .jsonl, .json or .csv file of pairs."})
    validation_file: str | None = field(default=None, metadata={"help": "A .jsonl, .json or .csv file of pairs."})
    generated_data: int | None = field(default=None, metadata={"help": "Generate this many training pairs."})

    def __post_init__(self) -> None:
        check_one_source(train_file=self.train_file is not None, generated_data=self.generated_data is not None)


@dataclass
class TrainingArguments(SentenceTransformerTrainingArguments, PipeTransformerTrainingArguments):
    """The fields of both."""


class Trainer(PipeTransformerTrainer, SentenceTransformerTrainer):
    """sentence-transformers' trainer with freezing and the activation cache."""


def load_pairs(data_args: DataArguments, seed: int) -> DatasetDict:
    """Loads or generates the pairs.

    Raises:
        ValueError: a file has no column `anchor` or `positive`.
    """
    if data_args.generated_data is not None:
        sizes = {"train": data_args.generated_data}
        sizes["validation"] = max(data_args.generated_data // GENERATED_TRAIN_PER_VALIDATION, 2)
        rng = random.Random(seed)
        return DatasetDict({name: generate_pairs(size, rng) for name, size in sizes.items()})
    given = {"train": data_args.train_file, "validation": data_args.validation_file}
    files = {name: path for name, path in given.items() if path is not None}
    splits = load_dataset(file_format(files, FILE_FORMATS), data_files=files)
    for name, split in splits.items():
        missing = [column for column in COLUMNS if column not in split.column_names]
        if missing:
            raise ValueError(f"The {name} data has no column {missing[0]!r}; it has {', '.join(split.column_names)}.")
    return splits.select_columns(list(COLUMNS))


def generate_pairs(size: int, rng: random.Random) -> Dataset:
    """Draws pairs such as "the plot is dull" and "overall the plot feels truly dull"."""
    pairs: dict[str, list[str]] = {column: [] for column in COLUMNS}
    for _ in range(size):
        subject, adjective = rng.choice(SUBJECTS), rng.choice(POSITIVE + NEGATIVE)
        pairs["anchor"].append(f"the {subject} {rng.choice(VERBS)} {adjective}")
        pairs["positive"].append(
            f"{rng.choice(OPENERS)} the {subject} {rng.choice(VERBS)} {rng.choice(STRONGER)} {adjective}"
        )
    return Dataset.from_dict(pairs)


def make_model(model_args: ModelArguments, training_args: TrainingArguments) -> SentenceTransformer:
    """Loads the model, or makes a small BERT from scratch, which is saved in `output_dir` first."""
    device = str(training_args.device)
    if model_args.model_name_or_path is not None:
        return SentenceTransformer(model_args.model_name_or_path, device=device)
    folder = str(Path(training_args.output_dir) / "from_scratch")
    with training_args.main_process_first(desc="making of the model"):
        if training_args.should_save:
            tokenizer = build_tokenizer()
            sizes = {name: value for name, value in SMALL_MODEL.items() if name in BertConfig().to_dict()}
            tokenizer.save_pretrained(folder)
            BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    body = Transformer(folder)
    return SentenceTransformer(modules=[body, Pooling(body.get_embedding_dimension())], device=device)


def make_evaluator(pairs: Dataset) -> TripletEvaluator:
    """How often an anchor is nearer to its own positive than to the next pair's."""
    negatives = [*pairs["positive"][1:], pairs["positive"][0]]
    return TripletEvaluator(list(pairs["anchor"]), list(pairs["positive"]), negatives, name="validation")


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains and evaluates as the arguments say. Every rank must call this.

    Returns:
        The metrics of training and evaluation.
    """
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments), usage=USAGE)
    model_args, data_args, training_args = parse_with(
        parser, DataArguments, sys.argv[1:] if arguments is None else arguments
    )
    if model_args.model_name_or_path is None and data_args.generated_data is None:
        raise ValueError("A train_file needs model_name_or_path: the small model knows the generated words only.")
    training_args.do_train = True
    start(training_args)
    pairs = load_pairs(data_args, training_args.seed)
    model = make_model(model_args, training_args)
    validation = pairs.get("validation")
    if validation is not None:
        validation = take_part(validation, data_args.max_eval_samples, training_args.seed)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=take_part(pairs["train"], data_args.max_train_samples, training_args.seed),
        eval_dataset=validation,
        loss=MultipleNegativesRankingLoss(model),
        evaluator=None if validation is None else make_evaluator(validation),
    )
    results = train(trainer)
    if validation is not None:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        results.update(metrics)
    return results


if __name__ == "__main__":
    record(main)()  # a launcher then shows the error itself
