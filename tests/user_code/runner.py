"""Is training exact or refused, whatever the user's code does? Many pieces of it, each against one process.

    python -m tests.user_code                                # all cases, on two processes of this machine
    python -m tests.user_code --only focal "crf" --verbose   # cases with these words in their names
    python -m tests.user_code --table table.md --json results.json

The cases are in `cases/`. Each is trained for a few steps in fp32 without dropout by a
`PipeTransformerTrainer` in the layout that it names, and by the stock `Trainer` in one process with the whole batch as
one batch: the reference. Verdicts:

    equal                the losses logged, the final weights and buffers, what evaluations found, and the loss of the
                         finished model agree
    refused              all processes raised a ValueError of the library before the first optimizer step
    stopped              likewise, in a later step
    as DDP               rows that belong together, with K = 1: each process has a loss of its own rows, with a warning
    SILENTLY DIFFERENT   the training ended, with other numbers
    crash                another error, or not on all processes
    hang                 a process had not ended after `--deadline` seconds
    no reference         the stock Trainer itself fails: the case is wrong

The command starts itself under torchrun. Each of torchrun's processes imports everything once; every case
then runs in forks of them, so that one which hangs or dies leaves the next alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
    Arms,
    Case,
    FreezesByHand,
    Job,
    Layout,
    Setting,
    Tape,
    bert_classifier,
    pad,
    recording,
    seed_all,
    texts,
)
from .pages import line_of, write_page
from .verdicts import DIED, Entry, Finding, Outcome, judge

WORLD = 2
DEADLINE_S = 60.0
GRACE_S = 8.0
"""For the other processes, once one has failed."""
PACKAGE = str(Path(hf_pipetransformer.__file__).parent)
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


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
        "per_device_eval_batch_size": 3,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "optim": "adamw_torch",
        "adam_epsilon": 1e-4,  # a gradient that is nothing but rounding moves nothing
        "seed": 42,
    }


def make_trainer(job: Job, case: Case, setting: Setting) -> Any:
    """The stock Trainer of the reference, or the pipeline's."""
    layout = setting.layout
    options = common_options() | job.options
    output = str(setting.folder / ("reference" if setting.is_reference else "run"))
    callbacks = [*job.callbacks, *([Arms(setting.tape)] if case.is_taped else [])]
    model = job.model if job.model is not None else bert_classifier()
    arguments: Any
    if setting.is_reference:
        base: type[Trainer] = Trainer
        arguments = TrainingArguments(output, use_cpu=True, per_device_train_batch_size=GLOBAL_BATCH, **options)
        if layout.freezes:
            callbacks.append(FreezesByHand(layout) if hasattr(model, "bert") else _freezing(layout))
    else:
        base = PipeTransformerTrainer
        arguments = PipeTransformerTrainingArguments(
            output,
            per_device_train_batch_size=layout.per_device,
            gradient_accumulation_steps=layout.accumulation,
            **{**options, **layout.pipeline_options(), **job.pipeline_options},
        )
    mixins = [*([recording(setting.tape)] if case.replays else []), *([job.trainer] if job.trainer else [])]
    cls = type("UsersTrainer", (*mixins, base), {}) if mixins else base
    keywords = {"train_dataset": job.data if job.data is not None else texts(), "data_collator": job.collator or pad}
    if job.evaluated is not None:
        keywords["eval_dataset"] = job.evaluated
    return cls(model=model, args=arguments, callbacks=callbacks, **keywords | job.keywords)


def _freezing(layout: Layout) -> LayerFreezeCallback:
    if layout.frozen is not None:
        return LayerFreezeCallback({"name": "schedule", "schedule": layout.frozen, "by": "step"}, "steps", 1)
    return LayerFreezeCallback({"name": "schedule", "schedule": layout.frozen_at_epochs})


def run_job(case: Case, setting: Setting) -> Outcome:
    """Train, and report; errors are part of the report."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    seed_all(1)
    outcome, started, trainer = Outcome(), time.monotonic(), None
    warnings = _Warnings()
    logger = logging.getLogger("hf_pipetransformer")
    logger.addHandler(warnings)
    logger.setLevel(logging.INFO)  # what all processes would say, the others log one level lower
    try:
        job = case.make(setting)
        seed_all(1)
        trainer = make_trainer(job, case, setting)
        job.drive(trainer)
        history = trainer.state.log_history
        outcome.losses = [entry["loss"] for entry in history if "loss" in entry]
        timing = ("_runtime", "_per_second", "_time")
        outcome.metrics = [
            float(value)
            for entry in history
            for name, value in sorted(entry.items())
            if name.startswith("eval_") and not name.endswith(timing) and isinstance(value, (int, float))
        ]
        outcome.weights = {
            name: tensor.detach().clone()
            for name, tensor in (*trainer.model.named_parameters(), *trainer.model.named_buffers())
        }
        outcome.observed = job.observe(trainer)
        outcome.finished = _loss_of_finished(trainer)
        outcome.drawn = list(setting.tape.values) if not setting.tape.replays else []
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        outcome.error = f"{type(error).__name__}: {error}"
        outcome.trace = "".join(traceback.format_exception(error))
        outcome.is_refusal = isinstance(error, ValueError) and frames[-1].filename.startswith(PACKAGE)
    outcome.says_as_ddp = any("as under DDP" in message for message in warnings.messages)
    outcome.steps = trainer.state.global_step if trainer is not None else 0
    outcome.seconds = time.monotonic() - started
    return outcome


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _loss_of_finished(trainer: Any) -> Any:
    """The loss of the finished model on the first samples: whatever is stale in it shows here."""
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


class _Fork:
    """A function in a fork of this process; its result comes by a file."""

    def __init__(self, function: Callable[[], Outcome], environment: dict[str, str | None], answer: Path) -> None:
        self.answer, self.log = answer, answer.with_suffix(".log")
        self.pid = os.fork()
        if not self.pid:
            self._child(function, environment)

    def _child(self, function: Callable[[], Outcome], environment: dict[str, str | None]) -> None:
        code = 1
        try:
            os.setpgid(0, 0)
            for name, value in environment.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            with open(self.log, "w", buffering=1) as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
                faulthandler.enable(stream)
                faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)
                part = self.answer.with_suffix(".part")
                part.write_bytes(pickle.dumps(function()))
                part.rename(self.answer)
                sys.stdout.flush()
                code = 0
        finally:
            os._exit(code)

    @property
    def has_ended(self) -> bool:
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = 0
        return not self.pid

    def outcome(self) -> Outcome:
        """What it returned; a hang or a death as an outcome."""
        if self.answer.exists():
            return pickle.loads(self.answer.read_bytes())
        log = self.log.read_text(errors="replace")[-12000:] if self.log.exists() else ""
        if not self.has_ended:
            return Outcome(error="it was still running", trace=log, is_hang=True)
        return Outcome(error=DIED, trace=log)

    def kill(self) -> None:
        if not self.has_ended:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.3)
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        if self.pid:
            os.waitpid(self.pid, 0)
            self.pid = 0


def serve(rank: int, world_size: int, entries: Sequence[Entry], deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Run cases one after the other, each in forks of `WORLD` processes that a launcher has started.

    Collective over these. Nothing distributed may have been begun in them.

    Returns:
        On rank 0 the findings, on others nothing.
    """
    timeout = timedelta(hours=1)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    control = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    if rank == 0:
        control.set("folder", tempfile.mkdtemp(prefix="user-code-"))
    folder = Path(control.get("folder").decode())
    torch.set_num_threads(1)
    if entries:
        _warm_up(folder)
    gc.collect()
    gc.freeze()
    known: dict[str, Outcome] = {}
    findings = []
    for number, entry in enumerate(entries):
        finding = _serve_one(rank, number, entry, control, folder / str(number), known, deadline_s)
        if finding is not None:
            findings.append(finding)
            if os.environ.get("USER_CODE_VERBOSE"):
                print(line_of(finding), flush=True)
    control.add("ended", 1)
    if rank == 0:
        while control.add("ended", 0) < world_size:
            time.sleep(0.01)
        shutil.rmtree(folder, ignore_errors=True)
    return findings


def _warm_up(folder: Path) -> None:
    """What is imported late is imported before the forks."""
    saved = {name: os.environ.pop(name) for name in LAUNCHERS if name in os.environ}
    make = Case("", "", "", lambda _: Job(options={"max_steps": 1}), (), "", "", False, 0.0, False)
    outcome = run_job(make, Setting(LAYOUTS["one"], 0, True, folder, Tape()))
    assert not outcome.error, outcome.trace
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    os.environ.update(saved)


def _serve_one(
    rank: int, number: int, entry: Entry, control: Any, folder: Path, known: dict[str, Outcome], deadline_s: float
) -> Finding | None:
    case, layout = CASES[entry[0]], LAYOUTS[entry[1]]
    started, store = time.monotonic(), None
    if rank == 0:
        folder.mkdir()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        control.set(f"{number}/port", str(store.port))
    port = control.get(f"{number}/port").decode()
    alone: dict[str, str | None] = dict.fromkeys(LAUNCHERS)
    launched: dict[str, str | None] = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(layout.world),
        "LOCAL_WORLD_SIZE": str(layout.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }

    def fork(tape: Tape, is_reference: bool) -> _Fork:
        setting = Setting(layout, 0 if is_reference else rank, is_reference, folder, tape)
        environment = launched if layout.world > 1 and not is_reference else alone
        answer = folder / ("reference.pkl" if is_reference else f"{rank}.pkl")
        return _Fork(lambda: run_job(case, setting), environment, answer)

    forks = []
    if rank < layout.world:
        forks.append(fork(Tape(), False))
    # one reference serves all layouts without freezing; what is replayed is known only when the ranks have ended
    what = case.name + (layout.name if layout.freezes else "")
    if rank == 0 and not case.is_taped and what not in known:
        forks.append(fork(Tape(), True))
    _wait(forks, control, f"{number}/failed", started + deadline_s)
    control.add(f"{number}/ended", 1)
    if rank > 0:
        return None
    while control.add(f"{number}/ended", 0) < WORLD:
        time.sleep(0.002)
    outcomes = [_read(folder / f"{r}.pkl") for r in range(layout.world)]
    if case.is_taped:
        drawn = outcomes[0].drawn if not outcomes[0].error else []
        forks = [fork(Tape(drawn), True)] if drawn else []
        _wait(forks, control, f"{number}/reference", time.monotonic() + deadline_s)
        reference = _read(folder / "reference.pkl") if drawn else None
    else:
        if what not in known:
            known[what] = _read(folder / "reference.pkl")
        reference = known[what]
    finding = judge(case, layout, reference, outcomes)
    finding.seconds = time.monotonic() - started
    shutil.rmtree(folder, ignore_errors=True)
    return finding


def _read(answer: Path) -> Outcome:
    return pickle.loads(answer.read_bytes())


def _wait(forks: list[_Fork], control: Any, failed: str, deadline: float) -> None:
    """Until all have ended, are over the deadline, or have been left alone by a failed one for `GRACE_S`."""
    last_look, has_told = time.monotonic(), False
    while sum(fork.has_ended for fork in forks) < len(forks):  # asks each: the ended are to be reaped
        now = time.monotonic()
        if now > deadline:
            break
        if now - last_look > 0.25:
            last_look = now
            if control.check([failed]):
                deadline = min(deadline, now + GRACE_S)
                failed = failed + " "  # looked for once
        if not has_told and any(fork.has_ended and fork.outcome().error for fork in forks):
            control.set(failed.strip(), "1")
            has_told = True
        time.sleep(0.003)
    for fork in forks:
        was_running = not fork.has_ended
        fork.kill()
        fork.reap()
        if not fork.answer.exists():
            outcome = fork.outcome()
            if was_running:
                outcome.error, outcome.is_hang = "it was still running", True
            fork.answer.write_bytes(pickle.dumps(outcome))
    if not has_told and any(fork.outcome().error for fork in forks):
        control.set(failed.strip(), "1")


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
    parser.add_argument("--json", type=Path, help="file for all findings")
    parser.add_argument("--verbose", action="store_true", help="tracebacks of what is not as expected")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for a case")
    parser.add_argument("--groups", nargs="*", choices=GROUPS, default=GROUPS)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORLD)]
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **os.environ}
        sys.exit(subprocess.run([*launcher, "-m", "tests.user_code", *sys.argv[1:]], env=environment).returncode)
    os.environ["USER_CODE_VERBOSE"] = "1"
    rank = int(os.environ["RANK"])
    started = time.monotonic()
    findings = serve(rank, int(os.environ["WORLD_SIZE"]), entries_of(options.only, options.groups), options.deadline)
    if rank > 0:
        return
    for finding in findings:
        if options.verbose and not finding.is_expected:
            print(f"\n--- {finding.case} [{finding.layout}]: {finding.verdict}\n{finding.reason}\n{finding.trace}")
    counts = Counter(finding.verdict for finding in findings)
    print(f"{len(findings)} in {time.monotonic() - started:.0f} s:", dict(counts))
    if options.table:
        write_page(options.table, findings)
    if options.json:
        options.json.write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
