"""Is training exact or refused? Many pieces of users' code, each against one process.

    python -m tests.user_code                                # all cases, on two processes of this machine
    python -m tests.user_code --only ema "l2" --verbose      # cases with these words in their names
    python -m tests.user_code --table table.md

The cases are in `cases/`. Each is trained for a few steps in fp32 without dropout by a
`PipeTransformerTrainer` in the layout that it names, and by the stock `Trainer` in one process with the whole batch as
one batch: the reference. Verdicts:

    equal                the losses logged, the final weights and buffers, and the loss of the finished model agree
    refused              all processes raised a ValueError of the library before the first optimizer step
    stopped              all processes raised such a ValueError in a later step
    as DDP               rows that belong together, with K = 1: each process has a loss of its own rows, with a warning
    SILENTLY DIFFERENT   the training ended, with other numbers
    crash                another error, or not on all processes
    hang                 a process had not ended after `--deadline` seconds
    no reference         the stock Trainer itself fails: the case is wrong

`tests/distributed.py` starts the ranks of a case.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from distributed import RankOutcome, RankTimeoutError, launch_ranks
from transformers import Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging

import hf_pipetransformer
from hf_pipetransformer import LayerFreezeCallback, PipeTransformerTrainer, PipeTransformerTrainingArguments

from . import cases  # noqa: F401
from .kit import (
    CASES,
    GLOBAL_BATCH,
    GROUPS,
    LAYOUTS,
    Case,
    Job,
    Layout,
    Lines,
    bert_classifier,
    pad,
    seed_all,
    texts,
)
from .pages import line_of, write_page
from .verdicts import DIED, Entry, Finding, Outcome, judge

DEADLINE_S = 60.0
GRACE_S = 8.0
"""For the other processes, once one has failed."""
PACKAGE = str(Path(hf_pipetransformer.__file__).parent)
LAUNCHERS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
"""Prefixes of the variables that a launcher sets."""


# ---------------------------------------------------------------------------------------------------------
# One process of one case
# ---------------------------------------------------------------------------------------------------------


def common_options() -> dict[str, Any]:
    """Training arguments of both sides."""
    return {
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "weight_decay": 0.05,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "optim": "adamw_torch",
        "adam_epsilon": 1e-4,  # a gradient that is mere rounding moves no weight
        "seed": 42,
    }


def make_trainer(job: Job, layout: Layout, is_reference: bool, folder: str) -> Any:
    """The stock Trainer of the reference, or the pipeline's."""
    options = common_options() | job.options
    output = f"{folder}/{'reference' if is_reference else 'run'}"
    callbacks = list(job.callbacks)
    model = job.model if job.model is not None else bert_classifier()
    arguments: Any
    if is_reference:
        base: type[Trainer] = Trainer
        arguments = TrainingArguments(output, use_cpu=True, per_device_train_batch_size=GLOBAL_BATCH, **options)
        if layout.freezes:
            callbacks.append(_freezing(layout))
    else:
        base = PipeTransformerTrainer
        arguments = PipeTransformerTrainingArguments(
            output,
            per_device_train_batch_size=layout.per_device,
            gradient_accumulation_steps=layout.accumulation,
            **{**options, **layout.pipeline_options()},
        )
    cls = type("UsersTrainer", (job.trainer, base), {}) if job.trainer else base
    keywords = {"train_dataset": job.data if job.data is not None else texts(), "data_collator": job.collator or pad}
    return cls(model=model, args=arguments, callbacks=callbacks, **keywords | job.keywords)


def _freezing(layout: Layout) -> LayerFreezeCallback:
    if layout.frozen is not None:
        return LayerFreezeCallback({"name": "schedule", "schedule": layout.frozen, "by": "step"}, "steps", 1)
    return LayerFreezeCallback({"name": "schedule", "schedule": layout.frozen_at_epochs})


def run_job(case: Case, layout: Layout, is_reference: bool, folder: str) -> Outcome:
    """Train, and report; errors are part of the report."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    seed_all(1)
    outcome, started, trainer = Outcome(), time.monotonic(), None
    warnings = Lines()
    logger = logging.getLogger("hf_pipetransformer")
    logger.addHandler(warnings)
    logger.setLevel(logging.INFO)  # what all processes would say, the others log one level lower
    try:
        job = case.make()
        seed_all(1)
        trainer = make_trainer(job, layout, is_reference, folder)
        job.drive(trainer)
        outcome.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        outcome.weights = {
            name: tensor.detach().clone()
            for name, tensor in (*trainer.model.named_parameters(), *trainer.model.named_buffers())
        }
        outcome.observed = job.observe(trainer)
        outcome.finished = _loss_of_finished(trainer)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        outcome.error = f"{type(error).__name__}: {error}"
        outcome.trace = "".join(traceback.format_exception(error))
        outcome.is_refusal = isinstance(error, ValueError) and frames[-1].filename.startswith(PACKAGE)
    outcome.says_as_ddp = any("as under DDP" in message for message in warnings.lines)
    outcome.steps = trainer.state.global_step if trainer is not None else 0
    outcome.seconds = time.monotonic() - started
    return outcome


def _loss_of_finished(trainer: Any) -> Any:
    """The loss of the finished model on the first samples: stale weights or buffers show here."""
    model, data = trainer.model, trainer.train_dataset
    try:
        batch = trainer.data_collator([data[i] for i in range(GLOBAL_BATCH)])
        model.eval()
        return float(trainer.compute_loss(model, dict(batch)).detach())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# ---------------------------------------------------------------------------------------------------------
# All processes
# ---------------------------------------------------------------------------------------------------------


class _Failed(Exception):
    """Carries the outcome of a rank that failed: the launch ends without waiting for the others."""


def train(rank: int, world_size: int, entry: Entry, folder: str, is_reference: bool) -> Outcome:
    """One rank of a case, or its reference."""
    case, layout = CASES[entry[0]], LAYOUTS[entry[1]]
    if world_size == 1:
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            del os.environ[name]
    outcome = run_job(case, layout, is_reference, folder)
    if outcome.error:
        os.environ["RANK"] = str(rank)  # who reports the error asks for it
        raise _Failed(outcome)
    return outcome


def _launch(entry: Entry, world_size: int, folder: str, deadline_s: float, is_reference: bool) -> list[Outcome]:
    options = {"timeout": deadline_s, "seconds_after_error": GRACE_S}
    with redirect_stdout(io.StringIO()):  # a finding has what matters of the logs
        ranks = launch_ranks(train, world_size, entry, folder, is_reference, **options)
    return [_outcome_of(rank) for rank in ranks]


def _outcome_of(rank: RankOutcome) -> Outcome:
    if isinstance(rank.error, _Failed):
        return rank.error.args[0]
    if isinstance(rank.error, RankTimeoutError):
        return Outcome(error="it was still running", trace=rank.log[-12000:], is_hang=True)
    if rank.error is not None:
        return Outcome(error=DIED, trace=rank.log[-12000:])
    return rank.value


def examine(entries: Sequence[Entry], deadline_s: float = DEADLINE_S, is_verbose: bool = False) -> list[Finding]:
    """Train cases, one after the other, and compare each with its reference."""
    known: dict[str, Outcome] = {}
    findings = []
    for entry in entries:
        case, layout, started = CASES[entry[0]], LAYOUTS[entry[1]], time.monotonic()
        with tempfile.TemporaryDirectory(prefix="user-code-") as folder:
            ranks = _launch(entry, layout.world, folder, deadline_s, is_reference=False)
            # one reference serves all layouts without freezing
            what = case.name + (layout.name if layout.freezes else "")
            if what not in known:
                known[what] = _launch(entry, 1, folder, deadline_s, is_reference=True)[0]
        findings.append(judge(case, layout, known[what], ranks))
        findings[-1].seconds = time.monotonic() - started
        if is_verbose:
            print(line_of(findings[-1]), flush=True)
    return findings


def entries_of(words: Sequence[str] = (), groups: Sequence[str] = GROUPS) -> list[Entry]:
    """All cases with their layouts, or those with one of the words in the name of case or layout."""
    return [
        (case.name, layout)
        for case in CASES.values()
        if case.group in groups
        for layout in case.layouts
        if not words or any(word.lower() in f"{case.name} [{layout}]".lower() for word in words)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="words in the names of cases or layouts")
    parser.add_argument("--table", type=Path, nargs="?", const=Path("/dev/stdout"), help="page in Markdown")
    parser.add_argument("--verbose", action="store_true", help="tracebacks of what is not as expected")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for a case")
    options = parser.parse_args()
    started = time.monotonic()
    findings = examine(entries_of(options.only), options.deadline, is_verbose=True)
    for finding in findings:
        if options.verbose and not finding.is_expected:
            print(f"\n--- {finding.case} [{finding.layout}]: {finding.verdict}\n{finding.reason}\n{finding.trace}")
    counts = Counter(finding.verdict for finding in findings)
    print(f"{len(findings)} in {time.monotonic() - started:.0f} s:", dict(counts))
    if options.table:
        write_page(options.table, findings)
