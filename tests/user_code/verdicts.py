"""What became of a case: how its processes ended, compared with the reference. See `runner`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .kit import Case, Layout

DIED = "the process died"
LOSS_TOLERANCE = 1e-4
"""Relative."""
WEIGHT_TOLERANCE = 1e-5
GOOD = ("equal", "refused", "stopped", "as DDP")
Entry = tuple[str, str]
"""Names of a case and of a layout."""


@dataclass
class Outcome:
    """How one process ended; plain values."""

    losses: list[float] = field(default_factory=list)
    steps: int = 0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    observed: dict[str, Any] = field(default_factory=dict)
    finished: Any = None
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
    weight_difference: float = math.nan
    is_expected: bool = False
    seconds: float = 0.0
    trace: str = ""

    @property
    def entry(self) -> Entry:
        return self.case, self.layout


def judge(case: Case, layout: Layout, reference: Outcome, ranks: Sequence[Outcome], slack: float = 1.0) -> Finding:
    """Compare what all processes report with the reference; `slack` is a factor of the tolerances."""
    finding = Finding(case.name, layout.name, case.group, case.what, "")
    for outcome in ranks:
        # the watchdog of one that was not yet as far ends it, with the error of the other
        told = [o.error.partition(": ")[2][:60] for o in ranks if o.is_refusal and o.steps == 0]
        # a process that the watchdog has ended, or that raised a received error, has the same sentence
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
    elif reference.error:
        finding.verdict, finding.reason, finding.trace = "no reference", reference.error, reference.trace
    else:
        _compare(finding, reference, ranks, slack)
    says_so = any(outcome.says_as_ddp for outcome in ranks)  # the main process logs it
    if finding.verdict == "SILENTLY DIFFERENT" and says_so:
        finding.verdict, finding.is_expected = "as DDP", True
        return finding
    wanted = {"exact": GOOD[:3]}.get(case.expect, (case.expect,))
    finding.is_expected = finding.verdict in wanted and (finding.verdict == "equal" or case.because in finding.reason)
    return finding


def _compare(finding: Finding, reference: Outcome, ranks: Sequence[Outcome], slack: float) -> None:
    problems: list[str] = []
    finding.weight_difference = 0.0
    for rank, outcome in enumerate(ranks):
        if outcome.steps != reference.steps or len(outcome.losses) != len(reference.losses):
            problems.append(f"rank {rank} took {outcome.steps} steps in place of {reference.steps}")
            continue
        loss = max(map(_relative, outcome.losses, reference.losses), default=0.0)
        if not loss <= slack * LOSS_TOLERANCE:
            at = next(
                i
                for i, pair in enumerate(zip(outcome.losses, reference.losses, strict=True))
                if _relative(*pair) > slack * LOSS_TOLERANCE
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
            if not weight <= slack * WEIGHT_TOLERANCE:
                problems.append(f"{name} differs by {weight:.1e} on rank {rank}")
        pairs = {"finished loss": (outcome.finished, reference.finished)}
        pairs |= {name: (outcome.observed.get(name), value) for name, value in reference.observed.items()}
        if rank and finding.layout.startswith("K2"):  # attributes that a loss sets on the trainer are on rank 0
            pairs = {}
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
