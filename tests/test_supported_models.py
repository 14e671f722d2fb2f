"""The script behind docs/supported_models.md finds what it should, on a few architectures of each outcome."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import slow
from transformers import CONFIG_MAPPING, BertForSequenceClassification

from hf_pipetransformer.model.dummy_inputs import dummy_batch
from tests.supported_models import __main__ as script
from tests.supported_models import page, tiny_models, trial
from tests.supported_models.trial import Candidate, Finding

ROOT = Path(__file__).parent.parent
SMALLEST = tiny_models.VARIANTS[0]


def candidate(name: str) -> Candidate:
    return next(c for c in script.candidates() if c.name == name)


def finding(name: str, result: str, reason: str = "") -> Finding:
    return Finding(name, "bert", "masked lm", result, reason)


def test_sizes_that_hang_together_still_do() -> None:
    config: Any = tiny_models.tiny_config("llava", SMALLEST).config
    text, default = config.text_config, CONFIG_MAPPING["llava"]().text_config
    assert text.hidden_size * 16 == default.hidden_size
    assert text.num_attention_heads * text.head_dim == text.hidden_size
    assert text.num_hidden_layers == config.vision_config.num_hidden_layers == tiny_models.LAYERS
    assert config.image_token_index < text.vocab_size == tiny_models.VOCABULARY


def test_what_is_random_is_switched_off_and_what_is_asked_for_is_noted() -> None:
    tiny = tiny_models.tiny_config("wav2vec2", SMALLEST)
    assert tiny.conditions == ["layerdrop=0.0"]
    assert tiny.config.layerdrop == tiny.config.hidden_dropout == tiny.config.mask_time_prob == 0.0


def test_every_class_is_a_candidate_once_under_its_own_type() -> None:
    found = script.candidates()
    assert len({c.name for c in found}) == len(found) > 800
    assert candidate("LlamaForCausalLM").model_type == "llama"


# ---------------------------------------------------------------------------------------------------------
# Outcomes
# ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "stacks"),
    [("BertForSequenceClassification", 1), *slow(("T5ForConditionalGeneration", 2))],
)
def test_supported(name: str, stacks: int) -> None:
    found = trial.examine(candidate(name))
    assert (found.result, found.reason, found.stacks) == ("supported", "", stacks)
    assert found.units == stacks * tiny_models.LAYERS


def test_batch_normalisation_is_a_condition() -> None:
    found = trial.examine(candidate("ResNetForImageClassification"))
    assert (found.result, found.conditions) == ("supported", ["num_microbatches=1"])


def test_refused() -> None:
    found = trial.examine(candidate("RwkvForCausalLM"))
    assert found.result == "refused" and "its own weights" in found.reason


def test_a_model_that_cannot_be_run_is_not_tried() -> None:
    found = trial.examine(Candidate("ReformerForMaskedLM", "bert", "masked lm"))
    assert found.result == "not tried" and found.reason


def test_a_cut_that_gives_something_else_is_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: here one weight is another one while the model is cut."""
    cut_step = trial.cut_step

    def with_another_weight(stack: Any, *args: Any) -> Any:
        with torch.no_grad():
            stack.model.classifier.weight[0, 0] += 0.1
        return cut_step(stack, *args)

    monkeypatch.setattr(trial, "cut_step", with_another_weight)
    found = trial.examine(candidate("BertForSequenceClassification"))
    assert found.result == "failing" and "output 0 differs by" in found.reason


def test_a_gradient_that_is_missing_is_a_difference() -> None:
    model = tiny_models.build(BertForSequenceClassification, tiny_models.tiny_config("bert", SMALLEST).config)
    batch = dict(dummy_batch(model))
    whole = trial.whole_step(model, batch)
    parts = trial.step_when_cut(trial.LayerStack.discover(model, batch), 2, batch)
    assert trial.difference_of(whole, parts) == ""
    del parts["gradient of bert.embeddings.word_embeddings.weight"]
    assert "word_embeddings" in trial.difference_of(whole, parts)


def test_a_class_that_takes_too_long_does_not_stop_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def examine(candidate: Candidate) -> Finding:
        while candidate.name == "slow":
            pass
        return finding(candidate.name, "supported")

    monkeypatch.setattr(script, "examine", examine)
    family = [Candidate(name, "bert", "") for name in ("first", "slow", "last")]
    found = list(script.examine_in_process(family, timeout_s=1.0, memory_gib=64))
    assert [(f.name, f.result) for f in found] == [
        ("first", "supported"),
        ("slow", "not tried"),
        ("last", "supported"),
    ]
    assert found[1].reason == "no result after 1 s"


# ---------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------
def test_a_page_is_brought_up_to_date_by_some_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.md"
    reason = "BertForX cannot be trained as a pipeline: it <is> so. Set pipeline_parallel_size=1."
    before = [finding("BertForMaskedLM", "refused", reason), finding("RobertaForMaskedLM", "supported")]
    before[1].conditions = ["layerdrop=0.0", "num_microbatches=1"]
    page.write_page(before, path, 0, ["MODEL_MAPPING"])
    text = path.read_text()
    assert "| masked lm | 1 | 1 |  |  |" in text and "| **all 2** | **1** | **1** | **0** | **0** |" in text
    assert "| it \\<is\\> so. | BertForMaskedLM |" in text
    kept = page.read_page(text, script.candidates())
    assert kept["RobertaForMaskedLM"].conditions == before[1].conditions
    assert (kept["BertForMaskedLM"].result, kept["BertForMaskedLM"].reason) == ("refused", "it <is> so.")
    monkeypatch.setattr(
        script, "examine_in_process", lambda family, *_: [finding(c.name, "supported") for c in family]
    )
    script.main(["BertForMaskedLM", "--table", str(path)])
    assert {f.result for f in page.read_page(path.read_text(), script.candidates()).values()} == {"supported"}
    assert "The results of 1 classes were kept" in path.read_text()


def test_the_readme_has_the_numbers_of_the_page() -> None:
    text, readme = (ROOT / "docs" / "supported_models.md").read_text(), (ROOT / "README.md").read_text()
    total = re.search(r"^\| \*\*all (\d+)\*\*" + r" \| \*\*(\d+)\*\*" * 4 + r" \|$", text, re.MULTILINE)
    assert total is not None
    tried, supported, _, failing, _ = total.groups()
    words = " ".join(readme.split())
    assert f"**{supported} of {tried}** classes tried give the same" in words
    assert failing == "0"
