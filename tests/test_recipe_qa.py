"""Question answering: SQuAD's scores, windows, the choice of answers, and the recipe from end to end."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
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


# ------------------------------------------------------------------------------------------ the choice of answers
CONTEXT = "red green blue"
OFFSETS = [None, None, (0, 3), (4, 9), (10, 14), None]  # [CLS] question red green blue [SEP]


def window(start: dict[int, float], end: dict[int, float]) -> tuple[np.ndarray, np.ndarray, list]:
    logits = np.full((2, len(OFFSETS)), -9.0)
    for row, scores in enumerate((start, end)):
        for position, score in scores.items():
            logits[row, position] = score
    return logits[0], logits[1], OFFSETS


def test_best_pair_lies_inside_the_context_and_runs_forward() -> None:
    found = answers.best_candidates(
        CONTEXT, [window({1: 9.0, 4: 5.0, 2: 3.0}, {3: 4.0, 5: 8.0, 2: 2.0})], answers.AnswerRules()
    )
    assert [c.text for c in found[:2]] == ["red green", "red"]  # "blue ... green" would score more, but runs backward
    assert found[0].score == 7.0
    assert sum(c.probability for c in found) == pytest.approx(1.0)


def test_no_answer_where_its_score_is_higher_in_every_window() -> None:
    rules = answers.AnswerRules(allows_no_answer=True)
    windows = [window({0: 2.0, 3: 1.0}, {0: 2.0, 3: 2.0}), window({0: 9.0}, {0: 9.0})]  # null: min(4, 18), best: 3
    found = answers.best_candidates(CONTEXT, windows, rules)
    assert (found[0].text, found[0].score) == ("", 4.0)
    assert answers.choose_answer(found, rules) == ""
    lenient = answers.AnswerRules(allows_no_answer=True, null_score_diff_threshold=1.5)
    assert answers.choose_answer(found, lenient) == "green"
    higher = [window({0: 0.0, 3: 1.0}, {0: 0.0, 3: 2.0}), windows[1]]
    assert answers.choose_answer(answers.best_candidates(CONTEXT, higher, rules), rules) == "green"


# ------------------------------------------------------------------------------------------ windows
def arguments(**options: object) -> run_qa.DataTrainingArguments:
    return run_qa.DataTrainingArguments(**{"generated_data": 10, "max_seq_length": 16, "doc_stride": 3, **options})


def rows_of(questions: list[dict]) -> Dataset:
    return Dataset.from_list(questions)


def test_a_question_that_leaves_no_room_for_its_context_is_named() -> None:
    """Of 16 tokens 3 are special; neighbouring windows share 3."""

    def windows(question: int, context: int) -> int:
        texts = {"question": " ".join(["is"] * question), "context": " ".join(["the"] * context)}
        row = {"id": "q", **texts, "answers": {"text": ["the"], "answer_start": [0]}}
        return len(run_qa.make_windows(rows_of([row]), build_tokenizer(64), arguments(), ""))

    assert (windows(9, 4), windows(9, 6)) == (1, 3)  # room for 4
    with pytest.raises(ValueError, match=r"Question 'q' has 10 tokens\..* 16 that leaves 3 .* doc_stride=3\. Give"):
        windows(10, 4)


@pytest.mark.parametrize("side", ["right", "left"])
def test_perfect_logits_give_the_right_answers(side: str) -> None:
    """From rows to windows to logits and back: exact match 100."""
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


def test_masked_loss_does_not_depend_on_padding() -> None:
    class Model:
        def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
            scores = input_ids.float()
            return SimpleNamespace(start_logits=scores, end_logits=-scores)

    def loss(length: int) -> float:
        row = [1, 3, 2, *([9] * (length - 3))]
        mask = [1, 1, 1, *([0] * (length - 3))]
        inputs = {"input_ids": torch.tensor([row]), "attention_mask": torch.tensor([mask])}
        inputs |= {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([2])}
        return float(run_qa.PaddingMaskedTrainer.compute_loss(None, Model(), inputs))

    own = -torch.tensor([1.0, 3.0, 2.0]).log_softmax(0)[1] - torch.tensor([-1.0, -3.0, -2.0]).log_softmax(0)[2]
    assert loss(3) == loss(7) == pytest.approx(float(own) / 2)


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
