#!/usr/bin/env python
"""Fine-tunes an encoder-decoder model (T5, BART, Pegasus) for summarisation in pipeline stages.

The data is a set from the hub (`--dataset_name`), JSON Lines or CSV files of one's own (`--train_file`,
`--validation_file`), or short reviews that are generated on the spot (`--generated_data 4000`). Evaluations generate
summaries (`--predict_with_generate`) and report ROUGE.

All arguments can stand in one YAML or JSON file, given first; those after it on the command line win:

    accelerate launch --config_file accelerate_configs/cpu_2.yaml recipes/run_summarization.py \
      recipes/configs/summarization_demo.yaml
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, EvalPrediction, PreTrainedTokenizerBase

from hf_pipetransformer import PipeTransformerSeq2SeqTrainer, PipeTransformerSeq2SeqTrainingArguments

from common import (
    TextArguments,
    check_one_source,
    evaluate,
    file_format,
    load_config,
    load_model,
    load_tokenizer,
    padding_multiple,
    parse_arguments,
    print_summary,
    refuse_prediction,
    split_names,
    start,
    take_part,
    train,
)
from generated_questions import generate_question
from run_clm import train_tokenizer

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv"}
IGNORED = -100  # the label that no loss counts
MAX_REVIEWS = 100_000  # far fewer than can be drawn without repetition
# Generated: one validation review for every so many training reviews, but not fewer than the minimum.
GENERATED_TRAIN_PER_VALIDATION = 16
GENERATED_MIN_VALIDATION = 100
SMALL_MODEL = {
    "d_model": 128,
    # T5
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "d_kv": 32,
    "d_ff": 256,
    # BART, Pegasus
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
}
"""Sizes of a model made from scratch; `--config_overrides` changes them."""


@dataclass
class DataTrainingArguments(TextArguments):
    """The data for training and evaluation."""

    dataset_name: str | None = field(default=None, metadata={"help": "A set on the hub, e.g. abisee/cnn_dailymail."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration, e.g. 3.0.0."})
    train_file: str | None = field(default=None, metadata={"help": "A .jsonl, .json or .csv file."})
    validation_file: str | None = field(default=None, metadata={"help": "A .jsonl, .json or .csv file."})
    generated_data: int | None = field(default=None, metadata={"help": "Generate this many reviews. No download."})
    text_column: str = field(default="text", metadata={"help": "The column of texts."})
    summary_column: str = field(default="summary", metadata={"help": "The column of summaries."})
    source_prefix: str = field(default="", metadata={"help": "Put before each text, e.g. 'summarize: ' for T5."})
    max_source_length: int = field(default=512, metadata={"help": "Tokens of a text; the rest is cut off."})
    max_target_length: int = field(
        default=128, metadata={"help": "Tokens of a summary, also of one that is generated (generation_max_length)."}
    )
    vocab_size: int = field(
        default=1000, metadata={"help": "Vocabulary size of the tokenizer trained on the texts, if none is named."}
    )

    def __post_init__(self) -> None:
        check_one_source(
            **{
                "dataset_name": self.dataset_name is not None,
                "train_file/validation_file": any((self.train_file, self.validation_file)),
                "generated_data": self.generated_data is not None,
            }
        )
        if min(self.max_source_length, self.max_target_length) < 2:
            raise ValueError(
                f"max_source_length={self.max_source_length} and max_target_length={self.max_target_length} must be at"
                " least 2."
            )


# ---------------------------------------------------------------------------------------------------- data
def generate_reviews(num_train: int, num_validation: int, seed: int = 0) -> DatasetDict:
    """Generates reviews of two sentences. The summary is a review's opinion without the name of its author.

    The same seed gives the same splits, on every rank, and no review occurs twice.
    """
    total = num_train + num_validation
    if num_train < 1 or num_validation < 1 or total > MAX_REVIEWS:
        raise ValueError(
            f"num_train={num_train} and num_validation={num_validation} must be at least 1 each and at most "
            f"{MAX_REVIEWS} together."
        )
    rng = random.Random(seed)
    summary_of: dict[str, str] = {}
    while len(summary_of) < total:
        sentences = [generate_question(rng)["context"] for _ in range(2)]
        summary_of[" . ".join(sentences)] = " , ".join(text.rpartition("the ")[2] for text in sentences)
    rows = [{"text": text, "summary": summary} for text, summary in summary_of.items()]
    return DatasetDict(train=Dataset.from_list(rows[:num_train]), validation=Dataset.from_list(rows[num_train:]))


def load_pairs(data_args: DataTrainingArguments, seed: int, cache_dir: str | None = None) -> DatasetDict:
    """Loads or generates the splits, with the columns `text` and `summary`.

    Raises:
        ValueError: a split lacks one of the columns.
    """
    if data_args.generated_data is not None:
        num_validation = max(GENERATED_MIN_VALIDATION, data_args.generated_data // GENERATED_TRAIN_PER_VALIDATION)
        return generate_reviews(data_args.generated_data, num_validation, seed)
    if data_args.dataset_name is not None:
        splits = load_dataset(data_args.dataset_name, data_args.dataset_config_name, cache_dir=cache_dir)
    else:
        given = {"train": data_args.train_file, "validation": data_args.validation_file}
        files = {name: path for name, path in given.items() if path is not None}
        splits = load_dataset(file_format(files, FILE_FORMATS), data_files=files, cache_dir=cache_dir)
    wanted = {"text_column": data_args.text_column, "summary_column": data_args.summary_column}
    for split in splits.values():
        for argument, column in wanted.items():
            if column not in split.column_names:
                raise ValueError(
                    f"{argument}={column!r}: no such column; the columns are {', '.join(split.column_names)}."
                )
    return DatasetDict(
        {
            name: Dataset.from_dict(
                {"text": split[data_args.text_column], "summary": split[data_args.summary_column]}
            ).filter(lambda row: bool(row["text"] and row["summary"]))
            for name, split in splits.items()
        }
    )


def tokenize(splits: DatasetDict, tokenizer: PreTrainedTokenizerBase, data_args: DataTrainingArguments) -> DatasetDict:
    """Turns texts and summaries into samples with `input_ids`, `attention_mask` and `labels`."""
    end = tokenizer.eos_token_id

    def ended(ids: list[int], length: int) -> list[int]:
        """The tokens and an end, which the tokenizer that is trained here does not add."""
        ids = ids[: length - 1] if len(ids) == length and ids[-1] != end else ids
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def encode(batch: dict[str, list]) -> dict[str, list]:
        texts = [data_args.source_prefix + text for text in batch["text"]]
        lengths = (data_args.max_source_length, data_args.max_target_length)
        encoded = [
            [ended(ids, length) for ids in tokenizer(rows, max_length=length, truncation=True)["input_ids"]]
            for rows, length in zip((texts, batch["summary"]), lengths, strict=True)
        ]
        return {
            "input_ids": encoded[0],
            "attention_mask": [[1] * len(ids) for ids in encoded[0]],
            "labels": encoded[1],
        }

    return DatasetDict(
        {
            name: split.map(
                encode,
                batched=True,
                num_proc=data_args.preprocessing_num_workers,
                remove_columns=split.column_names,
                load_from_cache_file=not data_args.overwrite_cache,
                desc=f"Tokenizing {name}",
            )
            for name, split in splits.items()
        }
    )


# ---------------------------------------------------------------------------------------------------- metrics
def f_measure(hits: int, predicted: int, wanted: int) -> float:
    """Harmonic mean of precision and recall."""
    return 2 * hits / (predicted + wanted) if hits else 0.0


def rouge_n(predicted: list[str], wanted: list[str], n: int) -> float:
    """F-measure of the n-grams that two texts share."""
    grams = [Counter(zip(*(words[i:] for i in range(n)), strict=False)) for words in (predicted, wanted)]
    return f_measure(sum((grams[0] & grams[1]).values()), sum(grams[0].values()), sum(grams[1].values()))


def rouge_l(predicted: list[str], wanted: list[str]) -> float:
    """F-measure of the longest common subsequence of two texts."""
    row = [0] * (len(wanted) + 1)
    for word in predicted:
        before = row
        row = [0]
        for index, other in enumerate(wanted):
            row.append(before[index] + 1 if word == other else max(before[index + 1], row[index]))
    return f_measure(row[-1], len(predicted), len(wanted))


def rouge(predictions: list[str], references: list[str]) -> dict[str, float]:
    """ROUGE-1, -2 and -L in percent, of lower-case words between blanks, without stemming."""
    pairs = [(p.lower().split(), r.lower().split()) for p, r in zip(predictions, references, strict=True)]
    scores = {
        "rouge1": [rouge_n(*pair, 1) for pair in pairs],
        "rouge2": [rouge_n(*pair, 2) for pair in pairs],
        "rougeL": [rouge_l(*pair) for pair in pairs],
    }
    return {name: 100 * float(np.mean(values)) for name, values in scores.items()}


def make_metrics(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Returns the `compute_metrics` for generated tokens."""

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        texts = [
            tokenizer.batch_decode(np.where(ids == IGNORED, tokenizer.pad_token_id, ids), skip_special_tokens=True)
            for ids in (prediction.predictions, prediction.label_ids)
        ]
        return rouge(*texts)

    return compute_metrics


# ---------------------------------------------------------------------------------------------------- the run
def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains and evaluates as the arguments say.

    Every rank must call this. Returns the metrics of training and evaluation.
    """
    model_args, data_args, training_args = parse_arguments(
        sys.argv[1:] if arguments is None else arguments,
        DataTrainingArguments,
        PipeTransformerSeq2SeqTrainingArguments,
    )
    refuse_prediction(training_args)
    start(training_args)
    if training_args.generation_max_length is None:
        training_args.generation_max_length = data_args.max_target_length

    with training_args.main_process_first(desc="loading of the data"):
        pairs = load_pairs(data_args, training_args.seed, model_args.cache_dir)
        tokenizer = load_tokenizer(model_args)
        if tokenizer is None:
            texts = pairs[split_names("train", pairs)[0]]
            tokenizer = train_tokenizer(texts, data_args.vocab_size, data_args.max_source_length)
        splits = tokenize(pairs, tokenizer, data_args)
    small = {
        "model_type": "t5",
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "forced_eos_token_id": None,
        "max_position_embeddings": max(data_args.max_source_length, data_args.max_target_length),
        **SMALL_MODEL,
    }
    is_new = model_args.model_name_or_path is None and model_args.config_name is None
    begin = {"decoder_start_token_id": tokenizer.pad_token_id} if is_new else {}
    model: Any = load_model(AutoModelForSeq2SeqLM, model_args, load_config(model_args, small, **begin))

    part = {"train": data_args.max_train_samples, "validation": data_args.max_eval_samples}
    asked = {"train": training_args.do_train, "validation": training_args.do_eval}
    train_dataset, eval_dataset = (
        take_part(splits[split_names(name, splits)[0]], part[name], training_args.seed) if asked[name] else None
        for name in ("train", "validation")
    )
    trainer = PipeTransformerSeq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=make_metrics(tokenizer) if training_args.predict_with_generate else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(
            tokenizer, label_pad_token_id=IGNORED, pad_to_multiple_of=padding_multiple(training_args)
        ),
    )
    results = {**train(trainer), **evaluate(trainer, {} if eval_dataset is None else {"validation": eval_dataset})}
    if training_args.push_to_hub:
        trainer.push_to_hub(finetuned_from=model_args.model_name_or_path, tasks="summarization")
    print_summary(trainer, results)
    return results


if __name__ == "__main__":
    record(main)()  # a launcher then shows the error itself
