"""The script behind docs/supported_models.md gives the right result for an architecture of each outcome."""

from __future__ import annotations

import re
from pathlib import Path

from tests.supported_models import __main__ as script
from tests.supported_models import trial
from tests.supported_models.trial import Candidate

ROOT = Path(__file__).parent.parent


def candidate(name: str) -> Candidate:
    return next(c for c in script.candidates() if c.name == name)


def test_each_outcome_is_found() -> None:
    bert = trial.examine(candidate("BertForSequenceClassification"))
    assert (bert.result, bert.reason, bert.stacks) == ("supported", "", 1)
    resnet = trial.examine(candidate("ResNetForImageClassification"))
    assert (resnet.result, resnet.conditions) == ("supported", ["num_microbatches=1"])
    rwkv = trial.examine(candidate("RwkvForCausalLM"))
    assert rwkv.result == "refused" and "its own weights" in rwkv.reason
    reformer = trial.examine(Candidate("ReformerForMaskedLM", "bert", "masked lm"))
    assert reformer.result == "not tried" and reformer.reason


def test_the_readme_has_the_numbers_of_the_page() -> None:
    text, readme = (ROOT / "docs" / "supported_models.md").read_text(), (ROOT / "README.md").read_text()
    total = re.search(r"^\| \*\*all (\d+)\*\*" + r" \| \*\*(\d+)\*\*" * 4 + r" \|$", text, re.MULTILINE)
    assert total is not None
    tried, supported, _, failing, _ = total.groups()
    assert f"**{supported} of {tried}** classes tried give the same" in " ".join(readme.split())
    assert failing == "0"
