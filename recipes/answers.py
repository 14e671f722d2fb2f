"""From the scores of a question-answering head to answers, and from answers to exact match and F1.

window of the text       [CLS] question [SEP] ... part of the context ... [SEP] padding
start logits, end logits   a score for each position
candidates               pairs (start, end) of the best starts and ends, inside the context, not too long
answer                   the text of the best pair over all windows of the example
no answer (SQuAD 2)      where the score at [CLS], the least over the windows, beats the best pair by a threshold
"""

from __future__ import annotations

import collections
import logging
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from metrics import is_offline

logger = logging.getLogger(__name__)

Offsets = Sequence[Sequence[int] | None]
"""For each position of a window the characters [start, end) of the context; None outside of the context."""
NO_ANSWER = ""
Scores = Callable[[Mapping[str, str], Mapping[str, Sequence[str]]], dict[str, float]]
SCORE_NAMES = {"exact_match", "exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1"}


@dataclass(frozen=True)
class Candidate:
    """A possible answer with its score, the sum of two logits, and its share of a softmax over the candidates."""

    text: str
    score: float
    probability: float = 0.0


@dataclass(frozen=True)
class AnswerRules:
    """How answers are chosen.

    Attributes:
        n_best: starts and ends in the context that are tried for each window; candidates kept for each example.
        max_answer_length: in tokens.
        allows_no_answer: SQuAD 2: a question may have no answer in its text.
        null_score_diff_threshold: no answer, if its score exceeds the best answer's by more than this.
    """

    n_best: int = 20
    max_answer_length: int = 30
    allows_no_answer: bool = False
    null_score_diff_threshold: float = 0.0

    def __post_init__(self) -> None:
        if self.n_best < 1 or self.max_answer_length < 1:
            raise ValueError(
                f"n_best_size={self.n_best} and max_answer_length={self.max_answer_length} must be at least 1."
            )


# ---------------------------------------------------------------------------------------------------- answers
def best_candidates(
    context: str,
    windows: Sequence[tuple[np.ndarray, np.ndarray, Offsets]],
    rules: AnswerRules,
) -> list[Candidate]:
    """The best answers to one question, the best first.

    Args:
        context: the text that the question is about.
        windows: (start logits [S], end logits [S], offsets) of each; position 0 stands for "no answer".
        rules: how many are kept, and how long they may be.

    Returns:
        At least one. Under `allows_no_answer` the empty text is among them, with the least null score of the windows.
    """
    found: dict[str, float] = {}
    for start_logits, end_logits, offsets in windows:
        # only these: padding that was left out of the loss may have any score
        inside = np.flatnonzero([offset is not None for offset in offsets])
        starts, ends = (inside[np.argsort(-scores[inside])][: rules.n_best] for scores in (start_logits, end_logits))
        lengths = ends[None, :] - starts[:, None] + 1
        for i, j in np.argwhere((lengths >= 1) & (lengths <= rules.max_answer_length)):
            first, last = offsets[starts[i]], offsets[ends[j]]
            assert first is not None and last is not None
            text = context[first[0] : last[1]]
            score = float(start_logits[starts[i]]) + float(end_logits[ends[j]])
            found[text] = max(score, found.get(text, -np.inf))
    ranked = sorted(found.items(), key=lambda item: -item[1])[: rules.n_best]
    if rules.allows_no_answer:
        ranked.append((NO_ANSWER, min(float(start[0]) + float(end[0]) for start, end, _ in windows)))
        ranked.sort(key=lambda item: -item[1])
    if not ranked:
        return [Candidate(NO_ANSWER, 0.0, 1.0)]
    scores = np.array([score for _, score in ranked])
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    return [Candidate(text, score, float(share)) for (text, score), share in zip(ranked, shares, strict=True)]


def choose_answer(candidates: Sequence[Candidate], rules: AnswerRules) -> str:
    """The best candidate; none where its score lies above every text's by more than the threshold."""
    texts = [candidate for candidate in candidates if candidate.text]
    if not texts:
        return NO_ANSWER
    best = texts[0]
    null = next((candidate for candidate in candidates if not candidate.text), None)
    if rules.allows_no_answer and null is not None and null.score - best.score > rules.null_score_diff_threshold:
        return NO_ANSWER
    return best.text


# ---------------------------------------------------------------------------------------------------- scores
def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and extra blanks."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, truth: str) -> float:
    """1 if both are the same when normalised, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(truth))


def f1(prediction: str, truth: str) -> float:
    """Harmonic mean of precision and recall of the normalised words."""
    predicted, actual = normalize_answer(prediction).split(), normalize_answer(truth).split()
    common = sum((collections.Counter(predicted) & collections.Counter(actual)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(actual)
    return 2 * precision * recall / (precision + recall)


def squad_metrics(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """What SQuAD 1.1's official script reports: `exact_match` and `f1`, in percent, over the best of the truths."""
    pairs = list(zip(predictions, references, strict=True))
    return {
        "exact_match": 100.0
        * _mean([max(exact_match(answer, truth) for truth in truths) for answer, truths in pairs]),
        "f1": 100.0 * _mean([max(f1(answer, truth) for truth in truths) for answer, truths in pairs]),
    }


def squad_v2_metrics(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """The metrics of SQuAD 2's official script: `exact` and `f1`, and both for questions with and without an answer.

    Truths that are empty when normalised do not count, and a question without truths has the answer "".
    """
    exact: list[float] = []
    overlap: list[float] = []
    for answer, truths in zip(predictions, references, strict=True):
        counted = [truth for truth in truths if normalize_answer(truth)] or [NO_ANSWER]
        exact.append(max(exact_match(answer, truth) for truth in counted))
        overlap.append(max(_f1_or_nothing(answer, truth) for truth in counted))
    result = {"exact": 100.0 * _mean(exact), "f1": 100.0 * _mean(overlap)}
    for name, wanted in (("HasAns", True), ("NoAns", False)):
        rows = [row for row, truths in enumerate(references) if bool(truths) == wanted]
        if rows:
            result[f"{name}_exact"] = 100.0 * _mean([exact[row] for row in rows])
            result[f"{name}_f1"] = 100.0 * _mean([overlap[row] for row in rows])
    return result


def _f1_or_nothing(prediction: str, truth: str) -> float:
    if not normalize_answer(prediction) or not normalize_answer(truth):
        return exact_match(prediction, truth)
    return f1(prediction, truth)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def load_scores(allows_no_answer: bool) -> Scores:
    """Returns the function that turns answers and truths, by the questions' ids, into SQuAD's numbers.

    By `evaluate` where it is reachable, else by the functions above; both give the same numbers under the same names.
    """

    def local(predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> dict[str, float]:
        metrics = squad_v2_metrics if allows_no_answer else squad_metrics
        return metrics([predictions[key] for key in references], list(references.values()))

    name = "squad_v2" if allows_no_answer else "squad"
    if is_offline():
        return local
    try:
        import evaluate

        metric = evaluate.load(name)
    except Exception as error:  # each layer below raises its own kind: connection, hub, missing package
        logger.warning("evaluate.load(%r) failed (%s); computing its metrics locally.", name, error)
        return local

    def online(predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> dict[str, float]:
        extra = {"no_answer_probability": 0.0} if allows_no_answer else {}
        result = metric.compute(
            predictions=[{"id": key, "prediction_text": predictions[key], **extra} for key in references],
            references=[
                {"id": key, "answers": {"text": list(truths), "answer_start": [0] * len(truths)}}
                for key, truths in references.items()
            ],
        )
        return {key: float(value) for key, value in result.items() if key in SCORE_NAMES}

    return online
