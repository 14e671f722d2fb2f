"""Whole trainings: pipelines that freeze, shrink, multiply and cache, beside plain ones.

    python -m benchmarks.studies.end_to_end --task sst2 --model FOLDER --data FOLDER --processes 2 --out results.json

    a    transformers.Trainer under DDP
    b    K stages to the end, all layers trained
    c    layers freeze                                             elastic=False, no cache
    d    layers freeze, and their outputs are cached               elastic=False
    e    layers freeze, K shrinks, freed processes become
         replicas                                                  no cache
    f    all of it
    g    layers freeze, and their outputs are cached               K = 1 from the start

All variants have the same data, seed and epochs. A turn is a seed: `--seed` and the next ones. Compared is the time
of the epochs, without evaluation; "efficiency" is the speed-up over (a), divided by the speed-up in counted FLOPs (an
active layer 3, a frozen one 1, a cached one 0 times its forward; the head always 3).
"train_s" are the seconds of the whole `train()`.

With `--from_config` weights are random, in the shape of the model's configuration: then only times say something. On
one GPU: `--processes 1 --variants a g --from_config --bf16`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, set_seed

from benchmarks import harness
from benchmarks.harness import Figures, Ratio, StepClock
from benchmarks.studies.tasks import Task, digits, squad, sst2
from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.planning.costs import step_flops

VARIANTS: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"freeze_policy": "none"},
    "c": {"elastic": False, "activation_cache": "off"},
    "d": {"elastic": False},
    "e": {"activation_cache": "off"},
    "f": {},
    "g": {"pipeline_parallel_size": 1},
}


class Flops(TrainerCallback):
    """FLOPs of a sample over all steps, with and without freezing."""

    trainer: Any = None

    def __init__(self) -> None:
        self.done = self.unfrozen = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        pipeline = getattr(self.trainer, "pipeline", None)
        if pipeline is not None:
            layout, costs = pipeline.current_layout, self.trainer._cut_model.unit_costs
            self.done += sum(step_flops(costs, layout.num_frozen_layers, layout.num_cached_layers))
            self.unfrozen += sum(step_flops(costs, 0))


def run(variant: str, options: argparse.Namespace, seeds: itertools.count[int]) -> Figures:
    """Train once. Collective over all processes."""
    seed = next(seeds)
    task = task_of(options, seed)
    set_seed(seed)
    clock, flops = StepClock(), Flops()
    freezing: dict[str, Any] = {"freeze_policy": "alpha", "freeze_alpha": float(options.alpha)}
    if options.freeze_schedule:
        freezing = {"freeze_policy": "schedule", "freeze_schedule": options.freeze_schedule}
    own = {"pipeline_parallel_size": options.stages or harness.num_processes(), **freezing, **VARIANTS[variant]}
    base: type[Trainer] = Trainer if variant == "a" else PipeTransformerTrainer
    overrides = {} if task.compute_loss is None else {"compute_loss": task.compute_loss}
    with harness.shared_folder() as folder:
        trainer = harness.make_trainer(
            task.build_model(),
            task.train,
            folder,
            [clock, flops],
            is_ours=variant != "a",
            trainer_class=type(base.__name__, (base,), overrides),
            keywords={
                "eval_dataset": task.validation,
                "data_collator": task.collate,
                "compute_metrics": task.compute_metrics,
            },
            per_device_train_batch_size=options.batch // harness.num_processes(),
            per_device_eval_batch_size=64,
            num_train_epochs=options.epochs,
            seed=seed,
            bf16=options.bf16,
            **{**task.options, **options.arguments, **({} if variant == "a" else own)},
        )
        flops.trainer = trainer
        began = time.perf_counter()
        trainer.train()
        train_s = time.perf_counter() - began
        metric = trainer.evaluate()[f"eval_{task.metric}"]
    allowed = flops.unfrozen / flops.done if flops.done else 1.0
    epochs_s = sum(epoch["seconds"] for epoch in clock.epochs)
    return {"epochs_s": epochs_s, "train_s": train_s, "flops_allow": allowed, task.metric: metric}


def task_of(options: argparse.Namespace, seed: int) -> Task:
    if options.task == "digits":
        return digits(seed)
    make = {"sst2": sst2, "squad": squad}[options.task]
    return make(options.model, options.data, options.samples, seed, options.from_config)


def main() -> None:
    """Train all variants and print the table. Every process must call this."""
    parser = harness.parser_of(__doc__, turns=1, processes=2)
    parser.add_argument("--task", choices=["sst2", "squad", "digits"], required=True)
    parser.add_argument("--model", help="folder or name of a pretrained encoder; digits need none")
    parser.add_argument("--from_config", action="store_true", help="random weights; the tokenizer is the model's own")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and validation.jsonl; digits need none")
    parser.add_argument("--samples", type=int, default=2048, help="of the training file, chosen at random")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seed", type=int, default=42, help="of the first turn")
    parser.add_argument("--alpha", type=Fraction, default=Fraction(1, 3), help="such as 1/3")
    parser.add_argument("--freeze_schedule", type=json.loads, help='in place of alpha, such as \'{"5": 2, "7": 4}\'')
    parser.add_argument("--arguments", type=json.loads, default={}, help="more training arguments, as JSON")
    parser.add_argument("--stages", type=int, default=0, help="K at the start; 0: one for each process")
    parser.add_argument("--batch", type=int, default=32, help="samples of the global batch")
    options = harness.start(parser)
    if options.task != "digits" and not (options.model and options.data):
        parser.error(f"--task {options.task} needs --model and --data")
    cases = {variant: partial(run, variant, options, itertools.count(options.seed)) for variant in options.variants}
    turns = harness.take_turns(cases, options)
    for turn in turns:
        for figures in turn.values():
            if "a" in turn:
                figures["efficiency"] = turn["a"]["epochs_s"] / figures["epochs_s"] / figures["flops_allow"]
    ratios = [Ratio(f"over ({base})", "epochs_s", base, is_speed_up=True) for base in ("a", "b")]
    harness.report(options, turns, ratios)


if __name__ == "__main__":
    main()
