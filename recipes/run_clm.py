#!/usr/bin/env python
"""Trains a causal language model (GPT-2, Llama, Qwen) in pipeline stages.

The data is a set from the hub (`--dataset_name`), text files of one's own (`--train_file`, `--validation_file`: plain
text, or JSON Lines with a column `text`), or sentences that are generated on the spot (`--generated_data 4000`). Texts
are packed into blocks of one length, or padded, a line a sample (`--line_by_line`).

All arguments can stand in one YAML or JSON file, given first; those after it on the command line win:

    accelerate launch --config_file accelerate_configs/cpu_2.yaml recipes/run_clm.py recipes/configs/clm_demo.yaml
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, Value, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from hf_pipetransformer import PipeTransformerTrainer

from common import (
    SMALL_MODEL,
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
from generated_data import generate_splits

FILE_FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json"}
IGNORED = -100  # the label that no loss counts
TEXTS_TO_LEARN_TOKENS_FROM = 50_000
# Generated: one validation sentence for every so many training sentences, but not fewer than the minimum.
GENERATED_TRAIN_PER_VALIDATION = 8
GENERATED_MIN_VALIDATION = 200


@dataclass
class DataTrainingArguments(TextArguments):
    """The data for training and evaluation."""

    dataset_name: str | None = field(default=None, metadata={"help": "A set on the hub, e.g. Salesforce/wikitext."})
    dataset_config_name: str | None = field(
        default=None, metadata={"help": "Its configuration, e.g. wikitext-2-raw-v1."}
    )
    train_file: str | None = field(default=None, metadata={"help": "A .txt, .jsonl or .json file."})
    validation_file: str | None = field(default=None, metadata={"help": "A .txt, .jsonl or .json file."})
    generated_data: int | None = field(
        default=None, metadata={"help": "Generate this many training sentences; see generated_data.py. No download."}
    )
    text_column: str | None = field(default=None, metadata={"help": "None: `text`, or the first column of strings."})
    validation_share: float = field(
        default=0.05, metadata={"help": "Share of the training texts to validate on, where there are no others."}
    )
    vocab_size: int = field(
        default=2000, metadata={"help": "Vocabulary size of the tokenizer trained on the texts, if none is named."}
    )
    block_size: int = field(default=128, metadata={"help": "Length of a packed block, and of the longest line."})
    line_by_line: bool = field(
        default=False, metadata={"help": "A line is a sample, padded to the longest of its batch; no packing."}
    )

    def __post_init__(self) -> None:
        check_one_source(
            **{
                "dataset_name": self.dataset_name is not None,
                "train_file/validation_file": any((self.train_file, self.validation_file)),
                "generated_data": self.generated_data is not None,
            }
        )
        if self.block_size < 2:
            raise ValueError(f"block_size={self.block_size} must be at least 2: each token predicts the next one.")
        if not 0.0 < self.validation_share < 1.0:
            raise ValueError(f"validation_share={self.validation_share} must lie between 0 and 1.")


# ---------------------------------------------------------------------------------------------------- data
def load_texts(data_args: DataTrainingArguments, seed: int, cache_dir: str | None = None) -> DatasetDict:
    """Loads or generates the splits, with one column `text`; empty texts are left out."""
    if data_args.generated_data is not None:
        num_validation = max(GENERATED_MIN_VALIDATION, data_args.generated_data // GENERATED_TRAIN_PER_VALIDATION)
        columns = generate_splits(data_args.generated_data, num_validation, seed=seed)
        return DatasetDict({name: Dataset.from_dict({"text": c["sentence"]}) for name, c in columns.items()})
    if data_args.dataset_name is not None:
        splits = load_dataset(data_args.dataset_name, data_args.dataset_config_name, cache_dir=cache_dir)
    else:
        given = {"train": data_args.train_file, "validation": data_args.validation_file}
        files = {name: path for name, path in given.items() if path is not None}
        splits = load_dataset(file_format(files, FILE_FORMATS), data_files=files, cache_dir=cache_dir)
    splits = DatasetDict({name: only_texts(split, data_args.text_column) for name, split in splits.items()})
    if "validation" not in splits and "train" in splits:
        parts = splits["train"].train_test_split(data_args.validation_share, seed=seed)
        splits = DatasetDict(train=parts["train"], validation=parts["test"])
    return splits


def only_texts(split: Dataset, column: str | None) -> Dataset:
    """Keeps the column of texts, under the name `text`, and of its rows those that are not empty.

    Raises:
        ValueError: there is no such column.
    """
    strings = [
        name
        for name, feature in split.features.items()
        if isinstance(feature, Value) and feature.dtype in {"string", "large_string"}
    ]
    found = column or ("text" if "text" in strings else next(iter(strings), None))
    if found not in strings:
        raise ValueError(
            f"text_column={column!r}: no such column of text; the columns are {', '.join(split.column_names)}."
        )
    split = split.select_columns([found])
    split = split if found == "text" else split.rename_column(found, "text")
    return split.filter(lambda row: bool((row["text"] or "").strip()))


def train_tokenizer(texts: Dataset, vocab_size: int, model_max_length: int) -> PreTrainedTokenizerFast:
    """Learns byte-level pairs (BPE) from the first texts; the same texts give the same tokenizer on every rank."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    some = texts.select(range(min(len(texts), TEXTS_TO_LEARN_TOKENS_FROM)))
    tokenizer.train_from_iterator((row["text"] for row in some), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=model_max_length,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|padding|>",
    )


def tokenize(splits: DatasetDict, tokenizer: PreTrainedTokenizerBase, data_args: DataTrainingArguments) -> DatasetDict:
    """Turns texts into samples with `input_ids`, `attention_mask` and `labels`, by packing or line by line.

    Raises:
        ValueError: packed, a split has fewer tokens than one block.
    """
    length = min(data_args.block_size, tokenizer.model_max_length)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(batch: dict[str, list]) -> dict[str, list]:
        # not verbose: it would warn of texts that are longer than the model reads, and they are cut below
        encoded = tokenizer(batch["text"], add_special_tokens=False, verbose=False)
        rows = [[*ids, *end] for ids in encoded["input_ids"]]
        rows = [row[:length] for row in rows if len(row) > 1] if data_args.line_by_line else blocks_of(rows, length)
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows], "labels": rows}

    samples = DatasetDict(
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
    for name, split in samples.items():
        if not len(split):
            raise ValueError(
                f"The {name} texts have no line of two tokens."
                if data_args.line_by_line
                else f"The {name} texts have fewer tokens than one block of block_size={length}: take a smaller one,"
                " or more text (validation_share, where they are a part of the training texts)."
            )
    return samples


def blocks_of(rows: list[list[int]], length: int) -> list[list[int]]:
    """Joins the rows and cuts them into blocks of `length`; a rest at the end is dropped."""
    tokens = list(chain.from_iterable(rows))
    return [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]


# ---------------------------------------------------------------------------------------------------- metrics
def token_losses(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """Of each row the sum of its tokens' losses, their number and the hits: [B, 3], in place of logits [B, S, V]."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    scores, wanted = logits[:, :-1].float(), labels[:, 1:]
    counted = wanted != IGNORED
    losses = torch.nn.functional.cross_entropy(scores.transpose(1, 2), wanted, reduction="none", ignore_index=IGNORED)
    hits = (scores.argmax(dim=-1) == wanted) & counted
    return torch.stack([losses.sum(dim=1), counted.sum(dim=1).float(), hits.sum(dim=1).float()], dim=1)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Perplexity and accuracy over all tokens of all batches."""
    loss, tokens, hits = np.asarray(prediction.predictions, dtype=np.float64).sum(axis=0)
    return {"perplexity": float(np.exp(loss / tokens)), "accuracy": float(hits / tokens)}


# ---------------------------------------------------------------------------------------------------- the run
def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains and evaluates as the arguments say.

    Every rank must call this. Returns the metrics of training and evaluation.
    """
    model_args, data_args, training_args = parse_arguments(
        sys.argv[1:] if arguments is None else arguments, DataTrainingArguments
    )
    refuse_prediction(training_args)
    start(training_args)

    with training_args.main_process_first(desc="loading of the data"):
        texts = load_texts(data_args, training_args.seed, model_args.cache_dir)
        tokenizer = load_tokenizer(model_args)
        if tokenizer is None:
            learnt_from = texts[split_names("train", texts)[0]]
            tokenizer = train_tokenizer(learnt_from, data_args.vocab_size, data_args.block_size)
        wanted = {
            split_names(kind, texts)[0]
            for kind, is_asked in (("train", training_args.do_train), ("validation", training_args.do_eval))
            if is_asked
        }
        splits = tokenize(DatasetDict({name: texts[name] for name in wanted}), tokenizer, data_args)
    small = {
        "model_type": "gpt2",
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": data_args.block_size,
        **SMALL_MODEL,
    }
    model = load_model(AutoModelForCausalLM, model_args, load_config(model_args, small))

    train_dataset = eval_dataset = None
    if training_args.do_train:
        train_dataset = take_part(
            splits[split_names("train", splits)[0]], data_args.max_train_samples, training_args.seed
        )
    if training_args.do_eval:
        eval_dataset = take_part(
            splits[split_names("validation", splits)[0]], data_args.max_eval_samples, training_args.seed
        )

    trainer = PipeTransformerTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=token_losses,
        processing_class=tokenizer,
        data_collator=make_collator(tokenizer, data_args.line_by_line, padding_multiple(training_args)),
    )
    results = {**train(trainer), **evaluate(trainer, {} if eval_dataset is None else {"validation": eval_dataset})}
    if training_args.push_to_hub:
        trainer.push_to_hub(finetuned_from=model_args.model_name_or_path, tasks="text-generation")
    print_summary(trainer, results)
    return results


def make_collator(tokenizer: PreTrainedTokenizerBase, line_by_line: bool, multiple: int | None = None) -> Any:
    """Pads lines on the right, their labels with -100; packed blocks have one length already."""
    if not line_by_line:
        return default_data_collator
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"  # as in training everywhere; left padding shifts a row's positions
    return DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED, pad_to_multiple_of=multiple)


if __name__ == "__main__":
    record(main)()  # a launcher then shows the error itself
