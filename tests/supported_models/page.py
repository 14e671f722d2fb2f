"""The page of all models: its table is written, and read again to keep what was found before."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from .trial import RESULTS, TOLERANCE, Candidate, Finding

INTRODUCTION = """# Supported models

Every class in {tried} of the {mappings} mappings behind the Auto classes of transformers {transformers}
([the others](#left-out)), tried by

    python -m tests.supported_models --table docs/supported_models.md

on a small instance with random weights, on the CPU (torch {torch}). This page is written by that script, {date}.{kept}

- **supported**: the layers were found, and the model gives the same when it is cut in two as when it is not: outputs
  that a loss is made of, and all gradients, within {tolerance:g} of the largest value (in float64 where float32 is too
  coarse). A model with batch normalisation runs the batch of a pipeline in one piece.
- **refused**: `UnsupportedModelError` with more than one stage. With `pipeline_parallel_size=1` these train as in the
  stock Trainer.
- **failing**: another error, or another result. A fault of this library.
- **not tried**: no small instance could be made from the default configuration, or no input for it. That says nothing
  about the model: with your configuration and data the trainer finds out by itself, before the first step, by the same
  trial.

Inputs were those that `dummy_batch` makes. About a hundred classes, whose rows are from 2026-11-25 or before, had
inputs or a configuration of their own, by a script that is in the repository at 4f12c05. Models of image and text were
mostly given text alone; then their vision tower counts with a layer of the text model and is not cut. Losses were not
looked at: one that couples samples drives the pipeline.
"""


LEFT_OUT = """## Left out

Classes that stand in one of these mappings alone were not looked at: bare models, backbones, encoders and codecs,
which have no head and no loss. Those with a head on top are in the tables above.

"""


def read_page(page: str, known: Sequence[Candidate]) -> dict[str, Finding]:
    """What a page says of each class that this version of transformers has."""
    candidates = {candidate.name: candidate for candidate in known}
    found: dict[str, Finding] = {}
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    for result in RESULTS:
        for first, entries in re.findall(r"^\| (.*) \| (.*) \|$", sections[result.capitalize()], re.MULTILINE):
            for entry in re.split(r", (?![^(]*\))", entries) if first not in ("reason", "model type") else ():
                name, _, conditions = entry.rstrip(")").partition(" (")
                if name in candidates:
                    reason = "" if result == "supported" else re.sub(r"\\(.)", r"\1", first)
                    c = candidates[name]
                    found[name] = Finding(name, c.model_type, c.task, result, reason)
                    found[name].conditions = conditions.split(", ") if conditions else []
    return found


def write_page(findings: Sequence[Finding], path: Path, num_kept: int, left_out: Sequence[str]) -> None:
    """Counts, then what is refused, failing or not tried with reasons, then everything that is supported.

    Args:
        findings: one for each class.
        path: the page.
        num_kept: number of findings that an earlier page had.
        left_out: names of mappings that were not looked at.
    """
    tasks = list(dict.fromkeys(finding.task for finding in findings))
    lines = [
        INTRODUCTION.format(
            tried=len(tasks),
            mappings=len(tasks) + len(left_out),
            transformers=version("transformers"),
            torch=version("torch").split("+")[0],
            date=datetime.now(timezone.utc).date(),
            kept=f" The results of {num_kept} classes were kept from an earlier page." if num_kept else "",
            tolerance=TOLERANCE,
        )
    ]
    lines += ["| task | " + " | ".join(RESULTS) + " |", "|---|" + "---|" * len(RESULTS)]
    for task in tasks:
        counts = [sum(f.task == task and f.result == result for f in findings) for result in RESULTS]
        if any(counts):
            lines.append(f"| {task} | " + " | ".join(str(count or "") for count in counts) + " |")
    counts = [sum(f.result == result for f in findings) for result in RESULTS]
    lines.append(f"| **all {len(findings)}** | " + " | ".join(f"**{count}**" for count in counts) + " |")
    for result in RESULTS[1:]:
        lines += ["", f"## {result.capitalize()}", "", *_by_reason([f for f in findings if f.result == result])]
    lines += [
        "",
        "## Supported",
        "",
        "By model type. What is in brackets has to be set, or says how the class was tried.",
        "",
    ]
    families: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.result == "supported":
            families.setdefault(finding.model_type, []).append(finding)
    lines += ["| model type | classes |", "|---|---|"]
    for model_type, members in sorted(families.items()):
        lines.append(f"| {model_type} | {', '.join(map(_with_conditions, sorted(members, key=lambda f: f.name)))} |")
    lines += ["", LEFT_OUT + textwrap.fill(", ".join(f"`{mapping}`" for mapping in left_out), 120) + "."]
    path.write_text("\n".join(lines) + "\n")


def _by_reason(findings: Sequence[Finding]) -> list[str]:
    """A table of reasons, those of many classes first."""
    if not findings:
        return ["None."]
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        reasons.setdefault(shortened(finding.reason), []).append(finding.name)
    rows = [
        f"| {reason} | {', '.join(sorted(names))} |"
        for reason, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return ["| reason | classes |", "|---|---|", *rows]


def shortened(reason: str) -> str:
    """A reason without the model's name and the remedy, and harmless in a table."""
    reason = re.sub(r"^\w+ cannot be trained as a pipeline: ", "", reason)
    reason = re.sub(r" Set pipeline_parallel_size=1\.$", "", reason)
    reason = re.sub(r"'[\w.]+' is a (\w+), whose result", r"a layer is a \1, whose result", reason)
    reason = re.sub(r" You can install it with.*$", "", reason)
    return re.sub(r"[<>|*_`\[\]]", lambda match: "\\" + match[0], reason[:200])


def _with_conditions(finding: Finding) -> str:
    return finding.name + (f" ({', '.join(finding.conditions)})" if finding.conditions else "")
