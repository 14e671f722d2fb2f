"""A small question-answering set that is generated, not downloaded: one-line reviews and questions about them.

    context     honestly critics said the plot is not very clever
    questions   who said it ?   what is it about ?   how is it ?
    answers     critics         plot                 not very clever

The words are from `generated_data.py`; the rows look as SQuAD's do. The same seed always gives the same rows, and
no context occurs twice. Half of the reviews name nobody who said it; with unanswerable questions, some ask for that.
"""

from __future__ import annotations

import random
from typing import Any

from generated_data import (
    NEGATIONS,
    NEGATIVE,
    OPENERS,
    POSITIVE,
    REPORTS,
    SPEAKERS,
    STRONGER,
    SUBJECTS,
    VERBS,
    WEAKER,
)

WHO, WHAT, HOW = "who said it ?", "what is it about ?", "how is it ?"
QUESTION_WORDS = ("who", "what", "how", "about", "?")
MAX_QUESTIONS = 100_000  # far fewer than can be drawn without repetition


def generate_question(rng: random.Random, with_unanswerable: bool = False) -> dict[str, Any]:
    """Draws one row with `context`, `question` and `answers`, as SQuAD has them."""
    opinion = rng.choice(POSITIVE + NEGATIVE)
    if rng.random() < 0.4:
        opinion = f"{rng.choice(STRONGER + WEAKER)} {opinion}"
    if rng.random() < 0.2:
        opinion = f"{rng.choice(NEGATIONS)} {opinion}"
    subject = rng.choice(SUBJECTS)
    parts = {WHAT: subject, HOW: opinion}
    beginning = f"{rng.choice(OPENERS)} " if rng.random() < 0.5 else ""
    if rng.random() < 0.5:
        parts[WHO] = rng.choice(SPEAKERS)
        beginning += f"{parts[WHO]} {rng.choice(REPORTS)} "
    context = f"{beginning}the {subject} {rng.choice(VERBS)} {opinion}"
    question = rng.choice([WHO, WHAT, HOW] if with_unanswerable else sorted(parts))
    starts = {
        WHO: context.find(parts.get(WHO, "")),
        WHAT: len(beginning) + len("the "),
        HOW: len(context) - len(opinion),
    }
    if question not in parts:
        return {"context": context, "question": question, "answers": {"text": [], "answer_start": []}}
    answers = {"text": [parts[question]], "answer_start": [starts[question]]}
    return {"context": context, "question": question, "answers": answers}


def generate_questions(
    num_train: int, num_validation: int, seed: int = 0, with_unanswerable: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Generates disjoint splits.

    Args:
        num_train: questions in `train`.
        num_validation: questions in `validation`.
        seed: the same seed gives the same splits, on every rank.
        with_unanswerable: about a sixth of the questions have no answer, as SQuAD 2 has them.

    Returns:
        `{"train": [{"id": ..., "context": ..., "question": ..., "answers": ...}, ...], "validation": [...]}`

    Raises:
        ValueError: a split would be empty, or more questions are asked for than can be drawn without repetition.
    """
    total = num_train + num_validation
    if num_train < 1 or num_validation < 1 or total > MAX_QUESTIONS:
        raise ValueError(
            f"num_train={num_train} and num_validation={num_validation} must be at least 1 each and at most "
            f"{MAX_QUESTIONS} together."
        )
    rng = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < total:
        row = generate_question(rng, with_unanswerable)
        rows.setdefault(row["context"], {"id": f"generated-{len(rows)}", **row})
    everything = list(rows.values())
    return {"train": everything[:num_train], "validation": everything[num_train:]}
