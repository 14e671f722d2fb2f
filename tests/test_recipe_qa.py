"""Question answering: SQuAD's scores, windows, the choice of answers, and the recipe from end to end."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from distributed import run_ranks

pytest.importorskip("datasets")

from datasets import Dataset

import answers
import generated_questions
import run_qa
from generated_data import build_tokenizer


def test_scores() -> None:
    """Articles, capital letters and punctuation do not count; of several truths the best one does."""
    scores = answers.squad_metrics(["the cat", "dog!"], [["Cat"], ["bird", "cat dog"]])
    assert scores == pytest.approx({"exact_match": 50.0, "f1": 100 * (1 + 2 / 3) / 2})
    scores = answers.squad_v2_metrics(["", "cat", "the"], [[], [], ["cat"]])
    thirds = {"exact": 100 / 3, "f1": 100 / 3}
    assert scores == pytest.approx(
        {**thirds, "HasAns_exact": 0.0, "HasAns_f1": 0.0, "NoAns_exact": 50.0, "NoAns_f1": 50.0}
    )


# ------------------------------------------------------------------------------------------ windows
def arguments(**options: object) -> run_qa.DataTrainingArguments:
    return run_qa.DataTrainingArguments(**{"generated_data": 10, "max_seq_length": 16, "doc_stride": 3, **options})


def rows_of(questions: list[dict]) -> Dataset:
    return Dataset.from_list(questions)


@pytest.mark.parametrize("side", ["right", "left"])
def test_perfect_logits_give_the_right_answers(side: str) -> None:
    """Rows become windows and logits, and these become answers again: exact match 100."""
    rng = random.Random(2)
    questions = rows_of([{"id": str(i), **generated_questions.generate_question(rng, True)} for i in range(40)])
    tokenizer = build_tokenizer(64, more_words=generated_questions.QUESTION_WORDS)
    tokenizer.padding_side = side
    data_args = arguments(version_2_with_negative=True, max_seq_length=24)
    windows = run_qa.make_windows(questions, tokenizer, data_args, "test")
    logits = [np.zeros((len(windows), 24)) for _ in range(2)]
    for scores, column in zip(logits, ("start_positions", "end_positions"), strict=True):
        scores[np.arange(len(windows)), windows[column]] = 5.0
    candidates = run_qa.answer_all(questions, windows, (logits[0], logits[1]), data_args.rules)
    chosen = {key: answers.choose_answer(found, data_args.rules) for key, found in candidates.items()}
    assert chosen == {row["id"]: "".join(row["answers"]["text"][:1]) for row in questions}
    assert 0 < sum(not text for text in chosen.values()) < 40


def test_user_errors() -> None:
    with pytest.raises(ValueError, match="doc_stride=20 must lie between 0 and max_seq_length=16"):
        arguments(doc_stride=20)
    with pytest.raises(ValueError, match="n_best_size=0"):
        _ = arguments(n_best_size=0).rules
    with pytest.raises(ValueError, match="got none"):
        arguments(generated_data=None)
    good = {"id": "1", "context": "a", "question": "b", "answers": {"text": ["a"], "answer_start": [0]}}
    with pytest.raises(ValueError, match="train data lacks id, answers"):
        run_qa.check_questions(rows_of([good]).remove_columns(["id", "answers"]), "train", arguments())
    unanswered = {**good, "answers": {"text": [], "answer_start": []}}
    with pytest.raises(ValueError, match=r"1 of the 2 questions .* row 1\): set version_2_with_negative"):
        run_qa.check_questions(rows_of([good, unanswered]), "train", arguments())
    run_qa.check_questions(rows_of([good, unanswered]), "train", arguments(version_2_with_negative=True))
    with pytest.raises(ValueError, match="Rows 0 and 2 of the test data have the same id, '1'"):
        run_qa.check_questions(rows_of([good, {**good, "id": "2"}, good]), "test", arguments())
    tokenizer = build_tokenizer(64)
    tokenizer.padding_side = "left"
    with pytest.raises(ValueError, match="pads on the left"):
        run_qa.make_windows(rows_of([good]), tokenizer, arguments(pad_to_max_length=False), "test")


# ------------------------------------------------------------------------------------------ from end to end
def run(rank: int, world_size: int, folder: str) -> dict[str, float]:
    rows = generated_questions.generate_questions(24, 8)
    rows["test"] = [{key: row[key] for key in row if key != "answers"} for row in rows["validation"]]
    files = {name: f"{folder}/{name}.jsonl" for name in ("train", "validation", "test")}
    if rank == 0:
        for name, path in files.items():
            Path(path).write_text("\n".join(map(json.dumps, rows[name])), encoding="utf-8")
        build_tokenizer(32, generated_questions.QUESTION_WORDS).save_pretrained(f"{folder}/tokenizer")
    dist.init_process_group("gloo")
    dist.barrier()
    overrides = "num_hidden_layers=2,hidden_size=16,num_attention_heads=2,intermediate_size=32"
    return run_qa.main(
        f"--train_file {files['train']} --validation_file {files['validation']} --test_file {files['test']}"
        f" --tokenizer_name {folder}/tokenizer --config_overrides {overrides} --max_seq_length 32 --doc_stride 8"
        f" --output_dir {folder}/out --do_train --do_eval --do_predict --pipeline_parallel_size 2"
        f" --per_device_train_batch_size 4 --max_steps 2 --report_to none --cache_dir {folder}/cache".split()
    )


@pytest.mark.slow
def test_from_files_to_answers(tmp_path: Path) -> None:
    results = run_ranks(run, 2, str(tmp_path), env={"HF_HUB_OFFLINE": "1"})
    assert results[0]["eval_samples"] == 8
    predictions = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert set(predictions) == {f"generated-{i}" for i in range(24, 32)}
    questions = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    chosen = [predictions[row["id"]] for row in questions]
    assert all(text in row["context"] for text, row in zip(chosen, questions, strict=True))
    scores = answers.squad_metrics(chosen, [row["answers"]["text"] for row in questions])  # of the same questions
    assert {name: results[0][f"eval_{name}"] for name in scores} == pytest.approx(scores)
    assert set(json.loads((tmp_path / "out" / "nbest_predictions.json").read_text())) == set(predictions)
