"""A small sentence-classification set that is generated, not downloaded.

Short reviews, positive (1) or negative (0). A bag of words does not suffice, since the label needs some composition:

    clause    = "the" subject verb [negation] [intensifier] adjective
    sentence  = [opener | "critics said it is dull yet"] clause ["and" clause | "but" clause]
    score     = ± 2 (adjective), flipped by a negation, × 2 or × 0.5 by an intensifier
    label     = sign of the sum; the clause after "but" counts three times, the critics' opinion not at all

The same seed always gives the same sentences. No sentence occurs twice, so none is in both train and validation.

    python recipes/generated_data.py --train 2000 --validation 200      # writes train.csv and validation.csv
"""

from __future__ import annotations

import argparse
import csv
import random
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

POSITIVE = (
    "amazing", "beautiful", "brilliant", "charming", "clever", "compelling", "delightful", "elegant", "engaging",
    "enjoyable", "excellent", "exciting", "fascinating", "fresh", "fun", "funny", "gorgeous", "graceful", "great",
    "gripping", "heartfelt", "hilarious", "honest", "imaginative", "impressive", "inspired", "lovely", "masterful",
    "memorable", "moving", "original", "perfect", "playful", "poetic", "powerful", "refreshing", "remarkable",
    "rich", "satisfying", "smart", "stunning", "superb", "tender", "thoughtful", "touching", "vivid", "warm",
    "witty", "wonderful",
)  # fmt: skip
NEGATIVE = (
    "annoying", "awful", "bad", "bland", "bloated", "boring", "careless", "cheap", "chaotic", "clumsy", "cold",
    "confusing", "contrived", "crude", "depressing", "dull", "empty", "exhausting", "flat", "forced",
    "forgettable", "hollow", "horrible", "incoherent", "irritating", "lazy", "lifeless", "mediocre", "messy",
    "monotonous", "muddled", "painful", "pathetic", "plodding", "pointless", "poor", "predictable", "pretentious",
    "shallow", "silly", "sloppy", "stale", "stupid", "tedious", "terrible", "tiresome", "trite", "ugly", "unfunny",
    "weak",
)  # fmt: skip
SUBJECTS = (
    "acting", "camerawork", "cast", "character", "climax", "comedy", "dialogue", "director", "drama", "editing",
    "ending", "film", "hero", "humor", "idea", "lighting", "movie", "music", "mystery", "opening", "pacing",
    "performance", "photography", "plot", "premise", "romance", "scenery", "score", "script", "sequel", "setting",
    "show", "soundtrack", "story", "style", "thriller", "villain", "visuals", "writing",
)  # fmt: skip
VERBS = ("is", "was", "feels", "seems", "looked", "remains")
NEGATIONS = ("not", "never", "hardly")
STRONGER = ("very", "really", "truly", "extremely", "incredibly", "deeply")
WEAKER = ("slightly", "somewhat", "mildly", "fairly")
OPENERS = ("honestly", "overall", "to me", "for once", "as expected", "in the end", "all in all")
SPEAKERS = ("critics", "friends", "the trailer", "the poster", "my brother", "everyone")
REPORTS = ("said", "claimed", "promised", "insisted", "wrote")
JOINS = ("and", "but")

MAX_SENTENCES = 1_000_000  # far fewer than the grammar has: drawing without repetition stays quick


def generate_sentence(rng: random.Random) -> tuple[str, int]:
    """Draws one sentence and its label, 0 (negative) or 1 (positive). Never a tie: those are drawn again."""
    while True:
        words, score = _clause(rng)
        if rng.random() < 0.5:
            join = rng.choice(JOINS)
            more_words, more_score = _clause(rng)
            words += [join, *more_words]
            score += 3 * more_score if join == "but" else more_score
        if rng.random() < 0.15:
            hearsay = [rng.choice(SPEAKERS), rng.choice(REPORTS), "it", "is", rng.choice(POSITIVE + NEGATIVE), "yet"]
            words = hearsay + words
        elif rng.random() < 0.25:
            words = [rng.choice(OPENERS), *words]
        if score != 0:
            return " ".join(words), int(score > 0)


def _clause(rng: random.Random) -> tuple[list[str], float]:
    """Draws "the plot is not very clever" and its score, here -4."""
    positive = rng.random() < 0.5
    adjective = rng.choice(POSITIVE if positive else NEGATIVE)
    score = 2.0 if positive else -2.0
    words = ["the", rng.choice(SUBJECTS), rng.choice(VERBS)]
    if rng.random() < 0.2:
        words.append(rng.choice(NEGATIONS))
        score = -score
    draw = rng.random()
    if draw < 0.2:
        words.append(rng.choice(STRONGER))
        score *= 2.0
    elif draw < 0.4:
        words.append(rng.choice(WEAKER))
        score *= 0.5
    return [*words, adjective], score


def generate_splits(num_train: int, num_validation: int, seed: int = 0) -> dict[str, dict[str, list]]:
    """Generates disjoint splits with as many positive as negative sentences (give or take one).

    Args:
        num_train: sentences in `train`.
        num_validation: sentences in `validation`.
        seed: the same seed gives the same splits, on every rank.

    Returns:
        `{"train": {"sentence": [...], "label": [...]}, "validation": {...}}`

    Raises:
        ValueError: a split would be empty, or more sentences are asked for than can be drawn without repetition.
    """
    total = num_train + num_validation
    if num_train < 1 or num_validation < 1 or total > MAX_SENTENCES:
        raise ValueError(
            f"num_train={num_train} and num_validation={num_validation} must be at least 1 each and at most "
            f"{MAX_SENTENCES} together."
        )
    rng = random.Random(seed)
    seen: set[str] = set()
    splits: dict[str, dict[str, list]] = {}
    for name, size in (("train", num_train), ("validation", num_validation)):
        sentences: list[str] = []
        labels: list[int] = []
        while len(sentences) < size:
            sentence, label = generate_sentence(rng)
            if sentence in seen or label != len(sentences) % 2:
                continue
            seen.add(sentence)
            sentences.append(sentence)
            labels.append(label)
        order = rng.sample(range(size), size)
        splits[name] = {"sentence": [sentences[i] for i in order], "label": [labels[i] for i in order]}
    return splits


def vocabulary() -> list[str]:
    """Every word the generator can draw, sorted."""
    groups = (
        POSITIVE, NEGATIVE, SUBJECTS, VERBS, NEGATIONS, STRONGER, WEAKER, OPENERS, SPEAKERS, REPORTS, JOINS,
        ("the", "it", "is", "yet"),
    )  # fmt: skip
    return sorted(set(chain.from_iterable(phrase.split() for phrase in chain.from_iterable(groups))))


def build_tokenizer(model_max_length: int = 128, more_words: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Builds a word-level tokenizer for the generated sentences, and other words, with BERT's special tokens."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    ids = {word: i for i, word in enumerate([*special, *vocabulary(), *more_words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=model_max_length,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def main(arguments: list[str] | None = None) -> None:
    """Write the splits as CSV files with the columns `sentence` and `label`, which says negative or positive."""
    parser = argparse.ArgumentParser(description="Write generated sentences as train.csv and validation.csv.")
    parser.add_argument("--train", type=int, default=2000, help="Number of training sentences.")
    parser.add_argument("--validation", type=int, default=200, help="Number of validation sentences.")
    parser.add_argument("--folder", type=Path, default=Path(), help="Where to write.")
    parsed = parser.parse_args(arguments)
    for name, split in generate_splits(parsed.train, parsed.validation).items():
        with (parsed.folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(split)
            names = ("negative", "positive")
            rows.writerows((text, names[label]) for text, label in zip(split["sentence"], split["label"], strict=True))


if __name__ == "__main__":
    main()
