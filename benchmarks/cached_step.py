#!/usr/bin/env python
"""How long a training step takes with frozen layers from the cache, beside plain `transformers.Trainer` under DDP.

    python benchmarks/cached_step.py --processes 2 --out results.json

For each f, in each turn: f layers computed, DDP, f layers cached, the other layers alone. A run with frozen layers has
four epochs and K = 1. The first one trains all layers, the second one fills the cache, the others read it:

    ddp        the median step of the second epoch, as the other runs have trained for two epochs as well
    uncached   of the epoch that fills the cache elsewhere, and of the next one
    cached     of the epoch that fills the cache, and of the later ones, which read it
    alone      DDP with a model that has only the trained layers, behind frozen embeddings: a step with free frozen
               layers. The cache and this library cost the rest of a cached step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

import harness
from harness import Figures, RandomRows, Ratio, StepClock

EPOCHS, DDP_EPOCHS = 4, 2
TARGETS = {"f=2 cached": ">= 1.9", "f=4 cached": ">= 3.6", "f=5 cached": ">= 7.0"}
"""Of MiniLM's 6 layers: DDP's step over the cached one, on two processes."""


def upper_layers(name: str | None, frozen: int) -> nn.Module:
    """A model with `frozen` layers fewer, and frozen embeddings."""
    config = copy.deepcopy(harness.load_config(name))
    config.num_hidden_layers -= frozen
    model = harness.make_model(name, config)
    model.base_model.embeddings.requires_grad_(False)
    return model


def epoch_ms(options: argparse.Namespace, frozen: int, cache: str, model: nn.Module | None = None) -> list[float]:
    """Median step of each epoch in ms, of a new Trainer; DDP for `frozen` = 0. Collective over all processes."""
    config, clock = harness.load_config(options.model), StepClock()
    count = EPOCHS if frozen else DDP_EPOCHS
    freezing: dict[str, Any] = {
        "freeze_policy": "schedule",
        "freeze_schedule": {1: frozen},
        "activation_cache": cache,
        "activation_cache_dtype": options.dtype,
    }
    with harness.shared_folder() as folder:
        harness.make_trainer(
            model if model is not None else harness.make_model(options.model, config),
            RandomRows(options.rows * options.steps, options.tokens, config.vocab_size),
            folder,
            [clock],
            is_ours=frozen > 0,
            per_device_train_batch_size=options.rows // harness.num_processes(),
            num_train_epochs=count,
            **(freezing if frozen else {}),
        ).train()
    epochs = [slice(k * options.steps, (k + 1) * options.steps) for k in range(count)]
    return [clock.step_ms(options.warmup, epoch) for epoch in epochs]


def frozen_case(options: argparse.Namespace, frozen: int, cache: str) -> Figures:
    _, filling, *reading = epoch_ms(options, frozen, cache)
    return {"step_ms": statistics.median(reading), "filling_ms": filling}


def ddp_case(options: argparse.Namespace, frozen: int = 0) -> Figures:
    model = upper_layers(options.model, frozen) if frozen else None
    return {"step_ms": epoch_ms(options, 0, "off", model)[-1]}


def main() -> None:
    """Time all cases and print the table. Every process must call this."""
    parser = harness.parser_of(__doc__, processes=2)
    harness.add_model_arguments(parser)
    parser.add_argument("--frozen", type=int, nargs="+", default=[2, 4, 5], help="numbers of frozen layers f")
    parser.add_argument("--dtype", default="auto", help="activation_cache_dtype")
    parser.add_argument("--steps", type=int, default=12, help="of each epoch")
    parser.add_argument("--warmup", type=int, default=3, help="first steps of each epoch that do not count")
    options = harness.start(parser)
    cases: dict[str, Callable[[], Figures]] = {}
    for f in options.frozen:
        cases[f"f={f} uncached"] = partial(frozen_case, options, f, "off")
        cases[f"f={f} ddp"] = partial(ddp_case, options)
        cases[f"f={f} cached"] = partial(frozen_case, options, f, "on")
        cases[f"f={f} alone"] = partial(ddp_case, options, f)

    def beside(case: str, only: str = "") -> Callable[[str], str | None]:
        return lambda name: name.rpartition(" ")[0] + f" {case}" if name.endswith(only) else None

    ratios = [
        Ratio("DDP / it", "step_ms", beside("ddp"), is_speed_up=True, targets=TARGETS),
        Ratio("to layers alone", "step_ms", beside("alone")),
        Ratio("filling to uncached", "filling_ms", beside("uncached", only=" cached")),
    ]
    harness.report(options, harness.take_turns(cases, options), ratios)


if __name__ == "__main__":
    main()
