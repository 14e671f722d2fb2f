"""A new head on a pretrained model, and a model whose lower half is frozen: the stock Trainer beside ours.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.frozen_front_real sst2 --model "$MODEL" --data data/sst2
    OMP_NUM_THREADS=1 python -m benchmarks.studies.frozen_front_real digits

sst2     a new head on a sentence encoder (MiniLM, 6 layers); batches are padded to their longest sentence
digits   a ViT (6 layers) trained for 12 epochs, then with its lower half frozen

Rates of dropout are 0 in what is frozen, so that both train the same thing. One process, fp32.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, set_seed

from benchmarks import harness
from benchmarks.harness import Figures, Ratio, StepClock
from benchmarks.studies.tasks import Task, digits, sst2

Weights = dict[str, torch.Tensor]


def head_on_encoder(options: argparse.Namespace) -> nn.Module:
    set_seed(0)
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.1}
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2, **rates)
    model.base_model.requires_grad_(False)
    model.bert.pooler.requires_grad_(True)
    return model


def lower_half_frozen(task: Task, weights: Weights) -> nn.Module:
    model: Any = task.build_model()
    model.load_state_dict(weights)
    for module in (model.vit.embeddings, *model.vit.layers[: model.config.num_hidden_layers // 2]):
        module.requires_grad_(False)
    return model


def fit(kind: str, model: nn.Module, task: Task, trained: dict[str, Weights], **arguments: Any) -> Figures:
    """Train and evaluate once; the final weights are added to `trained`."""
    set_seed(1)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        keywords = {"eval_dataset": task.validation, "data_collator": task.collate}
        trainer = harness.make_trainer(
            model,
            task.train,
            folder,
            [clock],
            is_ours=kind == "ours",
            keywords={**keywords, "compute_metrics": task.compute_metrics},
            per_device_train_batch_size=32,
            **arguments,
        )
        trainer.train()
        accuracy = trainer.evaluate()[f"eval_{task.metric}"]
    first, *later = [epoch["cpu_seconds"] for epoch in clock.epochs]
    figures = {"first_cpu_s": first, "later_cpu_s": sum(later), "all_cpu_s": first + sum(later), "accuracy": accuracy}
    trained[kind] = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    if "stock" in trained and kind == "ours":
        pairs = ((weight, trained["stock"][name]) for name, weight in trained["ours"].items())
        figures["difference"] = max(float((one - other).abs().max()) for one, other in pairs)
    return figures


def main() -> None:
    """Train both ways and print the table."""
    parser = harness.parser_of(__doc__, turns=1)
    parser.add_argument("task", choices=["sst2", "digits"])
    parser.add_argument("--model", help="a folder with a BERT's weights and tokenizer")
    parser.add_argument("--data", type=Path, default=Path("data/sst2"))
    parser.add_argument("--samples", type=int, default=1500)
    options = harness.start(parser)
    trained: dict[str, Weights] = {}
    if options.task == "sst2":
        task = sst2(options.model, options.data, options.samples, seed=0)
        arguments: dict[str, Any] = {"num_train_epochs": 5, "learning_rate": 2e-3}
        build = partial(head_on_encoder, options)
    else:
        task = digits(0)
        arguments = {"num_train_epochs": 6, "learning_rate": 1e-3}
        fit("pretrained", task.build_model(), task, trained, num_train_epochs=12, learning_rate=1e-3)
        build = partial(lower_half_frozen, task, trained["pretrained"])
    cases = {kind: lambda kind=kind: fit(kind, build(), task, trained, **arguments) for kind in ("stock", "ours")}
    ratios = [Ratio("first, to stock", "first_cpu_s", "stock")]
    ratios += [Ratio(f"{what}, stock / it", f"{what}_cpu_s", "stock", is_speed_up=True) for what in ("later", "all")]
    harness.report(options, harness.take_turns(cases, options), ratios)


if __name__ == "__main__":
    main()
