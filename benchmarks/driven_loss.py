#!/usr/bin/env python
"""The cost of a loss that drives the pipeline, beside the same loss by parts and beside DDP.

    python benchmarks/driven_loss.py --processes 2 --out results.json

A BERT of MiniLM's size without dropout, K = 2, M = 4: by parts (GPipe, 1F1B), driven with one call of the model,
driven with two calls (R-Drop), and DDP.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from typing import Any

import torch.nn.functional as F

from hf_pipetransformer import PipeTransformerTrainer

import harness
from harness import Figures, RandomRows, Ratio, StepClock

BASE, ONCE, TWICE = "GPipe by parts", "driven, one call", "driven, two calls"
STEPS, WARM_UP = 12, 4


class Own(PipeTransformerTrainer):
    """A loss of the user's with one call of the model."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits, labels)


class Twice(PipeTransformerTrainer):
    """R-Drop: two calls."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        one, two = model(**inputs).logits, model(**inputs).logits
        loss = F.cross_entropy(one, labels) + F.cross_entropy(two, labels)
        return loss + F.kl_div(one.log_softmax(-1), two.softmax(-1), reduction="batchmean")


CASES: dict[str, tuple[type[PipeTransformerTrainer], dict[str, Any]]] = {
    BASE: (Own, {"pipeline_schedule": "gpipe", "loss_reduction": "mean"}),
    "1F1B by parts": (Own, {"loss_reduction": "mean"}),
    ONCE: (Own, {}),
    TWICE: (Twice, {}),
    "DDP": (Own, {"pipeline_parallel_size": 1}),
}


def step(trainer_class: type[PipeTransformerTrainer], case: dict[str, Any], options: argparse.Namespace) -> Figures:
    """Train for some steps. Collective over all processes."""
    config, clock = harness.load_config(options.model), StepClock()
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    with tempfile.TemporaryDirectory() as folder:
        harness.make_trainer(
            harness.make_model(options.model, config),
            RandomRows(options.rows * STEPS, options.tokens, config.vocab_size),
            folder,
            [clock],
            is_ours=True,
            trainer_class=trainer_class,
            per_device_train_batch_size=options.rows // harness.num_processes(),
            max_steps=STEPS,
            **{"pipeline_parallel_size": 2, "num_microbatches": 4, **case},
        ).train()
    return {"step_ms": clock.step_ms(WARM_UP)}


def main() -> None:
    """Time all cases and print the table. Every process must call this."""
    parser = harness.parser_of(__doc__, processes=2)
    harness.add_model_arguments(parser, tokens=64)
    options = harness.start(parser)
    turns = harness.take_turns({name: partial(step, *case, options) for name, case in CASES.items()}, options)
    per_call = Ratio("to two single calls", "step_ms", lambda name: ONCE if name == TWICE else None)
    harness.report(options, turns, [Ratio("to GPipe", "step_ms", BASE), per_call])


if __name__ == "__main__":
    main()
