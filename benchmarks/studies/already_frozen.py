"""Models with a frozen part in their default configurations: the stock Trainer beside ours.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.already_frozen --model "$MODEL" --data data/sst2 --seeds 0 1 2
    OMP_NUM_THREADS=1 python -m benchmarks.studies.already_frozen bert-base vit whisper-tiny

minilm         a new pooler and head on MiniLM-L6 with its own weights; SST-2, batches padded to their longest sentence
bert-base      a new head on a BERT of BERT-base's size, random weights and data
vit            a new head on a ViT-base, random weights and images of 224 x 224
whisper-tiny   `freeze_encoder()` on a Whisper-tiny, random weights and 30 s of sound

The configurations are unchanged: MiniLM and BERT have dropout of 0.1, ViT and Whisper have none. Four ways:

stock                 `Trainer`, which runs frozen modules in training mode
ours                  the two class names changed
stock, eval mode      `Trainer`, with the frozen modules kept in evaluation mode (by an empty `train` method)
ours, eval mode       `eval_frozen_modules=True`

One process, fp32. "difference" is the largest one of a final weight from the stock Trainer's in the same mode.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
    set_seed,
)

from benchmarks import harness
from benchmarks.harness import Figures, Ratio, StepClock
from benchmarks.studies.tasks import sst2

WAYS = ("stock", "ours", "stock, eval mode", "ours, eval mode")
Weights = dict[str, torch.Tensor]


def random_rows(count: int, **columns: Callable[[torch.Generator], torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{name: make(draw) for name, make in columns.items()} for _ in range(count)]


def words(length: int, vocabulary: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda draw: torch.randint(vocabulary, (length,), generator=draw)


def label(draw: torch.Generator) -> torch.Tensor:
    return torch.randint(2, (), generator=draw)


class Case:
    """A model with a frozen part, and its data.

    Args:
        build: returns the model and its frozen modules.
        keywords: arguments of the trainer: data, and what comes with them.
        **options: training arguments.
    """

    def __init__(
        self, build: Callable[[], tuple[Any, list[nn.Module]]], keywords: dict[str, Any], **options: Any
    ) -> None:
        self.build, self.keywords, self.options = build, keywords, options


def minilm(options: argparse.Namespace) -> Case:
    task = sst2(options.model, options.data, options.samples, seed=0)

    def build() -> tuple[Any, list[nn.Module]]:
        model: Any = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)
        return model, [model.bert.embeddings, model.bert.encoder]  # its pooler has never been trained

    keywords = {"train_dataset": task.train, "eval_dataset": task.validation, "data_collator": task.collate}
    arguments = {"per_device_train_batch_size": 32, "learning_rate": 2e-3}
    return Case(build, {**keywords, "compute_metrics": task.compute_metrics}, **arguments)


def bert_base(_: argparse.Namespace) -> Case:
    def build() -> tuple[Any, list[nn.Module]]:
        model = BertForSequenceClassification(BertConfig())
        return model, [model.bert]

    return Case(build, {"train_dataset": random_rows(64, input_ids=words(32, 30522), labels=label)})


def vit(_: argparse.Namespace) -> Case:
    def build() -> tuple[Any, list[nn.Module]]:
        model = ViTForImageClassification(ViTConfig())
        return model, [model.vit]

    rows = random_rows(24, pixel_values=lambda draw: torch.randn(3, 224, 224, generator=draw), labels=label)
    return Case(build, {"train_dataset": rows})


def whisper_tiny(_: argparse.Namespace) -> Case:
    def build() -> tuple[Any, list[nn.Module]]:
        heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
        model = WhisperForConditionalGeneration(WhisperConfig(d_model=384, **heads))
        return model, [model.model.encoder]

    rows = random_rows(24, input_features=lambda draw: torch.randn(80, 3000, generator=draw), labels=words(16, 50000))
    return Case(build, {"train_dataset": rows})


KINDS = {"minilm": minilm, "bert-base": bert_base, "vit": vit, "whisper-tiny": whisper_tiny}


def fit(case: Case, way: str, seed: int, epochs: int, trained: dict[str, Weights]) -> Figures:
    """Train, and evaluate where there is a metric; the final weights are added to `trained`."""
    set_seed(seed)
    model, frozen = case.build()
    for module in frozen:
        module.requires_grad_(False)
    is_ours, in_eval_mode = way.startswith("ours"), way.endswith("eval mode")
    options = {"per_device_train_batch_size": 8, "num_train_epochs": epochs, "seed": seed, **case.options}
    if in_eval_mode and is_ours:
        options["eval_frozen_modules"] = True
    for module in frozen if in_eval_mode and not is_ours else ():
        module.eval()
        vars(module)["train"] = lambda mode=True: None  # each step calls model.train()
    clock, keywords = StepClock(), dict(case.keywords)
    with tempfile.TemporaryDirectory() as folder:
        data = keywords.pop("train_dataset")
        trainer = harness.make_trainer(model, data, folder, [clock], is_ours, keywords=keywords, **options)
        trainer.train()
        accuracy = {"accuracy": trainer.evaluate()["eval_accuracy"]} if "eval_dataset" in keywords else {}
    first, *later = [epoch["cpu_seconds"] for epoch in clock.epochs]
    trained[way] = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    stock = trained[way.replace("ours", "stock")] if way.replace("ours", "stock") in trained else trained[way]
    difference = max(float((weight - stock[name]).abs().max()) for name, weight in trained[way].items())
    seconds = {"all_cpu_s": first + sum(later), "first_cpu_s": first, "later_cpu_s": sum(later) / max(len(later), 1)}
    return {**seconds, "difference": difference, **accuracy}


def main() -> None:
    """Train all ways and print the table."""
    parser = harness.parser_of(__doc__, turns=1)
    parser.add_argument("kinds", nargs="*", metavar="kinds", help=f"some of {list(KINDS)}; default: minilm")
    parser.add_argument("--model", help="a folder with MiniLM's weights and tokenizer")
    parser.add_argument("--data", type=Path, default=Path("data/sst2"))
    parser.add_argument("--samples", type=int, default=1500, help="training samples of minilm")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = harness.start(parser)
    cases: dict[str, Callable[[], Figures]] = {}
    for kind in options.kinds or ["minilm"]:
        case = KINDS[kind](options)
        for seed in options.seeds:
            trained: dict[str, Weights] = {}
            for way in WAYS:
                cases[f"{kind}, seed {seed}: {way}"] = partial(fit, case, way, seed, options.epochs, trained)

    def stock_of(name: str) -> str:
        return name.replace(": ours", ": stock")

    ratios = [Ratio("first, to stock", "first_cpu_s", stock_of)]
    ratios += [Ratio(f"{what}, stock / it", f"{what}_cpu_s", stock_of, is_speed_up=True) for what in ("later", "all")]
    harness.report(options, harness.take_turns(cases, options), ratios)


if __name__ == "__main__":
    main()
