"""`benchmarks/time_to_accuracy.py`: how the task of questions is made of its files, and what is right in it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from time_to_accuracy_tasks import HELD_OUT, LENGTH, QUESTIONS, Task, make_task, right_span

WORDS = ("where", "is", "it", "?", ".", "here", "there")
PLACES = [f"place{number}" for number in range(40)]


def questions_task(folder: Path, contexts: int) -> Task:
    """The task made of 10 questions on each of these contexts, whose sentences are too many for one sample."""
    data, model = folder / "squad", folder / "model"
    data.mkdir()
    model.mkdir()
    numbers = [f"text{number}" for number in range(contexts)]
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", *WORDS, *PLACES, *numbers]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = Lowercase(), Whitespace()
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(model)
    rows = []
    for number in numbers:
        context = " ".join(f"There it is {place} here {number}." for place in PLACES)
        for place in PLACES[::4]:
            answers = {"text": [f"{place} here"], "answer_start": [context.index(f"{place} here")]}
            rows.append({"context": context, "question": f"Where is {place}?", "answers": answers})
    unanswered = {**rows[0], "answers": {"text": [], "answer_start": []}}
    for name, some in (("train", [unanswered, *rows[10:]]), ("validation", rows[:10])):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return make_task("squad", seed=0, data=folder, model=model)


def test_a_sample_is_a_question_and_the_sentences_around_its_answer(tmp_path: Path) -> None:
    task = questions_task(tmp_path, contexts=60)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    for tokens, (first, last) in zip(task.train.inputs, task.train.labels.tolist(), strict=True):
        place, here = tokenizer.convert_ids_to_tokens(tokens[first : last + 1])
        text = tokenizer.convert_ids_to_tokens(tokens)
        assert text[:6] == ["[CLS]", "where", "is", place, "?", "[SEP]"] and here == "here"
        assert (text[6], text[-2], text[-1]) == ("there", ".", "[SEP]")  # whole sentences
        assert LENGTH - 7 < len(tokens) <= LENGTH  # and as many as there is room for: one has 7 tokens


def test_no_context_is_in_two_splits(tmp_path: Path) -> None:
    task = questions_task(tmp_path, contexts=60)
    splits = (task.train, task.validation, task.test)
    assert [len(split) for split in splits] == [QUESTIONS, HELD_OUT, HELD_OUT]
    names = [{int(tokens[-3]) for tokens in split.inputs} for split in splits]  # the last sentence names the text
    assert not names[0] & names[1] and not names[0] & names[2] and not names[1] & names[2]


def test_a_span_is_right_if_both_of_its_ends_are() -> None:
    logits = torch.zeros(3, 2, 4)
    logits[:, 0, 2], logits[:, 1, 3] = 5.0, 4.0  # the likeliest span is [2, 3] ...
    logits[1, 1, 0] = 8.0  # ... also where a span that ends before it starts has a larger sum
    labels = torch.tensor([[2, 3], [2, 3], [2, 2]])
    assert right_span(logits, labels).tolist() == [True, True, False]
