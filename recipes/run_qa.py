#!/usr/bin/env python
"""Fine-tunes a model for extractive question answering (SQuAD 1.1 and 2.0) in pipeline stages.

The data is a set from the hub (`--dataset_name squad`), files of one's own in SQuAD's columns (`--train_file`,
`--validation_file`, `--test_file`: JSON Lines or JSON), or a set that is generated on the spot
(`--generated_data 2000`). Each text is cut into overlapping windows; the best answer over all of its windows counts.

Windows are padded to one fixed length: the models' loss is a softmax over all positions, padding included, so with
another padding it would be another loss (docs/numerics.md). For the same reason the outputs of frozen layers cannot be
cached, unless `--mask_padding` leaves padding out.

All arguments can stand in one YAML or JSON file, given first; those after it on the command line win:

    accelerate launch --config_file accelerate_configs/cpu_2.yaml recipes/run_qa.py recipes/configs/qa_demo.yaml
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, load_dataset
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    default_data_collator,
)

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

from answers import AnswerRules, Candidate, Offsets, best_candidates, choose_answer, load_scores
from common import (
    SMALL_MODEL,
    ModelArguments,
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
    split_names,
    start,
    take_part,
    train,
    without_column,
    without_missing,
)
from generated_data import build_tokenizer
from generated_questions import QUESTION_WORDS, generate_questions

FILE_FORMATS = {".jsonl": "json", ".json": "json"}
CONTEXT = 1  # the sequence id of a context's tokens; 0: the question's, None: special tokens and padding
# Generated: one validation question for every so many training questions, but not fewer than the minimum.
GENERATED_TRAIN_PER_VALIDATION = 8
GENERATED_MIN_VALIDATION = 200


@dataclass
class DataTrainingArguments(TextArguments):
    """The data for training, evaluation and prediction."""

    dataset_name: str | None = field(default=None, metadata={"help": "A set on the hub: squad, squad_v2, ..."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration, if it has several."})
    train_file: str | None = field(default=None, metadata={"help": "A .jsonl or .json file in SQuAD's columns."})
    validation_file: str | None = field(default=None, metadata={"help": "A .jsonl or .json file."})
    test_file: str | None = field(default=None, metadata={"help": "A .jsonl or .json file."})
    generated_data: int | None = field(
        default=None, metadata={"help": "Generate this many training questions; see generated_questions.py."}
    )
    version_2_with_negative: bool = field(
        default=False, metadata={"help": "Whether questions may have no answer, as in SQuAD 2."}
    )
    null_score_diff_threshold: float = field(
        default=0.0, metadata={"help": "No answer, if its score exceeds the best answer's by more than this."}
    )
    max_seq_length: int = field(default=384, metadata={"help": "Length of a window, question included, in tokens."})
    doc_stride: int = field(default=128, metadata={"help": "Tokens that neighbouring windows share."})
    pad_to_max_length: bool = field(
        default=True, metadata={"help": "Pad to max_seq_length, so that the loss does not depend on the batch."}
    )
    mask_padding: bool = field(
        default=False,
        metadata={"help": "Leave padding out of the loss's softmax: the outputs of frozen layers can then be cached."},
    )
    n_best_size: int = field(default=20, metadata={"help": "Candidates for each question that are compared."})
    max_answer_length: int = field(default=30, metadata={"help": "Longest answer, in tokens."})
    max_predict_samples: int | None = field(
        default=None, metadata={"help": "Predict only the first samples, this many."}
    )

    def __post_init__(self) -> None:
        check_one_source(
            **{
                "dataset_name": self.dataset_name is not None,
                "train_file/validation_file/test_file": any((self.train_file, self.validation_file, self.test_file)),
                "generated_data": self.generated_data is not None,
            }
        )
        if not 0 <= self.doc_stride < self.max_seq_length:
            raise ValueError(
                f"doc_stride={self.doc_stride} must lie between 0 and max_seq_length={self.max_seq_length}: it is the"
                " overlap of neighbouring windows."
            )

    @property
    def rules(self) -> AnswerRules:
        """How answers are chosen."""
        return AnswerRules(
            self.n_best_size, self.max_answer_length, self.version_2_with_negative, self.null_score_diff_threshold
        )


# ---------------------------------------------------------------------------------------------------- data
def load_questions(data_args: DataTrainingArguments, seed: int, cache_dir: str | None = None) -> DatasetDict:
    """Loads or generates the splits, with `id`, `context`, `question` and, if they are known, `answers`."""
    if data_args.generated_data is not None:
        num_validation = max(GENERATED_MIN_VALIDATION, data_args.generated_data // GENERATED_TRAIN_PER_VALIDATION)
        rows = generate_questions(data_args.generated_data, num_validation, seed, data_args.version_2_with_negative)
        return DatasetDict({name: Dataset.from_list(split) for name, split in rows.items()})
    if data_args.dataset_name is not None:
        splits = load_dataset(data_args.dataset_name, data_args.dataset_config_name, cache_dir=cache_dir)
    else:
        given = {
            "train": data_args.train_file,
            "validation": data_args.validation_file,
            "test": data_args.test_file,
        }
        files = {name: path for name, path in given.items() if path is not None}
        splits = load_dataset(file_format(files, FILE_FORMATS), data_files=files, cache_dir=cache_dir)
        splits = without_missing(splits, "answers")
    return without_column(splits, "answers", "test")


def questions_of(prefix: str, splits: DatasetDict, data_args: DataTrainingArguments) -> Dataset:
    """The split of this name, checked; others may be of any kind."""
    name = split_names(prefix, splits)[0]
    return check_questions(splits[name], name, data_args)


def check_questions(split: Dataset, name: str, data_args: DataTrainingArguments) -> Dataset:
    """Refuses columns that are missing, questions without an answer where each should have one, and ids that repeat.

    Training data may repeat an id, as it is not read there; elsewhere answers are kept by id.

    Raises:
        ValueError: naming the split, the columns or the rows.
    """
    needed = ["id", "context", "question"] + ([] if name.startswith("test") else ["answers"])
    missing = [column for column in needed if column not in split.column_names]
    if missing:
        raise ValueError(
            f"The {name} data lacks {', '.join(missing)}; its columns are {', '.join(split.column_names)}."
            " SQuAD's own nested files are on the hub as one row per question."
        )
    if "answers" in split.column_names and not data_args.version_2_with_negative:
        without = [row for row, answers in enumerate(split["answers"]) if not answers["text"]]
        if without:
            raise ValueError(
                f"{len(without)} of the {len(split)} questions of the {name} data have no answer (the first is row"
                f" {without[0]}): set version_2_with_negative, or remove them."
            )
    if not name.startswith("train"):
        row_of: dict[str, int] = {}
        for row, key in enumerate(split["id"]):
            first = row_of.setdefault(str(key), row)
            if first != row:
                raise ValueError(
                    f"Rows {first} and {row} of the {name} data have the same id, {key!r}: give each question an id"
                    " of its own, or one of their answers is lost."
                )
    return split


def check_room(batch: dict[str, list], tokenizer: PreTrainedTokenizerBase, max_length: int, doc_stride: int) -> None:
    """Refuses questions that leave too little of a window: the next one would not get on in the context.

    Raises:
        ValueError: naming the first of them.
    """
    room_of_pair = max_length - tokenizer.num_special_tokens_to_add(pair=True)
    asked = tokenizer(batch["question"], add_special_tokens=False)["input_ids"]
    for key, question, context in zip(batch["id"], asked, batch["context"], strict=True):
        room = room_of_pair - len(question)
        if room <= doc_stride and len(tokenizer(context, add_special_tokens=False)["input_ids"]) > room:
            raise ValueError(
                f"Question {key!r} has {len(question)} tokens. Of a window's {max_length} that leaves {max(room, 0)}"
                f" for its context, which is longer: there must be more than doc_stride={doc_stride}. Give a greater"
                " max_seq_length (up to the tokenizer's), or a smaller doc_stride, or shorten the question."
            )


def make_windows(
    questions: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    data_args: DataTrainingArguments,
    desc: str,
) -> Dataset:
    """Cuts each text into overlapping windows behind its question.

    Returns:
        One row for each window: the tokenizer's columns; `start_positions` and `end_positions` [tokens], both 0 if the
        window does not hold the answer; `example` (the question's row) and `offsets`, which the model does not read.

    Raises:
        ValueError: the tokenizer cannot do it, or a question leaves too little of a window for its context.
    """
    pads_right = tokenizer.padding_side == "right"
    max_length = min(data_args.max_seq_length, tokenizer.model_max_length)
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} knows no offsets: question answering needs a fast tokenizer.")
    if not pads_right and not data_args.pad_to_max_length:
        raise ValueError(
            f"{type(tokenizer).__name__} pads on the left, which moves the answers in a batch: leave"
            " --pad_to_max_length on, or set padding_side='right' in the tokenizer's configuration."
        )
    if not pads_right and data_args.mask_padding:
        raise ValueError(
            f"{type(tokenizer).__name__} pads on the left, where 'no answer' stands (position 0), which --mask_padding"
            " leaves out of the loss: leave --mask_padding off, or set padding_side='right' in the tokenizer's"
            " configuration."
        )

    def encode(batch: dict[str, list], rows: list[int]) -> dict[str, list]:
        asked = [question.strip() for question in batch["question"]]  # some are longer than a window by their blanks
        check_room({**batch, "question": asked}, tokenizer, max_length, data_args.doc_stride)
        encoded = tokenizer(
            *((asked, batch["context"]) if pads_right else (batch["context"], asked)),
            truncation="only_second" if pads_right else "only_first",
            max_length=max_length,
            stride=data_args.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length" if data_args.pad_to_max_length else False,
        )
        sources = encoded.pop("overflow_to_sample_mapping")
        all_offsets = encoded.pop("offset_mapping")
        windows: dict[str, list] = dict(encoded)
        windows |= {"example": [rows[source] for source in sources], "offsets": []}
        windows |= {"start_positions": [], "end_positions": []} if "answers" in batch else {}
        for window, source in enumerate(sources):
            context_id = CONTEXT if pads_right else 0
            inside = [sequence == context_id for sequence in encoded.sequence_ids(window)]
            offsets = [pair if is_in else None for pair, is_in in zip(all_offsets[window], inside, strict=True)]
            windows["offsets"].append(offsets)
            if "answers" in batch:
                first, last = answer_positions(batch["answers"][source], offsets)
                windows["start_positions"].append(first)
                windows["end_positions"].append(last)
        return windows

    return questions.map(
        encode,
        batched=True,
        with_indices=True,
        num_proc=data_args.preprocessing_num_workers,
        remove_columns=questions.column_names,
        load_from_cache_file=not data_args.overwrite_cache,
        desc=desc,
    )


def answer_positions(answers: Mapping[str, list], offsets: Offsets) -> tuple[int, int]:
    """First and last token of the first answer in a window; (0, 0) where the window does not hold all of it."""
    if not answers["text"]:
        return 0, 0
    begin = answers["answer_start"][0]
    end = begin + len(answers["text"][0])
    inside = [(token, offset) for token, offset in enumerate(offsets) if offset is not None]
    if not inside or inside[0][1][0] > begin or inside[-1][1][1] < end:
        return 0, 0
    first = max(token for token, offset in inside if offset[0] <= begin)
    last = min(token for token, offset in inside if offset[1] >= end)
    return (first, last) if first <= last else (0, 0)


# ---------------------------------------------------------------------------------------------------- answers
def answer_all(
    questions: Dataset, windows: Dataset, logits: tuple[np.ndarray, np.ndarray], rules: AnswerRules
) -> dict[str, list[Candidate]]:
    """The candidates for each question, by id, from the logits [windows, tokens] of start and end."""
    start_logits, end_logits = logits[:2]
    if len(start_logits) != len(windows):
        raise ValueError(f"{len(start_logits)} rows of logits for {len(windows)} windows.")
    of_question: dict[int, list[tuple[np.ndarray, np.ndarray, Offsets]]] = {}
    for row, (example, offsets) in enumerate(zip(windows["example"], windows["offsets"], strict=True)):
        length = len(offsets)  # a batch may have been padded to more
        of_question.setdefault(example, []).append((start_logits[row, :length], end_logits[row, :length], offsets))
    return {
        str(question["id"]): best_candidates(question["context"], of_question[row], rules)
        for row, question in enumerate(questions)
    }


def make_compute_metrics(questions: Dataset, windows: Dataset, rules: AnswerRules) -> Any:
    """Exact match and F1 over the questions that `windows` were cut from."""
    scores = load_scores(rules.allows_no_answer)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        candidates = answer_all(questions, windows, prediction.predictions, rules)
        chosen = {key: choose_answer(found, rules) for key, found in candidates.items()}
        return scores(chosen, {str(row["id"]): row["answers"]["text"] for row in questions})

    return compute_metrics


def write_answers(folder: Path, candidates: Mapping[str, list[Candidate]], rules: AnswerRules) -> None:
    """Writes the answers as SQuAD's official script reads them, and the candidates beside them."""
    chosen = {key: choose_answer(found, rules) for key, found in candidates.items()}
    n_best = {
        key: [{"text": c.text, "score": c.score, "probability": c.probability} for c in found]
        for key, found in candidates.items()
    }
    for name, content in (("predictions.json", chosen), ("nbest_predictions.json", n_best)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------- the run
class PaddingMaskedTrainer(PipeTransformerTrainer):
    """Start and end are chosen among a row's own tokens: its loss does not depend on how far it is padded."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean of both cross entropies, as the models compute it, but without padding."""
        positions = ("start_positions", "end_positions")
        outputs = model(**{name: value for name, value in inputs.items() if name not in positions})
        padding = inputs["attention_mask"] == 0
        losses = [
            torch.nn.functional.cross_entropy(
                logits.float().masked_fill(padding, torch.finfo(torch.float32).min), inputs[name]
            )
            for logits, name in zip((outputs.start_logits, outputs.end_logits), positions, strict=True)
        ]
        loss = torch.stack(losses).mean()
        return (loss, outputs) if return_outputs else loss


def find_tokenizer(model_args: ModelArguments, data_args: DataTrainingArguments) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer, or builds one for the generated questions."""
    tokenizer = load_tokenizer(model_args)
    if tokenizer is not None:
        return tokenizer
    if data_args.generated_data is None:
        raise ValueError("A model made from scratch needs tokenizer_name, unless the data is generated_data.")
    return build_tokenizer(model_max_length=data_args.max_seq_length, more_words=QUESTION_WORDS)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains, evaluates and predicts as the arguments say.

    Every rank must call this. Returns the metrics of training and evaluation.
    """
    model_args, data_args, training_args = parse_arguments(
        sys.argv[1:] if arguments is None else arguments, DataTrainingArguments
    )
    start(training_args)
    rules = data_args.rules

    with training_args.main_process_first(desc="loading of the data"):
        splits = load_questions(data_args, training_args.seed, model_args.cache_dir)
    tokenizer = find_tokenizer(model_args, data_args)
    small = {
        "model_type": "bert",
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": data_args.max_seq_length,
        **SMALL_MODEL,
    }
    model = load_model(AutoModelForQuestionAnswering, model_args, load_config(model_args, small))

    train_windows = eval_questions = eval_windows = compute_metrics = None
    with training_args.main_process_first(desc="tokenization"):
        if training_args.do_train:
            questions = take_part(
                questions_of("train", splits, data_args), data_args.max_train_samples, training_args.seed
            )
            train_windows = make_windows(questions, tokenizer, data_args, "Cutting train")
            train_windows = train_windows.remove_columns(["example", "offsets"])
        if training_args.do_eval:
            eval_questions = take_part(
                questions_of("validation", splits, data_args), data_args.max_eval_samples, training_args.seed
            )
            eval_windows = make_windows(eval_questions, tokenizer, data_args, "Cutting validation")
    if eval_questions is not None and eval_windows is not None:
        compute_metrics = make_compute_metrics(eval_questions, eval_windows, rules)

    padding_collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=padding_multiple(training_args))
    trainer = (PaddingMaskedTrainer if data_args.mask_padding else PipeTransformerTrainer)(
        model=model,
        args=training_args,
        train_dataset=train_windows,
        eval_dataset=eval_windows,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else padding_collator,
    )
    results = {**train(trainer), **evaluate(trainer, {} if eval_windows is None else {"validation": eval_windows})}

    if training_args.do_predict:
        predict(trainer, splits, tokenizer, data_args, training_args)
    if training_args.push_to_hub:
        trainer.push_to_hub(finetuned_from=model_args.model_name_or_path, tasks="question-answering")
    print_summary(trainer, results)
    return results


def predict(
    trainer: PipeTransformerTrainer,
    splits: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    data_args: DataTrainingArguments,
    training_args: PipeTransformerTrainingArguments,
) -> None:
    """Answers the questions of the test data and writes the answers. Every rank must call this."""
    questions = questions_of("test", splits, data_args)
    if data_args.max_predict_samples is not None:
        questions = questions.select(range(min(len(questions), data_args.max_predict_samples)))
    with training_args.main_process_first(desc="tokenization"):
        windows = make_windows(questions, tokenizer, data_args, "Cutting test")
    trainer.compute_metrics = None  # it knows the validation data
    logits = trainer.predict(windows, metric_key_prefix="predict").predictions
    if trainer.is_world_process_zero():
        candidates = answer_all(questions, windows, logits, data_args.rules)
        write_answers(Path(training_args.output_dir), candidates, data_args.rules)


if __name__ == "__main__":
    record(main)()  # a launcher then shows the error itself
