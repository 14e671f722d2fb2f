#!/usr/bin/env python
"""Whole trainings: pipelines that freeze, shrink, multiply and cache, beside those that do not.

    OMP_NUM_THREADS=1 accelerate launch --config_file accelerate_configs/cpu_2.yaml benchmarks/end_to_end.py \
        --task sst2 --model FOLDER --data FOLDER --seeds 1 2 3 --output results.json

All variants run one after the other in the same processes, with the same data, seed, epochs and trainer; then come the
next seed and the next alpha:

    a    transformers.Trainer under DDP
    b    K stages to the end                                       M settled on the first steps; once for each K of
                                                                   `--static_stages`
    c    layers freeze                                             elastic=False, no cache
    d    layers freeze, the others are divided anew among K
         stages, and what frozen layers give is kept               elastic=False
    e    layers freeze, K shrinks, freed processes become
         replicas                                                  no cache
    f    all of it
    g    layers freeze, and what they give is kept                 K = 1 from the start: what `hf-pipetransformer plan`
                                                                   advises for a model that fits one device

What is compared is the time of the epochs (without evaluation), the metric at the end, and the efficiency: the
speed-up over (a), divided by what the counted FLOPs of the training would allow (an active layer 3, a frozen one 1, a
cached one 0 times its forward; the head always 3). A speed-up over (b) is one over the fastest (b) of the same seed.

"wall_seconds", shown beside it, are those of the whole `train()`: the epochs and what comes before and after them,
that is finding the layers, timing them, the probe of the cache and cutting the model, then putting it together again.
They hold neither loading model and data nor the evaluation at the end.

Every result is written as soon as it is there. What `--output` has already, from a run with the same task, model,
data, options and sources of the library, is not run again.

With `--from_config` weights are random, in the shape of the model's configuration: then only times say something. On
one GPU, where there is no pipeline:

    accelerate launch --config_file accelerate_configs/gpu_1.yaml benchmarks/end_to_end.py --task sst2 --model FOLDER \
        --data FOLDER --from_config --bf16 --variants a g --output results.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import statistics
import tempfile
import time
from datetime import datetime, timezone
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from end_to_end_tasks import Task, digits, squad, sst2
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging as transformers_logging

import hf_pipetransformer
from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.planning.costs import step_flops
from hf_pipetransformer.run.events_file import FILE_NAME as EVENTS_FILE

VARIANTS: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {},
    "c": {"elastic": False, "activation_cache": "off"},
    "d": {"elastic": False},
    "e": {"activation_cache": "off"},
    "f": {},
    "g": {"pipeline_parallel_size": 1},
}
DDP, STATIC, ALL = "a", "b", "f"
TABLE_WIDTH = 150  # where the output is no terminal


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--task", choices=["sst2", "squad", "digits"], required=True)
    parser.add_argument("--model", help="folder or name of a pretrained encoder; digits need none")
    parser.add_argument("--from_config", action="store_true", help="random weights; the tokenizer is the model's own")
    parser.add_argument("--bf16", action="store_true", help="mixed precision, whatever accelerate's file says")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and validation.jsonl; digits need none")
    parser.add_argument("--samples", type=int, default=2048, help="of the training file, chosen at random")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--alpha", type=Fraction, default=Fraction(1, 3), help="such as 1/3")
    parser.add_argument("--alphas", nargs="*", type=Fraction, default=[], help="more of them, for variant f alone")
    parser.add_argument(
        "--freeze_schedule",
        type=json.loads,
        help='in place of alpha, such as \'{"5": 2, "7": 4}\': so many layers after so many epochs',
    )
    parser.add_argument(
        "--arguments",
        type=json.loads,
        default={},
        help="more training arguments, for all variants, such as '{\"learning_rate\": 2e-4}'",
    )
    parser.add_argument("--stages", type=int, default=0, help="K at the start; 0: one for each process")
    parser.add_argument(
        "--static_stages", type=int, nargs="+", help="numbers K for variant b; default: --stages alone"
    )
    parser.add_argument("--batch", type=int, default=32, help="rows of the global batch")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the results")
    options = parser.parse_args()
    if options.task != "digits" and not (options.model and options.data):
        parser.error(f"--task {options.task} needs --model and --data")
    if options.task == "digits" and options.from_config:
        parser.error("--from_config is for models that are given; those of --task digits have random weights")
    if options.freeze_schedule and options.alphas:
        parser.error("--alphas has no meaning with --freeze_schedule")
    return options


class Meter(TrainerCallback):
    """Seconds of each epoch's training, and the FLOPs of a row over all steps."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.seconds: list[float] = []
        self.flops = self.flops_unfrozen = 0.0
        self._began = 0.0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        pipeline = getattr(self.trainer, "pipeline", None)
        if pipeline is not None:
            plan = pipeline.current_plan
            self.flops += sum(step_flops(plan.unit_costs, plan.num_frozen_layers, plan.num_cached_layers))
            self.flops_unfrozen += sum(step_flops(plan.unit_costs, 0))

    @property
    def allowed(self) -> float:
        """Speed-up over a training without freezing, if time were FLOPs."""
        return self.flops_unfrozen / self.flops if self.flops else 1.0


def run(
    variant: str, seed: int, alpha: Fraction, stages: int, options: argparse.Namespace, task: Task
) -> dict[str, Any]:
    """Train once, with K = `stages` at the start. Collective over all processes."""
    world = PartialState().num_processes
    set_seed(seed)
    model = task.build_model()
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": options.batch // world,
            "per_device_eval_batch_size": 64,
            "num_train_epochs": options.epochs,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "logging_strategy": "epoch",
            "seed": seed,
            "bf16": options.bf16,
            **task.options,
            **options.arguments,
        }
        trainer_class: type[Trainer] = Trainer
        arguments: TrainingArguments
        if variant == DDP:
            arguments = TrainingArguments(**common, use_cpu=not torch.accelerator.is_available())
        else:
            trainer_class = PipeTransformerTrainer
            arguments = PipeTransformerTrainingArguments(
                **{
                    **common,
                    "pipeline_parallel_size": stages,
                    **freezing(variant, alpha, options),
                    **VARIANTS[variant],
                }
            )
        if task.compute_loss is not None:
            trainer_class = type(trainer_class.__name__, (trainer_class,), {"compute_loss": task.compute_loss})
        meter = Meter()
        trainer = trainer_class(
            model=model,
            args=arguments,
            train_dataset=task.train,
            eval_dataset=task.validation,
            data_collator=task.collate,
            compute_metrics=task.compute_metrics,
            callbacks=[meter],
        )
        meter.trainer = trainer
        began = time.perf_counter()
        trainer.train()
        wall_seconds = time.perf_counter() - began
        history = trainer.state.log_history
        events = Path(folder, EVENTS_FILE)
        scores = trainer.evaluate()
        return {
            "variant": variant,
            "seed": seed,
            "alpha": str(alpha),
            "stages": stages,
            "seconds": sum(meter.seconds),
            "epoch_seconds": meter.seconds,
            "wall_seconds": wall_seconds,
            "metric": scores[f"eval_{task.metric}"],
            "scores": scores,
            "allowed": meter.allowed,
            "loss": [entry["loss"] for entry in history if "loss" in entry],
            "changes": [entry for entry in history if "transform_seconds" in entry],
            "events": [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else [],
            "cache": [entry for entry in history if "cache_hit_rate" in entry],
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }


def freezing(variant: str, alpha: Fraction, options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of a pipeline's training."""
    if variant == STATIC:
        return {}
    if options.freeze_schedule:
        return {"freeze_policy": "schedule", "freeze_schedule": options.freeze_schedule}
    return {"freeze_policy": "alpha", "freeze_alpha": float(alpha)}


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    PipeTransformerTrainingArguments("unused")  # sets up the processes
    state = PartialState()
    common = facts(options, state.num_processes)  # before the first run: sources may change during one
    results: list[dict[str, Any]] = []
    if options.output.exists():
        before = json.loads(options.output.read_text())
        results = before["results"]
        other = {k: v for k, v in common.items() if before.get(k) != v}
        if other:
            raise ValueError(
                f"{options.output} has results of another run, which differs in {other}: give another file."
            )
    state.wait_for_everyone()  # all have read it
    done = {(r["variant"], r["seed"], r["alpha"], r["stages"]) for r in results}
    for variant, seed, alpha, stages in runs_of(options, state.num_processes):
        if (variant, seed, str(alpha), stages) in done:
            continue
        done.add((variant, seed, str(alpha), stages))
        results.append(run(variant, seed, alpha, stages, options, make_task(options, seed)))
        if state.is_main_process:
            write(options.output, common, results)
            print({k: results[-1][k] for k in ("variant", "stages", "seed", "alpha", "seconds", "metric")}, flush=True)
    if state.is_main_process:
        console = Console(width=max(TABLE_WIDTH, Console().width))
        console.print(summary(results, options, state.num_processes))
    if dist.is_initialized():
        dist.destroy_process_group()


def runs_of(options: argparse.Namespace, processes: int) -> list[tuple[str, int, Fraction, int]]:
    """What is asked for, in turn: variant, seed, alpha, and K at the start."""
    k = options.stages or processes
    wrong = [n for n in options.static_stages or [] if n < 2 or processes % n]
    if wrong:
        raise ValueError(f"--static_stages has {wrong}, but {processes} processes need divisors of theirs above 1.")
    stages_of: dict[str, list[int]] = {DDP: [1], STATIC: options.static_stages or [k], "g": [1]}
    alpha_of = {DDP: Fraction(0), STATIC: Fraction(0)}
    wanted = [
        (variant, seed, alpha_of.get(variant, options.alpha), stages)
        for seed in options.seeds
        for variant in options.variants
        for stages in stages_of.get(variant, [k])
    ]
    return wanted + [(ALL, seed, alpha, k) for seed in options.seeds for alpha in options.alphas]


def make_task(options: argparse.Namespace, seed: int) -> Task:
    if options.task == "digits":
        return digits(seed)
    make = {"sst2": sst2, "squad": squad}[options.task]
    return make(options.model, options.data, options.samples, seed, options.from_config)


def write(output: Path, common: dict[str, Any], results: list[dict[str, Any]]) -> None:
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    output.write_text(json.dumps({"date": date, **common, "results": results}, indent=2))


def facts(options: argparse.Namespace, processes: int) -> dict[str, Any]:
    """What all results of a file have in common."""
    varied = ("model", "data", "output", "seeds", "variants", "static_stages", "alpha", "alphas")
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "accelerate")},
        "library": checksum_of(Path(hf_pipetransformer.__file__).parent),
        "processes": processes,
        # names alone: where they lie is nobody's business
        "model": Path(options.model).name if options.model else None,
        "data": options.data.name if options.data else None,
        "options": {k: str(v) for k, v in vars(options).items() if k not in varied},
    }


def checksum_of(folder: Path) -> str:
    """Of a package's sources: results of two versions do not belong together, nor in one mean."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def summary(results: list[dict[str, Any]], options: argparse.Namespace, processes: int) -> Table:
    """A line for each variant, K and alpha: means over the seeds, of times each against (a) and (b) of its own seed.

    Of several (b) the fastest counts.
    """
    table = Table(title=f"{options.task}, {options.epochs} epochs, {processes} processes")
    columns = ("variant", "K", "alpha", "seeds", "training s", "(a) / it", "(b) / it", "FLOPs allow", "efficiency")
    for column in (*columns, "wall s", "(a)'s wall / it", "metric"):
        table.add_column(column, justify="left" if column == "variant" else "right")

    def speed_ups(group: list[dict[str, Any]], over: str, kind: str) -> list[float]:
        base: dict[int, float] = {}
        for r in results:
            if r["variant"] == over:
                base[r["seed"]] = min(r[kind], base.get(r["seed"], r[kind]))
        return [base[r["seed"]] / r[kind] for r in group if r["seed"] in base]

    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["variant"], result["stages"], result["alpha"]), []).append(result)
    for (variant, stages, alpha), group in groups.items():
        over_ddp = speed_ups(group, DDP, "seconds")
        allowed = statistics.fmean(r["allowed"] for r in group)
        table.add_row(
            variant,
            str(stages),
            "" if variant in (DDP, STATIC) or options.freeze_schedule else alpha,
            str(len(group)),
            spread([r["seconds"] for r in group], 1),
            spread(over_ddp, 2),
            spread(speed_ups(group, STATIC, "seconds"), 2),
            f"{allowed:.2f}",
            f"{statistics.fmean(over_ddp) / allowed:.3f}" if over_ddp else "",
            spread([r["wall_seconds"] for r in group], 1),
            spread(speed_ups(group, DDP, "wall_seconds"), 2),
            spread([r["metric"] for r in group], 4),
        )
    return table


def spread(values: list[float], digits: int) -> str:
    """Mean and standard deviation."""
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


if __name__ == "__main__":
    main()
