"""The page in Markdown that `python -m tests.user_code --table` writes, and the lines that it prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from .verdicts import GOOD, Finding

INTRODUCTION = """# Users' code

Does code like yours train the same? Each case below was trained in several layouts, and compared with the stock
Trainer in one process. To run a case yourself:

```bash
python -m tests.user_code --only penalty                        # the cases with this word in their names
python -m tests.user_code --table docs/users_code.md            # all, and write this page
```

| result | meaning |
|---|---|
| equal | losses, final weights and buffers agree; the number: the cell's largest difference of a final weight |
| refused | a `ValueError` on all processes before the first step |
| stopped | a `ValueError` in a later step |
| as DDP | each part of a batch has its own loss, as under plain DDP or accumulation; the log says so |

| layout | meaning |
|---|---|
| K2 | two stages, two micro-batches; rank 0 holds the last stage (the loss), rank 1 the first (the embeddings) |
| DP2 | two replicas of one stage |
| one | a single process |
| acc2 | with gradient accumulation; names combine: *K2 acc2* |
| freeze | a schedule freezes layers; no cache |
| cache | a schedule freezes layers; with the cache |
| zbv | `pipeline_schedule="zbv"`: each backward pass is split in two, for inputs and for weights |

Layouts that are missing were not tried.
"""
END = "<!-- What follows is not made by the command. -->"


def _gist(message: str) -> str:
    """The fault in an error of the library, without the error's type, the model's name and the remedy."""
    text = " ".join(message.split()).partition(": ")[2]
    text = text.partition(" cannot be trained as a pipeline: ")[2] or text
    return text if len(text) <= 130 else text[:130].rpartition(" ")[0] + " …"


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
            alike: dict[tuple[str, str], list[str]] = {}  # (verdict, reason) -> layouts: reasons may differ
            for finding in theirs:
                if finding.verdict != "equal":
                    gist = "" if finding.verdict == "as DDP" else f" ({_gist(finding.reason)})"
                    alike.setdefault((finding.verdict, gist), []).append(finding.layout)
            others = [
                f"{', '.join(layouts)}: {verdict if verdict in GOOD else f'**{verdict}**'}{gist}"
                for (verdict, gist), layouts in alike.items()
            ]
            cells = [f"{case}: {theirs[0].what}", where, "; ".join(others)]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join([*lines, END, ""])


def write_page(page: Path, findings: Sequence[Finding]) -> None:
    """Replace the part of a page that the command has written; the text behind it stays."""
    before = page.read_text() if page.is_file() else ""
    page.write_text(table_of(findings) + before.partition(f"{END}\n")[2])


def line_of(finding: Finding) -> str:
    sign = " " if finding.is_expected else "!"
    where = f"{finding.case} [{finding.layout}]"
    return (
        f"{sign} {finding.verdict:<18} {finding.seconds:5.1f} s  {where:<52} {' '.join(finding.reason.split())[:150]}"
    )
