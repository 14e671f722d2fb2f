"""The page of all models: its table is written, and read again to keep earlier findings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from .trial import RESULTS, TOLERANCE, Candidate, Finding

INTRODUCTION = """# Supported models

Can your model be split into several stages? Ask for it by name, folder or model type:

```bash
hf-pipetransformer inspect bert --stages 2
```

```console
2 stages × 1 pipeline = 2 ranks, 12 units
stage  units  first unit            parameters MiB  training MiB  FLOPs %
    0  0-5    bert.encoder.layer.0           253.2       1,017.2     50.0
    1  6-11   bert.encoder.layer.6           164.5         660.3     50.0
```

A model that cannot be split gives the reason:

```console
$ hf-pipetransformer inspect reformer --task sequence-classification
error: ReformerForSequenceClassification cannot be trained as a pipeline: ... Set pipeline_parallel_size=1.
```

With `pipeline_parallel_size=1` every model trains as in the stock Trainer. For several stages, the tables list every
class in {tried} of the {mappings} mappings behind the Auto classes of transformers {transformers}
([the others](#left-out)):

- **supported**: split in two, the model gives the outputs and gradients of the whole model, within
  {tolerance:g} of the largest value.
- **refused**: several stages raise an `UnsupportedModelError` before the first step.
- **failing**: another error, or another result.
- **not tried**: no small instance or input could be made. The trainer checks your own model and data before the first
  step.

[Tried](evidence/supported_models.md) with torch {torch} on the CPU, {date}{kept}.
"""


LEFT_OUT = """## Left out

Classes in these mappings alone were not tried: they have no head and no loss.

"""


def read_page(page: str, known: Sequence[Candidate]) -> dict[str, Finding]:
    """The page's findings about the classes of this version of transformers."""
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
    """Counts, then the refused, failing and untried classes with reasons, then all supported classes.

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
            kept=f"; {num_kept} results are older" if num_kept else "",
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
        "Brackets name a setting that is needed, or how the class was tried.",
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
    """A table of reasons; the reasons with the most classes come first."""
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
