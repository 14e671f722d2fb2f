#!/usr/bin/env python
"""Runs a recipe several times, with other learning rates, seeds or other arguments, over one store of frozen layers.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml recipes/sweep.py run_glue \
        --try learning_rate=1e-4,2e-4,4e-4 --try seed=1,2 --metric eval_accuracy --output_dir outputs/sweep \
        --task_name sst2 --model_name_or_path ... --do_train --do_eval \
        --freeze_policy schedule --freeze_schedule '{"0": 4}'

Layers that are frozen from the start have the same weights in each trial. The first trial stores their outputs, and
the others read these from their first step. Without a freeze policy it is a plain sweep. Arguments that this script
does not know go to the recipe; the metrics of each trial are added to `output_dir/trials.jsonl`.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.distributed.elastic.multiprocessing.errors import record

from hf_pipetransformer.parts.prefix_cache.cache.file_store import FileStore
from hf_pipetransformer.parts.prefix_cache.cache.sharing import STORE

FEW_SAMPLES = 16
"""So many are evaluated before the first trial, to see which metrics there are."""
TRAIN_METRICS = (
    "train_loss",
    "train_runtime",
    "train_samples",
    "train_samples_per_second",
    "train_steps_per_second",
    "total_flos",
    "epoch",
)
"""What each recipe gives of a training."""


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's arguments, and the recipe's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", help="name of the recipe, such as run_glue")
    parser.add_argument(
        "--try",
        dest="values",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="a field and its values; commas inside brackets, braces and quotes belong to a value",
    )
    parser.add_argument("--metric", default="eval_loss", help="by which the best trial is chosen")
    parser.add_argument("--smaller_is_better", action="store_true", help="as for a loss, where it is the default")
    parser.add_argument("--output_dir", type=Path, required=True, help="of the sweep; each trial has a folder in it")
    parser.add_argument(
        "--activation_cache_dir", type=Path, help="the cache in it is kept; by default output_dir, and removed"
    )
    return parser.parse_known_args(arguments)


def trials_of(values: list[str]) -> list[dict[str, str]]:
    """Return all combinations of the values.

    Raises:
        ValueError: one of the arguments is not `name=value,...`, or two have the same name.
    """
    names, choices = [], []
    for text in values:
        name, _, several = text.partition("=")
        if not name or not several:
            raise ValueError(f"--try {text!r} is invalid. Write a field and its values, such as seed=1,2,3.")
        if name in names:
            raise ValueError(
                f"--try {name}=... is given twice. Write all values of a field into one: --try {name}=1,2."
            )
        names.append(name)
        choices.append(_split(several))
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*choices)]


def _split(values: str) -> list[str]:
    """Split at the commas outside of brackets, braces and double quotes: a value may be JSON."""
    found, depth, is_quoted = [""], 0, False
    for character in values:
        is_quoted ^= character == '"'
        if not is_quoted:
            depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0 and not is_quoted:
            found.append("")
        else:
            found[-1] += character
    return found


def probe_metric(recipe: Any, arguments: list[str], options: argparse.Namespace) -> None:
    """Refuse a metric that the recipe does not give, before the first trial. Every rank must call this.

    Only an evaluation shows the recipe's metrics, so the model is evaluated on a few samples before it has been
    trained. A recipe that always trains does one step first.

    Raises:
        ValueError: the recipe gives no such metric.
    """
    if options.metric in TRAIN_METRICS or "--lazy_loading" in arguments:  # no process could hold all of that model
        return
    folder = options.output_dir / "_untrained"
    few = {"max_eval_samples": FEW_SAMPLES, "max_train_samples": FEW_SAMPLES, "max_steps": 1, "do_train": False}
    given = recipe.main([*arguments, *_as_arguments({**few, "output_dir": folder})])
    if os.environ.get("LOCAL_RANK", "0") == "0":
        shutil.rmtree(folder, ignore_errors=True)
    check_metric(options.metric, [*TRAIN_METRICS, *given])


def check_metric(metric: str, given: Collection[str]) -> None:
    """
    Raises:
        ValueError: the metric is not among those given.
    """
    if metric not in given:
        raise ValueError(
            f"--metric {metric!r} is not among the metrics: {', '.join(sorted(given))}. Pass one of"
            " these, and --do_eval for those that begin with eval_."
        )


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Run all trials. Every rank must call this.

    Returns:
        The values, the seconds and the metrics of each trial.

    Raises:
        ValueError: there is no such recipe, `--try` is invalid, or the recipe gives no such metric.
    """
    options, rest = parse(sys.argv[1:] if arguments is None else arguments)
    trials, known = trials_of(options.values), sorted(path.stem for path in Path(__file__).parent.glob("run_*.py"))
    if options.recipe not in known:
        raise ValueError(f"{options.recipe!r} is not a recipe. Pass one of {', '.join(known)}.")
    recipe = importlib.import_module(options.recipe)
    is_first = os.environ.get("RANK", "0") == "0"
    store = options.activation_cache_dir or options.output_dir
    probe_metric(recipe, [*rest, *_as_arguments(trials[0])], options)
    kept = set(options.output_dir.glob(f"{STORE}*"))  # of the user
    done = []
    try:
        for number, trial in enumerate(trials):
            fields = {**trial, "output_dir": options.output_dir / f"trial-{number}", "activation_cache_dir": store}
            began = time.perf_counter()
            metrics = recipe.main([*rest, *_as_arguments(fields)])
            check_metric(options.metric, metrics)
            done.append({**trial, "seconds": time.perf_counter() - began, **metrics})
            if is_first:
                with (options.output_dir / "trials.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[-1]) + "\n")
    finally:  # also after a trial that fails
        if options.activation_cache_dir is None and os.environ.get("LOCAL_RANK", "0") == "0":
            for folder in set(options.output_dir.glob(f"{STORE}*")) - kept:  # one for each node
                FileStore(folder).remove()
    if is_first:
        show(done, options.metric, options.smaller_is_better or options.metric.endswith("loss"))
    return done


def _as_arguments(fields: Mapping[str, Any]) -> list[str]:
    return [part for name, value in fields.items() for part in (f"--{name}", str(value))]


def show(done: list[dict[str, Any]], metric: str, smaller_is_better: bool) -> None:
    """Print the trials, the best one first."""
    done = sorted(done, key=lambda trial: trial[metric], reverse=not smaller_is_better)
    shown = [name for name in done[0] if not name.startswith(("eval_", "train_"))]
    table = Table(*shown, metric, title="Trials", title_justify="left")
    for trial in done:
        numbers = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in map(trial.get, shown)]
        table.add_row(*numbers, f"{trial[metric]:.4f}")
    Console().print(table)


if __name__ == "__main__":
    record(main)()  # a launcher then shows the error itself
