"""Trains each case with the stock `Trainer` in one process and as the product in its layout, and compares both.

Each of the two is a launch of `tests/distributed.py`: its processes are forks of one server that has imported torch
and transformers, so no case inherits state of another one, and a case that hangs is killed with all its children.
`user_code.verdicts` compares losses, weights and steps, and the results of the script.
"""

from __future__ import annotations

import functools
import io
import os
import tempfile
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from distributed import RankTimeoutError, launch_ranks
from transformers import Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging
from user_code.kit import Layout, seed_all
from user_code.runner import LAUNCHERS, PACKAGE
from user_code.verdicts import DIED, Finding, Outcome, judge

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

from . import cases  # noqa: F401
from .kit import CASES, LAYOUTS, FrozenBackbone, Script, pad, samples

DEADLINE_S = 12.0
"""Seconds of a quiet machine for one training of a case, after which it counts as hanging."""
GRACE_S = 6.0
"""Seconds of a quiet machine for the other processes, once one has failed."""


class WrongOutcomeError(AssertionError):
    """The product does not meet the case's expectation. The `xfail` marks name this error: other errors still fail."""


class _Failed(Exception):
    """Carries the outcome of a process that failed: the launch ends without waiting for the others."""


def check(name: str, layout: str, folder: Path) -> Finding:
    """Train a case both ways, and return the finding.

    Raises:
        WrongOutcomeError: The product does not meet the case's expectation.
        RuntimeError: The stock Trainer fails although the case does not expect an error: the case is wrong.
    """
    case = CASES[name]
    reference = _reference(name)
    if reference.error and case.expect != "crash":
        raise RuntimeError(f"the stock Trainer fails: {reference.error}\n{reference.trace}")
    ranks = _launch(name, layout, str(folder / "product"), is_reference=False)
    _note_stopped(ranks)
    finding = judge(case, LAYOUTS[layout], reference, ranks, case.slack)
    if not finding.is_expected or any(outcome.is_hang for outcome in ranks):
        raise WrongOutcomeError(f"{finding.verdict}: {finding.reason}\n{finding.trace}")
    return finding


@functools.cache
def _reference(name: str) -> Outcome:
    """The stock training, which is the same for all layouts."""
    with tempfile.TemporaryDirectory(prefix="stock-") as folder:
        return _launch(name, "K1", folder, is_reference=True)[0]


def train(rank: int, world_size: int, name: str, layout: str, folder: str, is_reference: bool) -> Outcome:
    """Train in one process of a case; an error is part of its outcome."""
    if world_size == 1:
        for variable in [variable for variable in os.environ if variable.startswith(LAUNCHERS)]:
            del os.environ[variable]
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    outcome, trainer = Outcome(), None
    try:
        seed_all(0)
        script: Any = CASES[name].make()
        trainer = make_trainer(script, LAYOUTS[layout], is_reference, folder)
        script.wire(trainer)
        returned = script.drive(trainer)
        outcome.observed = script.observe(trainer)
        if not hasattr(returned, "training_loss"):  # the result of train() has times
            outcome.observed["returned"] = returned
        outcome.losses = [e[key] for key in ("loss", "eval_loss") for e in trainer.state.log_history if key in e]
        tensors = (*trainer.model.named_parameters(), *trainer.model.named_buffers())
        outcome.weights = {name: tensor.detach().clone() for name, tensor in tensors}
    except BaseException as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        outcome.error = f"{type(error).__name__}: {error}"
        outcome.trace = "".join(traceback.format_exception(error))
        outcome.is_refusal = isinstance(error, ValueError) and innermost.filename.startswith(PACKAGE)
    outcome.steps = trainer.state.global_step if trainer is not None else 0
    if outcome.error:
        os.environ["RANK"] = str(rank)  # the report of the error asks for it
        raise _Failed(outcome)
    return outcome


def make_trainer(script: Script, layout: Layout, is_reference: bool, folder: str) -> Any:
    """Return the stock Trainer with all samples of a micro-step in one process, or the product's in its layout."""
    options: dict[str, Any] = {
        "output_dir": folder,
        "num_train_epochs": 3,
        "learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": script.batch // (1 if is_reference else layout.world),
        "per_device_eval_batch_size": 4,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
        "remove_unused_columns": False,
        **script.options,
    }
    base: type[Trainer] = Trainer
    arguments: Any = TrainingArguments
    if not is_reference:
        base, arguments = PipeTransformerTrainer, PipeTransformerTrainingArguments
        declared = ["backbone"] if isinstance(script.model, FrozenBackbone) else None
        options |= {"activation_cache": "on", "pipeline_parallel_size": layout.stages, "cached_modules": declared}
        options |= script.product
    trainer_class = type("UsersTrainer", (script.trainer, base), {}) if script.trainer else base
    trainer = trainer_class(
        model=script.model,
        args=arguments(**options),
        train_dataset=script.data if script.data is not None else samples(),
        data_collator=script.collator or pad,
        callbacks=list(script.callbacks),
        **script.keywords,
    )
    for callback in script.callbacks:
        callback.trainer = trainer  # type: ignore[attr-defined]
    return trainer


def _note_stopped(ranks: list[Outcome]) -> None:
    """A process that was ended by the refusal of another one, and says so, has refused as well."""
    refusals = [outcome.error.partition(": ")[2][:60] for outcome in ranks if outcome.is_refusal]
    for outcome in ranks:
        text = outcome.trace if outcome.error == DIED else outcome.error
        outcome.is_refusal |= any(refusal in text for refusal in refusals)


@functools.cache
def _start_server() -> None:
    """Have the server of forks import its modules, which takes longer than a case may."""
    launch_ranks(_do_nothing, 1)


def _do_nothing(rank: int, world_size: int) -> None:
    """Called on a rank."""


def _launch(name: str, layout: str, folder: str, is_reference: bool) -> list[Outcome]:
    _start_server()
    world_size = 1 if is_reference else LAYOUTS[layout].world
    limits = {"timeout": DEADLINE_S, "seconds_after_error": GRACE_S}
    with redirect_stdout(io.StringIO()):  # an outcome has the part of the logs that matters
        ranks = launch_ranks(train, world_size, name, layout, folder, is_reference, **limits)
    outcomes = []
    for rank in ranks:
        if isinstance(rank.error, _Failed):
            outcomes.append(rank.error.args[0])
        elif isinstance(rank.error, RankTimeoutError):
            outcomes.append(Outcome(error="it was still running", trace=rank.log[-12000:], is_hang=True))
        else:
            outcomes.append(rank.value or Outcome(error=DIED, trace=f"{rank.error}\n{rank.log[-12000:]}"))
    return outcomes
