#!/usr/bin/env python
"""How long a training step takes in a pipeline, beside plain `transformers.Trainer` under DDP.

    python benchmarks/pipeline_step.py --processes 2 --out results.json
    python benchmarks/pipeline_step.py --schedules 1f1b interleaved1f1b zbv --virtual_stages 2 3

Each run has a new model and a new Trainer. A step is the time from one `on_step_end` to the next: loading, forward,
backward, clipping and optimizer. The global batch is `--rows` x `--tokens` in every layout: on two processes,
`per_device_train_batch_size` is half of the rows; a pipeline of two stages gets all of them and cuts them into M
micro-batches. "cpu_ms" is the CPU time of a step, summed over the processes, which other programs change little.

`--profile` adds one turn that tells where a step's time goes on each process ("waiting": schedule and messages).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from rich.table import Table
from transformers import Trainer, TrainerCallback

from hf_pipetransformer.pipeline.gradients import StageGradients
from hf_pipetransformer.pipeline.schedule import PipelineScheduler
from hf_pipetransformer.planning.schedules import SCHEDULES

import harness
from harness import Figures, RandomRows, Ratio, StepClock

DDP = "Trainer, DDP"
TARGETS = {"K=1": "<= 1.03", "K=2 1f1b M=4": "<= 1.18"}
"""On two processes."""
PARTS = ("data", "forward", "backward", "waiting", "loss", "clipping", "optimizer")

Case = dict[str, Any]
"""Arguments of a pipeline; empty: the stock Trainer."""


def cases_of(options: argparse.Namespace) -> dict[str, Case]:
    """DDP first: the others are compared with it."""
    cases: dict[str, Case] = {DDP: {}}
    for k in options.stages:
        if k == 1:
            cases["K=1"] = {"pipeline_parallel_size": 1}
            continue
        for schedule in options.schedules:
            for v in options.virtual_stages if SCHEDULES[schedule].most_virtual_stages is None else [None]:
                for m in options.num_microbatches:
                    name = f"K={k} {schedule}{'' if v is None else f' V={v}'} M={m}"
                    cases[name] = {"pipeline_parallel_size": k, "pipeline_schedule": schedule, "num_microbatches": m}
                    cases[name]["virtual_pipeline_parallel_size"] = v
    return cases


class Stopwatch(TrainerCallback):
    """Sums the seconds spent in the parts of a step; time in an inner part does not count for the outer one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def switch(self, part: str | None) -> None:
        """Begin a part, or end the innermost one."""
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now
        if part is None:
            self._open.pop()
        else:
            self._open.append(part)

    @contextmanager
    def timing(self, owner: Any, attribute: str, part: str) -> Iterator[None]:
        """Inside, calls of `owner.attribute` count for `part`."""
        original = getattr(owner, attribute)

        @wraps(original)  # the Trainer reads the signature of a model's forward
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.switch(part)
            try:
                return original(*args, **kwargs)
            finally:
                self.switch(None)

        setattr(owner, attribute, timed)
        try:
            yield
        finally:
            setattr(owner, attribute, original)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.switch("optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.switch(None)

    def watch(self, trainer: Trainer) -> ExitStack:
        """Time each call of the model, each backward, and what lies between them."""
        trainer.add_callback(self)
        watched: tuple[tuple[Any, str, str], ...] = (
            (trainer, "get_batch_samples", "data"),
            (trainer, "training_step", "loss"),  # its remaining time: weighing, and the loss's all-reduce
            (type(trainer.model), "forward", "forward"),
            (torch.autograd, "backward", "backward"),  # with DDP's reduction, which is awaited in it
            (PipelineScheduler, "step", "waiting"),  # its remaining time: messages to and from neighbours
            (StageGradients, "complete", "waiting"),
            (trainer.accelerator, "clip_grad_norm_", "clipping"),
        )
        stack = ExitStack()
        for one in watched:
            stack.enter_context(self.timing(*one))
        return stack


def step(case: Case, options: argparse.Namespace, stopwatch: Stopwatch | None = None) -> Figures:
    """Train for some steps with a new Trainer. Collective over all processes."""
    config, clock = harness.load_config(options.model), StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = harness.make_trainer(
            harness.make_model(options.model, config),
            RandomRows(options.rows * options.steps, options.tokens, config.vocab_size),
            folder,
            [clock],
            is_ours=bool(case),
            per_device_train_batch_size=options.rows // harness.num_processes(),
            max_steps=options.steps,
            **case,
        )
        with stopwatch.watch(trainer) if stopwatch is not None else ExitStack():
            trainer.train()
    return {"step_ms": clock.step_ms(options.warmup), "cpu_ms": clock.cpu_ms(options.warmup)}


def print_profile(cases: dict[str, Case], options: argparse.Namespace) -> None:
    """One more turn. Collective over all processes."""
    table = Table(title="Where a step's time goes, ms (mean over all steps, the first ones included)")
    for column in ("case", "rank", *PARTS):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name, case in cases.items():
        stopwatch = Stopwatch()
        step(case, options, stopwatch)
        for rank, parts in enumerate(harness.everyone(dict(stopwatch.seconds))):
            table.add_row(name, str(rank), *(f"{1e3 * parts.get(part, 0) / options.steps:.1f}" for part in PARTS))
    harness.console().print(table)


def main() -> None:
    """Time all cases and print the table. Every process must call this."""
    parser = harness.parser_of(__doc__, processes=2)
    harness.add_model_arguments(parser)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2], help="numbers of stages K")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"], choices=list(SCHEDULES))
    parser.add_argument("--virtual_stages", type=int, nargs="+", default=[2], help="V of interleaved1f1b")
    parser.add_argument("--num_microbatches", type=int, nargs="+", default=[4], help="numbers of micro-batches M")
    parser.add_argument("--steps", type=int, default=20, help="of each run, with the warm-up")
    parser.add_argument("--warmup", type=int, default=3, help="first steps of each run that do not count")
    parser.add_argument("--profile", action="store_true", help="one more turn, which tells where the time goes")
    options = harness.start(parser)
    if not 0 < options.warmup < options.steps - 1:
        parser.error(f"--warmup {options.warmup} must lie between 1 and --steps {options.steps} - 2")
    if harness.num_processes() < 2 or options.rows % harness.num_processes():
        parser.error(f"--rows {options.rows} must be a multiple of the number of processes, which is at least 2")
    cases = cases_of(options)
    measures: dict[str, Callable[[], Figures]] = {name: partial(step, case, options) for name, case in cases.items()}
    turns = harness.take_turns(measures, options)
    if options.profile:
        print_profile(cases, options)
    harness.report(options, turns, [Ratio("to DDP", "step_ms", DDP, targets=TARGETS)])


if __name__ == "__main__":
    main()
