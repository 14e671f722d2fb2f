#!/usr/bin/env python
"""How long saving and resuming take, beside plain `transformers.Trainer` under DDP.

    python benchmarks/checkpointing.py --processes 2 --folder . --out results.json

A run trains with a new model and a new Trainer and saves every few steps; then another Trainer resumes from the last
checkpoint. On the slowest process it is measured

    step      from one step's end to the next one's, without the steps before which there was a save
    save      from a step's end to `on_save`: as long as the training stands still
    publish   of it, the checksums and the wait for the disk, which the stock Trainer does without
    start     from the call of `train()` to the first step, from the beginning
    resume    the same from a checkpoint: it holds finding the layers and cutting the model, as a start does

The model, AdamW's state and the random states are in both checkpoints. `--folder` says which disk is written to.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from hf_pipetransformer.progress import PROGRESS

import harness
from harness import Figures, RandomRows, Ratio

DDP = "Trainer, DDP"


class SaveClock(TrainerCallback):
    """Notes when steps begin and end and when saves end, and how long checkpoints are being published."""

    def __init__(self) -> None:
        self.first_step_at = 0.0
        self.steps: list[float] = []
        self.saves: list[float] = []
        self.publishing: list[float] = []
        self._last = 0.0  # end of a step or a save
        self._has_saved = True  # the first step is no measure either
        self._published_since: float | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.first_step_at = self.first_step_at or time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        if not self._has_saved:
            self.steps.append(now - self._last)
        self._last, self._has_saved = now, False

    def on_save(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.saves.append(now - self._last)
        self._last, self._has_saved = now, True

    def enter(self, phase: str, step: int) -> None:
        """Of the library: the phase that begins."""
        now = time.perf_counter()
        if self._published_since is not None:
            self.publishing.append(now - self._published_since)
        self._published_since = now if phase == "publish" else None

    @contextmanager
    def hearing_of_phases(self) -> Iterator[None]:
        PROGRESS.on_enter = self.enter
        try:
            yield
        finally:
            PROGRESS.on_enter = None


def trainer_of(stages: int, options: argparse.Namespace, folder: str, clock: SaveClock, saves: bool) -> Trainer:
    config, steps = harness.load_config(options.model), options.saves * options.save_every
    return harness.make_trainer(
        harness.make_model(options.model, config),
        RandomRows(options.rows * (steps + 1), options.tokens, config.vocab_size),
        folder,
        [clock],
        is_ours=stages > 0,
        per_device_train_batch_size=options.rows // harness.num_processes(),
        max_steps=steps if saves else steps + 1,
        save_strategy="steps" if saves else "no",
        save_steps=options.save_every,
        save_total_limit=1,
        **({"pipeline_parallel_size": stages} if stages else {}),
    )


def case(stages: int, options: argparse.Namespace) -> Figures:
    """Train and save, then resume; `stages` 0: the stock Trainer. Collective over all processes."""
    clock, resumed = SaveClock(), SaveClock()
    with harness.shared_folder(options.folder) as folder:
        trainer = trainer_of(stages, options, folder, clock, saves=True)
        start_s = seconds_to_first_step(trainer.train, clock)
        checkpoint = Path(folder, f"checkpoint-{trainer.state.max_steps}")
        size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        harness.everyone(None)  # all have read it
        trainer = trainer_of(stages, options, folder, resumed, saves=False)
        resume_s = seconds_to_first_step(lambda: trainer.train(resume_from_checkpoint=str(checkpoint)), resumed)
    found = {"step_s": clock.steps, "save_s": clock.saves[1:], "publish_s": clock.publishing[1:]}
    medians = {name: statistics.median(slowest(seconds) or [0.0]) for name, seconds in found.items()}
    in_steps = medians["save_s"] / medians["step_s"]
    return {**medians, "save_in_steps": in_steps, "megabytes": size / 1e6, "start_s": start_s, "resume_s": resume_s}


def seconds_to_first_step(train: Callable[[], Any], clock: SaveClock) -> float:
    """Train; on the slowest process. Collective over all processes."""
    harness.everyone(None)
    began = time.perf_counter()
    with clock.hearing_of_phases():
        train()
    return slowest([clock.first_step_at - began])[0]


def slowest(seconds: list[float]) -> list[float]:
    """The longest time of any process, for each measurement. Collective over all processes."""
    return [max(values) for values in zip(*harness.everyone(seconds), strict=True)]


def main() -> None:
    """Time all cases and print the table. Every process must call this."""
    parser = harness.parser_of(__doc__, processes=2)
    harness.add_model_arguments(parser, rows=16)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2], help="numbers of stages K")
    parser.add_argument("--saves", type=int, default=4, help="of each run; the first does not count")
    parser.add_argument("--save_every", type=int, default=3, help="steps")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; default: that for temporary files")
    options = harness.start(parser)
    if options.saves < 2 or options.save_every < 2:
        parser.error("--saves and --save_every must be at least 2: a first save and the step after one do not count")
    cases = {DDP: partial(case, 0, options)} | {f"K={k}": partial(case, k, options) for k in options.stages}
    turns = harness.take_turns(cases, options)
    harness.report(options, turns, [Ratio("save to DDP", "save_s", DDP), Ratio("resume to DDP", "resume_s", DDP)])


if __name__ == "__main__":
    main()
