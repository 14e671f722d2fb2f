"""Question answering: SQuAD's scores, windows, the choice of answers, and the recipe from end to end."""

from __future__ import annotations

import json
import random
import re
import string
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

pytest.importorskip("datasets")

from datasets import Dataset, DatasetDict

import answers
import generated_questions
import run_qa
from generated_data import build_tokenizer

# ------------------------------------------------------------------------------------------ scores


def official_1(predictions: list[str], references: list[list[str]]) -> dict[str, float]:
    """`evaluate-v1.1.py` of SQuAD, shortened."""

    def normalized(text: str) -> str:
        text = "".join(c for c in text.lower() if c not in set(string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())

    def f1(prediction: str, truth: str) -> float:
        found, true = normalized(prediction).split(), normalized(truth).split()
        num_same = sum((Counter(found) & Counter(true)).values())
        if num_same == 0:
            return 0
        precision, recall = 1.0 * num_same / len(found), 1.0 * num_same / len(true)
        return (2 * precision * recall) / (precision + recall)

    exact = total = 0.0
    for prediction, truths in zip(predictions, references, strict=True):
        exact += max(normalized(prediction) == normalized(truth) for truth in truths)
        total += max(f1(prediction, truth) for truth in truths)
    return {"exact_match": 100.0 * exact / len(predictions), "f1": 100.0 * total / len(predictions)}


def official_2(predictions: list[str], references: list[list[str]]) -> dict[str, float]:
    """`evaluate-v2.0.py` of SQuAD without probabilities of "no answer", shortened."""

    def normalize_answer(text: str) -> str:
        text = "".join(c for c in text.lower() if c not in set(string.punctuation))
        return " ".join(re.compile(r"\b(a|an|the)\b", re.UNICODE).sub(" ", text).split())

    def get_tokens(text: str) -> list[str]:
        return normalize_answer(text).split() if text else []

    def compute_f1(truth: str, prediction: str) -> float:
        true, found = get_tokens(truth), get_tokens(prediction)
        num_same = sum((Counter(true) & Counter(found)).values())
        if len(true) == 0 or len(found) == 0:
            return int(true == found)  # if either is no answer, 1 if they agree
        if num_same == 0:
            return 0
        precision, recall = 1.0 * num_same / len(found), 1.0 * num_same / len(true)
        return (2 * precision * recall) / (precision + recall)

    exact_scores, f1_scores, has_answer = [], [], []
    for prediction, truths in zip(predictions, references, strict=True):
        gold = [truth for truth in truths if normalize_answer(truth)] or [""]
        exact_scores.append(max(int(normalize_answer(a) == normalize_answer(prediction)) for a in gold))
        f1_scores.append(max(compute_f1(a, prediction) for a in gold))
        has_answer.append(bool(truths))
    result = {}
    for prefix, among in (("", {True, False}), ("HasAns_", {True}), ("NoAns_", {False})):
        chosen = [i for i, has in enumerate(has_answer) if has in among]
        if chosen:
            result[f"{prefix}exact"] = 100.0 * sum(exact_scores[i] for i in chosen) / len(chosen)
            result[f"{prefix}f1"] = 100.0 * sum(f1_scores[i] for i in chosen) / len(chosen)
    return result


PIECES = ["a", "the", "An", "The", "cat", "Cat's", "dog", "dog", "1,066", "über", "Ü-bahn", "-", ".", "'", "—", "\t"]


def random_text(rng: random.Random) -> str:
    """Often nothing but articles or punctuation, and of so few words that many are shared."""
    return rng.choice(["", " ", "\n"]).join(rng.choice(PIECES) for _ in range(rng.randrange(5)))


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_the_official_scripts(seed: int) -> None:
    rng = random.Random(seed)
    predictions = [random_text(rng) for _ in range(400)]
    references = [[random_text(rng) for _ in range(rng.randrange(1, 4))] for _ in predictions]
    assert answers.squad_metrics(predictions, references) == pytest.approx(official_1(predictions, references))
    with_none = [truths[rng.randrange(2) :] for truths in references]  # of some of one truth nothing is left
    assert answers.squad_v2_metrics(predictions, with_none) == pytest.approx(official_2(predictions, with_none))


def online_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """`evaluate.load(name)` gives what the official script does, and more; returns what it is asked to compute."""
    asked: list[dict] = []

    def compute(predictions: list[dict], references: list[dict]) -> dict[str, float]:
        asked.extend([*predictions, *references])
        truths = {row["id"]: row["answers"]["text"] for row in references}
        of_script = official_2 if name == "squad_v2" else official_1
        scores = of_script([row["prediction_text"] for row in predictions], [truths[row["id"]] for row in predictions])
        return {**scores, "total": len(predictions), "best_f1": 100.0, "best_f1_thresh": 0.0}

    def load(wanted: str) -> SimpleNamespace:
        if wanted != name:
            raise ConnectionError(wanted)
        return SimpleNamespace(compute=compute)

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setitem(sys.modules, "evaluate", SimpleNamespace(load=load))
    return asked


@pytest.mark.parametrize("name", ["squad", "squad_v2"])
def test_scores_of_evaluate_have_the_names_and_values_of_the_local_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allows_no_answer = name == "squad_v2"
    given = {"b": "yes", "a": "the year 1066"}
    truths = {"a": ["1066", "in 1066"], "b": [] if allows_no_answer else ["no"]}
    local = answers.load_scores(allows_no_answer)(given, truths)
    asked = online_scores(name, monkeypatch)
    assert answers.load_scores(allows_no_answer)(given, truths) == pytest.approx(local)
    extra = {"no_answer_probability": 0.0} if allows_no_answer else {}
    assert asked == [
        {"id": "a", "prediction_text": "the year 1066", **extra},
        {"id": "b", "prediction_text": "yes", **extra},
        {"id": "a", "answers": {"text": ["1066", "in 1066"], "answer_start": [0, 0]}},
        {"id": "b", "answers": {"text": truths["b"], "answer_start": [0] * len(truths["b"])}},
    ]


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


@pytest.mark.parametrize(("threshold", "answer"), [(0.0, ""), (1.5, "green")])
def test_no_answer_where_its_score_is_higher_in_every_window(threshold: float, answer: str) -> None:
    rules = answers.AnswerRules(allows_no_answer=True, null_score_diff_threshold=threshold)
    windows = [window({0: 2.0, 3: 1.0}, {0: 2.0, 3: 2.0}), window({0: 9.0}, {0: 9.0})]  # null: min(4, 18), best: 3
    found = answers.best_candidates(CONTEXT, windows, rules)
    assert (found[0].text, found[0].score) == ("", 4.0)
    assert answers.choose_answer(found, rules) == answer
    higher = [window({0: 0.0, 3: 1.0}, {0: 0.0, 3: 2.0}), windows[1]]
    assert answers.choose_answer(answers.best_candidates(CONTEXT, higher, rules), rules) == "green"


# ------------------------------------------------------------------------------------------ windows
def arguments(**options: object) -> run_qa.DataTrainingArguments:
    return run_qa.DataTrainingArguments(**{"generated_data": 10, "max_seq_length": 16, "doc_stride": 3, **options})


def rows_of(questions: list[dict]) -> Dataset:
    return Dataset.from_list(questions)


@pytest.mark.parametrize("side", ["right", "left"])
def test_windows_overlap_and_mark_the_answer(side: str) -> None:
    rng = random.Random(1)
    questions = [{"id": str(i), **generated_questions.generate_question(rng)} for i in range(50)]
    for row in questions:  # longer than a window, with the answer anywhere
        shift = "in the end everyone said honestly overall "
        row["context"] = shift + row["context"] + " and to me it was fun all in all"
        row["answers"] = {
            "text": row["answers"]["text"],
            "answer_start": [start + len(shift) for start in row["answers"]["answer_start"]],
        }
    tokenizer = build_tokenizer(64, more_words=generated_questions.QUESTION_WORDS)
    tokenizer.padding_side = side
    windows = run_qa.make_windows(rows_of(questions), tokenizer, arguments(), "test")
    assert len(windows) > 2 * len(questions)
    assert {len(ids) for ids in windows["input_ids"]} == {16}
    found = set()
    for row in windows:
        question = questions[row["example"]]
        first, last = row["start_positions"], row["end_positions"]
        inside = [pair for pair in row["offsets"] if pair is not None]
        text = question["context"][inside[0][0] : inside[-1][1]]
        if (first, last) == (0, 0):
            begin = question["answers"]["answer_start"][0]
            whole = inside[0][0] <= begin and begin + len(question["answers"]["text"][0]) <= inside[-1][1]
            assert not whole, text
            continue
        found.add(row["example"])
        begin, end = row["offsets"][first][0], row["offsets"][last][1]
        assert question["context"][begin:end] == question["answers"]["text"][0]
    assert found == set(range(len(questions)))


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_question_that_leaves_no_room_for_its_context_is_named(side: str) -> None:
    """Of 16 tokens 3 are special; neighbouring windows share 3."""
    tokenizer = build_tokenizer(64)
    tokenizer.padding_side = side

    def windows(question: int, context: int) -> int:
        texts = {"question": " ".join(["is"] * question), "context": " ".join(["the"] * context)}
        row = {"id": "q", **texts, "answers": {"text": ["the"], "answer_start": [0]}}
        return len(
            run_qa.make_windows(rows_of([{**row, "id": "p", "question": "is"}, row]), tokenizer, arguments(), "")
        )

    assert windows(9, 4) == 1 + 1  # room for 4
    assert windows(9, 6) == 1 + 3
    assert windows(10, 3) == 1 + 1  # room for 3
    for question, room in ((10, 3), (13, 0), (20, 0)):
        with pytest.raises(
            ValueError, match=rf"Question 'q' has {question} tokens\..* 16 that leaves {room} .* doc_stride=3\. Give"
        ):
            windows(question, 4)


def test_perfect_logits_give_the_right_answers() -> None:
    """From rows to windows to logits and back: exact match 100."""
    rng = random.Random(2)
    questions = rows_of([{"id": str(i), **generated_questions.generate_question(rng, True)} for i in range(40)])
    tokenizer = build_tokenizer(64, more_words=generated_questions.QUESTION_WORDS)
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
    for name in ("validation", "test"):
        with pytest.raises(ValueError, match=f"Rows 0 and 2 of the {name} data have the same id, '1'"):
            run_qa.check_questions(rows_of([good, {**good, "id": "2"}, good]), name, arguments())
    tokenizer = build_tokenizer(64)
    tokenizer.padding_side = "left"
    with pytest.raises(ValueError, match="pads on the left"):
        run_qa.make_windows(rows_of([good]), tokenizer, arguments(pad_to_max_length=False), "test")


@pytest.mark.parametrize("with_unanswerable", [False, True])
def test_questions_from_the_hub(with_unanswerable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In SQuAD's columns; sets that have test data have its answers, too, or none."""
    rows = generated_questions.generate_questions(30, 30, 0, with_unanswerable)
    hub = DatasetDict({name: Dataset.from_list([{"title": "T", **row} for row in rows[name]]) for name in rows})
    hub["test"] = hub["validation"]
    asked: list[object] = []

    def load_dataset(*names: object, **options: object) -> DatasetDict:
        asked.append((names, options))
        return hub

    monkeypatch.setattr(run_qa, "load_dataset", load_dataset)
    options = {"generated_data": None, "dataset_name": "squad", "dataset_config_name": "plain_text"}
    data_args = arguments(**options, version_2_with_negative=with_unanswerable)
    splits = run_qa.load_questions(data_args, 0, "here")
    assert asked == [(("squad", "plain_text"), {"cache_dir": "here"})]
    tokenizer = build_tokenizer(64, more_words=generated_questions.QUESTION_WORDS)
    for name in ("train", "validation"):
        windows = run_qa.make_windows(run_qa.questions_of(name, splits, data_args), tokenizer, data_args, name)
        assert set(windows["example"]) == set(range(30)) and "title" not in windows.column_names
        answered = {row["example"] for row in windows if row["end_positions"] > 0}
        assert answered == {i for i, row in enumerate(rows[name]) if row["answers"]["text"]}
    assert run_qa.questions_of("test", splits, data_args).column_names == ["title", "id", "context", "question"]
    if with_unanswerable:
        with pytest.raises(ValueError, match="of the 30 questions of the train data have no answer"):
            run_qa.questions_of("train", splits, arguments(**options))


# ------------------------------------------------------------------------------------------ generated questions


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
