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
import math
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
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
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

WORLD = 2
DEADLINE_S = 60.0
GRACE_S = 8.0
"""For the other processes, once one has failed."""
DIED = "the process died"
LOSS_TOLERANCE = 1e-4
"""Relative."""
GOOD = ("equal", "refused", "stopped", "as DDP")
PACKAGE = str(Path(hf_pipetransformer.__file__).parent)
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")

Entry = tuple[str, str]
"""Names of a case and of a layout."""


@dataclass
class Outcome:
    """How one process ended; plain values."""

    losses: list[float] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    steps: int = 0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    observed: dict[str, Any] = field(default_factory=dict)
    finished: Any = None
    drawn: list[Any] = field(default_factory=list)
    error: str = ""
    trace: str = ""
    is_refusal: bool = False
    says_as_ddp: bool = False
    is_hang: bool = False
    seconds: float = 0.0


@dataclass
class Finding:
    """What became of one case in one layout."""

    case: str
    layout: str
    group: str
    what: str
    verdict: str
    reason: str = ""
    loss_difference: float = math.nan
    weight_difference: float = math.nan
    is_expected: bool = False
    seconds: float = 0.0
    trace: str = ""

    @property
    def entry(self) -> Entry:
        return self.case, self.layout


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
# Verdicts
# ---------------------------------------------------------------------------------------------------------


def judge(case: Case, layout: Layout, reference: Outcome | None, ranks: Sequence[Outcome]) -> Finding:
    """Compare what all processes report with the reference."""
    finding = Finding(case.name, layout.name, case.group, case.what, "")
    for outcome in ranks:
        # the watchdog of one that was not yet as far ends it, with the error of the other
        told = [o.error.partition(": ")[2][:60] for o in ranks if o.is_refusal and o.steps == 0]
        # one that was ended by the watchdog, or that raised what it was told, says the same sentence
        outcome.is_refusal |= any(text in (outcome.trace if outcome.error == DIED else outcome.error) for text in told)
    failures = [outcome for outcome in ranks if outcome.error]
    # what fails because a peer is gone comes last
    failures.sort(
        key=lambda o: (o.is_hang, o.error == DIED, "peer" in o.error.lower() or "connect" in o.error.lower())
    )
    if failures:
        finding.reason, finding.trace = failures[0].error, failures[0].trace
        if any(outcome.is_hang for outcome in ranks) and all(o.is_hang for o in failures):
            finding.verdict = "hang"
        elif all(outcome.is_refusal for outcome in ranks):
            finding.verdict = "stopped" if any(outcome.steps for outcome in ranks) else "refused"
        else:
            finding.verdict = "crash"
    elif reference is None or reference.error:
        finding.verdict = "no reference"
        finding.reason, finding.trace = (reference.error, reference.trace) if reference else ("nothing drawn", "")
    else:
        _compare(finding, case, reference, ranks)
    says_so = any(outcome.says_as_ddp for outcome in ranks)  # the main process logs it
    if finding.verdict == "SILENTLY DIFFERENT" and says_so:
        finding.verdict, finding.is_expected = "as DDP", True
        return finding
    wanted = {"exact": GOOD[:3]}.get(case.expect, (case.expect,))
    finding.is_expected = finding.verdict in wanted and (finding.verdict == "equal" or case.because in finding.reason)
    return finding


def _compare(finding: Finding, case: Case, reference: Outcome, ranks: Sequence[Outcome]) -> None:
    problems: list[str] = []
    finding.loss_difference = finding.weight_difference = 0.0
    for rank, outcome in enumerate(ranks):
        if outcome.steps != reference.steps or len(outcome.losses) != len(reference.losses):
            problems.append(f"rank {rank} took {outcome.steps} steps in place of {reference.steps}")
            continue
        loss = max(map(_relative, outcome.losses, reference.losses), default=0.0)
        finding.loss_difference = max(finding.loss_difference, loss)
        if not loss <= LOSS_TOLERANCE:
            at = next(
                i
                for i, pair in enumerate(zip(outcome.losses, reference.losses, strict=True))
                if _relative(*pair) > 1e-4
            )
            values = f"{outcome.losses[at]:.5g} in place of {reference.losses[at]:.5g}"
            problems.append(f"the loss of step {at + 1} is {values}")
        if outcome.weights.keys() != reference.weights.keys():
            problems.append(f"other weights: {sorted(outcome.weights.keys() ^ reference.weights.keys())[:3]}")
        else:
            weight, name = max(
                ((_distance(outcome.weights[n], w), n) for n, w in reference.weights.items()), default=(0.0, "")
            )
            finding.weight_difference = max(finding.weight_difference, weight)
            if not weight <= case.tolerance:
                problems.append(f"{name} differs by {weight:.1e} on rank {rank}")
        pairs = {"metrics": (outcome.metrics, reference.metrics)}
        if not case.replays:  # samples are random there
            pairs["finished loss"] = (outcome.finished, reference.finished)
        pairs |= {name: (outcome.observed.get(name), value) for name, value in reference.observed.items()}
        if rank and finding.layout.startswith("K2"):  # what a loss leaves on the trainer is on rank 0
            pairs = {"metrics": pairs["metrics"]}
        problems += [f"{n}: {_short(a)} in place of {_short(b)}" for n, (a, b) in pairs.items() if not _same(a, b)]
    finding.verdict = "SILENTLY DIFFERENT" if problems else "equal"
    finding.reason = "; ".join(dict.fromkeys(problems))


def _relative(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if str(a) == str(b) else math.inf
    return abs(a - b) / max(abs(b), 1e-2)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    distance = (a.double() - b.double()).abs()
    return float(distance.nan_to_num(math.inf).max()) if distance.numel() else 0.0


def _same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and _distance(a, b) <= 1e-4
    if isinstance(b, float):
        return isinstance(a, (int, float)) and _relative(a, b) <= LOSS_TOLERANCE
    if isinstance(b, (list, tuple)):
        return isinstance(a, (list, tuple)) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(b, dict):
        return isinstance(a, dict) and a.keys() == b.keys() and all(_same(a[k], v) for k, v in b.items())
    return type(a) is type(b) and a == b


def _short(value: Any) -> str:
    text = " ".join((f"{value:.5g}" if isinstance(value, float) else str(value)).split())
    return text if len(text) < 90 else text[:87] + "..."


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
                print(_line(finding), flush=True)
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


# ---------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------


def _line(finding: Finding) -> str:
    sign = " " if finding.is_expected else "!"
    where = f"{finding.case} [{finding.layout}]"
    return f"{sign} {finding.verdict:<18} {finding.seconds:5.1f} s  {where:<52} {_short_reason(finding, 150)}"


INTRODUCTION = """# Users' code

What becomes of code as users write it, each piece in several layouts, against the stock Trainer in one process with
the whole batch. Made by `python -m tests.user_code --table docs/users_code.md`.

Equal: losses, final weights, buffers and what evaluations find agree; the number is the largest difference of a
weight. Refused: a `ValueError` on all processes before the first step; stopped: in a later step; as DDP: each part of
a batch has a loss of its own, as under plain DDP or accumulation, and a line of the log says so.

Layouts: K2, two stages with two micro-batches; DP2, two replicas of one stage; one, a single process; acc2, with
gradient accumulation; freeze, a schedule freezes layers; cache, likewise with the activation cache; slices, along
tokens.
"""


def _short_reason(finding: Finding, most: int = 230) -> str:
    text = " ".join(finding.reason.split())
    return text if len(text) <= most else text[: most - 3] + "..."


def _gist(message: str, most: int = 130) -> str:
    """Of an error of the library: what is wrong, without its type, the model's name and the remedy."""
    text = " ".join(message.split()).partition(": ")[2]
    text = text.partition(" cannot be trained as a pipeline: ")[2] or text
    return text if len(text) <= most else text[:most].rpartition(" ")[0] + " …"


def table_of(findings: Sequence[Finding]) -> str:
    """A page in Markdown: counts, and a line for each case."""
    counts = Counter(finding.verdict for finding in findings)
    lines = [
        INTRODUCTION,
        f"With torch {torch.__version__} and transformers {transformers.__version__}:",
        f"{len({f.case for f in findings})} cases in {len(findings)} layouts: "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        + ".",
        "",
    ]
    for group in dict.fromkeys(finding.group for finding in findings):
        lines += [f"## {group.capitalize()}", "", "| case | equal in | else |", "|---|---|---|"]
        of_group = [finding for finding in findings if finding.group == group]
        for case in dict.fromkeys(finding.case for finding in of_group):
            theirs = [finding for finding in of_group if finding.case == case]
            equal = [finding for finding in theirs if finding.verdict == "equal"]
            largest = max((f.weight_difference for f in equal), default=0.0)
            where = f"{', '.join(f.layout for f in equal)} ({largest:.0e})" if equal else ""
            by_verdict: dict[str, list[Finding]] = {}
            for finding in theirs:
                if finding.verdict != "equal":
                    by_verdict.setdefault(finding.verdict, []).append(finding)
            others = [
                f"{', '.join(f.layout for f in found)}: {verdict if verdict in GOOD else f'**{verdict}**'}"
                + ("" if verdict == "as DDP" else f" ({_gist(found[0].reason)})")
                for verdict, found in by_verdict.items()
            ]
            cells = [f"{case}: {theirs[0].what}", where, "; ".join(others)]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


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
        options.table.write_text(table_of(findings))
    if options.json:
        options.json.write_text(json.dumps([asdict(finding) for finding in findings], indent=1))
