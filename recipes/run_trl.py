#!/usr/bin/env python
"""Fine-tunes a language model with TRL's trainers in pipeline stages, or with layers that freeze.

    --method sft       on texts                          columns `text`, or `prompt` and `completion`
    --method reward    a reward model, on preferences    columns `prompt` (if any), `chosen`, `rejected`
    --method dpo       on preferences, without one       the same

The data is JSON Lines of one's own (`--train_file`, `--validation_file`), or generated on the spot
(`--generated_data 1000`). TRL's own arguments (`--max_length`, `--beta`) and ours go together:

    accelerate launch --config_file accelerate_configs/cpu_2.yaml recipes/run_trl.py recipes/configs/dpo_demo.yaml
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset, DatasetDict, load_dataset
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, HfArgumentParser

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

from common import (
    SMALL_MODEL,
    USAGE,
    ModelArguments,
    PartArguments,
    check_one_source,
    config_to_arguments,
    evaluate,
    load_config,
    load_model,
    load_tokenizer,
    parse_with,
    print_summary,
    refuse_prediction,
    start,
    take_part,
    train,
)
from generated_data import generate_splits
from run_clm import train_tokenizer

PROMPT = "Write a review that recommends it:"
VOCABULARY, LONGEST = 1000, 64  # of the tokenizer that is trained on the spot


class PipeSFTTrainer(PipeTransformerTrainer, trl.SFTTrainer):
    pass


class PipeRewardTrainer(PipeTransformerTrainer, trl.RewardTrainer):
    pass


class PipeDPOTrainer(PipeTransformerTrainer, trl.DPOTrainer):
    pass


@dataclass
class PipeSFTConfig(trl.SFTConfig, PipeTransformerTrainingArguments):
    pass


@dataclass
class PipeRewardConfig(trl.RewardConfig, PipeTransformerTrainingArguments):
    pass


@dataclass
class PipeDPOConfig(trl.DPOConfig, PipeTransformerTrainingArguments):
    pass


METHODS: dict[str, tuple[type, type]] = {
    "sft": (PipeSFTTrainer, PipeSFTConfig),
    "reward": (PipeRewardTrainer, PipeRewardConfig),
    "dpo": (PipeDPOTrainer, PipeDPOConfig),
}


@dataclass
class DataTrainingArguments(PartArguments):
    """How, and on what, the model is trained."""

    method: str = field(default="sft", metadata={"help": "What is trained.", "choices": list(METHODS)})
    train_file: str | None = field(default=None, metadata={"help": "JSON Lines."})
    validation_file: str | None = field(default=None, metadata={"help": "JSON Lines."})
    generated_data: int | None = field(default=None, metadata={"help": "Generate this many samples. No download."})

    def __post_init__(self) -> None:
        check_one_source(train_file=self.train_file is not None, generated_data=self.generated_data is not None)


@dataclass
class FewModelArguments:
    """Which model is fine-tuned. TRL's arguments have the others."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "A model on the hub or in a folder. Without it a small model is made from scratch."},
    )
    config_overrides: str | None = field(default=None, metadata={"help": "Changes a model made from scratch."})
    lora_rank: int | None = field(default=None, metadata={"help": "Train LoRA adapters of this rank."})


def parse(arguments: list[str]) -> tuple[ModelArguments, DataTrainingArguments, Any]:
    """Parses `[config.yaml] [--name value ...]`; the method decides which class of arguments is known."""
    if arguments and arguments[0].endswith((".yaml", ".yml", ".json")):
        arguments = config_to_arguments(Path(arguments[0])) + arguments[1:]
    first, _ = HfArgumentParser(DataTrainingArguments, add_help=False).parse_known_args(arguments)
    _, arguments_class = METHODS[first.method]
    parser = HfArgumentParser((FewModelArguments, DataTrainingArguments, arguments_class), usage=USAGE)
    model_args, data_args, training_args = parse_with(parser, DataTrainingArguments, arguments)
    few = {**vars(model_args), "trust_remote_code": training_args.trust_remote_code}
    return ModelArguments(**few), data_args, training_args


def load_data(data_args: DataTrainingArguments, seed: int) -> DatasetDict:
    """Loads the files, or generates texts, or pairs of a review that praises and one that does not."""
    if data_args.generated_data is None:
        files = {"train": data_args.train_file, "validation": data_args.validation_file}
        return load_dataset("json", data_files={name: file for name, file in files.items() if file is not None})
    splits = generate_splits(2 * data_args.generated_data, data_args.generated_data // 4, seed=seed)
    return DatasetDict({name: to_columns(columns, data_args.method) for name, columns in splits.items()})


def to_columns(columns: dict[str, list[Any]], method: str) -> Dataset:
    by_label: dict[int, list[str]] = {0: [], 1: []}
    for sentence, label in zip(columns["sentence"], columns["label"], strict=True):
        by_label[label].append(f" {sentence}")
    if method == "sft":
        return Dataset.from_dict({"prompt": [PROMPT] * len(by_label[1]), "completion": by_label[1]})
    pairs = list(zip(by_label[1], by_label[0], strict=False))
    chosen, rejected = ([pair[i] for pair in pairs] for i in range(2))
    return Dataset.from_dict({"prompt": [PROMPT] * len(pairs), "chosen": chosen, "rejected": rejected})


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains and evaluates as the arguments say.

    Every rank must call this. Returns the metrics of training and evaluation.
    """
    model_args, data_args, training_args = parse(sys.argv[1:] if arguments is None else arguments)
    refuse_prediction(training_args)
    start(training_args)
    with training_args.main_process_first(desc="loading of the data"):
        splits = load_data(data_args, training_args.seed)
    tokenizer = load_tokenizer(model_args)
    if tokenizer is None:
        rows = [{"text": " ".join(map(str, row.values()))} for row in splits["train"]]
        tokenizer = train_tokenizer(Dataset.from_list(rows), VOCABULARY, LONGEST)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    small = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": LONGEST,
        **SMALL_MODEL,
    }
    options = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id} if data_args.method == "reward" else {}
    if options:
        small.pop("pad_token_id")
    auto_class = AutoModelForSequenceClassification if data_args.method == "reward" else AutoModelForCausalLM
    model = load_model(auto_class, model_args, load_config(model_args, small, **options))
    trainer_class, _ = METHODS[data_args.method]
    keywords: dict[str, Any] = {}
    if data_args.method == "dpo" and model_args.lora_rank is None:
        keywords["ref_model"] = copy.deepcopy(model)  # with adapters the model without them is the reference
    eval_dataset = splits.get("validation") if training_args.do_eval else None
    if eval_dataset is not None:
        eval_dataset = take_part(eval_dataset, data_args.max_eval_samples, training_args.seed)
    trainer = trainer_class(
        model=model,
        args=training_args,
        train_dataset=take_part(splits["train"], data_args.max_train_samples, training_args.seed),
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        **keywords,
    )
    results = {**train(trainer), **evaluate(trainer, {} if eval_dataset is None else {"validation": eval_dataset})}
    print_summary(trainer, results)
    return results


if __name__ == "__main__":
    record(main)()  # a launcher then shows the error itself
