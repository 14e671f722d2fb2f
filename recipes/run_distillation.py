#!/usr/bin/env python
"""Distills a teacher into a smaller model for sentence classification; the teacher runs in the first epoch only.

The loss is the labels' loss and the distance from the teacher's probabilities. From the second epoch on, and in later
trainings over one `--activation_cache_dir` (a sweep over temperatures), the teacher's logits are read.

The data is as in `run_glue.py`. The teacher is a folder or a model on the hub; without one, a larger model is made
from scratch and trained on the labels first:

    python recipes/run_distillation.py --generated_data 2000 --do_train --do_eval --num_train_epochs 4 --log_level info
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

import run_glue
from common import (
    ModelArguments,
    evaluate,
    labels_of,
    padding_multiple,
    parse_arguments,
    print_summary,
    split_names,
    start,
    take_part,
    train,
)
from metrics import load_metric

TEACHER_LAYERS = 12
"""Number of layers of a teacher that is made from scratch."""


@dataclass
class DistillationArguments(run_glue.DataTrainingArguments):
    """The student's data, and its teacher."""

    teacher_name_or_path: str | None = field(default=None, metadata={"help": "The teacher: on the hub, or a folder."})
    teacher_epochs: float = field(
        default=1.0, metadata={"help": "Epochs for which a teacher from scratch is trained."}
    )
    temperature: float = field(default=2.0, metadata={"help": "Both models' logits are divided by it."})
    teacher_weight: float = field(default=0.5, metadata={"help": "Of the teacher's part of the loss, from 0 to 1."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature} must be above 0, for example 2.")
        if not 0 <= self.teacher_weight <= 1:
            raise ValueError(f"teacher_weight={self.teacher_weight} must be from 0 to 1.")


class DistillationTrainer(PipeTransformerTrainer):
    """Trains a student. The teacher is an attribute, frozen and in evaluation mode; it needs no other setting.

    Args:
        teacher: the teacher.
        temperature: both models' logits are divided by it.
        teacher_weight: of the teacher's part of the loss.
    """

    def __init__(self, *args: Any, teacher: nn.Module, temperature: float, teacher_weight: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval().requires_grad_(False).to(self.args.device)
        self.temperature, self.teacher_weight = temperature, teacher_weight

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits
        soft = F.kl_div(
            F.log_softmax(outputs.logits / self.temperature, -1),
            F.softmax(wanted / self.temperature, -1),
            reduction="batchmean",
        )
        of_teacher = soft * self.temperature**2
        loss = (1 - self.teacher_weight) * outputs.loss + self.teacher_weight * of_teacher
        return (loss, outputs) if return_outputs else loss


def teacher_of(
    model_args: ModelArguments,
    data_args: DistillationArguments,
    training_args: PipeTransformerTrainingArguments,
    data: run_glue.TaskData,
    tokenizer: Any,
    common: dict[str, Any],
) -> nn.Module:
    """Load the teacher, or make a larger model than the student and train it on the labels.

    Collective over all processes.
    """
    if data_args.teacher_name_or_path is not None:
        teacher: nn.Module = AutoModelForSequenceClassification.from_pretrained(data_args.teacher_name_or_path)
        return teacher
    overrides = f"num_hidden_layers={TEACHER_LAYERS}"
    of_teacher = replace(model_args, model_name_or_path=None, config_overrides=overrides, lora_rank=None)
    teacher = run_glue.make_model(of_teacher, data, tokenizer, data_args.max_seq_length)
    folder = str(Path(training_args.output_dir or ".") / "teacher")
    changes = {"output_dir": folder, "num_train_epochs": data_args.teacher_epochs, "save_strategy": "no"}
    of_training = replace(training_args, **changes, eval_strategy="no", load_best_model_at_end=False)
    PipeTransformerTrainer(model=teacher, args=of_training, **common).train()
    return teacher


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains and evaluates as the arguments say. Every rank must call this. Returns the metrics."""
    model_args, data_args, training_args = parse_arguments(
        sys.argv[1:] if arguments is None else arguments, DistillationArguments
    )
    start(training_args)
    known = labels_of(model_args)
    with training_args.main_process_first(desc="loading of the data"):
        data = run_glue.load_task_data(data_args, training_args.seed, model_args.cache_dir, known)
    data = run_glue.with_labels_of(known, data)
    tokenizer = run_glue.find_tokenizer(model_args, data_args)
    student = run_glue.make_model(model_args, data, tokenizer, data_args.max_seq_length)
    splits = run_glue.tokenize(data, tokenizer, data_args, training_args)
    rows = run_glue.split_with_labels(split_names("train", splits)[0], splits)
    common: dict[str, Any] = {
        "train_dataset": take_part(rows, data_args.max_train_samples, training_args.seed),
        "processing_class": tokenizer,
        "data_collator": DataCollatorWithPadding(tokenizer, pad_to_multiple_of=padding_multiple(training_args)),
    }
    eval_datasets = {}
    for name in split_names("validation", splits) if training_args.do_eval else ():
        evaluated = run_glue.split_with_labels(name, splits)
        eval_datasets[name] = take_part(evaluated, data_args.max_eval_samples, training_args.seed)
    metric = load_metric(data_args.task_name, data.is_regression)
    trainer = DistillationTrainer(
        model=student,
        args=training_args,
        eval_dataset=next(iter(eval_datasets.values()), None),
        compute_metrics=run_glue.make_compute_metrics(metric, data.is_regression),
        teacher=teacher_of(model_args, data_args, training_args, data, tokenizer, common),
        temperature=data_args.temperature,
        teacher_weight=data_args.teacher_weight,
        **common,
    )
    results = {**train(trainer), **evaluate(trainer, eval_datasets)}
    print_summary(trainer, results)
    return results


if __name__ == "__main__":
    record(main)()  # a launcher then shows the error itself
